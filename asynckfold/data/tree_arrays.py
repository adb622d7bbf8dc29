"""Inputs that are given as a dict or a tuple of arrays: ({"image": X, "age": A}, y)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from asynckfold.data.arrays import not_half, plain, rounded, unusable
from asynckfold.data.transforms import TreeArrays, is_tree, leaves_by_path
from asynckfold.errors import Problem, refuse
from asynckfold.jobs.schema import path_text


def as_trees(samples: Any, labels: Any) -> Any:
    """Return a dict or tuple of arrays as `TreeArrays`, anything else as it is.

    A tuple is one of several inputs if its items are arrays and it has not one item a label: then
    they are rows. float64 and half precision become float32, as in a single array. Raises
    `InputError` where lengths differ, or an array holds no numbers.
    """
    return samples if isinstance(samples, TreeArrays) else converted(samples, labels)[0]


def converted(samples: Any, labels: Any) -> tuple[Any, tuple[str, ...]]:
    """Return what `as_trees` returns, and notes on what the conversion loses."""
    if isinstance(samples, TreeArrays):
        return samples, ()
    if not _holds_arrays(samples, labels):
        return samples, ()
    by_path, spec = leaves_by_path(samples, stops=lambda item: isinstance(item, list))
    leaves = {path_text(path): leaf for path, leaf in by_path.items()}
    refuse(_kind_problems(leaves))
    arrays = {path: plain(leaf, f"X{path}") for path, leaf in leaves.items()}
    refuse([*_length_problems(arrays, labels), *_number_problems(leaves, arrays)])
    notes: list[str] = []
    found = [
        _narrow(array, f"X{path}", getattr(leaves[path], "columns", None), notes)
        for path, array in arrays.items()
    ]
    return TreeArrays(tree_unflatten(found, spec)), tuple(notes)


def _holds_arrays(samples: Any, labels: Any) -> bool:
    if not is_tree(samples) or isinstance(samples, list):
        return False
    if isinstance(samples, dict):
        return True
    is_of_rows = hasattr(labels, "__len__") and len(samples) == len(labels)
    return bool(samples) and not is_of_rows and all(map(_is_array_or_tree, samples))


def _is_array_or_tree(item: Any) -> bool:
    if is_tree(item) and not isinstance(item, list):
        leaves, _ = leaves_by_path(item)
        return bool(leaves) and all(map(_is_array_or_tree, leaves.values()))
    return bool(hasattr(item, "__array__") and np.ndim(item))


def _kind_problems(leaves: dict[str, Any]) -> Iterator[Problem]:
    if not leaves:
        yield Problem("X must hold an array", "an empty dict", "Pass {'name': array, ...}.")
    for path, leaf in leaves.items():
        if not (hasattr(leaf, "__array__") and np.ndim(leaf)):
            yield Problem(
                f"X{path} must be an array with a row for each sample",
                type(leaf).__name__,
                "Pass a NumPy array or a tensor of shape (n_samples, ...).",
            )


def _length_problems(arrays: dict[str, Any], labels: Any) -> Iterator[Problem]:
    sizes = {f"X{path}": len(array) for path, array in arrays.items()}
    if hasattr(labels, "__len__"):
        sizes["y"] = len(labels)
    if len(set(sizes.values())) > 1:
        yield Problem(
            "all inputs and y must have one length",
            ", ".join(f"{name} has {size}" for name, size in sizes.items()),
            "Pass one row of each input, and one label, for each sample.",
        )


def _number_problems(leaves: dict[str, Any], arrays: dict[str, Any]) -> Iterator[Problem]:
    for path, array in arrays.items():
        if isinstance(array, Tensor):
            continue
        columns = unusable(leaves[path])
        if array.dtype.kind not in "biuf" or columns:
            yield Problem(
                f"X{path} must hold numbers",
                f"columns {columns}" if columns else f"an array of {array.dtype}",
                "Encode other columns, for instance by pandas.get_dummies, or leave them out.",
            )


def _narrow(array: Any, name: str, columns: Any, notes: list[str]) -> Any:
    """Return an array as models take it; note what that loses."""
    short = not_half(array)
    if short is not array:
        before = str(array.dtype).removeprefix("torch.")
        notes.append(f"{name} was converted from {before} to float32")
    if isinstance(short, Tensor) or short.dtype != np.float64:
        return short
    notes.append(f"{name} was converted from float64 to float32")
    if lost := rounded(short, name, columns):
        notes.append(f"{lost}: scale it first")
    with np.errstate(over="ignore"):
        return short.astype(np.float32)
