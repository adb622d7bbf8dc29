"""What a reader process does: look at some samples, then read a range of them.

Only this code runs the dataset and the user's transforms before jobs do. A `Pass` watches the
generators at each step of each sample: a step that draws for one sample in a thousand is random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from asynckfold.data.batches import ItemForm, item_form
from asynckfold.data.dataset import (
    DRESSED,
    SampleSource,
    how_to_undress,
    open_source,
    redressed,
    unreadable,
)
from asynckfold.data.transforms.random_numbers import Draw, Watch, generators_kept, seeded, varies
from asynckfold.data.transforms.steps import Step, apply, is_known
from asynckfold.data.transforms.trees import (
    Array,
    Misfit,
    Records,
    copied,
    digest_of,
    is_tree,
    kind_of,
    mapped,
    same_sample,
    to_array,
)
from asynckfold.data.views import Place, TraceFacts, Tracer, make_views, some_samples, train_steps
from asynckfold.errors import InputError, Problem

BASE: Place = ("dataset", 0)
"""The place of what a dataset does itself."""

Beat = Callable[[int], bool]
"""Called with each sample number before it is read, and with -1 before a longer phase; returns
whether to go on."""


@dataclass(frozen=True)
class SampleFacts:
    """What some samples tell about a dataset."""

    how: str = ""  # to take the transform out, see `how_to_undress`
    traces: TraceFacts = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    random: bool = False  # the dataset itself is random
    steady: bool = True  # one seed gives one sample and one target
    seconds: float = 0.0  # per sample
    problems: tuple[Problem, ...] = ()  # why none could be read
    form: ItemForm = field(default_factory=ItemForm)
    stored_as: Records | None = None  # of samples for a `collate_fn` that can be stored


@dataclass(frozen=True, eq=False)
class SampleCheck:
    """Looks at some samples of a dataset."""

    dataset: Any
    train_transform: Any = None
    eval_transform: Any = None
    random: bool = False  # the user says that the dataset is random
    drawn: frozenset[Place] = frozenset()  # steps seen to draw
    unseeded: frozenset[Place] = frozenset()  # of these, those with a generator that nobody seeds
    dressed: bool = False  # a `Pass` could not take the transform out
    collates: bool = False  # samples may be anything that a `collate_fn` takes

    def __call__(self, low: int, high: int, outputs: Sequence[Array], beat: Beat) -> SampleFacts:
        """Return the facts; the range has no meaning."""
        with generators_kept():
            try:
                return self._facts(beat)
            except InputError as error:
                return SampleFacts(problems=error.problems)

    def _facts(self, beat: Beat) -> SampleFacts:
        source = replace(open_source(self.dataset), on_read=beat)
        with seeded(0):
            form = item_form(source) if self.collates else ItemForm()
            how = DRESSED if self.dressed else how_to_undress(source)
        source = redressed(source, how)
        random = self.random or BASE in self.drawn
        if not (random or source.known):
            random = any(varies(partial(source.read, index)) for index in source.probes)
        begun = time.perf_counter()
        with seeded(0):
            tracing = Tracer(some_samples(source), self.drawn)
        beat(-1)
        transforms = self.train_transform, self.eval_transform
        facts = SampleFacts(how, tracing.facts, random=random, form=form)
        try:
            views = make_views(source, *transforms, tracing, collates=self.collates)
        except InputError:
            if not tracing.facts:
                raise
            return facts
        seconds = (time.perf_counter() - begun) / len(source.probes)
        notes, steady = _steadiness(source, train_steps(source, *transforms))
        if self.unseeded:
            notes, steady = (_UNSEEDED,), steady and BASE not in self.unseeded
        facts = replace(facts, notes=notes, steady=steady, seconds=seconds)
        if self.collates:
            with seeded(0):
                seen = [apply(views.eval.pipeline, copied(item)) for item in tracing.samples]
            return replace(facts, stored_as=Records.of_any_shape(seen))
        return facts


_UNSEEDED = (
    "the training view draws from a generator that is not the global one of random, "
    "NumPy or torch: it cannot be seeded, and results differ from run to run"
)


def _steadiness(source: SampleSource, steps: Sequence[Step]) -> tuple[tuple[str, ...], bool]:
    """Return a note on generators that cannot be seeded, and whether the dataset has none.

    Raises `InputError` where input and target both vary: no evaluation would see a pair.
    """
    if source.known and all(map(is_known, steps)):
        return (), True
    notes: tuple[str, ...] = ()
    steady = True
    for index in source.probes:
        with seeded(0):
            sample, label = source.read(index)
            first = apply(steps, copied(sample))
        with seeded(0):
            again, label_again = source.read(index)
            second = apply(steps, copied(again))
        same = same_sample(sample, again), same_sample(label, label_again)
        if not any(same):
            raise InputError.one(
                "a random dataset must give the same pair (x, y) again under the same seed",
                f"x and y both changed at dataset[{index}]",
                "Draw from the global generators of torch, NumPy or random, which are seeded for "
                "each sample. Seed a library's transform with its own generator before it is "
                "applied: in __getitem__, "
                "transform.set_random_state(seed=int(torch.randint(2**31, ()))) of MONAI.",
            )
        if not all(same) or not same_sample(first, second):
            notes, steady = (_UNSEEDED,), steady and all(same)
    return notes, steady


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Steps that each sample passes in a `Pass`, and where each comes from."""

    steps: tuple[Step, ...]
    places: tuple[tuple[Place, ...], ...]  # several where both views share the step


