"""Trees of tensors and of whole arrays, taken apart by torch's pytree."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import (
    GetAttrKey,
    SequenceKey,
    TreeSpec,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
)

from asynckfold.jobs.schema import Path, path_text

Array = npt.NDArray[Any]


def is_tree(value: Any) -> bool:
    """Return whether a value is a tuple, list or dict, which torch's pytree takes apart.

    >>> is_tree({"a": 1}), is_tree((1, 2)), is_tree(torch.zeros(2))
    (True, True, False)
    """
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    return is_named or type(value) in (tuple, list, dict, OrderedDict, defaultdict)


def leaves_by_path(
    tree: Any, stops: Callable[[Any], bool] | None = None
) -> tuple[dict[Path, Any], TreeSpec]:
    """Return the leaves of a tree by their path, and its structure.

    A part for which `stops` is true is a leaf.

    >>> leaves_by_path({"a": 1, "b": (2, None)})[0]
    {('a',): 1, ('b', 0): 2, ('b', 1): None}
    """
    pairs, spec = tree_flatten_with_path(tree, is_leaf=stops)
    return {tuple(map(_key, path)): leaf for path, leaf in pairs}, spec


def _key(step: Any) -> Any:
    if isinstance(step, SequenceKey):
        return step.idx
    return step.name if isinstance(step, GetAttrKey) else step.key


def mapped(function: Callable[[Tensor], Any], inputs: Any) -> Any:
    """Apply a function to a tensor, or to each tensor of a tree; other leaves stay.

    >>> mapped(len, {"a": torch.zeros(2), "b": "text"})
    {'a': 2, 'b': 'text'}
    """
    if isinstance(inputs, Tensor):
        return function(inputs)
    return tree_map(lambda item: function(item) if isinstance(item, Tensor) else item, inputs)


def on_device(inputs: Any, device: torch.device) -> Any:
    """Return a tensor, or a tree of tensors and of what has a method `to`, on a device."""
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    return tree_map(
        lambda item: item.to(device) if hasattr(item, "to") else item,
        inputs,
        # Its batch sizes stay on the CPU.
        is_leaf=lambda item: isinstance(item, PackedSequence),
    )


def tensors_in(inputs: Any) -> list[Tensor]:
    """Return the tensors of a batch."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return [item for item in tree_leaves(inputs) if isinstance(item, Tensor)]


def kinds_text(inputs: Any, *, samples: bool = False) -> str:
    """Return types and shapes, for messages; of a sample each with `samples`.

    >>> kinds_text({"a": torch.zeros(4, 2), "b": torch.zeros(4)}, samples=True)
    "['a'] float32 (2,), ['b'] float32 ()"
    """
    kinds = {
        path: f"{str(leaf.dtype)[6:]} {tuple(leaf.shape[samples:])}"
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for path, leaf in leaves_by_path(inputs)[0].items()
    }
    return ", ".join(f"{path_text(path)} {kind}".strip() for path, kind in kinds.items())


@dataclass(frozen=True, eq=False)
class TreeArrays:
    """A tree of arrays of equal length; an index gives the tree of their rows."""

    tree: Any

    def __len__(self) -> int:
        return len(tree_leaves(self.tree)[0])

    def __getitem__(self, index: Any) -> Any:
        return tree_map(lambda array: array[index], self.tree)
