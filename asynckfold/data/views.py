"""The train view and the eval view of a dataset: what is stored, and what is done per batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from asynckfold.data.dataset import SampleSource
from asynckfold.data.transforms.random_numbers import Draw, seeded
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
from asynckfold.data.transforms.trees import Kind, Records, copied, kind_of, records_in
from asynckfold.errors import InputError, Problem


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

TraceFacts = dict[str, PipelineTrace | tuple[Problem, ...]]
"""By pipeline: its trace without the steps, or why that failed."""


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


@dataclass(eq=False)
class Tracer:
    """Traces untransformed samples and keeps the facts; without samples, it repeats them.

    `drawn`: steps seen to draw random numbers.
    """

    samples: Sequence[Any] = ()
    drawn: frozenset[Place] = frozenset()
    facts: TraceFacts = field(default_factory=dict)

    def __call__(self, name: str, steps: Sequence[Step]) -> PipelineTrace:
        """Return the trace of a pipeline; raise `InputError` where a step fails."""
        if self.samples:
            drawn = [at for pipeline, at in self.drawn if pipeline == name.removesuffix(_PACKED)]
            try:
                self.facts[name] = replace(trace(steps, self.samples, drawn), steps=())
            except InputError as error:
                self.facts[name] = error.problems
        facts = self.facts[name]
        if isinstance(facts, tuple):
            raise InputError(facts)
        return replace(facts, steps=tuple(steps))


def make_views(
    source: SampleSource,
    train_transform: Any,
    eval_transform: Any,
    tracer: Tracer,
    *,
    collates: bool = False,
) -> Views:
    """Divide the pipelines of both views; `prepare` says which transform goes where.

    `collates`: a function of the user's makes batches of samples, which may be anything.
    """
    while True:
        views, leaks = _made(source, train_transform, eval_transform, tracer, collates)
        if not leaks or not tracer.samples:
            return views
        # What is random for samples that come to it without the steps before it.
        tracer.drawn |= leaks


def _made(
    source: SampleSource, train_transform: Any, eval_transform: Any, tracer: Tracer, collates: bool
) -> tuple[Views, frozenset[Place]]:
    """Return the views, and random steps left in a derived eval view."""

    def packed(name: str, steps: Sequence[Step]) -> PipelineTrace:
        """Trace a pipeline; where it gives trees, with a step that packs them."""
        traced = tracer(name, steps)
        records = None if collates or traced.final is None else traced.final.records
        return traced if records is None else tracer(name + _PACKED, (*steps, records))

    train = packed(TRAIN, train_steps(source, train_transform, eval_transform))
    notes, problems = [], []
    if not (train.steps or collates) and train.final is not None and train.final.form == "image":
        from torchvision.transforms import ToTensor

        train = tracer(SCALED, (ToTensor(),))
        notes.append(_SCALED)
    name, evaluation = TRAIN, train
    if eval_transform is not None:
        name, evaluation = EVAL, packed(EVAL, flatten(eval_transform))
    elif source.steps and train_transform is not None:
        name, evaluation = DATASET, packed(DATASET, source.steps)
    flagged = list(enumerate(zip(evaluation.steps, evaluation.random, strict=True)))
    drawing = ", ".join(step_name(step) for _, (step, random) in flagged if random)
    if drawing and eval_transform is not None:
        rule = "eval_transform must give the same sample each time"
        remedy = "Leave them out of eval_transform; they belong in train_transform."
        problems.append(Problem(rule, f"random steps: {drawing}", remedy))
    elif drawing:
        flagged = [item for item in flagged if not item[1][1]]
        fits = False
        try:
            evaluation = tracer(EVAL, [step for _, (step, _) in flagged])
            fits = _outline(evaluation.final) == _outline(train.final)
            received = _kind_text(evaluation.final)
        except InputError as error:
            received = str(error)
        if fits:
            notes.append(
                f"the evaluation view leaves out the random steps {drawing}; "
                "pass eval_transform= to choose it yourself"
            )
        else:
            rule = f"the evaluation view, which leaves out {drawing}, must give samples like the "
            rule += f"training view's, {_kind_text(train.final)}"
            remedy = "Pass eval_transform=, such as Compose([Resize(...), CenterCrop(...), "
            problems.append(Problem(rule, received, remedy + "ToTensor()])."))
    places = tuple((name, place) for place, _ in flagged)
    leaks = frozenset(
        place
        for place, random in zip(places, evaluation.random, strict=False)
        if random and not problems
    )
    if not collates:
        problems = _sample_problems("training", train) + problems
    problems = problems or _structure_problems(train, evaluation)
    if not (collates or problems):
        problems = _sample_problems("evaluation", evaluation)
    return Views(
        divide(train),
        divide(evaluation),
        evaluation.final.shape if evaluation.final else (),
        tuple(notes),
        tuple(problems),
        (tuple((TRAIN, place) for place in range(len(train.steps))), places),
    ), leaks


def _structure_problems(train: PipelineTrace, evaluation: PipelineTrace) -> list[Problem]:
    both = records_in(train.steps), records_in(evaluation.steps)
    problem = Problem(
        "both views must give inputs of one structure",
        " and ".join("one tensor" if records is None else records.text for records in both),
        "Return the same keys, shapes and types from train_transform and eval_transform.",
    )
    return [problem] * (both[0] != both[1])


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


def _sample_problems(view: str, traced: PipelineTrace) -> list[Problem]:
    if traced.final is None:
        rule = f"all samples of the {view} view must have one shape and type"
        received = " and ".join(map(_kind_text, traced.apart)) or "samples that differ"
        remedy = "Add Resize and CenterCrop, or padding, to the transform; or pass collate_fn=, "
        return [Problem(rule, received, f"{remedy}which makes a batch of a list of samples.")]
    if traced.final.form in ("tensor", "array", "number"):
        return []
    rule = f"samples of the {view} view must be tensors, arrays or numbers"
    received = "a PIL image" if traced.final.form == "image" else _kind_text(traced.final)
    return [Problem(rule, received, "End the transform with torchvision's ToTensor().")]


def _outline(kind: Kind | None) -> Any:
    return kind and (kind.form, kind.shape)


def _kind_text(kind: Kind | None) -> str:
    if kind is None:
        return "samples that differ in shape"
    if kind.storable:
        return f"{kind.form} {kind.dtype} {kind.shape}"
    return kind.records.text if kind.records else kind.dtype or "an object that is not an array"
