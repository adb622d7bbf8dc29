"""Open a dataset: its samples before their transform, and the transform's steps."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from asynckfold.data.arrays import (
    ExactArrays,
    as_trees,
    by_position,
    is_sparse,
    not_half,
    plain,
    targets_as_trees,
)
from asynckfold.data.known_datasets import subset_of, tensors_of, whole_arrays
from asynckfold.data.target_encoding import Encoding
from asynckfold.data.transforms.random_numbers import generators_kept, seed_generators
from asynckfold.data.transforms.samples import (
    copied,
    kind_of,
    native,
    records_in,
    same_sample,
    to_array,
)
from asynckfold.data.transforms.steps import Step, apply, flatten, step_name
from asynckfold.data.transforms.trees import Array, TreeArrays, mapped
from asynckfold.errors import InputError, Problem, nearest
from asynckfold.jobs.folds import Indices

_PROBES = 8


TARGET_KEYS = ("labels", "target")
"""Keys of the target of an item that is a dict, without `target_key`."""


def divided(item: Any, index: int, key: str | None = None) -> tuple[dict[Any, Any], Any]:
    """Return the inputs and the target of an item that is a dict; raise `InputError` without one.

    >>> divided({"image": 1, "labels": 2}, 0)
    ({'image': 1}, 2)
    """
    names = list(item) if isinstance(item, dict) else []
    targets = [name for name in names if name in (TARGET_KEYS if key is None else (key,))]
    if len(targets) != 1 or len(names) == 1:
        rule = f"dataset[{index}] must hold its inputs, and its target under "
        known = " or ".join(map(repr, TARGET_KEYS if key is None else (key,)))
        received = f"a dict of {', '.join(map(repr, names))}" if names else type(item).__name__
        hint = "" if key is None else nearest(key, map(str, names))
        remedy = f"Name the key of the target: target_key=.{hint}"
        raise InputError.one(rule + known, received, remedy)
    return {name: part for name, part in item.items() if name != targets[0]}, item[targets[0]]


class KeyedTargets:
    """A dataset of dicts as one of pairs: the target stands under a key."""

    def __init__(self, dataset: Any, key: str) -> None:
        self.dataset, self.key = dataset, key
        if hasattr(dataset, "classes"):
            self.classes = dataset.classes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[dict[Any, Any], Any]:
        return divided(self.dataset[index], index, self.key)


def pair_of(index: int, item: Any) -> tuple[Any, Any]:
    """Return the inputs and the target of an item; raise `InputError` where it is no pair."""
    if isinstance(item, dict):
        return divided(item, index)
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    size = f" of length {len(item)}" if hasattr(item, "__len__") else ""
    raise InputError.one(
        "each sample of the dataset must be a pair (x, y)",
        f"{type(item).__name__}{size} at index {index}",
        "Wrap the dataset so that it returns (x, y), pass a tuple (X, y) of arrays, or "
        "task='reconstruction' if the input is the target.",
    )


def _inputs_of(index: int, item: Any) -> tuple[Any, Any]:
    """Return the inputs of an item whose target, if any, does not matter."""
    if isinstance(item, dict):
        return {name: part for name, part in item.items() if name not in TARGET_KEYS}, 0
    return (item[0] if isinstance(item, (tuple, list)) and len(item) in (1, 2) else item), 0


def _list_or_inputs_of(index: int, item: Any) -> tuple[Any, Any]:
    """Return the same, where a list is a sample, such as token ids, and only a tuple is a pair."""
    return (item, 0) if type(item) is list else _inputs_of(index, item)


class _Pairs:
    """An array of samples and an array of labels as a dataset; samples are copies."""

    def __init__(self, samples: Any, labels: Any) -> None:
        self.samples = samples
        self.labels = labels

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return copied(self.samples[index]), self.labels[index]


@dataclass(frozen=True, eq=False)
class SampleSource:
    """A dataset, opened: its samples before their transform, and the transform's steps."""

    base: Any  # gives untransformed pairs; the user's object if it has no ``transform``
    steps: tuple[Step, ...] = ()  # the transform; empty where it cannot be taken out
    rows: Indices | None = None  # rows of `base` in the dataset; None: all
    # all of `base` as stored, if they can be had without reading one by one
    samples: Array | None = None
    labels: Any = None  # likewise
    names: tuple[str, ...] = ()  # of the classes
    notes: tuple[str, ...] = ()
    known: bool = False  # samples are rows of `samples`: reading them runs no user code
    # called with each sample number before it is read
    on_read: Callable[[int], object] | None = field(default=None, repr=False)
    # stands for the transform of `base`
    recorder: TransformRecorder | None = field(default=None, repr=False)
    # how an item is divided, by its index
    pair: Callable[[int, Any], tuple[Any, Any]] = field(default=pair_of, repr=False)

    def __len__(self) -> int:
        return len(self.base) if self.rows is None else len(self.rows)

    def row(self, index: int) -> int:
        """Return the position of a sample in `base`."""
        return index if self.rows is None else int(self.rows[index])

    def read(self, index: int) -> tuple[Any, Any]:
        """Return an untransformed pair; raise `InputError` where the dataset gives none."""
        if self.on_read is not None:
            self.on_read(index)
        try:
            item = self.base[self.row(index)]
        except (Exception, SystemExit) as error:
            if isinstance(self.base, KeyedTargets) and isinstance(error, InputError):
                raise
            raise InputError([unreadable(index, error)]) from error
        sample, label = self.pair(index, item)
        if self.recorder is not None:
            kept = self.recorder.taken(sample)
            if not kept:
                raise InputError.one(
                    f"dataset[{index}] must be the transform's result for one sample, as for "
                    "earlier samples",
                    "something else",
                    "Pass the transform as train_transform or eval_transform instead.",
                )
            sample = kept[0]
        return native(sample), label

    def without_arrays(self) -> SampleSource:
        """Return a source that reads the same samples one by one, and is cheaper to send."""
        return replace(self, samples=None, labels=None)

    @property
    def probes(self) -> list[int]:
        """Some sample numbers, evenly spread."""
        last = len(self) - 1
        return sorted({round(last * step / (_PROBES - 1)) for step in range(_PROBES)})


