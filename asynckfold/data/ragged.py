"""Samples of different length: each one a record of its own size in one array of bytes.

::

    offsets  int64 (n + 1,)    0         48                104 …
    values   uint8 (total,)    [record 0][    record 1    ][…
                                 └─ shapes of its parts, int64 ─ part 0 ─ part 1 …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from asynckfold.data.transforms import Array, Kind, Misfit, kind_of, leaves_by_path, to_array

_ALIGNED = 8
"""Bytes to a multiple of which each part begins."""

_NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class RaggedPart:
    """What one tensor, array, image, number or list of numbers is in every sample."""

    path: str
    form: str  # as in `Kind`, or "python" for a number of Python, "list" for a list of these
    ndim: int
    dtype: str  # NumPy's name


@dataclass(frozen=True)
class RaggedLayout:
    """The parts of samples whose shapes differ."""

    parts: tuple[RaggedPart, ...]
    spec: TreeSpec = field(repr=False)

    def pack(self, sample: Any) -> Array:
        """Return the record of a sample, uint8 (size,); raise `Misfit` for one that differs."""
        leaves, spec = leaves_by_path(sample, stops=_is_list)
        if spec != self.spec:
            raise Misfit("it has other parts than other samples")
        shapes: list[int] = []
        blocks: list[bytes] = []
        for part, leaf in zip(self.parts, leaves.values(), strict=True):
            array = _array_of(leaf, part)
            shapes += array.shape
            block = np.ascontiguousarray(array).tobytes()
            blocks.append(block + bytes(-len(block) % _ALIGNED))
        record = np.asarray(shapes, np.int64).tobytes() + b"".join(blocks)
        return np.frombuffer(record, np.uint8)

    def unpack(self, record: Tensor) -> Any:
        """Return the sample of a record as its data set gives it; it shares nothing."""
        rows = record.numpy()
        dims = sum(part.ndim for part in self.parts)
        shapes = rows[: 8 * dims].view(np.int64).tolist()
        low, leaves = 8 * dims, []
        for part in self.parts:
            shape, shapes = tuple(shapes[: part.ndim]), shapes[part.ndim :]
            dtype = np.dtype(part.dtype)
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            array = rows[low : low + size].copy().view(dtype).reshape(shape)
            low += -(-size // _ALIGNED) * _ALIGNED
            leaves.append(_restored(part, array))
        return tree_unflatten(leaves, self.spec)


def ragged_layout(samples: Sequence[Any]) -> RaggedLayout | None:
    """Return the layout of some samples; None where they cannot be packed alike.

    >>> layout = ragged_layout([([1, 2], 0.5), ([3], 1.0)])
    >>> layout.unpack(torch.from_numpy(layout.pack(([7, 8, 9], 2.0)).copy()))
    ([7, 8, 9], 2.0)
    """
    found: RaggedLayout | None = None
    for sample in samples:
        leaves, spec = leaves_by_path(sample, stops=_is_list)
        parts = [_part_of(path, leaf) for path, leaf in leaves.items()]
        if not parts or None in parts:
            return None
        layout = RaggedLayout(tuple(part for part in parts if part is not None), spec)
        # An empty list does not tell what it holds.
        if found is None or any(part.dtype == "" for part in found.parts):
            found = layout
    if found is None or any(part.dtype == "" for part in found.parts):
        return None
    try:
        for sample in samples:
            found.pack(sample)
    except Misfit:
        return None
    return found


def _is_list(item: Any) -> bool:
    """Whether an item is a list of numbers of one type, such as token ids."""
    if type(item) is not list:
        return False
    kinds = set(map(type, item))
    return not kinds or (len(kinds) == 1 and kinds.pop() in _NUMBERS)


def _part_of(path: str, leaf: Any) -> RaggedPart | None:
    if _is_list(leaf):
        array = np.asarray(leaf)
        known = array.dtype.kind in "bif"
        return RaggedPart(path, "list", 1, str(array.dtype) if leaf else "") if known else None
    if type(leaf) in _NUMBERS:
        dtype = np.asarray(leaf).dtype
        return RaggedPart(path, "python", 0, str(dtype)) if dtype.kind in "bif" else None
    kind = kind_of(leaf)
    return RaggedPart(path, kind.form, len(kind.shape), kind.dtype) if kind.storable else None


def _array_of(leaf: Any, part: RaggedPart) -> Array:
    if part.form == "list" and _is_list(leaf) and not leaf:
        return np.zeros(0, part.dtype)
    found = _part_of(part.path, leaf)
    if found != part:
        where = f"{part.path} is " if part.path else "it is "
        text = type(leaf).__name__ if found is None else f"{found.form} of {found.dtype}"
        raise Misfit(f"{where}{text} where others are {part.form} of {part.dtype}")
    return to_array(leaf)


def _restored(part: RaggedPart, array: Array) -> Any:
    if part.form == "list":
        return array.tolist()
    if part.form == "python":
        return array.item()
    return Kind(part.form, array.shape, part.dtype).restore(torch.from_numpy(array))
