"""A dataset, ready for all jobs: opened, checked, divided, read, and audited."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from asynckfold.data.batches import DataHandle
from asynckfold.data.labels import Labels, label_array, resolve_labels
from asynckfold.data.opened import OneByOne, Opened, open_source
from asynckfold.data.reading import Reading, read_all
from asynckfold.data.shared import ArraySpec, SharedArray
from asynckfold.data.views import Views, make_views
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.transforms import (
    Array,
    View,
    apply,
    describe,
    kind_of,
    same_sample,
    seeded,
    to_array,
)

_NOT_EQUAL = (
    "samples are read one by one in the workers, since batches did not equal single samples"
)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A dataset, ready for all jobs; it lives in the parent process.

    Parameters
    ----------
    targets : ndarray
        int64 class indices (n,), or float32 regression targets (n,) or (n, m).
    classes : tuple of str
        Class names by index; empty for regression.
    classification : bool
        Whether the targets are classes.
    n_samples : int
        Number of samples.
    fingerprint : str
        SHA-256 of stored samples and targets; what is done per batch is the plan's code.
    fingerprint_before : str
        The same with a text of what is done per batch, as runs have it whose plan holds no code.
    notes : tuple of str
        What the log must say.
    held : bool
        False: samples are read one by one in the workers.
    sample_shape : tuple of int
        Of one input of the eval view.
    """

    targets: Array
    classes: tuple[str, ...]
    classification: bool
    n_samples: int
    fingerprint: str
    fingerprint_before: str
    notes: tuple[str, ...]
    held: bool
    sample_shape: tuple[int, ...]
    _handle: DataHandle
    _shared: tuple[SharedArray, ...]
    _ordinary: tuple[OneByOne, OneByOne]

    def ordinary(self) -> tuple[OneByOne, OneByOne]:
        """Return the train view and the eval view as data sets that read sample by sample."""
        return self._ordinary

    def handle(self) -> DataHandle:
        """Return what a worker needs, with this process's descriptors of the shared arrays."""
        return replace(self._handle, fds=tuple(array.fd for array in self._shared))

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
    criterion_wants_classes: bool | None = None,
    memory_budget: int | None = None,
    folder: Path | None = None,
) -> Prepared:
    """Read a dataset once, check it, and divide its transform.

    Parameters
    ----------
    dataset : map-style torch Dataset of (x, y), or tuple (X, y) of arrays
        A ``transform`` attribute is divided into a train and an eval view; the object itself is
        never changed.
    train_transform, eval_transform : callable, optional
        In place of the dataset's own transform, or on top of its samples where it has none. From
        one transform alone the eval view is derived by leaving its random steps out.
    targets : array-like, optional
        Labels, in place of the dataset's.
    criterion_wants_classes : bool or None
        Whether the criterion needs class indices; None: told by the labels' type.
    memory_budget : int, optional
        Bytes that may be held in memory; beyond it the arrays go into a file in `folder`.
    folder : Path, optional
        Where that file, which has no name, is kept.

    Raises
    ------
    InputError
        All problems found in samples, transforms and labels.
    """
    source = open_source(dataset)
    views = make_views(source, train_transform, eval_transform)
    given = _given_labels(source, targets)
    labels, problems = _resolved(given, criterion_wants_classes, source.names)
    refuse([*views.problems, *problems])
    reading = read_all(source, views, memory_budget, folder, labels is None)
    if labels is None:
        labels = resolve_labels(reading.labels, criterion_wants_classes, source.names)
    prepared = _assemble(source, views, labels, reading)
    if not prepared.held or _equals_single_samples(prepared, source, views):
        return prepared
    prepared.close()
    return _assemble(source, views, labels, Reading(notes=(_NOT_EQUAL,)))


