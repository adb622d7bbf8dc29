"""The train view and the eval view of a dataset: what is stored, and what is done per batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from asynckfold.data.dataset import SampleSource
from asynckfold.data.transforms.random_numbers import Draw, seeded
from asynckfold.data.transforms.samples import Kind, Records, copied, kind_of, records_in
from asynckfold.data.transforms.steps import (
    BatchStep,
    NoChange,
    PerSample,
    RandomCrop,
    RandomFlip,
    Step,
    batch_step,
    flatten,
    is_random,
    step_name,
)
from asynckfold.errors import InputError, Problem, refuse


@dataclass(frozen=True)
class View:
    """A pipeline in two parts."""

    prefix: tuple[Step, ...]  # run once per sample; the result is stored
    stored: Kind | None  # None: samples differ in shape, or cannot be stacked
    steps: tuple[BatchStep, ...]  # the rest, for whole batches
    pipeline: tuple[Step, ...]  # all of the user's steps, to read samples one by one

    @property
    def drawing(self) -> list[int]:
        """Places of the steps that draw for each sample, on any device."""
        kinds = (RandomCrop, RandomFlip)
        return [place for place, step in enumerate(self.steps) if isinstance(step, kinds)]

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Apply the batch steps to stored samples (B, ...)."""
        for place, step in enumerate(self.steps):
            batch = step(batch, draw.at(place))
        return batch


@dataclass(frozen=True)
class PipelineTrace:
    """What a few samples became on their way through a pipeline."""

    steps: tuple[Step, ...]
    random: tuple[bool, ...]  # by step
    # before each step and after the last; None where samples differ in kind
    kinds: tuple[Kind | None, ...]
    apart: tuple[Kind, ...] = ()  # two of the results that differ

    @property
    def final(self) -> Kind | None:
        """Kind of the results."""
        return self.kinds[-1]

    def split(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """Return the deterministic steps and the random ones."""
        flagged = list(zip(self.steps, self.random, strict=True))
        return (
            tuple(step for step, random in flagged if not random),
            tuple(step for step, random in flagged if random),
        )


def trace(
    steps: Sequence[Step], samples: Sequence[Any], drawn: Collection[int] = ()
) -> PipelineTrace:
    """Send copies of a few samples through the steps, one step after the other.

    `drawn`: steps already seen to draw random numbers, perhaps for other samples only. Raises
    `InputError`, naming the step, where one fails.
    """
    values = [copied(sample) for sample in samples]
    flags, kinds = [], [_common_kind(values)]
    for place, step in enumerate(steps):
        try:
            flags.append(place in drawn or is_random(step, values))
            with seeded(0):
                values = [step(value) for value in values]
        except Exception as error:
            rule = f"transform step {step_name(step)} must work on each sample"
            received = f"{type(error).__name__}: {error}"
            raise InputError.one(rule, received, "Try the transform on dataset[0].") from error
        kinds.append(_common_kind(values))
    last = tuple(dict.fromkeys(map(kind_of, values)))
    apart = last[:2] if len(last) > 1 else ()
    return PipelineTrace(tuple(steps), tuple(flags), tuple(kinds), apart)


def _common_kind(values: Sequence[Any]) -> Kind | None:
    kinds = {kind_of(value) for value in values}
    return kinds.pop() if len(kinds) == 1 else None


def divide(traced: PipelineTrace) -> View:
    """Divide a pipeline into what is stored and what is done per batch.

    The stored part ends before the first random step, or earlier, where the steps in between have a
    batched form and start from uint8 pixels: that keeps the stored array small.
    """
    steps = traced.steps
    forms = [batch_step(step, kind) for step, kind in zip(steps, traced.kinds, strict=False)]
    cut = _cut(traced, forms)
    last = max((place + 1 for place in range(cut, len(steps)) if forms[place] is None), default=cut)
    stored = traced.kinds[cut]
    batched = [form for form in forms[last:] if form is not None and form != NoChange()]
    single = [PerSample(steps[cut:last], stored)] if stored and last > cut else []
    return View(
        steps[:cut], stored if stored and stored.storable else None, (*single, *batched), steps
    )


def _cut(traced: PipelineTrace, forms: Sequence[BatchStep | None]) -> int:
    end = traced.random.index(True) if True in traced.random else len(forms)
    start = end
    for place in range(end - 1, -1, -1):
        if forms[place] is None:
            break
        kind = traced.kinds[place]
        if kind is not None and kind.is_uint8_image:
            start = place
    return start


TRAIN, DATASET, EVAL, SCALED = "train", "own transform", "eval", "scaled"
"""Names of pipelines that are traced."""

_PACKED = " packed"
"""Ends the name of a pipeline with a last step that packs trees into records."""

_SCALED = (
    "the dataset has no transform: its images are taken as tensors scaled to [0, 1] (ToTensor); "
    "pass train_transform= to choose it yourself"
)

Place = tuple[str, int]
"""A step: the name of its pipeline, and where it is in it."""

TraceFacts = (
    tuple[tuple[bool, ...], tuple[Kind | None, ...], tuple[Kind, ...]] | tuple[Problem, ...]
)
"""The results of a trace besides the steps, or why it failed."""


@dataclass(frozen=True, eq=False)
class Views:
    """Both views of a source, with notes and problems."""

    train: View
    eval: View
    sample_shape: tuple[int, ...]  # of one input of the eval view
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]  # why they cannot be used
    # where the steps of the train view and of the eval view come from
    places: tuple[tuple[Place, ...], tuple[Place, ...]]

    @property
    def records(self) -> Records | None:
        """What samples of several tensors are stored as."""
        return records_in(self.eval.pipeline)


