"""Datasets made of others: a training set and a validation set joined, samples repeated, and those
whose input is the target."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, cat
from torch.utils._pytree import tree_map
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from asynckfold.data.arrays import as_trees, by_position, column_problems, plain, targets_as_trees
from asynckfold.data.dataset import open_source
from asynckfold.data.transforms.trees import TreeArrays
from asynckfold.errors import InputError, refuse
from asynckfold.jobs.folds import Indices


def joined(dataset: Any, other: Any) -> tuple[Any, Indices, Indices]:
    """Return one dataset with the samples of two, and where those of each are.

    Both are datasets, each keeping its own transform, or both are tuples (X, y). Raises
    `InputError` where these kinds, or the columns of tables, differ.

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
        refuse(column_problems(mine[0], theirs[0], "valid"))
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
        else tuple(_array(part, name)[numbers] for part, name in zip(arrays, "Xy", strict=True))
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


def _stacked(mine: Any, theirs: Any, name: str) -> Any:
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
