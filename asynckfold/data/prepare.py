"""Prepare a dataset for all jobs: open, check, divide its transform, read, fingerprint."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from asynckfold.data.arrays import NOT_FINITE, targets_as_trees
from asynckfold.data.batches import Collation, DataHandle, ItemForm, item_form
from asynckfold.data.dataset import (
    DRESSED,
    OneByOne,
    SampleSource,
    file_labels,
    how_to_undress,
    listing,
    open_source,
    redressed,
    unreadable,
)
from asynckfold.data.labels import Encoding, Labels, label_array, resolve_labels
from asynckfold.data.shared_arrays import ArraySpec, SharedArray, mapped_file
from asynckfold.data.transforms.random_numbers import Draw, Watch, generators_kept, seeded, varies
from asynckfold.data.transforms.steps import Step, apply, flatten, is_known, same_steps
from asynckfold.data.transforms.trees import (
    DIGEST_BYTES,
    Array,
    Kind,
    Misfit,
    Records,
    TreeArrays,
    copied,
    digest_of,
    is_tree,
    kind_of,
    mapped,
    records_in,
    same_sample,
    tensors_in,
    to_array,
)
from asynckfold.data.views import (
    Place,
    TraceFacts,
    Tracer,
    View,
    Views,
    make_views,
    some_samples,
    train_steps,
)
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.criteria import Criterion

_ELSEWHERE = (
    "samples were read in this process: a worker, which imports modules again, read different "
    "ones. Was a module changed after its import, or does a sample depend on earlier reads?"
)


@dataclass(frozen=True, eq=False)
class PreparedData:
    """A dataset, ready for all jobs; lives in the parent process."""

    labels: Labels
    checked: CheckedDataset
    notes: tuple[str, ...]
    held: bool  # False: samples are read one by one in the workers
    fingerprint: str  # SHA-256 of stored samples and targets; code per batch is in the plan
    _handle: DataHandle
    _shared: tuple[SharedArray, ...]
    _digest: bytes
    last_is_target: bool = False  # see `DataArguments`

    @property
    def targets(self) -> Array:
        """Targets, as in `Labels`."""
        return self.labels.targets

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, as in `Labels`."""
        return self.labels.classes

    @property
    def n_samples(self) -> int:
        """Number of samples."""
        return len(self.targets)

    def numbered(self) -> PreparedData:
        """Return the data with renumbered labels; earlier handles must not be used any more."""
        labels, handle = self.labels.numbered(), self._handle
        if handle.encoding is not None:
            encoding = handle.encoding.numbered(self.targets, labels.targets)
            handle = replace(handle, encoding=encoding)
        self._shared[0].writable()[...] = labels.targets
        fingerprint = _fingerprint(handle, self._shared, labels, self._digest)
        return replace(
            self,
            labels=labels,
            notes=(*self.notes, *labels.notes[len(self.labels.notes) :]),
            fingerprint=fingerprint,
            _handle=handle,
        )

    def ordinary(self) -> tuple[OneByOne, OneByOne]:
        """Return the train view and the eval view as datasets that read sample by sample."""
        source, encoding = self.checked.source, self._handle.encoding
        steps = self.checked.views.train.pipeline, self.checked.views.eval.pipeline
        train, evaluation = (OneByOne(source, each, self.targets, encoding) for each in steps)
        return train, evaluation

    def handle(self) -> DataHandle:
        """Return what a worker needs, with this process's descriptors of the shared arrays."""
        fds = tuple(array.fd for array in self._shared)
        return replace(self._handle, fds=fds, last_is_target=self.last_is_target)

    def preprocess_problems(self) -> Iterator[Problem]:
        """Yield that a scikit-learn transformer cannot have samples of several tensors."""
        inputs = self._handle.records.text if self._handle.records else ""
        if self._handle.collation is not None or inputs:
            rule = "preprocess needs samples of one tensor: it gets one row of numbers each"
            remedy = "Leave one out, or transform inputs before, by train_transform."
            yield Problem(rule, f"a collate_fn, or inputs {inputs}", remedy)

    def stored(self, rows: Sequence[int]) -> Array | None:
        """Return samples as the eval view stores them; None where they are read one by one."""
        records = self._handle.records
        if not self.held or (records is not None and records.ragged):
            return None
        samples: Array = self._shared[self._handle.slots[1]].readable()
        return samples[list(rows)]

    def close(self) -> None:
        """Close the shared arrays; workers that mapped them keep them."""
        for array in self._shared:
            array.close()