class LiveTracer:
    """Traces untransformed samples, and keeps the facts for a `RecordedTracer`.

    `drawn`: steps seen to draw random numbers.
    """

    def __init__(self, samples: Sequence[Any], drawn: Collection[Place] = ()) -> None:
        self.samples = samples
        self.drawn = drawn
        self.facts: dict[str, TraceFacts] = {}

    def __call__(self, name: str, steps: Sequence[Step]) -> PipelineTrace:
        """Return the trace of a pipeline; raise `InputError` where a step fails."""
        name_alone = name.removesuffix(_PACKED)
        drawn = [place for pipeline, place in self.drawn if pipeline == name_alone]
        try:
            made = trace(steps, self.samples, drawn)
        except InputError as error:
            self.facts[name] = error.problems
            raise
        self.facts[name] = (made.random, made.kinds, made.apart)
        return made


@dataclass(frozen=True)
class RecordedTracer:
    """Repeats the facts of a `LiveTracer`, in another process."""

    facts: Mapping[str, TraceFacts]

    def __call__(self, name: str, steps: Sequence[Step]) -> PipelineTrace:
        """Return the trace of a pipeline, or raise what it raised."""
        facts = self.facts[name]
        if not facts or isinstance(facts[0], Problem):
            refuse(facts)
        random, kinds, apart = facts
        return PipelineTrace(tuple(steps), random, kinds, apart)  # type: ignore[arg-type]


Tracer = LiveTracer | RecordedTracer


def make_views(
    source: SampleSource,
    train_transform: Any,
    eval_transform: Any,
    traced: Tracer | None = None,
    *,
    collates: bool = False,
) -> Views:
    """Divide the pipelines of both views; `prepare` says which transform goes where.

    Without `traced`, some samples are read here. `collates`: a function of the user's makes batches
    of samples, which may be anything.
    """
    traced = traced or LiveTracer(some_samples(source))
    while True:
        views, leaks = _made(source, train_transform, eval_transform, traced, collates)
        if not leaks or isinstance(traced, RecordedTracer):
            return views
        # What is random for samples that come to it without the steps before it.
        traced.drawn = {*traced.drawn, *leaks}


def _made(
    source: SampleSource, train_transform: Any, eval_transform: Any, traced: Tracer, collates: bool
) -> tuple[Views, tuple[Place, ...]]:
    """Return the views, and random steps left in a derived eval view."""
    packed = traced if collates else partial(_packed, traced)
    steps = train_steps(source, train_transform, eval_transform)
    train = packed(TRAIN, steps)
    steps = train.steps
    notes: tuple[str, ...] = ()
    if not (steps or collates) and train.final is not None and train.final.form == "image":
        from torchvision.transforms import ToTensor

        steps, notes = (ToTensor(),), (_SCALED,)
        train = traced(SCALED, steps)
    if eval_transform is not None:
        evaluation = _given(packed(EVAL, flatten(eval_transform)))
    elif source.steps and train_transform is not None:
        evaluation = _derived(DATASET, packed(DATASET, source.steps), train.final, traced)
    else:
        evaluation = _derived(TRAIN, train, train.final, traced)
    problems = evaluation.problems
    if not collates:
        problems = _sample_problems("training", train) + problems
    problems = problems or _structure_problems(train, evaluation.traced)
    flagged = zip(evaluation.places, evaluation.traced.random, strict=False)
    leaks = () if evaluation.problems else tuple(place for place, random in flagged if random)
    return Views(
        divide(train),
        divide(evaluation.traced),
        evaluation.traced.final.shape if evaluation.traced.final else (),
        (*notes, *evaluation.notes),
        problems or (() if collates else _sample_problems("evaluation", evaluation.traced)),
        (tuple((TRAIN, place) for place in range(len(steps))), evaluation.places),
    ), leaks