def unreadable(index: int, error: BaseException) -> Problem:
    """Report that a sample could not be read or transformed."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return Problem(
        f"dataset[{index}] must be readable",
        f"{type(error).__name__}: {error}{place}",
        "Repair the dataset, or leave the sample out with torch.utils.data.Subset.",
    )


class OneByOne:
    """One view as an ordinary map-style dataset, as a DataLoader gets it in an ordinary script.

    With an `encoding` (random dataset), sample and target come from one read.
    """

    def __init__(
        self,
        source: SampleSource,
        steps: Sequence[Step],
        targets: Array,
        encoding: Encoding | None = None,
    ) -> None:
        self.source = source.without_arrays()
        self.steps = tuple(steps)
        self.targets = torch.from_numpy(targets)
        self.encoding = encoding

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        sample, label = self.source.read(index)
        inputs = apply(self.steps, copied(sample) if self.steps else sample)
        records = records_in(self.steps)
        if records is not None:
            inputs = mapped(lambda item: item[0], records.unpack(torch.from_numpy(inputs)[None]))
        if self.encoding is None:
            return inputs, self.targets[index]
        return inputs, torch.from_numpy(np.asarray(self.encoding(label, index)))


def open_source(dataset: Any) -> SampleSource:
    """Take a dataset, or a tuple (X, y) of arrays, apart without changing it.

    `Subset` is followed to the dataset below; a ``transform`` is taken out of a shallow copy.
    Raises `InputError` where it is not map-style, has fewer than two samples, or X and y differ in
    length.
    """
    if isinstance(dataset, tuple):
        return _sized(_open_arrays(dataset))
    dataset, rows = _below_subsets(dataset)
    tensors = tensors_of(dataset)
    if tensors is not None:
        arrays = _open_arrays(tensors)
        return _sized(replace(arrays, rows=rows, names=_names(dataset)))
    _check_style(dataset)
    source = _sized(SampleSource(dataset, rows=rows, names=_names(dataset)))
    whole = whole_arrays(dataset)
    if whole is None:
        return source
    return replace(redressed(source, PLAIN), samples=whole[0], labels=whole[1], known=True)


def _names(dataset: Any) -> tuple[str, ...]:
    names = getattr(dataset, "classes", ())
    plain = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    return tuple(names) if plain else ()


def _below_subsets(dataset: Any) -> tuple[Any, Indices | None]:
    rows: Indices | None = None
    while subset_of(dataset):
        below = np.asarray(dataset.indices, dtype=np.int64)
        rows = below if rows is None else below[rows]
        dataset = dataset.dataset
    return dataset, rows


def open_inputs(
    inputs: Any,
    *,
    undress: bool = False,
    exact: bool = False,
    several: bool = False,
    lists: bool = False,
) -> SampleSource:
    """Take samples apart whose targets, if any, do not matter: arrays, (X, y), or a dataset.

    `undress`: take out its ``transform``, which another one replaces. `exact`: leave float64 arrays
    as they are. `several`: samples are trees, so that a tuple may hold one array an input. `lists`:
    samples may be lists. Raises `InputError` where there is no sample, or the transform cannot be
    taken out.
    """
    if several:
        parts = inputs
        if type(inputs) is TensorDataset:
            parts = (inputs.tensors[:-1], inputs.tensors[-1])
        is_pair = isinstance(parts, tuple) and len(parts) == 2
        trees = as_trees(*parts) if is_pair else None
        if not isinstance(trees, TreeArrays):
            trees = as_trees(parts, None)
        if isinstance(trees, TreeArrays):
            return _open_arrays((trees, np.zeros(len(trees))))
    if isinstance(inputs, tuple):
        inputs = inputs[0] if len(inputs) == 2 else None
    inputs, rows = _below_subsets(inputs)
    if type(inputs) is TensorDataset:
        inputs = inputs.tensors[0]
    is_array = isinstance(inputs, Tensor) or hasattr(inputs, "__array__") or is_sparse(inputs)
    if is_array and np.ndim(inputs):
        samples = not_half(plain(inputs, "inputs"))
        pair = samples, np.zeros(len(samples))
        source = replace(_open_arrays(ExactArrays(pair) if exact else pair), rows=rows)
    else:
        _check_style(None if is_array else inputs, "inputs")
        source = SampleSource(inputs, rows=rows, pair=_list_or_inputs_of if lists else _inputs_of)
    if not len(source):
        remedy = "Check the path and any Subset."
        raise InputError.one("inputs must hold a sample", "none", remedy)
    if is_array or not undress or getattr(source.base, "transform", None) is None:
        return source
    bare = redressed(source, how_to_undress(source))
    if not bare.steps:
        raise InputError.one(
            "the transform of inputs must be separable from them, like that of the run's data set",
            step_name(source.base.transform),
            "Pass a data set whose transform is None.",
        )
    return bare


def _check_style(dataset: Any, name: str = "dataset") -> None:
    """Refuse what is not map-style."""
    lacking = [method for method in ("__len__", "__getitem__") if not hasattr(dataset, method)]
    if lacking or isinstance(dataset, dict):
        raise InputError.one(
            f"{name} must be map-style: have a length and give samples by index",
            type(dataset).__name__ + f" without {' and '.join(lacking)}" * bool(lacking),
            "Pass a torch.utils.data.Dataset with __len__ and __getitem__ (a stream can be read "
            "into a list once), or a tuple (X, y), where X may be {'name': array, ...}.",
        )


def _sized(source: SampleSource) -> SampleSource:
    if len(source) < 2:
        raise InputError.one(
            "dataset must have at least 2 samples",
            f"{len(source)} sample{'s' * (len(source) != 1)}",
            "Check the path, the split and any Subset.",
        )
    return source


def _open_arrays(pair: tuple[Any, ...]) -> SampleSource:
    if len(pair) == 2:
        targets = targets_as_trees(pair[1], pair[0])
        pair = pair if targets is pair[1] else (pair[0], targets)
    if len(pair) == 2 and isinstance(trees := as_trees(*pair), TreeArrays):
        labels = by_position(pair[1], "y")
        return SampleSource(_Pairs(trees, labels), labels=labels, known=True)
    parts = pair if len(pair) != 2 else (plain(pair[0], "X"), by_position(pair[1], "y"))
    sizes = [
        len(part) if hasattr(part, "__len__") and getattr(part, "ndim", 1) > 0 else None
        for part in parts
    ]
    if len(pair) != 2 or None in sizes or sizes[0] != sizes[1]:
        raise InputError.one(
            "a tuple must be (X, y), two arrays of equal length",
            f"{len(pair)} parts of lengths {sizes}",
            "Pass one row of X and one label for each sample.",
        )
    samples, labels = parts
    notes: tuple[str, ...] = ()
    if samples.dtype == np.float64 and not isinstance(pair, ExactArrays):
        notes = ("X was converted from float64 to float32",)
        with np.errstate(over="ignore"):
            samples = samples.astype(np.float32)
    whole = to_array(samples) if kind_of(samples).storable else None
    pairs = _Pairs(samples, labels)
    return SampleSource(pairs, samples=whole, labels=labels, notes=notes, known=True)


PLAIN, RECORDED, DRESSED = "without a transform", "as its transform gets them", "as they come"
"""How the samples of a dataset before its transform can be had."""


class TransformRecorder:
    """Stands for a dataset's transform: keeps what it gets, and returns itself.

    A dataset that returns it as the sample has called its transform once and has not changed the
    result. Anything else is noticed at each sample.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, sample: Any) -> TransformRecorder:
        """Take the place of the transform."""
        # The file of a picture may be closed, and a buffer used again, when it is asked for.
        self.kept.append(copied(sample))
        return self

    def taken(self, result: Any) -> list[Any]:
        """Return the sample that the transform got; empty where the result is something else."""
        kept, self.kept = self.kept, []
        return kept if result is self and len(kept) == 1 else []