def prepare(
    dataset: Any,
    *,
    train_transform: Any = None,
    eval_transform: Any = None,
    targets: Any = None,
    criterion: Criterion | None = None,
    task: str | None = None,
    random_samples: bool = False,
    memory_budget: int | None = None,
    folder: Path | None = None,
    readers: Readers | None = None,
    collate_fn: Any = None,
) -> PreparedData:
    """Read a dataset once, check it, and divide its transform; the dataset is never changed.

    `train_transform` and `eval_transform` stand in place of the dataset's, or on top of its samples
    where it has none; from one transform alone the eval view is derived by leaving its random steps
    out. `targets` stand in place of the dataset's. `criterion`, or without one `task` or the
    labels' type, decides what targets are. `random_samples`: another read of a sample may give
    another pair, though this does not show. Beyond `memory_budget` bytes arrays go into an unnamed
    file in `folder`. `readers` run the code of the dataset and of the transforms; this process by
    default. With a `collate_fn`, samples may differ in shape. Raises `InputError` with all problems
    of samples, transforms and labels.
    """
    check = SampleCheck(
        dataset, train_transform, eval_transform, random_samples, collates=collate_fn is not None
    )
    source = open_source(dataset)
    resolve = partial(
        resolve_labels,
        names=source.names,
        criterion=criterion,
        task=task,
    )
    labels: Labels | None = None
    problems: tuple[Problem, ...] = ()
    if (values := _given_labels(source, targets)) is not None:
        try:
            labels = resolve(values)
        except InputError as error:
            problems = error.problems
    read = partial(
        _read,
        check,
        labels=labels,
        problems=problems,
        resolve=resolve,
        where=(memory_budget, folder),
        collate_fn=collate_fn,
    )
    if readers is None or not runs_user_code(check):
        return read(Here())
    prepared = read(readers)
    if not prepared.held or _same_here(prepared):
        return prepared
    prepared.close()
    again = read(Here())
    return replace(again, notes=(*again.notes, _ELSEWHERE))


def _read(
    check: SampleCheck,
    readers: Readers,
    *,
    labels: Labels | None,
    problems: tuple[Problem, ...],
    resolve: Callable[[Any], Labels],
    where: tuple[int | None, Path | None],
    collate_fn: Any,
) -> PreparedData:
    """Read the dataset; `labels` need no reading, `problems` are theirs."""
    checked = check_samples(check, readers)
    while True:
        refuse([*checked.views.problems, *problems])
        try:
            reading = read_all(checked, readers, *where)
            break
        except ReadAgainError as again:
            checked = check_samples(again.check, readers)
    encoding = None
    if labels is None:
        try:
            labels = resolve(reading.labels)
        except InputError:
            reading.close()
            raise
        encoding = Encoding.of(reading.labels, labels) if reading.random else None
    source, views, facts = checked.source, checked.views, checked.facts
    target_array = SharedArray(ArraySpec(labels.targets.shape, str(labels.targets.dtype)))
    target_array.writable()[...] = labels.targets
    shared = (target_array, *reading.arrays)
    unlabelled = odd_rows(labels.targets.reshape(len(labels.targets), -1), None)
    collation, records = None, views.records
    if collate_fn is not None:
        collation = Collation(collate_fn, facts.form, labels.objective.targets)
        records = facts.stored_as if reading.held else None
    handle = DataHandle(
        tuple(array.spec for array in shared),
        _sent(views.train, reading.held),
        _sent(views.eval, reading.held),
        # The first shared array holds the targets.
        (min(1, len(reading.arrays)), len(reading.arrays)),
        None if reading.held else source.without_arrays(),
        encoding=encoding,
        records=records,
        collation=collation,
        schema=labels.objective.targets,
        not_finite=tuple(dict.fromkeys((*reading.not_finite, *unlabelled[:1].tolist()))),
    )
    notes = source.notes, views.notes, facts.notes, labels.notes, reading.notes, readers.notes
    return PreparedData(
        labels,
        checked,
        tuple(dict.fromkeys(chain(*notes))),
        reading.held,
        _fingerprint(handle, shared, labels, reading.digest),
        handle,
        shared,
        reading.digest,
    )


