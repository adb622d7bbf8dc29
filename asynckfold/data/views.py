"""The train view and the eval view of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asynckfold.data.opened import Opened
from asynckfold.errors import InputError, Problem
from asynckfold.transforms import (
    Kind,
    Step,
    Trace,
    View,
    apply,
    copied,
    divide,
    flatten,
    same_sample,
    seeded,
    step_name,
    trace,
)


@dataclass(frozen=True, eq=False)
class Views:
    """The train view and the eval view of a source, with what was found about them."""

    train: View
    eval: View
    sample_shape: tuple[int, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]


def make_views(source: Opened, train_transform: Any, eval_transform: Any) -> Views:
    """Divide the pipelines of both views; see `prepare` for which transform goes where."""
    samples = [source.read(index)[0] for index in source.probes]
    own, given_eval = source.steps, flatten(eval_transform)
    steps = flatten(train_transform) if train_transform is not None else own or given_eval
    train = trace(steps, samples)
    notes = _repeat_notes(source, steps)
    if eval_transform is None:
        origin = trace(own, samples) if own and train_transform is not None else train
        evaluation = _derived(origin, samples, train.final)
    else:
        evaluation = _given(trace(given_eval, samples))
    problems = _sample_problems("training", train) + evaluation.problems
    return Views(
        divide(train),
        divide(evaluation.traced),
        evaluation.traced.final.shape if evaluation.traced.final else (),
        notes + evaluation.notes,
        problems or _sample_problems("evaluation", evaluation.traced),
    )


def _repeat_notes(source: Opened, steps: Sequence[Step]) -> tuple[str, ...]:
    for index in source.probes:
        results = []
        for _ in range(2):
            with seeded(0):
                results.append(apply(steps, copied(source.read(index)[0])))
        if not same_sample(*results):
            return (
                "the training view draws from a generator that is not the global one of random, "
                "NumPy or torch: it cannot be seeded, and results differ from run to run",
            )
    return ()


def _sample_problems(view: str, traced: Trace) -> tuple[Problem, ...]:
    if traced.final is None:
        problem = Problem(
            f"all samples of the {view} view must have one shape and type",
            "samples that differ",
            "Add Resize and CenterCrop, or padding, to the transform.",
        )
        return (problem,)
    if traced.final.form in ("tensor", "array", "number"):
        return ()
    problem = Problem(
        f"samples of the {view} view must be tensors, arrays or numbers",
        "a PIL image" if traced.final.form == "image" else "an object that is no array",
        "End the transform with torchvision's ToTensor().",
    )
    return (problem,)


@dataclass(frozen=True, eq=False)
class _Evaluation:
    """The eval view's pipeline, and what was found about it."""

    traced: Trace
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def _given(traced: Trace) -> _Evaluation:
    _, drawn = traced.split()
    if not drawn:
        return _Evaluation(traced)
    problem = Problem(
        "eval_transform must give the same sample each time",
        f"random steps: {_names(drawn)}",
        "Leave them out of eval_transform; they belong into train_transform.",
    )
    return _Evaluation(traced, problems=(problem,))


def _derived(origin: Trace, samples: Sequence[Any], expected: Kind | None) -> _Evaluation:
    """Leave the random steps out and say so; ask for another pipeline if that does not work."""
    kept, drawn = origin.split()
    if not drawn:
        return _Evaluation(origin)
    try:
        traced = trace(kept, samples)
        received = _kind_text(traced.final)
    except InputError as error:
        traced, received = origin, str(error)
    if received == _kind_text(expected):
        note = (
            f"the evaluation view leaves out the random steps {_names(drawn)}; "
            "pass eval_transform= to choose it yourself"
        )
        return _Evaluation(traced, notes=(note,))
    problem = Problem(
        f"the evaluation view, which leaves out {_names(drawn)}, must give samples like the "
        f"training view's, {_kind_text(expected)}",
        received,
        "Pass eval_transform=, such as Compose([Resize(...), CenterCrop(...), ToTensor()]).",
    )
    return _Evaluation(traced, problems=(problem,))


def _names(steps: Sequence[Step]) -> str:
    return ", ".join(step_name(step) for step in steps)


def _kind_text(kind: Kind | None) -> str:
    return "samples that differ in shape" if kind is None else f"{kind.form} {kind.shape}"
