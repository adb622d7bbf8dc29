"""A pipeline, divided into what is stored and what is done per batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from asynckfold.data.transforms.batch_steps import (
    BatchStep,
    PerSample,
    RandomCrop,
    RandomFlip,
    Unchanged,
)
from asynckfold.data.transforms.draws import AnyDraw
from asynckfold.data.transforms.equivalents import batch_step
from asynckfold.data.transforms.generators import seeded
from asynckfold.data.transforms.samples import Kind, copied, kind_of
from asynckfold.data.transforms.steps import Step, is_random, step_name
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

    def __call__(self, batch: Tensor, draw: AnyDraw) -> Tensor:
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
            raise InputError([_failing(step, error)]) from error
        kinds.append(_common_kind(values))
    return PipelineTrace(tuple(steps), tuple(flags), tuple(kinds), _apart(values))


def _failing(step: Step, error: Exception) -> Problem:
    return Problem(
        f"transform step {step_name(step)} must work on each sample",
        f"{type(error).__name__}: {error}",
        "Try the transform on dataset[0].",
    )


def _common_kind(values: Sequence[Any]) -> Kind | None:
    kinds = {kind_of(value) for value in values}
    return kinds.pop() if len(kinds) == 1 else None


def _apart(values: Sequence[Any]) -> tuple[Kind, ...]:
    kinds = tuple(dict.fromkeys(map(kind_of, values)))
    return kinds[:2] if len(kinds) > 1 else ()


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
    batched = [form for form in forms[last:] if form is not None and form != Unchanged()]
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