def _sent(view: View, held: bool) -> View:
    """Return what a worker needs of a view, so that it need not import torchvision."""
    return replace(view, prefix=(), pipeline=()) if held else replace(view, prefix=(), steps=())


def _same_here(prepared: PreparedData) -> bool:
    """Compare some samples of the eval view with what this process reads."""
    handle, checked = prepared.handle(), prepared.checked
    source = checked.source
    probes = np.array(source.probes[:3], dtype=np.int64)
    batches = handle.open(handle.fds)
    with seeded(0):
        pipeline = checked.views.eval.pipeline
        single = [apply(pipeline, source.read(index)[0]) for index in probes.tolist()]
    if handle.collation is not None:
        return all(map(same_sample, batches.samples_of(probes), single))
    pair = batches.eval(probes)[0], batches.unpacked(default_collate(single))
    ours, theirs = ([item.numpy() for item in tensors_in(inputs)] for inputs in pair)
    # The last digits of a sum depend on the number of threads.
    return len(ours) == len(theirs) and all(
        one.shape == other.shape and np.allclose(one, other, rtol=1e-3, equal_nan=True)
        for one, other in zip(ours, theirs, strict=True)
    )


def _given_labels(source: SampleSource, targets: Any) -> Any:
    if targets is None:
        if source.labels is None or source.rows is None:
            return source.labels
        return label_array(source.labels)[source.rows]
    targets = targets_as_trees(targets, source)
    if not hasattr(targets, "__len__") or len(targets) != len(source):
        size = len(targets) if hasattr(targets, "__len__") else type(targets).__name__
        raise InputError.one(
            f"targets must hold one label for each of the {len(source)} samples",
            str(size),
            "Pass an array of that length, in the dataset's order.",
        )
    return targets


def _fingerprint(
    handle: DataHandle, shared: Sequence[SharedArray], labels: Labels, samples: bytes
) -> str:
    """Return `Prepared.fingerprint`."""
    digest = hashlib.sha256(repr((handle.specs, labels.classes, handle.slots)).encode())
    if handle.collation is not None:
        digest.update(repr(handle.collation.form).encode())
    if handle.schema is not None:
        digest.update(repr(handle.schema).encode())
    if handle.records is not None:
        digest.update(repr((handle.records.parts, handle.records.spec)).encode())
    for array in shared:
        digest.update(array.readable().data if array.spec.nbytes else b"\0")
    digest.update(samples)
    return digest.hexdigest()


# Read once: into shared arrays, or where that is impossible, labels and a digest


STREAMED = "samples are read one by one in the workers, as a DataLoader does, since "


class Readers(Protocol):
    """Runs tasks where the code of a dataset may run; `notes` says how it was read."""

    notes: list[str]

    def __call__(
        self, task: Task, count: int, arrays: Sequence[SharedArray], seconds: float
    ) -> list[Any]:
        """Return what the task gave for consecutive ranges of `count` samples (0: none), in order.

        It writes into `arrays`; `seconds` is the expected time of all samples. Raises `InputError`,
        naming the sample, where the reading process died or hung.
        """
        ...


class Here:
    """Reads in this process, with one thread as everywhere, so that bits are equal."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def __call__(
        self, task: Task, count: int, arrays: Sequence[SharedArray], seconds: float
    ) -> list[Any]:
        """Return what the task gave for all samples, as one range."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [task(0, count, [array.writable() for array in arrays], lambda index: True)]
        finally:
            torch.set_num_threads(threads)


