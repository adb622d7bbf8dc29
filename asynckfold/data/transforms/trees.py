"""Trees of tensors and of whole arrays, taken apart by torch's pytree; samples, and their records.

::

    {"image": float32 (3, 8, 8), "age": int64 ()}      a sample of several tensors
          └─ Records ──► uint8 (776,) ──┐
                                        │ stored, shared, sampled, moved as one array (n, 776)
    {"image": (B, 3, 8, 8), "age": (B,)} ◄── Records.unpack, of a batch

    ([7, 4, 9], 0.5)                                   a sample of any length, for a `collate_fn`
          └─ Records ──► uint8 (40,): the shapes of its parts, then the parts
    ([7, 4, 9], 0.5) ◄── Records.restore, of one record
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
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
    tree_unflatten,
)

from asynckfold.jobs.schema import Part, Path, path_text

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


# Samples: what they are, how they are stored, and when two are the same


_ALIGNED = 8
"""Bytes to a multiple of which each part begins: torch reads no number across such an edge."""

_NUMBERS = (bool, int, float)
_STORED_MODES = {"L": 1, "RGB": 3, "RGBA": 4}


@dataclass(frozen=True)
class Kind:
    """What a sample is at one point of the pipeline, and how it is stored there."""

    form: str  # image (PIL), tensor, array, number, tree (of these), other
    shape: tuple[int, ...] = ()  # as stored: channels first for images
    dtype: str = ""  # NumPy's name, as stored; or why a tree cannot be stored
    records: Records | None = field(default=None, repr=False)  # of a tree

    @property
    def is_uint8_image(self) -> bool:
        """Whether it is uint8 pixels: the cheapest point to store."""
        image_like = len(self.shape) == 3 or (self.form == "array" and len(self.shape) == 2)
        return self.dtype == "uint8" and image_like

    @property
    def storable(self) -> bool:
        """Whether samples of this kind can be stacked into one array."""
        return self.form not in ("other", "tree")

    def restore(self, stored: Tensor) -> Any:
        """Turn a stored sample back into what the user's steps expect."""
        if self.form == "tensor":
            return stored
        array = stored.numpy()
        if self.form == "image":
            from PIL import Image

            return Image.fromarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0).copy())
        return array[()] if self.form == "number" else array


def kind_of(sample: Any) -> Kind:
    """Return the kind of a sample."""
    if _is_pil(sample):
        channels = _STORED_MODES.get(sample.mode)
        if channels is None:
            return Kind("other")
        return Kind("image", (channels, sample.height, sample.width), "uint8")
    if isinstance(sample, Tensor):
        if sample.is_sparse or sample.dtype in (torch.bfloat16, torch.float16):
            return Kind("other")
        return Kind("tensor", tuple(sample.shape), str(sample.dtype).removeprefix("torch."))
    if isinstance(sample, np.ndarray):
        plain = sample.dtype.kind in "biuf" and sample.dtype.itemsize <= 8
        form = "array" if plain else "other"
        return Kind(form, sample.shape, str(sample.dtype)) if plain else Kind(form)
    if isinstance(sample, (bool, int, float, np.number, np.bool_)):
        return Kind("number", (), str(np.asarray(sample).dtype))
    if not is_tree(sample):
        return Kind("other")
    why = unstorable(sample)
    return Kind("other", dtype=why) if why else Kind("tree", records=Records.of(sample))


class Misfit(Exception):  # noqa: N818
    """A sample has other parts than the first one."""


