"""The user's steps, random or equal; their forms for whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from asynckfold.data.transforms.random_numbers import Draw, generators_kept, seed_generators, varies
from asynckfold.data.transforms.trees import Kind, Records, copied, native, to_array
from asynckfold.jobs.digests.run import digest_of

Step = Callable[[Any], Any]

_RANDOM_NAMES = {
    "AugMix",
    "AutoAugment",
    "ColorJitter",
    "CutMix",
    "ElasticTransform",
    "GaussianNoise",
    "MixUp",
    "RandAugment",
    "ScaleJitter",
    "TrivialAugmentWide",
}


def flatten(transform: Any) -> tuple[Step, ...]:
    """Return a pipeline as a list of steps; nested ``Compose`` and ``Sequential`` are opened.

    >>> flatten(None)
    ()
    >>> flatten(abs)
    (<built-in function abs>,)
    """
    if transform is None:
        return ()
    inner: Any = None
    if is_torchvision(transform, "Compose"):
        inner = transform.transforms
    elif type(transform) is torch.nn.Sequential or isinstance(transform, (list, tuple)):
        inner = transform
    if inner is None:
        return (transform,)
    return tuple(step for item in inner for step in flatten(item))


def is_torchvision(step: Any, *names: str) -> bool:
    """Return whether a step is torchvision's own, with one of these names if any are given."""
    kind = type(step)
    is_its_own = kind.__module__.startswith("torchvision.transforms")
    return is_its_own and (not names or kind.__name__ in names)


def is_known(step: Step) -> bool:
    """Return whether a step is torchvision's code, or this package's, throughout.

    >>> is_known(abs)
    False
    """
    if isinstance(step, Records):
        return True
    if not is_torchvision(step) or is_torchvision(step, "Lambda"):
        return False
    return all(is_known(inner) for inner in flatten(getattr(step, "transforms", None)))


def apply(steps: Sequence[Step], sample: Any) -> Any:
    """Send a sample through steps."""
    for step in steps:
        sample = step(sample)
    return native(sample) if steps else sample


def step_name(step: Any) -> str:
    """Return the name by which messages call a step."""
    return getattr(step, "__name__", None) or type(step).__name__


def is_random(step: Step, samples: Sequence[Any] = ()) -> bool:
    """Return whether a step may give another result for the same sample.

    Torchvision's transforms are judged by class and settings, anything else by trying it on
    `samples` under different seeds.
    """
    if isinstance(step, Records):
        return False
    if not is_torchvision(step) or is_torchvision(step, "Lambda"):
        return any(varies(partial(_try, step, sample)) for sample in samples)
    name = type(step).__name__
    span = getattr(step, {"GaussianBlur": "sigma", "JPEG": "quality"}.get(name, ""), None)
    is_range = isinstance(span, Sequence) and len(set(span)) > 1
    return is_range or name in _RANDOM_NAMES or name.startswith("Random")


def _try(step: Step, sample: Any) -> Any:
    return step(copied(sample))


def same_steps(one: Sequence[Step], other: Sequence[Step]) -> bool:
    """Tell whether two lists of steps do the same: the same objects, or equal torchvision ones."""
    return len(one) == len(other) and all(map(_same_step, one, other))


def _same_step(one: Step, other: Step) -> bool:
    if one is other:
        return True
    return is_known(one) and type(one) is type(other) and digest_of(one) == digest_of(other)


# Steps for whole batches


class BatchStep(Protocol):
    """One step of a view, for a whole batch; it may change the batch in place and returns it."""

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Transform a batch of shape (B, ...)."""
        ...


@dataclass(frozen=True)
class NoChange:
    """A step that leaves stored samples as they are, such as PILToTensor."""

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Return the batch."""
        return batch


@dataclass(frozen=True)
class ToFloat:
    """Pixels (B, C, H, W) to floating point, bit-identical with torchvision."""

    dtype: torch.dtype = torch.float32
    scale: str = "divide"  # divide by 255 (ToTensor), multiply by 1/255 (v2.ToDtype), or keep
    channels_last: bool = False  # the batch is (B, H, W) or (B, H, W, C)

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Return (B, C, H, W) of `dtype`."""
        if self.channels_last:
            batch = batch.unsqueeze(-1) if batch.dim() == 3 else batch
            batch = batch.permute(0, 3, 1, 2).contiguous()
        batch = batch.to(self.dtype)
        if self.scale == "divide":
            return batch.div_(255)
        return batch.mul_(1.0 / 255) if self.scale == "multiply" else batch


@dataclass(frozen=True)
class Normalize:
    """Per channel: subtract the mean, divide by the standard deviation."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Return the normalised batch (B, C, H, W), changed in place."""
        mean = _per_channel(self.mean, batch.dtype, batch.device)
        return batch.sub_(mean).div_(_per_channel(self.std, batch.dtype, batch.device))