@dataclass(frozen=True, eq=False)
class Reading:
    """What reading the dataset gave: arrays, or a note why there are none."""

    arrays: tuple[SharedArray, ...] = ()  # empty: samples are read one by one in the workers
    labels: Any = None  # of all samples, where they were read
    notes: tuple[str, ...] = ()
    random: bool = False  # another read of a sample may give another pair
    digest: bytes = b""  # of samples that no array holds
    not_finite: tuple[int, ...] = ()  # the first sample of each array that holds NaN or infinity

    @property
    def held(self) -> bool:
        """Whether there are arrays."""
        return bool(self.arrays)

    def close(self) -> None:
        """Close the arrays."""
        for array in self.arrays:
            array.close()


@dataclass(frozen=True, eq=False)
class CheckedDataset:
    """A dataset of which some samples were checked."""

    check: SampleCheck
    facts: SampleFacts
    source: SampleSource  # with its transform taken out
    views: Views


def check_samples(check: SampleCheck, readers: Readers) -> CheckedDataset:
    """Check some samples; raise `InputError` where one cannot be read or transformed."""
    (facts,) = readers(check, 0, (), 0.0)
    refuse(facts.problems)
    return with_facts(check, facts)


def with_facts(check: SampleCheck, facts: SampleFacts) -> CheckedDataset:
    """Return the dataset with the facts of a check in another process; reads no sample."""
    source = redressed(open_source(check.dataset), facts.how)
    transforms = check.train_transform, check.eval_transform
    views = make_views(source, *transforms, Tracer(facts=facts.traces), collates=check.collates)
    return CheckedDataset(check, facts, source, views)


def runs_user_code(check: SampleCheck) -> bool:
    """Return whether reading samples runs code other than torch's and torchvision's."""
    source = open_source(check.dataset)
    given = (*flatten(check.train_transform), *flatten(check.eval_transform))
    return not (source.known and all(map(is_known, (*source.steps, *given))))


class _CannotHoldError(Exception):
    """Samples cannot be held in arrays; the text says why."""


class ReadAgainError(Exception):
    """All samples must be read again, since other steps are random, or cannot be taken out."""

    def __init__(self, check: SampleCheck) -> None:
        super().__init__()
        self.check = check


def read_all(
    checked: CheckedDataset, readers: Readers, memory_budget: int | None, folder: Path | None
) -> Reading:
    """Read all samples into shared arrays, or digests of them.

    Raises `ReadAgainError` where a step turned out to be random, so that the views change.
    """
    why = _why_not_held(checked)
    if not why:
        hold = _hold_ragged if checked.check.collates else _hold
        try:
            return hold(checked, readers, memory_budget, folder)
        except _CannotHoldError as error:
            why = str(error)
    refuse(checked.views.problems)
    return _stream(checked, readers, why)


def _why_not_held(checked: CheckedDataset) -> str:
    views, facts = checked.views, checked.facts
    if facts.random:
        return (
            "the dataset itself is random: x and y come from one read of a sample, which is "
            "seeded by job, epoch and sample in training, and by sample in evaluation; folds are "
            "made from the targets of evaluation"
        )
    if checked.check.collates:
        if facts.stored_as is None:
            return (
                "they differ in structure, or hold something else than tensors, arrays and numbers"
            )
        alike = same_steps(views.train.pipeline, views.eval.pipeline)
        return "" if alike else "training and evaluation see them differently"
    if views.train.stored is None or views.eval.stored is None:
        return "they differ in shape or cannot be stored as an array before the random steps"
    return ""


def _hold(
    checked: CheckedDataset, readers: Readers, memory_budget: int | None, folder: Path | None
) -> Reading:
    """Fill one shared array for each view, or one for both."""
    source, views = checked.source, checked.views
    pipelines, kinds = zip(*_stored(views), strict=True)
    whole = _whole(source, [pipeline.steps for pipeline in pipelines])
    in_file = None if whole is None or source.rows is not None else mapped_file(whole)
    labels, where = None, ""
    if in_file is not None and len(pipelines) == 1:
        arrays = [in_file]
    else:
        specs = [ArraySpec((len(source), *kind.shape), kind.dtype) for kind in kinds]
        arrays, where = _allocated(specs, memory_budget, folder)
        if whole is not None:
            for array in arrays:
                array.fill(whole, source.rows)
        else:
            work = Pass(checked.check.dataset, checked.facts.how, pipelines, hold=True)
            try:
                labels = _passed(checked, readers, work, arrays)
            except _CannotHoldError as error:
                if not (views.train.steps and views.eval.steps):
                    # No later step could make their shapes equal.
                    raise InputError.one(
                        "all samples must have one shape and type",
                        str(error),
                        "Add Resize and CenterCrop, or padding, to the transform; or pass "
                        "collate_fn=, which makes a batch of a list of samples.",
                    ) from error
                raise
    notes, first = _not_finite(arrays, views.records)
    notes = (*filter(None, [where]), *notes)
    return Reading(tuple(arrays), labels, notes, not_finite=first)