@dataclass(frozen=True, eq=False)
class Records:
    """Packs samples into records of bytes; the last step of a pipeline that gives trees.

    Records of the same parts are equal, in whichever order a dict has its keys. If samples differ
    in shape, a record starts with the shapes of its parts, as int64.
    """

    parts: tuple[Part, ...]
    spec: TreeSpec = field(repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Records) and set(self.parts) == set(other.parts)

    def __hash__(self) -> int:
        return hash(frozenset(self.parts))

    @classmethod
    def of(cls, tree: Any) -> Records:
        """Return the records of storable trees like this one; images become float32 tensors."""
        leaves, spec = leaves_by_path(tree)
        kinds = {path: kind_of(leaf) for path, leaf in leaves.items()}
        parts = (
            Part(path, kind.shape, "float32" if kind.form == "image" else kind.dtype)
            for path, kind in kinds.items()
        )
        return cls(tuple(parts), spec)

    @classmethod
    def of_any_shape(cls, samples: Sequence[Any]) -> Records | None:
        """Return the records of samples that differ in shape; None if their parts differ.

        Samples are restored as they were, lists of numbers and images included.

        >>> records = Records.of_any_shape([([1, 2], 0.5), ([3], 1.0)])
        >>> records.restore(torch.from_numpy(records(([7, 8, 9], 2.0))))
        ([7, 8, 9], 2.0)
        """
        records: Records | None = None
        for sample in samples:
            leaves, spec = leaves_by_path(sample, stops=_is_list)
            parts = tuple(_part_of_any_shape(path, leaf) for path, leaf in leaves.items())
            if not parts or not all(parts):
                return None
            # An empty list does not tell what it holds.
            if records is None or not all(part.dtype for part in records.parts):
                records = cls(tuple(part for part in parts if part), spec)
        if records is None or not all(part.dtype for part in records.parts):
            return None
        try:
            for sample in samples:
                records(sample)
        except Misfit:
            return None
        return records

    @property
    def ragged(self) -> bool:
        """Whether samples may differ in shape."""
        return any(part.form for part in self.parts)

    @property
    def places(self) -> list[slice]:
        """Where the bytes of each part are."""
        places, low = [], 0
        for part in self.parts:
            size = prod(part.shape) * np.dtype(part.dtype).itemsize
            places.append(slice(low, low + size))
            low += -(-size // _ALIGNED) * _ALIGNED
        return places

    @property
    def text(self) -> str:
        """``"['image'] float32 (3, 8, 8), ['age'] int64 ()"``."""
        return ", ".join(part.text for part in self.parts)

    def __call__(self, sample: Any) -> Array:
        """Return the record of a sample, uint8 (size,); raise `Misfit` for one that differs."""
        leaves, _ = leaves_by_path(sample, stops=_is_list if self.ragged else None)
        if not self.ragged and (why := unstorable(sample)):
            raise Misfit(why)
        shapes: list[int] = []
        record = bytearray()
        for part, leaf in zip(self.parts, self._matched(leaves), strict=True):
            array = _as_stored(leaf, part)
            shapes += array.shape
            record += array.tobytes()
            record += bytes(-len(record) % _ALIGNED)
        if self.ragged:
            record = bytearray(np.asarray(shapes, np.int64).tobytes()) + record
        return np.frombuffer(record, np.uint8)

    def _matched(self, leaves: dict[Any, Any]) -> list[Any]:
        """Return leaves in the order of the parts; raise `Misfit` if they are others."""
        paths = [part.path for part in self.parts]
        for path in (*paths, *leaves):
            if path not in leaves:
                raise Misfit(f"it has no {path_text(path)}")
            if path not in paths:
                raise Misfit(f"it has {path_text(path) or 'one tensor'}, which others have not")
        return [leaves[path] for path in paths]

    def pack_rows(self, arrays: TreeArrays) -> Array:
        """Return the records of all samples, uint8 (n, size)."""
        leaves, count = self._matched(leaves_by_path(arrays.tree)[0]), len(arrays)
        places = self.places
        records = np.zeros((count, -(-places[-1].stop // _ALIGNED) * _ALIGNED), np.uint8)
        for place, leaf in zip(places, leaves, strict=True):
            block = np.ascontiguousarray(to_array(leaf)).reshape(count, -1)
            records[:, place] = block.view(np.uint8).reshape(count, -1)
        return records

    def unpack(self, records: Tensor) -> Any:
        """Return a batch of records (B, size) as a tree of tensors (B, ...)."""
        leaves = []
        for part, place in zip(self.parts, self.places, strict=True):
            kind: torch.dtype = getattr(torch, part.dtype)
            shape = (len(records), *part.shape)
            if place.stop > place.start:
                leaves.append(records[:, place].contiguous().view(kind).view(shape))
            else:
                leaves.append(torch.empty(shape, dtype=kind, device=records.device))
        return tree_unflatten(leaves, self.spec)

    def restore(self, record: Tensor) -> Any:
        """Return the sample of a record of any shape; it shares nothing."""
        row = record.numpy()
        low = 8 * sum(len(part.shape) for part in self.parts)
        shapes, leaves = row[:low].view(np.int64).tolist(), []
        for part in self.parts:
            shape, shapes = tuple(shapes[: len(part.shape)]), shapes[len(part.shape) :]
            dtype = np.dtype(part.dtype)
            size = prod(shape) * dtype.itemsize
            array = row[low : low + size].copy().view(dtype).reshape(shape)
            low += -(-size // _ALIGNED) * _ALIGNED
            if part.form in ("list", "python"):
                leaves.append(array.tolist())
            else:
                kind = Kind(part.form, array.shape, part.dtype)
                leaves.append(kind.restore(torch.from_numpy(array)))
        return tree_unflatten(leaves, self.spec)


def records_in(steps: Any) -> Records | None:
    """Return the records that a pipeline gives; None where it gives none."""
    return steps[-1] if steps and isinstance(steps[-1], Records) else None


def unstorable(tree: Any) -> str:
    """Say why no record can hold a tree; empty if one can.

    >>> unstorable({"age": 1, "name": "Ann"})
    "['name'] is a str, no dense tensor, array, image or number"
    """
    if not is_tree(tree):
        return f"it is a {type(tree).__name__}, no tuple or dict"
    leaves, _ = leaves_by_path(tree)
    for path, leaf in leaves.items():
        if not kind_of(leaf).storable:
            what = f"{getattr(leaf, 'dtype', '')} {type(leaf).__name__}".strip()
            return f"{path_text(path)} is a {what}, no dense tensor, array, image or number"
    return "" if leaves else "it holds no tensor"


def _as_stored(leaf: Any, part: Part) -> Array:
    """Return a leaf as the array of a part; raise `Misfit` where it is another."""
    kind = kind_of(leaf)
    actual: Part | None
    if not part.form:
        dtype = "float32" if kind.form == "image" else kind.dtype
        actual = Part(part.path, kind.shape, dtype)
    elif part.form == "list" and _is_list(leaf):
        actual = part if not leaf else _part_of_any_shape(part.path, leaf)
    else:
        actual = _part_of_any_shape(part.path, leaf)
    if actual != part:
        what = type(leaf).__name__ if actual is None else actual.kind
        raise Misfit(f"{path_text(part.path) or 'it'} is {what} where others are {part.kind}")
    if part.form == "list":
        return np.asarray(leaf, part.dtype)
    if kind.form == "image" and not part.form:
        from torchvision.transforms import ToTensor

        return to_array(ToTensor()(leaf))
    return to_array(leaf)


def _is_list(item: Any) -> bool:
    """Whether an item is a list of numbers of one type, such as token ids."""
    if type(item) is not list:
        return False
    kinds = set(map(type, item))
    return not kinds or (len(kinds) == 1 and kinds.pop() in _NUMBERS)


def _part_of_any_shape(path: Any, leaf: Any) -> Part | None:
    if _is_list(leaf) or type(leaf) in _NUMBERS:
        array = np.asarray(leaf)
        form, shape = ("list", (-1,)) if _is_list(leaf) else ("python", ())
        dtype = "" if leaf == [] else str(array.dtype)
        return Part(path, shape, dtype, form) if array.dtype.kind in "bif" else None
    kind = kind_of(leaf)
    return Part(path, (-1,) * len(kind.shape), kind.dtype, kind.form) if kind.storable else None


def _is_pil(sample: Any) -> bool:
    return type(sample).__module__.split(".")[0] == "PIL" and hasattr(sample, "mode")


def to_array(sample: Any) -> Array:
    """Return a sample as it is stored: images channels first, uint8."""
    if isinstance(sample, np.ndarray):
        return sample
    if isinstance(sample, Tensor):
        array: Array = sample.detach().as_subclass(Tensor).cpu().numpy()
        return array
    array = np.asarray(sample)
    if _is_pil(sample):
        return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return array


def native(sample: Any) -> Any:
    """Return a sample whose arrays torch can take: in native byte order, no stride below 0.

    Lists, which may be long, stay.

    >>> native(np.arange(3, dtype=">i2")[::-1]).tolist()
    [2, 1, 0]
    """
    if is_tree(sample) and not isinstance(sample, list):
        parts = sample.values() if isinstance(sample, dict) else sample
        if all(isinstance(part, Tensor) for part in parts):
            return sample
        return tree_map(native, sample, is_leaf=lambda item: isinstance(item, list))
    if not isinstance(sample, np.ndarray) or sample.dtype.kind not in "biufc":
        return sample
    if sample.dtype == np.longdouble:
        sample = sample.astype(np.float64)
    if not sample.dtype.isnative:
        sample = sample.astype(sample.dtype.newbyteorder("="))
    return sample.copy() if any(stride < 0 for stride in sample.strides) else sample


def copied(sample: Any) -> Any:
    """Return a copy that shares nothing with the sample."""
    if isinstance(sample, Tensor):
        # deepcopy would copy the whole array of which the sample is a row.
        return sample.clone()
    if _is_pil(sample):
        return sample.copy()
    if type(sample) in (tuple, list, dict):
        return tree_map(copied, sample)
    return sample.copy() if isinstance(sample, np.ndarray) else copy.deepcopy(sample)


DIGEST_BYTES = 16
"""Size of a sample's digest."""


def digest_of(sample: Any) -> bytes:
    """Return a digest of a sample."""
    kind = kind_of(sample)
    if is_tree(sample):
        leaves, _ = leaves_by_path(sample)
        # joblib hashes the storage of a tensor by its address, too.
        if any(isinstance(leaf, Tensor) for leaf in leaves.values()):
            parts = [path_text(path).encode() + digest_of(leaf) for path, leaf in leaves.items()]
            return hashlib.sha256(b"".join(parts)).digest()[:DIGEST_BYTES]
    digest = hashlib.sha256(repr(kind if kind.storable else Kind("other")).encode())
    if kind.storable:
        digest.update(to_array(sample).tobytes())
    else:
        import joblib

        digest.update(joblib.hash(sample).encode())
    return digest.digest()[:DIGEST_BYTES]


def same_sample(one: Any, other: Any) -> bool:
    """Tell whether two samples are of one kind and equal to the bit (NaN equals NaN).

    >>> same_sample((torch.ones(2), "a"), (torch.ones(2), "a"))
    True
    """
    return digest_of(one) == digest_of(other)
