"""Read a dataset once: into shared arrays, or where that is impossible, labels and a digest.

::

    SampleCheck ── views ── arrays ── Pass, in ranges, each by a reader ── labels, digests
              ▲                   │
              └── a step drew ────┘   the views are divided anew, and all is read again
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from asynckfold.data.arrays import NOT_FINITE
from asynckfold.data.dataset import Opened, open_source, redressed
from asynckfold.data.known_datasets import all_known, file_labels, listing
from asynckfold.data.range_reader import (
    DIGEST_BYTES,
    Pass,
    Pipeline,
    RangeRead,
    SampleCheck,
    SampleFacts,
)
from asynckfold.data.shared_arrays import ArraySpec, SharedArray, mapped_file
from asynckfold.data.transforms import (
    Array,
    Kind,
    Records,
    Step,
    TreeArrays,
    flatten,
    same_steps,
    tensors_in,
)
from asynckfold.data.views import Place, Traced, Views, make_views
from asynckfold.errors import Problem, refuse

Task = SampleCheck | Pass

STREAMED = "samples are read one by one in the workers, as a DataLoader does, since "


class Readers(Protocol):
    """Runs tasks where the code of a dataset may run; `notes` says how it was read."""

    notes: list[str]

    def __call__(
        self, task: Task, count: int, arrays: Sequence[SharedArray], seconds: float
    ) -> list[Any]:
        """Return what the task gave for consecutive ranges of `count` samples, in order.

        `count` is 0 for a task without a range, `seconds` the expected time of all samples. The
        task writes into `arrays`. Raises `InputError`, naming the sample, where the reading process
        died or hung.
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
    slots: tuple[int, int] = (0, 0)  # arrays of the train view and the eval view
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
    source: Opened  # with its transform taken out
    views: Views

    @property
    def random(self) -> bool:
        """Whether the dataset itself is random."""
        return self.facts.random


def check_samples(check: SampleCheck, readers: Readers) -> CheckedDataset:
    """Check some samples; raise `InputError` where one cannot be read or transformed."""
    (facts,) = readers(check, 0, (), 0.0)
    refuse(facts.problems)
    return with_facts(check, facts)


def with_facts(check: SampleCheck, facts: SampleFacts) -> CheckedDataset:
    """Return the dataset with what a check in another process found; reads no sample."""
    source = redressed(open_source(check.dataset), facts.how)
    traced = Traced(facts.traces)
    given = check.train_transform, check.eval_transform
    views = make_views(source, *given, traced, collates=check.collates)
    return CheckedDataset(check, facts, source, views)


def runs_user_code(check: SampleCheck) -> bool:
    """Return whether reading samples runs code other than torch's and torchvision's."""
    source = open_source(check.dataset)
    given = (*flatten(check.train_transform), *flatten(check.eval_transform))
    return not (source.known and all_known((*source.steps, *given)))


@dataclass
class _Found:
    """Why samples are not held, and what was found on the way."""

    why: str = ""
    drew: frozenset[Place] = frozenset()
    unseeded: frozenset[Place] = frozenset()
    dressed: bool = False
    parts: list[RangeRead] = field(default_factory=list)

    @property
    def anew(self) -> bool:
        """Whether all must be read again with other views."""
        return self.dressed or bool(self.drew)


def read_all(
    checked: CheckedDataset, readers: Readers, memory_budget: int | None, folder: Path | None
) -> Reading | CheckedDataset:
    """Read all samples into shared arrays, or digests of them.

    Returns `CheckedDataset` instead where a step turned out to be random, so that the views change.
    """
    why = _why_not_held(checked)
    if not why:
        hold = _hold_ragged if checked.check.collates else _hold
        found = hold(checked, readers, memory_budget, folder)
        if isinstance(found, Reading):
            return found
        if found.anew:
            return _checked_again(checked, readers, found)
        why = found.why
    if checked.views.problems:
        refuse(checked.views.problems)
    return _stream(checked, readers, why)


def labels_of(checked: CheckedDataset, readers: Readers) -> list[Any]:
    """Read all labels of a dataset whose samples cannot be used as they are."""
    work = Pass(checked.check.dataset, checked.facts.how, (), hold=False, random=True)
    digests = SharedArray(ArraySpec((len(checked.source), DIGEST_BYTES), "uint8"))
    try:
        found = _passed(checked, readers, work, [digests])
    finally:
        digests.close()
    return [label for part in found.parts for label in part.labels]


def _checked_again(checked: CheckedDataset, readers: Readers, found: _Found) -> CheckedDataset:
    check = checked.check
    drawn, unseeded = check.drawn | found.drew, check.unseeded | found.unseeded
    dressed = check.dressed or found.dressed
    return check_samples(replace(check, drawn=drawn, unseeded=unseeded, dressed=dressed), readers)


def _why_not_held(checked: CheckedDataset) -> str:
    if checked.random:
        return (
            "the dataset itself is random: x and y come from one read of a sample, which is "
            "seeded by job, epoch and sample in training, and by sample in evaluation; folds are "
            "made from the targets of evaluation"
        )
    if checked.check.collates:
        return _why_not_ragged(checked)
    if checked.views.train.stored is None or checked.views.eval.stored is None:
        return "they differ in shape or cannot be stored as an array before the random steps"
    if not checked.facts.equal:
        return "batches did not equal single samples"
    return ""