def _stored(views: Views) -> list[tuple[Pipeline, Kind]]:
    """Return what is stored: one array for both views where they begin alike."""
    train, evaluation = views.train, views.eval
    assert train.stored is not None
    assert evaluation.stored is not None
    places = [
        tuple((place,) for place in places[: len(view.prefix)])
        for view, places in zip((train, evaluation), views.places, strict=True)
    ]
    if train.stored == evaluation.stored and same_steps(train.prefix, evaluation.prefix):
        both = tuple((*mine, *theirs) for mine, theirs in zip(*places, strict=True))
        return [(Pipeline(train.prefix, both), train.stored)]
    return [
        (Pipeline(train.prefix, places[0]), train.stored),
        (Pipeline(evaluation.prefix, places[1]), evaluation.stored),
    ]


def _whole(source: SampleSource, stored: Sequence[tuple[Step, ...]]) -> Array | None:
    """Return what is stored of all of `source.base`, where it needs no reading one by one."""
    if not any(stored):
        return source.samples
    arrays = getattr(source.base, "samples", None) if source.known else None
    records = records_in(stored[0]) if len(stored) == len(stored[0]) == 1 else None
    if records is not None and isinstance(arrays, TreeArrays):
        return records.pack_rows(arrays)
    return None


def _hold_ragged(
    checked: CheckedDataset, readers: Readers, memory_budget: int | None, folder: Path | None
) -> Reading:
    """Fill two shared arrays: where each sample begins, and all records.

    Reads all samples twice: what they take together must be known before it is allocated.
    """
    count, facts = len(checked.source), checked.facts
    places = tuple(zip(*checked.views.places, strict=True))
    pipeline = Pipeline(checked.views.eval.pipeline, places)
    work = Pass(checked.check.dataset, facts.how, (pipeline,), True, stored_as=facts.stored_as)
    with closing(SharedArray(ArraySpec((count,), "int64"))) as sizes:
        _passed(checked, readers, work, [sizes])
        edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes.readable())])
    specs = ArraySpec((count + 1,), "int64"), ArraySpec((int(edges[-1]),), "uint8")
    arrays, where = _allocated(specs, memory_budget, folder)
    arrays[0].writable()[...] = edges
    labels = _passed(checked, readers, replace(work, edges=edges), arrays[1:])
    return Reading(tuple(arrays), labels, (where,) * bool(where))


def _passed(
    checked: CheckedDataset, readers: Readers, work: Pass, arrays: Sequence[SharedArray]
) -> list[Any]:
    """Read all samples; return their labels.

    Raises `ReadAgainError` for steps that drew, `_CannotHoldError` for a sample that does not fit,
    and `InputError` for one that cannot be read.
    """
    count, check = len(checked.source), checked.check
    parts: list[RangeRead] = readers(work, count, arrays, checked.facts.seconds * count)
    ended = sorted((part for part in parts if part.at >= 0), key=lambda part: part.at)
    if any(part.dressed for part in ended):
        raise ReadAgainError(replace(check, dressed=True))
    if drew := frozenset(place for part in ended for place in part.drew):
        unseeded = frozenset(place for part in ended if part.unseeded for place in part.drew)
        raise ReadAgainError(
            replace(check, drawn=check.drawn | drew, unseeded=check.unseeded | unseeded)
        )
    for part in ended:
        refuse(part.problems)
        raise _CannotHoldError(part.odd)
    return [label for part in parts for label in part.labels]


