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
    without_random,
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
    own = source.steps
    given_eval = flatten(eval_transform)
    train_steps = flatten(train_transform) if train_transform is not None else own or given_eval
    train_trace = trace(train_steps, samples)
    notes = _repeat_notes(source, train_steps)
    problems = _sample_problems("training", train_trace)
    if eval_transform is not None:
        eval_steps, eval_trace = given_eval, trace(given_eval, samples)
        problems += _eval_random_problems(eval_steps, eval_trace)
    else:
        origin = own or train_steps
        origin_trace = train_trace if origin is train_steps else trace(origin, samples)
        eval_steps = without_random(origin, origin_trace)
        eval_trace, found, said = _derived(origin, origin_trace, eval_steps, samples, train_trace)
        problems += found
        notes += said
    if not problems:
        problems += _sample_problems("evaluation", eval_trace)
    shape = eval_trace.kinds[-1].shape if eval_trace.kinds[-1] else ()
    return Views(
        divide(train_steps, train_trace),
        divide(eval_steps, eval_trace),
        shape,
        tuple(notes),
        tuple(problems),
    )


def _repeat_notes(source: Opened, steps: Sequence[Step]) -> list[str]:
    for index in source.probes:
        results = []
        for _ in range(2):
            with seeded(0):
                results.append(apply(steps, copied(source.read(index)[0])))
        if not same_sample(*results):
            return [
                "the training view draws from a generator that is not the global one of random, "
                "NumPy or torch: it cannot be seeded, and results differ from run to run"
            ]
    return []


def _sample_problems(view: str, traced: Trace) -> list[Problem]:
    final = traced.kinds[-1]
    if final is None:
        return [
            Problem(
                f"all samples of the {view} view must have one shape and type",
                "samples that differ",
                "Add Resize and CenterCrop, or padding, to the transform.",
            )
        ]
    if final.form in ("tensor", "array", "number"):
        return []
    found = "a PIL image" if final.form == "image" else "an object that is no array"
    return [
        Problem(
            f"samples of the {view} view must be tensors, arrays or numbers",
            found,
            "End the transform with torchvision's ToTensor().",
        )
    ]


def _eval_random_problems(steps: Sequence[Step], traced: Trace) -> list[Problem]:
    drawn = [step_name(step) for step, flag in zip(steps, traced.random, strict=True) if flag]
    if not drawn:
        return []
    return [
        Problem(
            "eval_transform must give the same sample each time",
            f"random steps: {', '.join(drawn)}",
            "Leave them out of eval_transform; they belong into train_transform.",
        )
    ]


def _derived(
    origin: Sequence[Step],
    origin_trace: Trace,
    steps: Sequence[Step],
    samples: Sequence[Any],
    train_trace: Trace,
) -> tuple[Trace, list[Problem], list[str]]:
    """Follow the eval view that leaves the random steps out; say so, or ask for another."""
    if len(steps) == len(origin):
        return origin_trace, [], []
    names = [step_name(s) for s, flag in zip(origin, origin_trace.random, strict=True) if flag]
    left_out = ", ".join(names)
    try:
        traced = trace(steps, samples)
        received = _kind_text(traced.kinds[-1])
    except InputError as error:
        traced, received = origin_trace, str(error)
    expected = _kind_text(train_trace.kinds[-1])
    if received == expected:
        note = (
            f"the evaluation view leaves out the random steps {left_out}; "
            "pass eval_transform= to choose it yourself"
        )
        return traced, [], [note]
    problem = Problem(
        f"the evaluation view, which leaves out {left_out}, must give samples like the "
        f"training view's, {expected}",
        received,
        "Pass eval_transform=, such as Compose([Resize(...), CenterCrop(...), ToTensor()]).",
    )
    return traced, [problem], []


def _kind_text(kind: Kind | None) -> str:
    return "samples that differ in shape" if kind is None else f"{kind.form} {kind.shape}"
