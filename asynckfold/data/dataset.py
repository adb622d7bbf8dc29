"""Open a dataset: its samples before their transform, and the transform's steps."""

from __future__ import annotations

import copy
import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, cat
from torch.utils._pytree import tree_map
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from asynckfold.data.arrays import (
    ExactArrays,
    as_trees,
    by_position,
    is_sparse,
    is_table,
    not_half,
    plain,
    targets_as_trees,
)
from asynckfold.data.labels import Encoding
from asynckfold.data.table_codes import with_columns
from asynckfold.data.transforms.random_numbers import generators_kept, seed_generators
from asynckfold.data.transforms.steps import Step, apply, flatten, step_name
from asynckfold.data.transforms.trees import (
    Array,
    TreeArrays,
    copied,
    kind_of,
    mapped,
    native,
    records_in,
    same_sample,
    to_array,
)
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
    # A dataset that only selects samples of another.
    while isinstance(dataset, Subset) and type(dataset).__module__ in _PLAIN:
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
    if lacking or isinstance(dataset, (dict, str)):
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
    if not same_sample(ours, theirs):
        # One seed does not give one sample if the transform has its own generator.
        seed_generators(0)
        once = apply(bare.steps, copied(sample))
        seed_generators(0)
        repeats = same_sample(once, apply(bare.steps, copied(sample)))
        if repeats or kind_of(ours) != kind_of(theirs):
            return False
    return np.array_equal(np.asarray(label), np.asarray(their_label))


# Datasets made of others: two joined, samples repeated, and those whose input is the target


def joined(dataset: Any, other: Any) -> tuple[Any, Indices, Indices]:
    """Return one dataset with the samples of two, and where those of each are.

    Both are datasets, each keeping its own transform, or both are tuples (X, y), tables with the
    same columns in any order. Raises `InputError` where these kinds differ, or a column is missing.

    >>> both, first, second = joined((np.zeros((3, 2)), [0, 1, 0]), (np.ones((1, 2)), [1]))
    >>> both[0].shape, both[1].tolist(), first.tolist(), second.tolist()
    ((4, 2), [0, 1, 0, 1], [0, 1, 2], [3])
    """
    mine, theirs = _arrays(dataset), _arrays(other)
    if (mine is None) != (theirs is None):
        rule = "dataset and valid must be of one kind"
        received = f"{type(dataset).__name__} and {type(other).__name__}"
        remedy = "Pass two data sets, two tuples (X, y), or sample numbers as valid."
        raise InputError.one(rule, received, remedy)
    if mine is None:
        both: Any = ConcatDataset([dataset, other])
        counts = len(dataset), len(other)
    else:
        if is_table(mine[0]) and is_table(theirs[0]):
            theirs = (with_columns(theirs[0], mine[0].columns, "valid"), theirs[1])
        both = tuple(map(_stacked, mine, theirs, "Xy"))
        counts = len(mine[0]), len(theirs[0])
    numbers = np.arange(sum(counts))
    return both, numbers[: counts[0]], numbers[counts[0] :]


def repeated(dataset: Any, most: int) -> tuple[Any, Indices, Indices]:
    """Return a dataset with up to `most` of its samples, evenly spread, appended again.

    >>> both, first, second = repeated((np.arange(4.0), [0, 1, 0, 1]), 2)
    >>> both[0].tolist(), first.tolist(), second.tolist()
    ([0.0, 1.0, 2.0, 3.0, 0.0, 3.0], [0, 1, 2, 3], [4, 5])
    """
    count = len(open_source(dataset))
    numbers = np.concatenate([np.arange(count), evenly(count, most)])
    arrays = _arrays(dataset)
    both: Any = (
        Subset(dataset, numbers.tolist())
        if arrays is None
        else tuple(_rows(part, name, numbers) for part, name in zip(arrays, "Xy", strict=True))
    )
    places = np.arange(len(numbers))
    return both, places[:count], places[count:]


def evenly(count: int, most: int) -> Indices:
    """Return the numbers of up to `most` of `count` samples, evenly spread."""
    rows: Indices = np.linspace(0, count - 1, min(most, count)).round().astype(np.int64)
    return rows


def _arrays(dataset: Any) -> Any:
    if isinstance(dataset, tuple) and len(dataset) == 2:
        samples, targets = dataset
        targets = targets_as_trees(targets, samples)
        return as_trees(samples, targets), targets
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return dataset.tensors
    return None


def _array(part: Any, name: str) -> Any:
    if isinstance(part, TreeArrays):
        return part
    return plain(part, name) if name == "X" else np.asarray(by_position(part, name))


def _rows(part: Any, name: str, numbers: Indices) -> Any:
    is_kept = name == "X" and is_table(part)
    return part.iloc[numbers] if is_kept else _array(part, name)[numbers]


def _stacked(mine: Any, theirs: Any, name: str) -> Any:
    if name == "X" and is_table(mine) and is_table(theirs):
        import pandas as pd

        return pd.concat([mine, theirs])
    if isinstance(mine, TreeArrays):
        return tree_map(partial(_stacked, name=name), mine.tree, theirs.tree)
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return cat([mine, theirs])
    return np.concatenate([np.asarray(_array(part, name)) for part in (mine, theirs)])