def _why_not_ragged(checked: CheckedDataset) -> str:
    if checked.facts.stored_as is None:
        return "they differ in structure, or hold something else than tensors, arrays and numbers"
    if not same_steps(checked.views.train.pipeline, checked.views.eval.pipeline):
        return "training and evaluation see them differently"
    return ""


def _hold_ragged(
    checked: CheckedDataset, readers: Readers, memory_budget: int | None, folder: Path | None
) -> Reading | _Found:
    """Fill two shared arrays, where each sample begins and all records; or say why not.

    Reads all samples twice: what they take together must be known before it is allocated.
    """
    count, check, facts = len(checked.source), checked.check, checked.facts
    places = tuple(zip(*checked.views.places, strict=True))
    pipeline = Pipeline(checked.views.eval.pipeline, places)
    work = Pass(check.dataset, facts.how, (pipeline,), True, stored_as=facts.stored_as)
    sizes = SharedArray(ArraySpec((count,), "int64"))
    try:
        found = _passed(checked, readers, work, [sizes])
        edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes.readable())])
    finally:
        sizes.close()
    if found.anew or found.why:
        return found
    specs = ArraySpec((count + 1,), "int64"), ArraySpec((int(edges[-1]),), "uint8")
    arrays, where = _allocate(specs, memory_budget, folder)
    if not arrays:
        return _Found(where)
    arrays[0].writable()[...] = edges
    found = _passed(checked, readers, replace(work, edges=edges), arrays[1:])
    if found.anew or found.why:
        return found
    labels = [label for part in found.parts for label in part.labels]
    return Reading(tuple(arrays), (1, 2), labels, (where,) * bool(where))


def _hold(
    checked: CheckedDataset, readers: Readers, memory_budget: int | None, folder: Path | None
) -> Reading | _Found:
    """Fill shared arrays, or say why that cannot be."""
    source, stored = checked.source, _distinct_prefixes(checked.views)
    whole = _whole(source, [pipeline.steps for pipeline, _ in stored])
    mapped = None if whole is None or source.rows is not None else mapped_file(whole)
    if mapped is not None and len(stored) == 1:
        notes, rows = _not_finite([mapped], None)
        return Reading((mapped,), _slots((0, 0)), notes=notes, not_finite=rows)
    specs = [ArraySpec((len(source), *kind.shape), kind.dtype) for _, kind in stored]
    arrays, where = _allocate(specs, memory_budget, folder)
    if not arrays:
        return _Found(where)
    slots = _slots((0, len(arrays) - 1))
    if whole is not None:
        for array in arrays:
            array.fill(whole, source.rows)
        notes, rows = _not_finite(arrays, checked.views.records)
        notes = (*filter(None, [where]), *notes)
        return Reading(tuple(arrays), slots, notes=notes, not_finite=rows)
    pipelines = tuple(pipeline for pipeline, _ in stored)
    found = _passed(
        checked, readers, Pass(checked.check.dataset, checked.facts.how, pipelines, True), arrays
    )
    if found.anew:
        return found
    if found.why:
        _refuse_odd_sample(checked.views, found.why)
        return found
    labels = [label for part in found.parts for label in part.labels]
    notes, rows = _not_finite(arrays, checked.views.records)
    notes = (*filter(None, [where]), *notes)
    return Reading(tuple(arrays), slots, labels, notes, not_finite=rows)


def _whole(source: Opened, stored: Sequence[tuple[Step, ...]]) -> Array | None:
    """Return what is stored of all of `source.base`, where it needs no reading one by one."""
    if not any(stored):
        return source.samples
    arrays = getattr(source.base, "samples", None) if source.known else None
    first = stored[0][0] if len(stored) == len(stored[0]) == 1 else None
    if isinstance(first, Records) and isinstance(arrays, TreeArrays):
        return first.pack_rows(arrays)
    return None


def _slots(slots: tuple[int, int]) -> tuple[int, int]:
    """Shift by one: the first shared array holds the targets."""
    return slots[0] + 1, slots[1] + 1


def _passed(
    checked: CheckedDataset, readers: Readers, work: Pass, arrays: Sequence[SharedArray]
) -> _Found:
    """Read all samples; report what drew or did not fit, refuse what cannot be read."""
    count = len(checked.source)
    parts: list[RangeRead] = readers(work, count, arrays, checked.facts.seconds * count)
    first = sorted((part for part in parts if part.at >= 0), key=lambda part: part.at)
    drew = frozenset(place for part in first for place in part.drew)
    if any(part.dressed for part in first):
        return _Found(dressed=True)
    if drew:
        own = frozenset(place for part in first if part.unseeded for place in part.drew)
        return _Found(drew=drew, unseeded=own)
    for part in first:
        refuse(part.problems)
        if part.odd:
            return _Found(part.odd)
    return _Found(parts=parts)


