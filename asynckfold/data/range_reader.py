"""What a reader does in its own process: look at some samples, then read a range of them.

::

    SampleCheck   some samples ── how to take out the transform, what steps make, what is random
    Pass          a range of samples ── arrays, labels, digests; the first misfit

Only this code runs the dataset and the user's transforms before jobs do. A `Pass` watches the
generators at each step of each sample: a step that draws for one sample in a thousand is random.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor, from_numpy
from torch.utils.data import default_collate

from asynckfold.data.collation import ItemForm, item_form
from asynckfold.data.dataset import (
    DRESSED,
    Opened,
    how_to_undress,
    open_source,
    redressed,
    unreadable,
)
from asynckfold.data.known_datasets import all_known
from asynckfold.data.transforms import (
    Array,
    Draw,
    Kind,
    Misfit,
    Records,
    Step,
    View,
    Watch,
    apply,
    copied,
    generators_kept,
    is_known,
    is_tree,
    kind_of,
    leaves_by_path,
    mapped,
    same_sample,
    seeded,
    to_array,
    unstorable,
    varies,
)
from asynckfold.data.views import Place, TraceFacts, Tracing, make_views, some_samples, train_steps
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.schema import path_text

BASE: Place = ("dataset", 0)
"""The place of what a dataset does itself."""

DIGEST_BYTES = 16
"""Of a sample's digest."""

Beat = Callable[[int], bool]
"""Told of each sample before it is read, or of -1 before what may take longer; returns whether to
go on."""


@dataclass(frozen=True)
class SampleFacts:
    """What some samples tell."""

    how: str = ""  # to take the transform out, see `how_to_undress`
    traces: dict[str, TraceFacts] = field(default_factory=dict)  # for `Traced`
    notes: tuple[str, ...] = ()
    random: bool = False  # the dataset itself is random
    steady: bool = True  # one seed gives one sample and one target
    equal: bool = True  # batches equal single samples
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
    unseeded: frozenset[Place] = frozenset()  # of these, those with a generator of their own
    dressed: bool = False  # a `Pass` found that the transform cannot be taken out
    collates: bool = False  # samples may be anything that a `collate_fn` takes

    def __call__(self, low: int, high: int, outputs: Sequence[Array], beat: Beat) -> SampleFacts:
        """Return what was found; the range has no meaning."""
        with generators_kept():
            try:
                return self._found(beat)
            except InputError as error:
                return SampleFacts(problems=error.problems)

    def _found(self, beat: Beat) -> SampleFacts:
        source = replace(open_source(self.dataset), on_read=beat)
        with seeded(0):
            form = item_form(source) if self.collates else ItemForm()
            how = DRESSED if self.dressed else how_to_undress(source)
        source = redressed(source, how)
        random = self.random or BASE in self.drawn or (not source.known and _varies(source))
        begun = time.perf_counter()
        with seeded(0):
            tracing = Tracing(some_samples(source), self.drawn)
        if not self.collates and self.train_transform is None and not source.steps:
            refuse(_structure_problems(source.probes, tracing.samples))
        beat(-1)
        try:
            views = make_views(
                source,
                self.train_transform,
                self.eval_transform,
                tracing,
                collates=self.collates,
            )
        except InputError:
            if not tracing.found:
                raise
            return SampleFacts(how, tracing.found, random=random)
        seconds = (time.perf_counter() - begun) / len(source.probes)
        notes, steady = _steadiness(
            source, train_steps(source, self.train_transform, self.eval_transform)
        )
        if self.unseeded:
            notes, steady = (_UNSEEDED,), steady and BASE not in self.unseeded
        if self.collates:
            with seeded(0):
                seen = [apply(views.eval.pipeline, copied(item)) for item in tracing.samples]
            found = how, tracing.found, notes, random, steady
            return SampleFacts(
                *found, seconds=seconds, form=form, stored_as=Records.of_any_shape(seen)
            )
        equal = random or bool(views.problems) or _batches_equal(source, views.eval)
        return SampleFacts(how, tracing.found, notes, random, steady, equal, seconds)


_UNSEEDED = (
    "the training view draws from a generator that is not the global one of random, "
    "NumPy or torch: it cannot be seeded, and results differ from run to run"
)