def how_to_undress(source: SampleSource) -> str:
    """Return how to get samples before the dataset's transform; reads some in both ways."""
    transform = getattr(source.base, "transform", None)
    if transform is None or source.known:
        return PLAIN
    bare = redressed(source, RECORDED)
    if bare.recorder is None:
        return DRESSED
    with generators_kept():
        return RECORDED if all(_reads_alike(at, source, bare) for at in source.probes) else DRESSED


def redressed(source: SampleSource, how: str) -> SampleSource:
    """Return the source with its transform taken out in this way, from a shallow copy."""
    transform = getattr(source.base, "transform", None)
    if transform is None:
        return source
    recorder = TransformRecorder() if how == RECORDED else None
    base = None if how == DRESSED else _redressed(source.base, transform, recorder)
    if base is not None:
        return replace(source, base=base, steps=flatten(transform), recorder=recorder)
    note = "the dataset's transform could not be separated from it; samples are used with it"
    return replace(source, notes=(*source.notes, note))


def _redressed(dataset: Any, transform: Any, replacement: Any) -> Any:
    """Return a shallow copy with another transform; None where it cannot be set."""
    dressed = copy.copy(dataset)
    try:
        dressed.transform = replacement
    except AttributeError:
        return None
    joint = getattr(dataset, "transforms", None)
    if getattr(joint, "transform", None) is transform and hasattr(joint, "target_transform"):
        dressed.transforms = copy.copy(joint)
        dressed.transforms.transform = replacement
    return dressed


def _reads_alike(index: int, source: SampleSource, bare: SampleSource) -> bool:
    try:
        seed_generators(0)
        sample, label = bare.read(index)
        ours = apply(bare.steps, copied(sample))
    except (TypeError, AttributeError, ValueError, RuntimeError, InputError):
        return False
    seed_generators(0)
    theirs, their_label = source.read(index)
    alike = same_sample(ours, theirs) or (
        kind_of(ours) == kind_of(theirs) and not _repeats(bare.steps, sample)
    )
    return alike and np.array_equal(np.asarray(label), np.asarray(their_label))


def _repeats(steps: Sequence[Step], sample: Any) -> bool:
    """Return whether one seed gives one sample: not so if the transform has its own generator."""
    results = []
    for _ in range(2):
        seed_generators(0)
        results.append(apply(steps, copied(sample)))
    return same_sample(*results)