class InputAsTarget:
    """A map-style data set whose samples are their own targets; other targets are left out."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        item = self.dataset[index]
        sample = item[0] if isinstance(item, (tuple, list)) else item
        return sample, sample


def with_input_as_target(dataset: Any) -> Any:
    """Return a data set whose targets are its inputs."""
    if isinstance(dataset, InputAsTarget):
        return dataset
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple):
        return tensors[0], tensors[0]
    if isinstance(dataset, tuple):
        return dataset[0], dataset[0]
    is_array = hasattr(dataset, "__array__")
    return (dataset, dataset) if is_array else InputAsTarget(dataset)


# Datasets whose code is known: whole arrays, or a list of files, instead of reading each sample.
# `data` and `targets` are used only where the class is exactly one of these; for a subclass or any
# other class, `__getitem__` is the truth.


_MNIST, _CIFAR, _SVHN = (f"torchvision.datasets.{name}" for name in ("mnist", "cifar", "svhn"))
_OWN = "asynckfold.data.sources.datasets"
_PLAIN = ("torch.utils.data.dataset", _OWN)

_LABELS = {
    **{(_MNIST, name): "targets" for name in ("MNIST", "FashionMNIST", "KMNIST", "EMNIST")},
    (_CIFAR, "CIFAR10"): "targets",
    (_CIFAR, "CIFAR100"): "targets",
    (_SVHN, "SVHN"): "labels",
    (_OWN, "ImageArrays"): "targets",
}
"""The attribute of the labels of each class whose ``data`` holds pixels of a byte."""

_FOLDER = "torchvision.datasets.folder"
_FOLDERS = ((_FOLDER, "DatasetFolder"), (_FOLDER, "ImageFolder"))
_LOADERS = (
    (_FOLDER, "default_loader"),
    (_FOLDER, "pil_loader"),
    ("asynckfold.data.sources.images", "open_rgb"),
)


def _is_exactly(dataset: Any, known: Any) -> bool:
    """Whether the class is one of these, with its original methods."""
    kind = type(dataset)
    place = kind.__module__, kind.__qualname__
    if place not in known or getattr(sys.modules.get(place[0]), place[1], None) is not kind:
        return False
    methods = (getattr(kind, name, None) for name in ("__getitem__", "__len__"))
    return all(getattr(method, "__module__", None) == place[0] for method in methods)


def tensors_of(dataset: Any) -> tuple[Tensor, Tensor] | None:
    """Return X and y of a dataset of two tensors."""
    plain = isinstance(dataset, TensorDataset) and type(dataset).__module__ in _PLAIN
    return tuple(dataset.tensors) if plain and len(dataset.tensors) == 2 else None


def whole_arrays(dataset: Any) -> tuple[Array, Any] | None:
    """Return pixels (n, C, H, W) and n labels of a dataset of images in one array.

    None where the class is not exactly a known one, or was modified.
    """
    if not _is_exactly(dataset, _LABELS) or getattr(dataset, "target_transform", None) is not None:
        return None
    kind = type(dataset).__module__, type(dataset).__qualname__
    data, labels = getattr(dataset, "data", None), getattr(dataset, _LABELS[kind], None)
    if isinstance(data, Tensor) and kind[0] == _MNIST:
        data = to_array(data)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim not in (3, 4):
        return None
    if data.ndim == 3:
        data = data[:, None]
    elif kind[0] != _SVHN:
        data = data.transpose(0, 3, 1, 2)
    is_image = data.shape[1] == 3 or (data.shape[1] == 1 and kind[0] in (_MNIST, _OWN))
    if not is_image or not isinstance(labels, (list, tuple, np.ndarray, Tensor)):
        return None
    indices = np.asarray(to_array(labels) if isinstance(labels, Tensor) else labels)
    # The class gives int(label), and int() of anything else would change it.
    fits = indices.ndim == 1 and indices.dtype.kind in "iu" and len(indices) == len(data)
    return (data, indices) if fits else None


def file_labels(dataset: Any) -> list[int] | None:
    """Return the labels of torchvision's image folder without reading images."""
    if not _is_exactly(dataset, _FOLDERS) or dataset.target_transform is not None:
        return None
    loader = dataset.loader
    if (getattr(loader, "__module__", ""), getattr(loader, "__qualname__", "")) not in _LOADERS:
        return None
    return [target for _, target in dataset.samples]


def sample_names(source: SampleSource) -> list[str]:
    """Return the ``names`` of a dataset's samples, or of its files without endings; else none."""
    dataset = source.base
    names, files = (getattr(dataset, name, None) for name in ("names", "paths"))
    if names is None and files is None:
        pairs: Any = getattr(dataset, "samples", None)
        is_listing = isinstance(pairs, list) and all(isinstance(item, tuple) for item in pairs)
        files = [item[0] for item in pairs] if is_listing else None
    if names is None and isinstance(files, (list, tuple)):
        names = [Path(Path(file).name.removesuffix(".gz")).stem for file in files]
    if not isinstance(names, (list, tuple)) or len(names) != len(dataset):
        return []
    return [str(names[row]) for row in (range(len(names)) if source.rows is None else source.rows)]


def listing(dataset: Any, rows: Indices | None) -> bytes:
    """Return a digest of the folder's files: relative names, sizes, modification times."""
    digest = hashlib.sha256()
    for row in range(len(dataset.samples)) if rows is None else rows.tolist():
        path, target = dataset.samples[row]
        try:
            facts = Path(path).stat()
        except OSError as error:
            remedy = "Create the data set again."
            raise InputError.one("each file must be there", str(error), remedy) from error
        name = os.path.relpath(path, dataset.root)
        digest.update(repr((name, target, facts.st_size, facts.st_mtime_ns)).encode())
    return digest.digest()