def _structure_problems(places: Sequence[int], samples: Sequence[Any]) -> Iterator[Problem]:
    """Yield that a sample is a tree that no record can hold, or another one than the first."""
    if not is_tree(samples[0]):
        return
    if why := unstorable(samples[0]):
        yield Problem(
            f"the inputs of dataset[{places[0]}] must be tensors, arrays, images or numbers",
            why,
            "Turn it into numbers in the dataset.",
        )
        return
    records = Records.of(samples[0])
    for index, sample in zip(places, samples, strict=True):
        try:
            records(sample)
        except Misfit as error:
            yield unreadable(index, error)
            return


def _varies(source: Opened) -> bool:
    return any(varies(lambda at=index: source.read(at)) for index in source.probes)  # type: ignore[misc]


def _steadiness(source: Opened, steps: Sequence[Step]) -> tuple[tuple[str, ...], bool]:
    """Return a note on generators that cannot be seeded, and whether the dataset has none.

    Raises `InputError` where input and target both vary: no evaluation would see a pair.
    """
    if source.known and all_known(steps):
        return (), True
    for index in source.probes:
        pairs = []
        for _ in range(2):
            with seeded(0):
                pairs.append(source.read(index))
        same = [same_sample(*parts) for parts in zip(*pairs, strict=True)]
        if not any(same):
            raise InputError([_unsteady_pair(index)])
        if not all(same):
            return (_UNSEEDED,), False
        results = []
        for _ in range(2):
            with seeded(0):
                results.append(apply(steps, copied(pairs[0][0])))
        if not same_sample(*results):
            return (_UNSEEDED,), True
    return (), True


def _unsteady_pair(index: int) -> Problem:
    return Problem(
        "a random dataset must give the same pair (x, y) again under the same seed",
        f"x and y both changed at dataset[{index}]",
        "Draw from the global generators of torch, NumPy or random, which are seeded for each "
        "sample. Seed a library's transform with its own generator before it is applied: in "
        "__getitem__, transform.set_random_state(seed=int(torch.randint(2**31, ()))) of MONAI.",
    )