def _given_labels(source: Opened, targets: Any) -> Any:
    if targets is None:
        if source.labels is None or source.rows is None:
            return source.labels
        return label_array(source.labels)[source.rows]
    if not hasattr(targets, "__len__") or len(targets) != len(source):
        size = len(targets) if hasattr(targets, "__len__") else type(targets).__name__
        raise InputError(
            [
                Problem(
                    f"targets must hold one label for each of the {len(source)} samples",
                    str(size),
                    "Pass an array of that length, in the dataset's order.",
                )
            ]
        )
    return targets


def _resolved(
    values: Any, wants_classes: bool | None, names: tuple[str, ...]
) -> tuple[Labels | None, tuple[Problem, ...]]:
    """Resolve labels, if there are any yet; return problems, to be told with others."""
    if values is None:
        return None, ()
    try:
        return resolve_labels(values, wants_classes, names), ()
    except InputError as error:
        return None, error.problems


def _assemble(source: Opened, views: Views, labels: Labels, reading: Reading) -> Prepared:
    targets = labels.targets
    target_array = SharedArray(ArraySpec(targets.shape, str(targets.dtype)))
    target_array.writable()[...] = targets
    shared = (target_array, *reading.arrays)
    handle = _handle(source, views, shared, reading)
    train, evaluation = (
        OneByOne(source, view.pipeline, targets) for view in (views.train, views.eval)
    )
    notes = (*source.notes, *views.notes, *labels.notes, *reading.notes)
    fingerprint, before = _fingerprints(handle, shared, labels, source)
    return Prepared(
        targets=targets,
        classes=labels.classes,
        classification=labels.classification,
        n_samples=len(source),
        fingerprint=fingerprint,
        fingerprint_before=before,
        notes=tuple(dict.fromkeys(notes)),
        held=reading.held,
        sample_shape=views.sample_shape,
        _handle=handle,
        _shared=shared,
        _ordinary=(train, evaluation),
    )


def _handle(
    source: Opened, views: Views, shared: Sequence[SharedArray], reading: Reading
) -> DataHandle:
    return DataHandle(
        tuple(array.spec for array in shared),
        _travelling(views.train, reading.held),
        _travelling(views.eval, reading.held),
        reading.slots,
        None if reading.held else source.without_arrays(),
    )


def _travelling(view: View, held: bool) -> View:
    """Return what a worker needs of a view: less to send, and no torchvision to import."""
    return replace(view, prefix=(), pipeline=()) if held else replace(view, prefix=(), steps=())


def _equals_single_samples(prepared: Prepared, source: Opened, views: Views) -> bool:
    """Compare a few samples of the eval view, read in both ways.

    The user's own steps are the reference, so that a change in torchvision can cost speed but
    never changes a number.
    """
    handle = prepared.handle()
    probes = np.array(source.probes, dtype=np.int64)
    ours = handle.open(handle.fds).eval(probes)[0]
    with seeded(0):
        theirs = default_collate([apply(views.eval.pipeline, source.read(i)[0]) for i in probes])
    return same_sample(ours, theirs)


def _fingerprints(
    handle: DataHandle, shared: Sequence[SharedArray], labels: Labels, source: Opened
) -> tuple[str, str]:
    """Return the fingerprint of the samples, and the one with a text of the steps per batch."""
    digest = hashlib.sha256(repr((handle.specs, labels.classes, handle.slots)).encode())
    for array in shared:
        with memoryview(mmap.mmap(array.fd, 0, access=mmap.ACCESS_READ)) as memory:
            digest.update(memory)
    with_steps = digest.copy()
    for view in (handle.train, handle.eval):
        with_steps.update(describe((view.steps, view.pipeline), depth=6).encode())
    for part in _probed(source) if handle.source is not None else ():
        digest.update(part)
        with_steps.update(part)
    return digest.hexdigest(), with_steps.hexdigest()


def _probed(source: Opened) -> Iterator[bytes]:
    """Yield the kinds and the content of some samples that are read one by one."""
    for index in source.probes:
        with seeded(0):
            sample = source.read(index)[0]
        yield repr(kind_of(sample)).encode()
        if kind_of(sample).storable:
            yield to_array(sample).tobytes()
