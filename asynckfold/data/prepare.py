"""Prepare a dataset for all jobs: open, check, divide its transform, read, fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from asynckfold.data.arrays import targets_as_trees
from asynckfold.data.batches import Collation, DataHandle
from asynckfold.data.dataset import OneByOne, SampleSource, open_source
from asynckfold.data.duplicates import LeakCheck
from asynckfold.data.labels import Encoding, Labels, label_array, resolve_labels
from asynckfold.data.passes import SampleCheck
from asynckfold.data.reading import (
    CheckedDataset,
    Here,
    ReadAgainError,
    Readers,
    check_samples,
    odd_rows,
    read_all,
    runs_user_code,
)
from asynckfold.data.shared_arrays import ArraySpec, SharedArray
from asynckfold.data.table_codes import TableCodes
from asynckfold.data.transforms.random_numbers import seeded
from asynckfold.data.transforms.steps import apply
from asynckfold.data.transforms.trees import Array, same_sample, tensors_in
from asynckfold.data.views import View
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.criteria import VALUES, Criterion
from asynckfold.jobs.objective import REGRESSION

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
    sample_weight: Array | None = None  # in float64; None where all are equal
    leak_checks: Mapping[str, LeakCheck] = field(default_factory=dict)  # for `CVResults.audit`

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

    def with_codes(self, codes: TableCodes | None) -> PreparedData:
        """Return the data as rows of a table, what their numbers stand for being part of them."""
        if codes is None:
            return self
        handle, digest = replace(self._handle, codes=codes), self._digest + codes.digest
        fingerprint = _fingerprint(handle, self._shared, self.labels, digest)
        return replace(self, fingerprint=fingerprint, _handle=handle, _digest=digest)

    def with_sample_weight(self, weights: Any) -> PreparedData:
        """Return the data with a weight of each sample; equal weights are none."""
        if weights is None:
            return self
        values = np.asarray(weights)
        is_number = values.dtype.kind in "biuf" and values.shape == (self.n_samples,)
        if not is_number or not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise InputError.one(
                "sample_weight must hold a finite number, at least 0 and not all zero, for each "
                f"of the {self.n_samples} samples",
                f"an array of {values.dtype} of shape {values.shape}"
                + (f", from {values.min():g} to {values.max():g}" if is_number else ""),
                "Pass an array of that length, in the order of the data set.",
            )
        if (values == values[0]).all():
            return self
        array = SharedArray(ArraySpec(values.shape, "float64"))
        array.writable()[...] = numbers = values.astype(np.float64)
        handle = replace(self._handle, specs=(*self._handle.specs, array.spec), has_weights=True)
        shared = *self._shared, array
        fingerprint = _fingerprint(handle, shared, self.labels, self._digest)
        notes = *self.notes, "losses and scores are weighted by sample_weight"
        weighted = replace(self, sample_weight=numbers, fingerprint=fingerprint, notes=notes)
        return replace(weighted, _handle=handle, _shared=shared)

    def preprocess_problems(self) -> Iterator[Problem]:
        """Yield that a scikit-learn transformer cannot have samples of several tensors."""
        inputs = self._handle.records.text if self._handle.records else ""
        if self._handle.collation is not None or inputs:
            rule = "preprocess needs samples of one tensor: it gets one row of numbers each"
            remedy = "Leave one out, or transform inputs before, by train_transform."
            yield Problem(rule, f"a collate_fn, or inputs {inputs}", remedy)

    def target_transform_problems(self) -> Iterator[Problem]:
        """Yield that targets are no numbers on the scale of outputs, or that reads differ."""
        objective, is_random = self.labels.objective, self._handle.encoding is not None
        is_plain = objective.targets is None and objective.scale == VALUES
        if objective.kind != REGRESSION or not is_plain or is_random:
            rule = "target_transform needs targets that are numbers, which outputs are compared to"
            what = f"{objective.kind}, outputs that are {objective.scale}"
            remedy = "Leave it out, or use a criterion such as MSELoss."
            yield Problem(rule, what + ", and random targets" * is_random, remedy)

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
    resolve = partial(resolve_labels, names=source.names, criterion=criterion, task=task)
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