def _batches_equal(source: Opened, view: View) -> bool:
    """Compare a few samples of the eval view, read in both ways.

    The user's own steps are the reference, so a change in torchvision can cost speed but never
    changes a number.
    """
    if view.stored is None:
        return True
    probes = np.array(source.probes, dtype=np.int64)
    with seeded(0):
        stored = [to_array(apply(view.prefix, source.read(index)[0])) for index in probes.tolist()]
        ours = view(from_numpy(np.stack(stored)), Draw(0, 0, probes))
    with seeded(0):
        single = [apply(view.pipeline, source.read(index)[0]) for index in probes.tolist()]
        theirs = default_collate(single)
    return same_sample(ours, theirs)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Steps that each sample passes in a `Pass`, and where each comes from."""

    steps: tuple[Step, ...]
    places: tuple[tuple[Place, ...], ...]  # several where both views share the step


@dataclass(frozen=True)
class RangeRead:
    """What reading a range gave; it ends at the first sample that draws, fails or does not fit."""

    labels: list[Any]  # as the dataset gives them, tensors as arrays
    drew: tuple[Place, ...] = ()  # steps that drew random numbers
    unseeded: bool = False  # from a generator of their own
    dressed: bool = False  # the dataset changes what its transform returns
    odd: str = ""  # how the sample differs from others
    at: int = -1  # number of that sample
    problems: tuple[Problem, ...] = ()


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
        whole = open_source(self.dataset)
        labels: list[Any] = []
        with generators_kept():
            reading = _Reading(self, whole, redressed(whole, self.how))
            seeds = Draw(0, 0, np.arange(low, high)).bits().tolist()
            for index, seed in zip(range(low, high), seeds, strict=True):
                if not beat(index):
                    break
                try:
                    label, odd = reading.one(index, seed, outputs)
                except _DrewError as found:
                    return RangeRead(labels, found.places, reading.watch.own, at=index)
                except _DressedError:
                    return RangeRead(labels, dressed=True, at=index)
                except InputError as error:
                    return RangeRead(labels, problems=error.problems, at=index)
                if odd:
                    return RangeRead(labels, odd=odd, at=index)
                labels.append(label)
        return RangeRead(labels)


class _DrewError(Exception):
    """Something drew random numbers."""

    def __init__(self, places: Collection[Place]) -> None:
        super().__init__()
        self.places = tuple(places)


class _DressedError(Exception):
    """The transform cannot be taken out."""


class _Reading:
    """Reads samples one by one and watches what draws."""

    def __init__(self, work: Pass, whole: Opened, source: Opened) -> None:
        self.work, self.source = work, source
        self.whole = None if source.recorder is None else whole
        self.watched = [
            [None if is_known(step) else places for step, places in zip(*parts, strict=True)]
            for parts in ((pipeline.steps, pipeline.places) for pipeline in work.pipelines)
        ]
        steps = [step for pipeline in work.pipelines for step in pipeline.steps]
        self.quiet = source.known and all_known(steps)
        self.watch = Watch(source.base, *(step for step in steps if not is_known(step)))

    def one(self, index: int, seed: int, outputs: Sequence[Array]) -> tuple[Any, str]:
        """Read a sample; return its label, and how it does not fit."""
        if self.work.random:
            self.watch.sync(seed)
        try:
            sample, label = self.source.read(index)
        except InputError:
            if self.whole is not None:
                self.whole.read(index)
                raise _DressedError from None
            raise
        if not (self.work.random or self.quiet) and self.watch.drew():
            raise _DrewError([BASE])
        if self.work.random:
            self.watch.sync(seed)
        if isinstance(label, Tensor) or is_tree(label):
            label = mapped(to_array, label)
        if not self.work.hold:
            outputs[0][index] = np.frombuffer(digest_of(sample), np.uint8)
        odd = ""
        for number, pipeline in enumerate(self.work.pipelines):
            # Steps may change what they get, which may be a part of the dataset.
            given = copied(sample) if pipeline.steps else sample
            result = self._through(pipeline.steps, self.watched[number], given, index)
            if self.work.stored_as is not None:
                odd = odd or self._packed(result, outputs[number], index)
            elif self.work.hold:
                odd = odd or _stored(result, outputs[number], index)
        return label, odd

    def _packed(self, result: Any, output: Array, index: int) -> str:
        """Store the record of a sample, or its size; or return why it does not fit."""
        assert self.work.stored_as is not None
        try:
            record = self.work.stored_as(result)
        except Misfit as error:
            return f"sample {index} has another structure: {error}"
        if self.work.edges is None:
            output[index] = len(record)
            return ""
        low, high = self.work.edges[index : index + 2].tolist()
        if len(record) != high - low:
            return f"sample {index} has another size when it is read again"
        output[low:high] = record
        return ""

    def _through(
        self,
        steps: Sequence[Step],
        watched: Sequence[Sequence[Place] | None],
        sample: Any,
        index: int,
    ) -> Any:
        for step, places in zip(steps, watched, strict=True):
            try:
                sample = step(sample)
            except (Exception, SystemExit) as error:
                raise InputError([unreadable(index, error)]) from error
            if places is not None and self.watch.drew():
                raise _DrewError(places)
        return sample


def _stored(result: Any, output: Array, index: int) -> str:
    """Store a sample, or return why it does not fit."""
    array = to_array(result) if kind_of(result).storable else None
    if array is not None and (array.shape, array.dtype) == (output.shape[1:], output.dtype):
        output[index] = array
        return ""
    found = "an object that is not an array" if array is None else f"{array.dtype} {array.shape}"
    return f"sample {index} is {found} where others are {output.dtype} {output.shape[1:]}"


def digest_of(sample: Any) -> bytes:
    """Return a digest of a sample."""
    kind = kind_of(sample)
    if is_tree(sample):
        leaves, _ = leaves_by_path(sample)
        # joblib hashes the storage of a tensor by its address, too.
        if any(isinstance(leaf, Tensor) for leaf in leaves.values()):
            parts = [path_text(path).encode() + digest_of(leaf) for path, leaf in leaves.items()]
            return hashlib.sha256(b"".join(parts)).digest()[:DIGEST_BYTES]
    # Digests of trees keep the form that they had when these were objects like any other.
    digest = hashlib.sha256(repr(kind if kind.storable else Kind("other")).encode())
    if kind.storable:
        digest.update(to_array(sample).tobytes())
    else:
        import joblib

        digest.update(joblib.hash(sample).encode())
    return digest.digest()[:DIGEST_BYTES]