def _packed(traced: Tracer, name: str, steps: Sequence[Step]) -> PipelineTrace:
    """Return the trace of a pipeline; where it gives trees, with a step that packs them."""
    made = traced(name, steps)
    records = None if made.final is None else made.final.records
    return made if records is None else traced(name + _PACKED, (*steps, records))


def _structure_problems(train: PipelineTrace, evaluation: PipelineTrace) -> tuple[Problem, ...]:
    both = records_in(train.steps), records_in(evaluation.steps)
    if both[0] == both[1]:
        return ()
    problem = Problem(
        "both views must give inputs of one structure",
        " and ".join("one tensor" if records is None else records.text for records in both),
        "Return the same keys, shapes and types from train_transform and eval_transform.",
    )
    return (problem,)


def train_steps(
    source: SampleSource, train_transform: Any, eval_transform: Any
) -> tuple[Step, ...]:
    """Return the steps of the train view."""
    if train_transform is not None:
        return flatten(train_transform)
    return source.steps or flatten(eval_transform)


def some_samples(source: SampleSource) -> list[Any]:
    """Read a few samples."""
    return [source.read(index)[0] for index in source.probes]


def _sample_problems(view: str, traced: PipelineTrace) -> tuple[Problem, ...]:
    if traced.final is None:
        problem = Problem(
            f"all samples of the {view} view must have one shape and type",
            " and ".join(map(_of_kind, traced.apart)) or "samples that differ",
            "Add Resize and CenterCrop, or padding, to the transform; or pass collate_fn=, which "
            "makes a batch of a list of samples.",
        )
        return (problem,)
    if traced.final.form in ("tensor", "array", "number"):
        return ()
    problem = Problem(
        f"samples of the {view} view must be tensors, arrays or numbers",
        "a PIL image" if traced.final.form == "image" else "an object that is not an array",
        "End the transform with torchvision's ToTensor().",
    )
    return (problem,)


@dataclass(frozen=True, eq=False)
class _Evaluation:
    """The eval view's pipeline, with notes and problems."""

    traced: PipelineTrace
    places: tuple[Place, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def _places(name: str, traced: PipelineTrace, *, kept: bool = False) -> tuple[Place, ...]:
    flagged = enumerate(traced.random)
    return tuple((name, place) for place, random in flagged if not (kept and random))


def _given(traced: PipelineTrace) -> _Evaluation:
    _, drawn = traced.split()
    places = _places(EVAL, traced)
    if not drawn:
        return _Evaluation(traced, places)
    problem = Problem(
        "eval_transform must give the same sample each time",
        f"random steps: {_names(drawn)}",
        "Leave them out of eval_transform; they belong in train_transform.",
    )
    return _Evaluation(traced, places, problems=(problem,))


def _derived(
    name: str, origin: PipelineTrace, expected: Kind | None, tracer: Tracer
) -> _Evaluation:
    """Leave out the random steps with a note; ask for eval_transform if that fails."""
    kept, drawn = origin.split()
    places = _places(name, origin, kept=True)
    if not drawn:
        return _Evaluation(origin, places)
    try:
        traced = tracer(EVAL, kept)
        received = _kind_text(traced.final)
    except InputError as error:
        traced, received = origin, str(error)
    if received == _kind_text(expected):
        note = (
            f"the evaluation view leaves out the random steps {_names(drawn)}; "
            "pass eval_transform= to choose it yourself"
        )
        return _Evaluation(traced, places, notes=(note,))
    problem = Problem(
        f"the evaluation view, which leaves out {_names(drawn)}, must give samples like the "
        f"training view's, {_kind_text(expected)}",
        received,
        "Pass eval_transform=, such as Compose([Resize(...), CenterCrop(...), ToTensor()]).",
    )
    return _Evaluation(traced, places, problems=(problem,))


def _names(steps: Sequence[Step]) -> str:
    return ", ".join(step_name(step) for step in steps)


def _of_kind(kind: Kind) -> str:
    return f"{kind.form} {kind.dtype} {kind.shape}" if kind.storable else f"a {kind.form}"


def _kind_text(kind: Kind | None) -> str:
    return "samples that differ in shape" if kind is None else f"{kind.form} {kind.shape}"
