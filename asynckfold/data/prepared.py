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

from asynckfold.criteria import Criterion
from asynckfold.data.batches import DataHandle
from asynckfold.data.labels import Labels, label_array, resolve_labels
from asynckfold.data.opened import OneByOne, Opened, open_source
from asynckfold.data.reading import Reading, read_all
from asynckfold.data.shared import ArraySpec, SharedArray
from asynckfold.data.views import Views, make_views
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.objective import Objective
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
        int64 class indices (n,), or float32 numbers (n,) or (n, m): regression targets, or codes of
        two classes each.
    classes : tuple of str
        Class names by index; empty for numbers and for several labels of a sample.
    classification : bool
        Whether the targets are class indices.
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
    _labels: Labels
    _source: Opened

    @property
    def objective(self) -> Objective:
        """What targets ask of a model, as far as it is known before a model ran."""
        return self._labels.objective

    @property
    def strata(self) -> Array | None:
        """The class of each sample; None where it has none, or several."""
        return self._labels.strata

    @property
    def highest(self) -> int:
        """The greatest class index of a sample; -1 for numbers."""
        return self._labels.highest

    @property
    def may_be_numbered(self) -> bool:
        """Whether labels are class indices as they are, which would be less if numbered anew."""
        return self._labels.may_be_numbered

    def numbered(self) -> Prepared:
        """Return the data with labels that are numbered by sorted order.

        The arrays are the same, filled anew; what was opened before is not to be used any more.
        """
        labels = self._labels.numbered()
        train, evaluation = self._ordinary

        def view(item: OneByOne) -> OneByOne:
            return OneByOne(item.source, item.steps, labels.targets)

        self._shared[0].writable()[...] = labels.targets
        return replace(
            self,
            targets=labels.targets,
            classes=labels.classes,
            fingerprint=_fingerprint(self._handle, self._shared, labels, self._source),
            notes=(*self.notes, *labels.notes[len(self._labels.notes) :]),
            _ordinary=(view(train), view(evaluation)),
            _labels=labels,
        )

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
    criterion: Criterion | None = None,
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
    criterion : Criterion or None
        What the criterion asks for; it stands above `criterion_wants_classes`.
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
    wanted = criterion_wants_classes, source.names, criterion
    labels, problems = _resolved(given, *wanted)
    refuse([*views.problems, *problems])
    reading = read_all(source, views, memory_budget, folder, labels is None)
    if labels is None:
        labels = resolve_labels(reading.labels, *wanted)
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
    values: Any,
    wants_classes: bool | None,
    names: tuple[str, ...],
    criterion: Criterion | None,
) -> tuple[Labels | None, tuple[Problem, ...]]:
    """Resolve labels, if there are any yet; return problems, to be told with others."""
    if values is None:
        return None, ()
    try:
        return resolve_labels(values, wants_classes, names, criterion), ()
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
    return Prepared(
        targets=targets,
        classes=labels.classes,
        classification=labels.classification,
        n_samples=len(source),
        fingerprint=_fingerprint(handle, shared, labels, source),
        notes=tuple(dict.fromkeys(notes)),
        held=reading.held,
        sample_shape=views.sample_shape,
        _handle=handle,
        _shared=shared,
        _ordinary=(train, evaluation),
        _labels=labels,
        _source=source,
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
