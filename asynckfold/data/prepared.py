"""A dataset, ready for all jobs: opened, checked, divided, read, and audited."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
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
        SHA-256 of stored samples, targets and what is done per batch.
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
    refusal = None if given is None else _label_refusal(given, criterion_wants_classes, source)
    refuse([*views.problems, *(refusal.problems if refusal else ())])
    reading = read_all(source, views, memory_budget, folder, given is None)
    labels = resolve_labels(
        given if given is not None else reading.labels, criterion_wants_classes, source.names
    )
    return _assemble(source, views, labels, reading)


def _given_labels(source: Opened, targets: Any) -> Any:
    if targets is None:
        if source.labels is None or source.rows is None:
            return source.labels
        return label_array(source.labels)[source.rows]
    if not hasattr(targets, "__len__") or len(targets) != len(source):
        size = len(targets) if hasattr(targets, "__len__") else type(targets).__name__
        refuse(
            [
                Problem(
                    f"targets must hold one label for each of the {len(source)} samples",
                    str(size),
                    "Pass an array of that length, in the dataset's order.",
                )
            ]
        )
    return targets


def _label_refusal(values: Any, wants_classes: bool | None, source: Opened) -> InputError | None:
    try:
        resolve_labels(values, wants_classes, source.names)
    except InputError as error:
        return error
    return None


def _assemble(source: Opened, views: Views, labels: Labels, reading: Reading) -> Prepared:
    target_array = SharedArray(ArraySpec(labels.targets.shape, str(labels.targets.dtype)))
    target_array.writable()[...] = labels.targets
    shared = (target_array, *reading.arrays)
    handle = DataHandle(
        tuple(array.spec for array in shared),
        _travelling(views.train, reading.held),
        _travelling(views.eval, reading.held),
        reading.slots,
        None if reading.held else replace(source, samples=None, labels=None),
    )
    notes = (*source.notes, *views.notes, *labels.notes, *reading.notes)
    prepared = Prepared(
        labels.targets,
        labels.classes,
        labels.classification,
        len(source),
        _fingerprint(handle, shared, labels, source),
        tuple(dict.fromkeys(notes)),
        reading.held,
        views.sample_shape,
        handle,
        shared,
        (
            OneByOne(source, views.train.pipeline, labels.targets),
            OneByOne(source, views.eval.pipeline, labels.targets),
        ),
    )
    return _audited(source, views, labels, prepared)


def _travelling(view: View, held: bool) -> View:
    """Return what a worker needs of a view: less to send, and no torchvision to import."""
    return replace(view, prefix=(), pipeline=()) if held else replace(view, prefix=(), steps=())


def _audited(source: Opened, views: Views, labels: Labels, prepared: Prepared) -> Prepared:
    """Read a few samples of the eval view in both ways; what differs is not held.

    The user's own steps are the reference, so that a change in torchvision can cost speed but
    never changes a number.
    """
    if not prepared.held:
        return prepared
    handle = prepared.handle()
    probes = np.array(source.probes, dtype=np.int64)
    ours = handle.open(handle.fds).eval(probes)[0]
    with seeded(0):
        theirs = default_collate([apply(views.eval.pipeline, source.read(i)[0]) for i in probes])
    if same_sample(ours, theirs):
        return prepared
    prepared.close()
    note = "samples are read one by one in the workers, since batches did not equal single samples"
    return _assemble(source, views, labels, Reading(notes=(note,)))


def _fingerprint(
    handle: DataHandle, shared: Sequence[SharedArray], labels: Labels, source: Opened
) -> str:
    digest = hashlib.sha256(repr((handle.specs, labels.classes, handle.slots)).encode())
    for array in shared:
        with memoryview(mmap.mmap(array.fd, 0, access=mmap.ACCESS_READ)) as memory:
            digest.update(memory)
    for view in (handle.train, handle.eval):
        digest.update(describe((view.steps, view.pipeline), depth=6).encode())
    if handle.source is not None:
        for index in source.probes:
            with seeded(0):
                digest.update(repr(kind_of(sample := source.read(index)[0])).encode())
            if kind_of(sample).storable:
                digest.update(to_array(sample).tobytes())
    return digest.hexdigest()