@dataclass(frozen=True)
class RangeRead:
    """The labels of a range; it ends at the first sample that draws, fails or does not fit."""

    labels: list[Any]  # as the dataset gives them, tensors as arrays
    at: int = -1  # number of that sample
    drew: tuple[Place, ...] = ()  # steps that drew random numbers
    unseeded: bool = False  # from a generator that nobody seeds
    dressed: bool = False  # the dataset changes what its transform returns
    odd: str = ""  # how the sample differs from others
    problems: tuple[Problem, ...] = ()


class _EndedError(Exception):
    """Reading ends at a sample; `facts` are those of `RangeRead`."""

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        self.facts = facts


@dataclass(frozen=True, eq=False)
class Pass:
    """Reads each sample of a range once."""

    dataset: Any
    how: str  # to take the transform out
    pipelines: tuple[Pipeline, ...]
    hold: bool  # store results, one array per pipeline; else digests (n, DIGEST_BYTES)
    random: bool = False  # read each sample under its evaluation seed
    # store records, one after another, of samples of different length
    stored_as: Records | None = None
    edges: Array | None = None  # where each record begins and ends; None: measure their sizes

    def __call__(self, low: int, high: int, outputs: Sequence[Array], beat: Beat) -> RangeRead:
        """Read samples from `low` to `high` into `outputs`."""
        labels: list[Any] = []
        with generators_kept():
            reader = _Reader(self, outputs)
            seeds = Draw(0, 0, np.arange(low, high)).bits().tolist()
            for index, seed in zip(range(low, high), seeds, strict=True):
                if not beat(index):
                    break
                try:
                    labels.append(reader.read(index, seed))
                except _EndedError as ended:
                    return RangeRead(labels, index, **ended.facts)
                except InputError as error:
                    return RangeRead(labels, index, problems=error.problems)
        return RangeRead(labels)


class _Reader:
    """Reads samples one by one into arrays, and watches what draws."""

    def __init__(self, work: Pass, outputs: Sequence[Array]) -> None:
        self.work, self.outputs = work, outputs
        self.whole = open_source(work.dataset)
        self.source = redressed(self.whole, work.how)
        steps = [step for pipeline in work.pipelines for step in pipeline.steps]
        self.is_quiet = self.source.known and all(map(is_known, steps))
        self.pipelines = [
            [
                (step, () if is_known(step) else places)
                for step, places in zip(pipeline.steps, pipeline.places, strict=True)
            ]
            for pipeline in work.pipelines
        ]
        self.watch = Watch(self.source.base, *(step for step in steps if not is_known(step)))

    def read(self, index: int, seed: int) -> Any:
        """Read and store a sample; return its label."""
        work, watch = self.work, self.watch
        if work.random:
            watch.sync(seed)
        try:
            sample, label = self.source.read(index)
        except InputError:
            if self.source.recorder is None:
                raise
            self.whole.read(index)
            raise _EndedError(dressed=True) from None
        if not (work.random or self.is_quiet) and watch.drew():
            raise _EndedError(drew=(BASE,), unseeded=watch.unseeded)
        if work.random:
            watch.sync(seed)
        if not work.hold:
            self.outputs[0][index] = np.frombuffer(digest_of(sample), np.uint8)
        for number, steps in enumerate(self.pipelines):
            # Steps may change what they get, which may be a part of the dataset.
            result = copied(sample) if steps else sample
            for step, places in steps:
                try:
                    result = step(result)
                except (Exception, SystemExit) as error:
                    raise InputError([unreadable(index, error)]) from error
                if places and watch.drew():
                    raise _EndedError(drew=places, unseeded=watch.unseeded)
            if work.stored_as is not None:
                self._store_record(result, self.outputs[number], index)
            elif work.hold:
                self._store(result, self.outputs[number], index)
        return mapped(to_array, label) if isinstance(label, Tensor) or is_tree(label) else label

    def _store(self, result: Any, output: Array, index: int) -> None:
        array = to_array(result) if kind_of(result).storable else None
        if array is None or (array.shape, array.dtype) != (output.shape[1:], output.dtype):
            what = "an object that is not an array"
            what = what if array is None else f"{array.dtype} {array.shape}"
            others = f"{output.dtype} {output.shape[1:]}"
            raise _EndedError(odd=f"sample {index} is {what} where others are {others}")
        output[index] = array

    def _store_record(self, result: Any, output: Array, index: int) -> None:
        """Store the record of a sample, or its size."""
        assert self.work.stored_as is not None
        try:
            record = self.work.stored_as(result)
        except Misfit as error:
            raise _EndedError(odd=f"sample {index} has another structure: {error}") from error
        if self.work.edges is None:
            output[index] = len(record)
            return
        low, high = self.work.edges[index : index + 2].tolist()
        if len(record) != high - low:
            raise _EndedError(odd=f"sample {index} has another size when it is read again")
        output[low:high] = record


Task = SampleCheck | Pass