def _stream(checked: CheckedDataset, readers: Readers, why: str) -> Reading | CheckedDataset:
    """Return labels and a digest of samples that jobs will read themselves."""
    source, view = checked.source, checked.views.eval
    if not checked.random and all_known(view.pipeline):
        if source.known and source.samples is not None:
            digest = _digest_of_rows(source.samples, source.rows)
            return Reading(notes=(STREAMED + why,), digest=digest)
        targets = file_labels(source.base)
        if targets is not None:
            return Reading(
                labels=np.asarray(targets)[slice(None) if source.rows is None else source.rows],
                notes=(
                    STREAMED + why,
                    "changed files are detected by their names, sizes and times, not by their "
                    "contents",
                ),
                digest=listing(source.base, source.rows),
            )
    places = tuple((place,) for place in checked.views.places[1])
    # What torchvision's own steps do is known; to decode and scale all samples takes its time.
    is_known = all_known(view.pipeline) and checked.views.records is None
    pipelines = () if is_known else (Pipeline(view.pipeline, places),)
    work = Pass(
        checked.check.dataset, checked.facts.how, pipelines, hold=False, random=checked.random
    )
    digests = SharedArray(ArraySpec((len(source), DIGEST_BYTES), "uint8"))
    try:
        found = _passed(checked, readers, work, [digests])
        if found.anew:
            return _checked_again(checked, readers, found)
        digest = hashlib.sha256(digests.writable().tobytes()).digest()
    finally:
        digests.close()
    notes = [STREAMED + why]
    if not checked.facts.steady:
        digest = b""
        notes.append(
            "changes of the samples are not detected, since no read of them can be repeated"
        )
    labels = [label for part in found.parts for label in part.labels]
    return Reading(labels=labels, notes=tuple(notes), random=checked.random, digest=digest)


def _digest_of_rows(samples: Array, rows: Any) -> bytes:
    digest = hashlib.sha256(str(samples.dtype).encode())
    count = len(samples) if rows is None else len(rows)
    for low in range(0, count, 1024):
        part = slice(low, low + 1024) if rows is None else rows[low : low + 1024]
        digest.update(samples[part].tobytes())
    return digest.digest()


def _distinct_prefixes(views: Views) -> list[tuple[Pipeline, Kind]]:
    """Return what is stored: one array for both views where they begin alike."""
    train, evaluation = views.train, views.eval
    assert train.stored is not None
    assert evaluation.stored is not None
    places = [
        [(place,) for place in found[: len(view.prefix)]]
        for view, found in zip((train, evaluation), views.places, strict=True)
    ]
    if train.stored == evaluation.stored and same_steps(train.prefix, evaluation.prefix):
        both = tuple((*mine, *theirs) for mine, theirs in zip(*places, strict=True))
        return [(Pipeline(train.prefix, both), train.stored)]
    return [
        (Pipeline(train.prefix, tuple(places[0])), train.stored),
        (Pipeline(evaluation.prefix, tuple(places[1])), evaluation.stored),
    ]


def _allocate(
    specs: Sequence[ArraySpec], memory_budget: int | None, folder: Path | None
) -> tuple[list[SharedArray], str]:
    """Return the arrays and where they are, or no arrays and why."""
    need = sum(spec.nbytes for spec in specs)
    if memory_budget is None or need <= memory_budget:
        return [SharedArray(spec) for spec in specs], ""
    text = f"{need} bytes are needed, {memory_budget} may be held in memory"
    if folder is None:
        return [], text
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if need <= free:
        try:
            arrays = [SharedArray(spec, folder) for spec in specs]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
        else:
            return arrays, f"{text}: the samples are kept in an unnamed file in {folder}"
    return [], f"{text} and {free} are free in {folder}"


def _refuse_odd_sample(views: Views, odd: str) -> None:
    """Refuse samples of several shapes where no later step could equalise them."""
    if not views.train.steps or not views.eval.steps:
        remedy = (
            "Add Resize and CenterCrop, or padding, to the transform; or pass collate_fn=, which "
            "makes a batch of a list of samples."
        )
        refuse([Problem("all samples must have one shape and type", odd, remedy)])


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
        odd = np.concatenate([low + _odd_rows(flat[low : low + 4096], records) for low in lows])
        if odd.size:
            notes.append(f"{odd.size} of {len(flat)} samples {NOT_FINITE}")
            first.append(int(odd[0]))
    return tuple(dict.fromkeys(notes)), tuple(dict.fromkeys(first))


def _odd_rows(rows: Array, records: Records | None) -> Array:
    """Return the places of samples that hold a number that is not finite."""
    if records is None:
        # A sum is finite only if all its numbers are; it is faster than to look at each.
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(rows.sum()):
                return np.empty(0, np.int64)
        return np.flatnonzero(~np.isfinite(rows).all(axis=1))
    found = np.ones(len(rows), bool)
    for item in tensors_in(records.unpack(torch.tensor(rows))):
        found &= item.isfinite().reshape(len(rows), -1).all(dim=1).numpy()
    return np.flatnonzero(~found)