def _stream(checked: CheckedDataset, readers: Readers, why: str) -> Reading:
    """Return labels and a digest of samples that jobs will read themselves."""
    source, view, facts = checked.source, checked.views.eval, checked.facts
    all_known = all(map(is_known, view.pipeline))
    notes = [STREAMED + why]
    if all_known and not facts.random:
        if source.known and source.samples is not None:
            digest = _digest_of_rows(source.samples, source.rows)
            return Reading(notes=tuple(notes), digest=digest)
        if (targets := file_labels(source.base)) is not None:
            notes.append(
                "changed files are detected by their names, sizes and times, not by their contents"
            )
            rows = slice(None) if source.rows is None else source.rows
            digest = listing(source.base, source.rows)
            return Reading(labels=np.asarray(targets)[rows], notes=tuple(notes), digest=digest)
    places = tuple((place,) for place in checked.views.places[1])
    # What torchvision's steps do is known; to decode and scale all samples takes its time.
    all_known &= checked.views.records is None
    pipelines = () if all_known else (Pipeline(view.pipeline, places),)
    work = Pass(checked.check.dataset, facts.how, pipelines, hold=False, random=facts.random)
    with closing(SharedArray(ArraySpec((len(source), DIGEST_BYTES), "uint8"))) as digests:
        labels = _passed(checked, readers, work, [digests])
        digest = hashlib.sha256(digests.writable().tobytes()).digest()
    if not facts.steady:
        digest = b""
        notes.append(
            "changes of the samples are not detected, since no read of them can be repeated"
        )
    return Reading(labels=labels, notes=tuple(notes), random=facts.random, digest=digest)


def _digest_of_rows(samples: Array, rows: Any) -> bytes:
    digest = hashlib.sha256(str(samples.dtype).encode())
    count = len(samples) if rows is None else len(rows)
    for low in range(0, count, 1024):
        part = slice(low, low + 1024) if rows is None else rows[low : low + 1024]
        digest.update(samples[part].tobytes())
    return digest.digest()


def _allocated(
    specs: Sequence[ArraySpec], memory_budget: int | None, folder: Path | None
) -> tuple[list[SharedArray], str]:
    """Return the arrays, and a note if they lie in a file."""
    need = sum(spec.nbytes for spec in specs)
    if memory_budget is None or need <= memory_budget:
        return [SharedArray(spec) for spec in specs], ""
    text = f"{need} bytes are needed, {memory_budget} may be held in memory"
    if folder is None:
        raise _CannotHoldError(text)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    try:
        if need <= free:
            arrays = [SharedArray(spec, folder) for spec in specs]
            return arrays, f"{text}: the samples are kept in an unnamed file in {folder}"
    except OSError as error:
        text += f" ({error})"
    raise _CannotHoldError(f"{text} and {free} are free in {folder}")


def _not_finite(
    arrays: Sequence[SharedArray], records: Records | None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return notes on samples that hold NaN or infinity, and the first of each array."""
    notes, first = [], []
    for shared in arrays:
        if np.dtype(shared.spec.dtype).kind != "f" and records is None:
            continue
        flat = shared.readable().reshape(shared.spec.shape[0], -1)
        lows = range(0, len(flat), 4096)
        odd = np.concatenate([low + odd_rows(flat[low : low + 4096], records) for low in lows])
        if odd.size:
            notes.append(f"{odd.size} of {len(flat)} samples {NOT_FINITE}")
            first.append(int(odd[0]))
    return tuple(dict.fromkeys(notes)), tuple(dict.fromkeys(first))


def odd_rows(rows: Array, records: Records | None) -> Array:
    """Return the places of samples that hold a number that is not finite."""
    if records is None:
        # A sum is finite only if all its numbers are; it is faster than to look at each.
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(rows.sum()):
                return np.empty(0, np.int64)
        return np.flatnonzero(~np.isfinite(rows).all(axis=1))
    finite = np.ones(len(rows), bool)
    for item in tensors_in(records.unpack(torch.tensor(rows))):
        finite &= item.isfinite().reshape(len(rows), -1).all(dim=1).numpy()
    return np.flatnonzero(~finite)


# What a reader process does: look at some samples, then read a range of them.
# Only this code runs the dataset and the user's transforms before jobs do. A `Pass` watches the
# generators at each step of each sample: a step that draws for one sample in a thousand is random.


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
