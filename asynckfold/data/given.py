"""A dataset and its transforms in one form, however `AsyncKFold` got them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import TensorDataset

from asynckfold.data import arrays
from asynckfold.data.arrays import Given, by_position
from asynckfold.data.target_trees import targets_as_trees
from asynckfold.data.transforms import TreeArrays
from asynckfold.data.tree_arrays import converted


def as_given(
    dataset: Any, train_transform: Any, eval_transform: Any, *, preprocessed: bool
) -> Given:
    """Return what `arrays.as_given` returns; inputs in a dict or tuple become `TreeArrays`."""
    last_is_target = type(dataset) is TensorDataset and len(dataset.tensors) > 2
    if last_is_target:
        dataset = (dataset.tensors[:-1], dataset.tensors[-1])
    if isinstance(dataset, tuple) and len(dataset) == 2:
        dataset = (dataset[0], targets_as_trees(dataset[1], dataset[0]))
        samples, notes = converted(*dataset)
        if isinstance(samples, TreeArrays):
            pair = samples, by_position(dataset[1], "y")
            return Given(pair, train_transform, eval_transform, notes, last_is_target)
    return arrays.as_given(dataset, train_transform, eval_transform, preprocessed=preprocessed)
