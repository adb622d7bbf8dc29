"""Reads the samples of a checked dataset: all of them into shared arrays, or one by one later."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from asynckfold.data.arrays import NOT_FINITE
from asynckfold.data.dataset import SampleSource, file_labels, listing, open_source, redressed
from asynckfold.data.passes import Pass, Pipeline, RangeRead, SampleCheck, SampleFacts, Task
from asynckfold.data.shared_arrays import ArraySpec, SharedArray, mapped_file
from asynckfold.data.transforms.steps import Step, flatten, is_known, same_steps
from asynckfold.data.transforms.trees import (
    DIGEST_BYTES,
    Array,
    Kind,
    Records,
    TreeArrays,
    records_in,
    tensors_in,
)
from asynckfold.data.views import Tracer, Views, make_views
from asynckfold.errors import InputError, refuse

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