@lru_cache(maxsize=64)
def _per_channel(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)


@dataclass(frozen=True)
class RandomFlip:
    """Mirror each sample with probability `p`."""

    p: float = 0.5
    dim: int = -1  # -1: left and right; -2: top and bottom

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Return the batch (B, C, H, W), changed in place."""
        flips = self.flips(draw.bits_on(batch.device))
        if batch.device.type != "cpu":
            return torch.where(flips.view(-1, 1, 1, 1), batch.flip(self.dim), batch)
        flipped = flips.nonzero()[:, 0]
        mirrored = batch.index_select(0, flipped).flip(self.dim)
        # NumPy writes whole samples, torch single pixels: 2 against 37 us for 18 of 3x32x32.
        batch.numpy()[flipped.numpy()] = mirrored.numpy()
        return batch

    def flips(self, bits: Tensor) -> Tensor:
        """Return which samples are mirrored, without asking the host."""
        return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53 < self.p


@dataclass(frozen=True)
class RandomCrop:
    """Pad with a constant and cut a window (height, width) at a uniformly random place."""

    size: tuple[int, int]
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)  # left, top, right, bottom
    fill: float = 0

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Return (B, C, height, width)."""
        left, top, right, bottom = self.padding
        if any(self.padding):
            sides = (left, right, top, bottom)
            batch = torch.nn.functional.pad(batch, sides, value=self.fill)
        height, width = self.size
        counts = batch.shape[-2] - height + 1, batch.shape[-1] - width + 1
        windows = batch.unfold(2, height, 1).unfold(3, width, 1)
        tops, lefts = self.corners(*counts, draw.bits_on(batch.device))
        if batch.device.type != "cpu":
            return windows[torch.arange(len(batch), device=batch.device), :, tops, lefts]
        # NumPy copies whole windows, torch single pixels: 21 against 125 us for 32 of 3x32x32.
        places = np.arange(len(batch)), slice(None), tops.numpy(), lefts.numpy()
        return torch.from_numpy(windows.numpy()[places])

    @staticmethod
    def corners(n_tops: int, n_lefts: int, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw upper left corners from ``range(n_tops)`` and ``range(n_lefts)``.

        A 32-bit number times the count, shifted right by 32 (Lemire 2019, "Fast random integer
        generation in an interval"); the bias is below ``count / 2**32``.
        """
        word = 2**32 - 1
        return (((bits >> 32) & word) * n_tops) >> 32, ((bits & word) * n_lefts) >> 32


@dataclass(frozen=True)
class PerSample:
    """Steps without a batched form: each sample passes them alone, under its own seed."""

    steps: tuple[Step, ...]
    kind: Kind  # what stored samples are turned back into

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Return the stacked results, on the batch's device."""
        with generators_kept():
            results = []
            for stored, seed in zip(batch.cpu(), draw.bits().tolist(), strict=True):
                seed_generators(seed)
                results.append(to_array(apply(self.steps, self.kind.restore(stored))))
        return torch.from_numpy(np.stack(results)).to(batch.device)


# Of torchvision


def batch_step(step: Any, kind: Kind | None) -> BatchStep | None:
    """Return the batched form of a torchvision step for samples of a kind, or None."""
    make = _BATCHED.get(type(step).__name__) if is_torchvision(step) else None
    return None if make is None or kind is None else make(step, kind)


def _batched_to_tensor(step: Any, kind: Kind) -> BatchStep | None:
    if not kind.is_uint8_image or kind.form == "tensor":
        return None
    return ToFloat(torch.get_default_dtype(), channels_last=kind.form == "array")


def _batched_unchanged(step: Any, kind: Kind) -> BatchStep | None:
    return NoChange() if _is_channels_first(kind) else None


def _is_channels_first(kind: Kind) -> bool:
    return kind.form in ("image", "tensor") and len(kind.shape) == 3


def _batched_to_dtype(step: Any, kind: Kind) -> BatchStep | None:
    dtype = step.dtype
    if kind.form != "tensor" or not isinstance(dtype, torch.dtype):
        return None
    if str(dtype) == f"torch.{kind.dtype}":
        return NoChange()
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
