"""A sample of several tensors as one record of bytes.

::

    {"image": float32 (3, 8, 8), "age": int64 ()}      a tree, as the dataset gives it
          └─ Layout.pack ──► uint8 (776,) ──┐
                                            │ stored, shared, sampled, moved as one array (n, 776)
    {"image": (B, 3, 8, 8), "age": (B,)} ◄──┘ Layout.unpack, of a batch
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

Array = npt.NDArray[Any]

ALIGNED = 8
"""Bytes to a multiple of which each tensor begins: torch reads no number across such an edge."""


@dataclass(frozen=True)
class Part:
    """One tensor of a sample."""

    path: str  # such as ``['age']``
    shape: tuple[int, ...]
    dtype: str  # NumPy's name

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def text(self) -> str:
        """``"float32 (3, 8, 8)"``."""
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a sample lie in its record.

    Layouts of the same tensors are equal, in whichever order a dict has its keys.
    """

    same: frozenset[Part]
    parts: tuple[Part, ...] = field(compare=False)
    spec: TreeSpec = field(compare=False, repr=False)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each part begins, and the size of a record."""
        found = [0]
        for part in self.parts:
            found.append(found[-1] + -(-part.nbytes // ALIGNED) * ALIGNED)
        return tuple(found)

    @property
    def places(self) -> dict[str, slice]:
        """Bytes of each part, by path."""
        pairs = zip(self.parts, self.offsets, strict=False)
        return {part.path: slice(low, low + part.nbytes) for part, low in pairs}

    @property
    def text(self) -> str:
        """``"['image'] float32 (3, 8, 8), ['age'] int64 ()"``."""
        return ", ".join(f"{part.path} {part.text}" for part in self.parts)

    def unpack(self, records: Tensor) -> Any:
        """Return a batch of records (B, size) as a tree of tensors (B, ...)."""
        found = []
        for part, low in zip(self.parts, self.offsets, strict=False):
            block = records[:, low : low + part.nbytes].contiguous()
            kind: torch.dtype = getattr(torch, part.dtype)
            shaped = (len(records), *part.shape)
            found.append(
                block.view(kind).view(shaped)
                if part.nbytes
                else torch.empty(shaped, dtype=kind, device=records.device)
            )
        return tree_unflatten(found, self.spec)


def is_tree(value: Any) -> bool:
    """Return whether a value is a tuple, list or dict, which torch's pytree takes apart.

    >>> is_tree({"a": 1}), is_tree((1, 2)), is_tree(np.zeros(2))
    (True, True, False)
    """
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    return is_named or type(value) in (tuple, list, dict, OrderedDict, defaultdict)


def leaves_by_path(
    tree: Any, stops: Callable[[Any], bool] | None = None
) -> tuple[dict[str, Any], TreeSpec]:
    """Return the leaves of a tree by their path, such as ``['age']``, and its structure.

    A part for which `stops` is true is a leaf.
    """
    pairs, spec = tree_flatten_with_path(tree, is_leaf=stops)
    return {keystr(path): leaf for path, leaf in pairs}, spec


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
    leaves = leaves_by_path(inputs)[0]
    return ", ".join(
        f"{path} {str(item.dtype)[6:]} {tuple(item.shape[samples:])}".strip()
        if isinstance(item, Tensor)
        else f"{path} {type(item).__name__}".strip()
        for path, item in leaves.items()
    )
