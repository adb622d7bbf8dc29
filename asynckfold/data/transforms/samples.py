"""Samples: what they are, how they are stored, and when two are the same."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from asynckfold.data.transforms.records import Layout, Part, is_tree, leaves_by_path

Array = npt.NDArray[Any]

_STORED_MODES = {"L": 1, "RGB": 3, "RGBA": 4}


@dataclass(frozen=True)
class Kind:
    """What a sample is at one point of the pipeline, and how it is stored there."""

    form: str  # image (PIL), tensor, array, number, tree (of these), other
    shape: tuple[int, ...] = ()  # as stored: channels first for images
    dtype: str = ""  # NumPy's name, as stored
    layout: Layout | None = field(default=None, repr=False)  # of a tree, as it is packed

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
    if is_tree(sample) and not misfit(sample):
        return Kind("tree", layout=layout_of(sample))
    return Kind("other")


def layout_of(tree: Any) -> Layout:
    """Return how a tree of storable leaves is packed; images become float32, see `Pack`."""
    leaves, spec = leaves_by_path(tree)
    kinds = {path: kind_of(leaf) for path, leaf in leaves.items()}
    parts = tuple(
        Part(path, kind.shape, "float32" if kind.form == "image" else kind.dtype)
        for path, kind in kinds.items()
    )
    return Layout(frozenset(parts), parts, spec)


def misfit(tree: Any, layout: Layout | None = None) -> str:
    """Say why a tree cannot be packed, or not as in `layout`; empty if it can.

    >>> misfit({"age": 1, "name": "Ann"})
    "['name'] is a string"
    """
    if not is_tree(tree):
        return f"it is {_article(tree)}, no tuple or dict"
    leaves, _ = leaves_by_path(tree)
    if not leaves:
        return "it holds no tensor"
    for path, leaf in leaves.items():
        if isinstance(leaf, (str, bytes)):
            return f"{path or 'it'} is a string"
        if not kind_of(leaf).storable:
            return f"{path or 'it'} is {_article(leaf)}, no dense tensor, array, image or number"
    if layout is None:
        return ""
    wanted = {part.path: part for part in layout.parts}
    for path in (*wanted, *leaves):
        if path not in leaves:
            return f"it has no {path}"
        if path not in wanted:
            return f"it has {path or 'one tensor'}, which the first sample has not"
    found = layout_of(tree)
    for part in found.parts:
        if part != wanted[part.path]:
            return f"{part.path} is {part.text} where others are {wanted[part.path].text}"
    return ""


def _article(leaf: Any) -> str:
    kind = f"{leaf.dtype!s} " if hasattr(leaf, "dtype") else ""
    return f"a {kind}{type(leaf).__name__}"


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


def same_sample(one: Any, other: Any) -> bool:
    """Tell whether two samples are of one kind and equal to the bit (NaN equals NaN).

    >>> same_sample((torch.ones(2), "a"), (torch.ones(2), "a"))
    True
    """
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(same_sample, one, other))
    if type(one) is dict and type(other) is dict:
        return one.keys() == other.keys() and all(same_sample(one[key], other[key]) for key in one)
    kind = kind_of(one)
    if kind != kind_of(other):
        return False
    if not kind.storable:
        import joblib

        return bool(joblib.hash(one) == joblib.hash(other))
    return to_array(one).tobytes() == to_array(other).tobytes()
