"""Prepare a dataset for all jobs: open, check, divide its transform, read, fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from asynckfold.data.batches import DataHandle
from asynckfold.data.collation import Collation
from asynckfold.data.dataset import OneByOne, Opened, open_source
from asynckfold.data.labels import Labels, label_array, resolve_labels
from asynckfold.data.materialize import (
    CheckedDataset,
    Here,
    Readers,
    Reading,
    check_samples,
    labels_of,
    read_all,
    runs_user_code,
)
from asynckfold.data.range_reader import SampleCheck
from asynckfold.data.shared_arrays import ArraySpec, SharedArray
from asynckfold.data.target_encoding import Encoding
from asynckfold.data.target_trees import targets_as_trees
from asynckfold.data.transforms import (
    Array,
    View,
    apply,
    same_sample,
    seeded,
    tensors_in,
)
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.criteria import Criterion

_PATIENCE_SECONDS = 5.0
"""How long labels are read for a message that tells all problems at once."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A dataset, ready for all jobs; lives in the parent process."""

    targets: Array  # as in `Labels`
    classes: tuple[str, ...]
    classification: bool
    n_samples: int
    fingerprint: str  # SHA-256 of stored samples and targets; code per batch is in the plan
    notes: tuple[str, ...]
    held: bool  # False: samples are read one by one in the workers
    sample_shape: tuple[int, ...]  # of one input of the eval view
    checked: CheckedDataset
    _handle: DataHandle
    _shared: tuple[SharedArray, ...]
    labels: Labels
    _ordinary: tuple[OneByOne, OneByOne]
    _digest: bytes
    last_is_target: bool = False  # see `Given`

    def numbered(self) -> Prepared:
        """Return the data with renumbered labels; earlier handles must not be used any more."""
        labels = self.labels.numbered()
        train, evaluation = self._ordinary
        encoding = self._handle.encoding
        if encoding is not None:
            encoding = encoding.numbered(self.targets, labels.targets)

        def view(item: OneByOne) -> OneByOne:
            return OneByOne(item.source, item.steps, labels.targets, encoding)

        self._shared[0].writable()[...] = labels.targets
        fingerprint = _fingerprint(self._handle, self._shared, labels, self._digest)
        return replace(
            self,
            targets=labels.targets,
            classes=labels.classes,
            fingerprint=fingerprint,
            _handle=replace(self._handle, encoding=encoding),
            notes=(*self.notes, *labels.notes[len(self.labels.notes) :]),
            _ordinary=(view(train), view(evaluation)),
            labels=labels,
        )

    def ordinary(self) -> tuple[OneByOne, OneByOne]:
        """Return the train view and the eval view as datasets that read sample by sample."""
        return self._ordinary

    def handle(self) -> DataHandle:
        """Return what a worker needs, with this process's descriptors of the shared arrays."""
        fds = tuple(array.fd for array in self._shared)
        return replace(self._handle, fds=fds, last_is_target=self.last_is_target)

    def preprocess_problems(self) -> Iterator[Problem]:
        """Yield that a scikit-learn transformer cannot have samples of several tensors."""
        if self._handle.collation is not None:
            yield Problem(
                "preprocess needs samples of one tensor: it gets one row of numbers each",
                "a collate_fn",
                "Leave one of them out, or transform each sample by train_transform.",
            )
        records = self._handle.records
        if records is not None and not records.ragged:
            yield Problem(
                "preprocess needs samples of one tensor: it gets one row of numbers each",
                f"inputs {records.text}",
                "Transform each input before, or in the model.",
            )

    def stored(self, rows: Sequence[int]) -> Array | None:
        """Return samples as the eval view stores them; None where they are read one by one."""
        records = self._handle.records
        if not self.held or (records is not None and records.ragged):
            return None
        found: Array = self._shared[self._handle.slots[1]].readable()[list(rows)]
        return found

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
    task: str | None = None,
    random_samples: bool = False,
    memory_budget: int | None = None,
    folder: Path | None = None,
    readers: Readers | None = None,
    collate_fn: Any = None,
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
        Whether the criterion needs class indices; None: by the labels' type.
    criterion : Criterion or None
        What the criterion asks for; it stands above `criterion_wants_classes`.
    task : str, optional
        What the user says that is asked of the models.
    random_samples : bool
        Whether another read of a sample may give another pair, though this does not show.
    memory_budget : int, optional
        Bytes that may be held in memory; beyond it the arrays go into a file in `folder`.
    folder : Path, optional
        Where that file, which has no name, is kept.
    readers : Readers, optional
        Who runs the code of the dataset and of the transforms; this process by default.
    collate_fn : callable, optional
        Makes a batch of a list of items; samples may then differ in shape.

    Raises
    ------
    InputError
        All problems found in samples, transforms and labels.
    """
    collates = collate_fn is not None
    check = SampleCheck(dataset, train_transform, eval_transform, random_samples, collates=collates)
    source = open_source(dataset)
    given = _given_labels(source, targets)
    wanted = criterion_wants_classes, source.names, criterion, task
    known, where = _resolved(given, *wanted), (memory_budget, folder)
    if readers is None or not runs_user_code(check):
        return _prepared(check, Here(), known, wanted, where, collate_fn)
    prepared = _prepared(check, readers, known, wanted, where, collate_fn)
    if not prepared.held or _same_here(prepared):
        return prepared
    prepared.close()
    again = _prepared(check, Here(), known, wanted, where, collate_fn)
    return replace(again, notes=(*again.notes, _ELSEWHERE))


_Wanted = tuple[bool | None, tuple[str, ...], Criterion | None, str | None]
"""Whether the criterion wants classes, the names of the classes, the criterion, and the task."""


def _prepared(
    check: SampleCheck,
    readers: Readers,
    known: tuple[Labels | None, tuple[Problem, ...]],
    wanted: _Wanted,
    where: tuple[int | None, Path | None],
    collate_fn: Any,
) -> Prepared:
    """Read the dataset; `known` are labels that need no reading, and their problems."""
    labels, problems = known
    found: CheckedDataset | Reading
    checked = found = check_samples(check, readers)
    while isinstance(found, CheckedDataset):
        checked = found
        if checked.views.problems and labels is None and not problems and _is_quick(checked):
            _, problems = _resolved(labels_of(checked, readers), *wanted)
        refuse([*checked.views.problems, *problems])
        found = read_all(checked, readers, *where)
    encoding = None
    if labels is None:
        try:
            labels = resolve_labels(found.labels, *wanted)
        except InputError:
            found.close()
            raise
        encoding = Encoding.of(found.labels, labels) if found.random else None
    reading = replace(found, notes=(*found.notes, *readers.notes))
    return _assemble(checked, labels, reading, encoding, collate_fn)


_ELSEWHERE = (
    "samples were read in this process: a worker, which imports modules again, read different "
    "ones. Was a module changed after its import, or does a sample depend on earlier reads?"
)


def _is_quick(checked: CheckedDataset) -> bool:
    return checked.facts.seconds * len(checked.source) < _PATIENCE_SECONDS


def _same_here(prepared: Prepared) -> bool:
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
    return len(ours) == len(theirs) and all(map(_are_close, ours, theirs))


def _are_close(ours: Array, theirs: Array) -> bool:
    # The last digits of a sum depend on the number of threads.
    return ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=1e-3, equal_nan=True)


def _given_labels(source: Opened, targets: Any) -> Any:
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


def _resolved(
    values: Any,
    wants_classes: bool | None,
    names: tuple[str, ...],
    criterion: Criterion | None,
    task: str | None,
) -> tuple[Labels | None, tuple[Problem, ...]]:
    """Resolve labels if they are known already; return problems instead of raising."""
    if values is None:
        return None, ()
    try:
        return resolve_labels(values, wants_classes, names, criterion, task), ()
    except InputError as error:
        return None, error.problems


def _assemble(
    checked: CheckedDataset,
    labels: Labels,
    reading: Reading,
    encoding: Encoding | None,
    collate_fn: Any,
) -> Prepared:
    source, views, targets = checked.source, checked.views, labels.targets
    target_array = SharedArray(ArraySpec(targets.shape, str(targets.dtype)))
    target_array.writable()[...] = targets
    shared = (target_array, *reading.arrays)
    handle = _handle(checked, shared, reading, encoding, labels)
    if collate_fn is not None:
        collation = Collation(collate_fn, checked.facts.form, labels.objective.targets)
        records = checked.facts.stored_as if reading.held else None
        handle = replace(handle, collation=collation, records=records)
    train, evaluation = (
        OneByOne(source, view.pipeline, targets, encoding) for view in (views.train, views.eval)
    )
    notes = (*source.notes, *views.notes, *checked.facts.notes, *labels.notes, *reading.notes)
    fingerprint = _fingerprint(handle, shared, labels, reading.digest)
    return Prepared(
        targets=targets,
        classes=labels.classes,
        classification=labels.classification,
        n_samples=len(source),
        fingerprint=fingerprint,
        notes=tuple(dict.fromkeys(notes)),
        held=reading.held,
        sample_shape=views.sample_shape,
        checked=checked,
        _handle=handle,
        _shared=shared,
        _ordinary=(train, evaluation),
        labels=labels,
        _digest=reading.digest,
    )


def _handle(
    checked: CheckedDataset,
    shared: Sequence[SharedArray],
    reading: Reading,
    encoding: Encoding | None,
    labels: Labels,
) -> DataHandle:
    unlabelled = []
    if labels.targets.dtype.kind == "f":
        rows = labels.targets.reshape(len(labels.targets), -1)
        unlabelled = np.flatnonzero(~np.isfinite(rows).all(axis=1))[:1].tolist()
    return DataHandle(
        tuple(array.spec for array in shared),
        _travelling(checked.views.train, reading.held),
        _travelling(checked.views.eval, reading.held),
        reading.slots,
        None if reading.held else checked.source.without_arrays(),
        encoding=encoding,
        records=checked.views.records,
        schema=labels.objective.targets,
        not_finite=tuple(dict.fromkeys((*reading.not_finite, *unlabelled))),
    )


def _travelling(view: View, held: bool) -> View:
    """Return what a worker needs of a view, so that it need not import torchvision."""
    return replace(view, prefix=(), pipeline=()) if held else replace(view, prefix=(), steps=())


def _fingerprint(
    handle: DataHandle, shared: Sequence[SharedArray], labels: Labels, samples: bytes
) -> str:
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
