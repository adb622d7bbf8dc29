"""Which batch step gives what a torchvision step gives, and for which samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from asynckfold.data.transforms.batch_steps import (
    BatchStep,
    Normalize,
    RandomCrop,
    RandomFlip,
    ToFloat,
    Unchanged,
)
from asynckfold.data.transforms.samples import Kind
from asynckfold.data.transforms.steps import is_torchvision


def batch_step(step: Any, kind: Kind | None) -> BatchStep | None:
    """Return the batched form of a torchvision step for samples of a kind, or None."""
    make = _BATCHED.get(type(step).__name__) if is_torchvision(step) else None
    return None if make is None or kind is None else make(step, kind)


def _batched_to_tensor(step: Any, kind: Kind) -> BatchStep | None:
    if not kind.is_uint8_image or kind.form == "tensor":
        return None
    return ToFloat(torch.get_default_dtype(), channels_last=kind.form == "array")


def _batched_unchanged(step: Any, kind: Kind) -> BatchStep | None:
    return Unchanged() if _is_channels_first(kind) else None


def _is_channels_first(kind: Kind) -> bool:
    return kind.form in ("image", "tensor") and len(kind.shape) == 3


def _batched_to_dtype(step: Any, kind: Kind) -> BatchStep | None:
    dtype = step.dtype
    if kind.form != "tensor" or not isinstance(dtype, torch.dtype):
        return None
    if str(dtype) == f"torch.{kind.dtype}":
        return Unchanged()
    if kind.dtype != "uint8" or not dtype.is_floating_point:
        return None
    if type(step).__module__ == "torchvision.transforms.transforms":
        return ToFloat(dtype, "divide")
    return ToFloat(dtype, "multiply" if getattr(step, "scale", True) else "keep")


def _batched_normalize(step: Any, kind: Kind) -> BatchStep | None:
    if not _is_channels_first(kind) or not kind.dtype.startswith("float"):
        return None
    mean, std = (tuple(np.ravel(values).tolist()) for values in (step.mean, step.std))
    fits = {len(mean), len(std)} <= {1, kind.shape[0]}
    return Normalize(mean, std) if fits else None


def _batched_flip(step: Any, kind: Kind) -> BatchStep | None:
    if not _is_channels_first(kind):
        return None
    return RandomFlip(float(step.p), -2 if "Vertical" in type(step).__name__ else -1)


def _batched_crop(step: Any, kind: Kind) -> BatchStep | None:
    fill, padding = step.fill, _padding(step)
    plain_fill = isinstance(fill, int) or (isinstance(fill, float) and kind.form == "tensor")
    if not _is_channels_first(kind) or not plain_fill:
        return None
    if step.pad_if_needed or step.padding_mode != "constant" or padding is None:
        return None
    height, width = (int(side) for side in step.size)
    left, top, right, bottom = padding
    fits = kind.shape[1] + top + bottom >= height and kind.shape[2] + left + right >= width
    return RandomCrop((height, width), padding, fill) if fits and min(padding) >= 0 else None


def _padding(step: Any) -> tuple[int, int, int, int] | None:
    given = step.padding
    values = [given] if isinstance(given, int) else list(given or [0])
    if len(values) in (1, 2):
        values = (values * 2 if len(values) == 1 else values) * 2
    elif type(step).__module__.startswith("torchvision.transforms.v2"):
        # v2 holds left, right, top, bottom; v1 holds left, top, right, bottom.
        values = [values[0], values[2], values[1], values[3]]
    left, top, right, bottom = (int(value) for value in values)
    return left, top, right, bottom


_BATCHED: dict[str, Callable[[Any, Kind], BatchStep | None]] = {
    "ConvertImageDtype": _batched_to_dtype,
    "Normalize": _batched_normalize,
    "PILToTensor": _batched_unchanged,
    "RandomCrop": _batched_crop,
    "RandomHorizontalFlip": _batched_flip,
    "RandomVerticalFlip": _batched_flip,
    "ToDtype": _batched_to_dtype,
    "ToImage": _batched_unchanged,
    "ToPureTensor": _batched_unchanged,
    "ToTensor": _batched_to_tensor,
}
