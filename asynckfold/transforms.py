"""Dividing a transform pipeline: what is done once per sample, and what is done per batch.

::

    user's steps    Resize   RandomCrop   RandomHorizontalFlip   ToTensor   Normalize
                    ------   ------------------------------------------------------
    View            prefix   steps, each for a whole batch (B, C, H, W)
                    applied once, result stored as uint8

A random step draws for each sample from (seed, epoch, sample number, place of the step) alone, so
that a sample is augmented alike whatever batch it is in. From the first random step on, steps for
which no batched form is known run sample by sample, in `PerSample`, under generators seeded the
same way.
"""

from __future__ import annotations

import copy
import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType
from typing import Any, Protocol

import joblib
import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from asynckfold.errors import InputError, Problem

Step = Callable[[Any], Any]

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


# ---- random numbers that depend on nothing but their place ----


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
    return state ^ (state >> 31)


def splitmix64(seed: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return numbers of the SplitMix64 sequence of `seed`, by their place in it.

    Parameters
    ----------
    seed : int
        State of the generator; taken modulo 2**64.
    places : ndarray of int64, shape (n,)
        Which numbers of the sequence, from 0.

    Returns
    -------
    ndarray of uint64, shape (n,)

    Notes
    -----
    Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators". The state is a
    counter, so that any number of the sequence is had without the ones before it.

    Examples
    --------
    >>> hex(int(splitmix64(0, np.array([0]))[0]))
    '0xe220a8397b1dcdaf'
    """
    state: npt.NDArray[np.uint64] = (places.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    state += np.uint64(seed & _WORD)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


@dataclass(frozen=True, eq=False)
class Draw:
    """The random numbers of one step, one 64-bit number for each sample of a batch.

    Parameters
    ----------
    seed, epoch : int
        The job's seed and the epoch, from 0.
    indices : ndarray of int64, shape (B,)
        Sample numbers.
    place : int
        Place of the step among the steps of its view.
    """

    seed: int
    epoch: int
    indices: npt.NDArray[np.int64]
    place: int = 0

    def bits(self) -> npt.NDArray[np.uint64]:
        """Return one 64-bit number per sample, shape (B,)."""
        key = 0
        for part in (self.seed, self.epoch, self.place):
            key = _mix((key + part + _GOLDEN) & _WORD)
        return splitmix64(key, self.indices)

    def at(self, place: int) -> Draw:
        """Return the draw of another step for the same samples."""
        return Draw(self.seed, self.epoch, self.indices, place)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch (CPU); put them back afterwards."""
    with generators_kept():
        seed_generators(seed)
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the global generators of Python, NumPy and torch (CPU) back as they were."""
    kept = _generator_states()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002  users' transforms draw from it
        torch.set_rng_state(kept[2])


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (CPU)."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  users' transforms draw from it
    # torch.manual_seed would also touch every other device.
    torch.default_generator.manual_seed(seed & _WORD)


def _generator_states() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def _drew(before: tuple[Any, Any, Tensor], after: tuple[Any, Any, Tensor]) -> bool:
    numpy_same = before[1][2] == after[1][2] and np.array_equal(before[1][1], after[1][1])
    return before[0] != after[0] or not numpy_same or not torch.equal(before[2], after[2])


def varies(call: Callable[[], Any]) -> bool:
    """Tell whether a call is random: it draws from a global generator, or two results differ.

    A call that draws is taken as random even when both results are equal, since a rare event
    (a flip in one of a hundred samples) does not show in a few results.
    """
    results = []
    for seed in (1, 2):
        with seeded(seed):
            before = _generator_states()
            results.append(call())
            if _drew(before, _generator_states()):
                return True
    return not same_sample(*results)


# ---- samples, and how they are stored ----

_STORED_MODES = {"L": 1, "RGB": 3, "RGBA": 4}


@dataclass(frozen=True)
class Kind:
    """What a sample is at one point of the pipeline, and how it is stored there.

    Parameters
    ----------
    form : {"image", "tensor", "array", "number", "other"}
        A PIL image, a torch tensor, a NumPy array, a number, or none of these.
    shape : tuple of int
        As stored: channels first for images.
    dtype : str
        NumPy's name, as stored.
    """

    form: str
    shape: tuple[int, ...] = ()
    dtype: str = ""

    @property
    def is_uint8_image(self) -> bool:
        """Whether pixels of one byte are held, so that storing here takes least memory."""
        image_like = len(self.shape) == 3 or (self.form == "array" and len(self.shape) == 2)
        return self.dtype == "uint8" and image_like

    @property
    def storable(self) -> bool:
        """Whether samples of this kind can be stacked into one array."""
        return self.form != "other"

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
    return Kind("other")


def _is_pil(sample: Any) -> bool:
    return type(sample).__module__.split(".")[0] == "PIL" and hasattr(sample, "mode")


def to_array(sample: Any) -> npt.NDArray[Any]:
    """Return a sample as it is stored: images channels first, uint8."""
    if isinstance(sample, np.ndarray):
        return sample
    if isinstance(sample, Tensor):
        array: npt.NDArray[Any] = sample.detach().as_subclass(Tensor).cpu().numpy()
        return array
    array = np.asarray(sample)
    if _is_pil(sample):
        return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return array


def copied(sample: Any) -> Any:
    """Return a copy that shares nothing with the sample."""
    if isinstance(sample, Tensor):
        # deepcopy would copy the whole array of which the sample is a row.
        return sample.clone()
    return sample.copy() if isinstance(sample, np.ndarray) else copy.deepcopy(sample)


def same_sample(one: Any, other: Any) -> bool:
    """Tell whether two samples are of one kind and equal to the bit (NaN equals NaN)."""
    kind = kind_of(one)
    if kind != kind_of(other):
        return False
    if not kind.storable:
        return bool(joblib.hash(one) == joblib.hash(other))
    return to_array(one).tobytes() == to_array(other).tobytes()


# ---- the user's steps ----

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
    """Return a pipeline as a list of steps: nested ``Compose`` and ``Sequential`` are opened.

    Examples
    --------
    >>> flatten(None)
    ()
    >>> flatten(abs)
    (<built-in function abs>,)
    """
    if transform is None:
        return ()
    inner: Any = None
    if _is_torchvision(transform, "Compose"):
        inner = transform.transforms
    elif type(transform) is torch.nn.Sequential or isinstance(transform, (list, tuple)):
        inner = transform
    if inner is None:
        return (transform,)
    return tuple(step for item in inner for step in flatten(item))


def _is_torchvision(step: Any, *names: str) -> bool:
    kind = type(step)
    is_its_own = kind.__module__.startswith("torchvision.transforms")
    return is_its_own and (not names or kind.__name__ in names)


def apply(steps: Sequence[Step], sample: Any) -> Any:
    """Send a sample through steps."""
    for step in steps:
        sample = step(sample)
    return sample


def step_name(step: Any) -> str:
    """Return the name by which messages call a step."""
    return getattr(step, "__name__", None) or type(step).__name__


def is_random(step: Step, samples: Sequence[Any] = ()) -> bool:
    """Tell whether a step may give another result for the same sample.

    Parameters
    ----------
    step : callable
        Torchvision's own transforms are told by their class and settings.
    samples : sequence
        Samples on which any other callable is tried, under different seeds.
    """
    if not _is_torchvision(step) or _is_torchvision(step, "Lambda"):
        return any(varies(partial(_try, step, sample)) for sample in samples)
    name = type(step).__name__
    if name == "GaussianBlur":
        return _is_range(getattr(step, "sigma", None))
    if name == "JPEG":
        return _is_range(getattr(step, "quality", None))
    return name in _RANDOM_NAMES or name.startswith("Random")


def _try(step: Step, sample: Any) -> Any:
    return step(copied(sample))


def _is_range(setting: Any) -> bool:
    return isinstance(setting, Sequence) and len(set(setting)) > 1


def describe(step: Any, depth: int = 3) -> str:
    """Return a text that is equal, in any process, for equal steps, and else most likely not.

    Parameters
    ----------
    step : object
        A step, or a setting of one.
    depth : int
        How deep to look into attributes, which may refer back to where they came from.

    Examples
    --------
    >>> describe(lambda x: x + 1) == describe(lambda x: x + 2)
    False
    """
    name = f"{type(step).__module__}.{getattr(step, '__qualname__', type(step).__qualname__)}"
    parts = [name, re.sub(r" at 0x[0-9a-f]+", "", repr(step))]
    return "|".join(parts + [describe(inner, depth - 1) for inner in _inside(step) if depth])


def _inside(step: Any) -> list[Any]:
    """Return what a step's text does not show: its code, its settings, its parts."""
    if isinstance(step, CodeType):
        constants = [value for value in step.co_consts if isinstance(value, CodeType)]
        plain = [value for value in step.co_consts if not isinstance(value, CodeType)]
        digest = hashlib.sha256(step.co_code).hexdigest()
        return [digest, repr(plain), repr(step.co_names), *constants]
    if isinstance(step, (tuple, list)):
        return list(step)
    code = getattr(step, "__code__", None)
    if isinstance(code, CodeType):
        cells = [cell.cell_contents for cell in getattr(step, "__closure__", None) or ()]
        return [code, *(getattr(step, "__defaults__", None) or ()), *cells]
    if not callable(step) or isinstance(step, type):
        return []
    settings = sorted(getattr(step, "__dict__", {}).items())
    return [pair for pair in settings if not pair[0].startswith("_")]


def same_steps(one: Sequence[Step], other: Sequence[Step]) -> bool:
    """Tell whether two lists of steps do the same: the same objects, or equal torchvision ones."""
    return len(one) == len(other) and all(map(_same_step, one, other))


def _same_step(one: Step, other: Step) -> bool:
    if one is other:
        return True
    plain = _is_torchvision(one) and not _is_torchvision(one, "Lambda")
    return plain and type(one) is type(other) and describe(one) == describe(other)


# ---- steps for whole batches ----


class BatchStep(Protocol):
    """One step of a view, for a whole batch; it may change the batch in place and returns it."""

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Transform a batch of shape (B, ...)."""
        ...


@dataclass(frozen=True)
class Unchanged:
    """What leaves stored samples as they are, such as PILToTensor."""

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Return the batch."""
        return batch


@dataclass(frozen=True)
class ToFloat:
    """Pixels as floating-point numbers, to the bit as torchvision has them.

    Parameters
    ----------
    dtype : torch.dtype
        The floating-point type.
    scale : {"divide", "multiply", "keep"}
        By 255 (``ToTensor``), by 1/255 (v2's ``ToDtype``, whose rounding differs), or not at all.
    channels_last : bool
        Whether the batch is (B, H, W) or (B, H, W, C), of arrays.
    """

    dtype: torch.dtype = torch.float32
    scale: str = "divide"
    channels_last: bool = False

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
    """Mirror each sample with probability `p`.

    Parameters
    ----------
    p : float
        Probability.
    dim : int
        -1 mirrors left and right, -2 top and bottom.
    """

    p: float = 0.5
    dim: int = -1

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Return the batch (B, C, H, W), changed in place."""
        chances = (draw.bits() >> np.uint64(11)) * 2.0**-53
        flipped = torch.from_numpy(np.flatnonzero(chances < self.p)).to(batch.device)
        if len(flipped):
            batch[flipped] = batch.index_select(0, flipped).flip(self.dim)
        return batch


@dataclass(frozen=True)
class RandomCrop:
    """Pad with a constant and cut a window at a random place, every place equally likely.

    Parameters
    ----------
    size : (int, int)
        Height and width.
    padding : (int, int, int, int)
        Left, top, right, bottom.
    fill : float
        The constant.
    """

    size: tuple[int, int]
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    fill: float = 0

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Return (B, C, height, width)."""
        left, top, right, bottom = self.padding
        if any(self.padding):
            sides = (left, right, top, bottom)
            batch = torch.nn.functional.pad(batch, sides, value=self.fill)
        height, width = self.size
        corners = self.corners(batch.shape[-2] - height + 1, batch.shape[-1] - width + 1, draw)
        return _windows(batch, self.size, *corners)

    @staticmethod
    def corners(
        n_tops: int, n_lefts: int, draw: Draw
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the upper left corners, drawn from ``range(n_tops)`` and ``range(n_lefts)``.

        A 32-bit number times the count, shifted down by 32 bits (Lemire 2019, "Fast random integer
        generation in an interval"); no place is favoured by more than ``count / 2**32``.
        """
        bits, half = draw.bits(), np.uint64(32)
        tops = ((bits >> half) * np.uint64(n_tops)) >> half
        lefts = ((bits & np.uint64(0xFFFFFFFF)) * np.uint64(n_lefts)) >> half
        return tops.astype(np.int64), lefts.astype(np.int64)


def _windows(
    batch: Tensor,
    size: tuple[int, int],
    tops: npt.NDArray[np.int64],
    lefts: npt.NDArray[np.int64],
) -> Tensor:
    """Cut one window (C, height, width) out of each sample."""
    if batch.device.type == "cpu":
        # NumPy copies whole windows, torch single pixels: 31 against 125 us for 32 of 3x32x32.
        views = sliding_window_view(batch.numpy(), size, axis=(2, 3))
        return torch.from_numpy(views[np.arange(len(batch)), :, tops, lefts])
    top, left = (torch.from_numpy(values).to(batch.device) for values in (tops, lefts))
    windows = batch.unfold(2, size[0], 1).unfold(3, size[1], 1)
    return windows[torch.arange(len(batch), device=batch.device), :, top, left]


@dataclass(frozen=True)
class PerSample:
    """Steps without a batched form: each sample goes through them alone, under its own seed.

    Parameters
    ----------
    steps : tuple of callable
        The user's own.
    kind : Kind
        What the stored samples are turned back into.
    """

    steps: tuple[Step, ...]
    kind: Kind

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Return the stacked results, on the batch's device."""
        with generators_kept():
            results = [
                self._one(stored, seed)
                for stored, seed in zip(batch.cpu(), draw.bits().tolist(), strict=True)
            ]
        return torch.from_numpy(np.stack(results)).to(batch.device)

    def _one(self, stored: Tensor, seed: int) -> npt.NDArray[Any]:
        seed_generators(seed)
        return to_array(apply(self.steps, self.kind.restore(stored)))


def batch_step(step: Any, kind: Kind | None) -> BatchStep | None:
    """Return the batched form of a torchvision step for samples of a kind, or None."""
    make = _BATCHED.get(type(step).__name__) if _is_torchvision(step) else None
    return None if make is None or kind is None else make(step, kind)


def _batched_to_tensor(step: Any, kind: Kind) -> BatchStep | None:
    if not kind.is_uint8_image or kind.form == "tensor":
        return None
    return ToFloat(torch.get_default_dtype(), channels_last=kind.form == "array")


def _batched_unchanged(step: Any, kind: Kind) -> BatchStep | None:
    return Unchanged() if kind.form in ("image", "tensor") and len(kind.shape) == 3 else None


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
    if kind.form != "tensor" or not kind.dtype.startswith("float") or len(kind.shape) != 3:
        return None
    mean, std = (tuple(np.ravel(values).tolist()) for values in (step.mean, step.std))
    fits = {len(mean), len(std)} <= {1, kind.shape[0]}
    return Normalize(mean, std) if fits else None


def _batched_flip(step: Any, kind: Kind) -> BatchStep | None:
    if kind.form not in ("image", "tensor") or len(kind.shape) != 3:
        return None
    return RandomFlip(float(step.p), -2 if "Vertical" in type(step).__name__ else -1)


def _batched_crop(step: Any, kind: Kind) -> BatchStep | None:
    fill, padding = step.fill, _padding(step)
    plain_fill = isinstance(fill, int) or (isinstance(fill, float) and kind.form == "tensor")
    if kind.form not in ("image", "tensor") or len(kind.shape) != 3 or not plain_fill:
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


# ---- dividing a pipeline ----


@dataclass(frozen=True)
class View:
    """A pipeline in two parts.

    Parameters
    ----------
    prefix : tuple of callable
        Applied once per sample; the result is stored.
    stored : Kind or None
        Of the samples that are stored; None when they differ among samples or cannot be stacked.
    steps : tuple of BatchStep
        The rest, for whole batches.
    pipeline : tuple of callable
        All of the user's steps, for reading samples one by one.
    """

    prefix: tuple[Step, ...]
    stored: Kind | None
    steps: tuple[BatchStep, ...]
    pipeline: tuple[Step, ...]

    def __call__(self, batch: Tensor, draw: Draw) -> Tensor:
        """Send stored samples (B, ...) through the batch steps."""
        for place, step in enumerate(self.steps):
            batch = step(batch, draw.at(place))
        return batch


@dataclass(frozen=True)
class Trace:
    """What a few samples became on their way through a pipeline.

    Parameters
    ----------
    random : tuple of bool
        For each step, whether it is random.
    kinds : tuple of (Kind or None)
        Before each step and after the last; None where the samples differ in kind.
    """

    random: tuple[bool, ...]
    kinds: tuple[Kind | None, ...]


def trace(steps: Sequence[Step], samples: Sequence[Any]) -> Trace:
    """Send a few samples through the steps, one step after the other.

    Parameters
    ----------
    steps : sequence of callable
        A flattened pipeline.
    samples : sequence
        Some samples as the dataset gives them; they are copied, not changed.

    Raises
    ------
    InputError
        A step raised; it is named.
    """
    values = [copied(sample) for sample in samples]
    flags, kinds = [], [_common_kind(values)]
    for step in steps:
        try:
            flags.append(is_random(step, values))
            with seeded(0):
                values = [step(value) for value in values]
        except Exception as error:
            raise InputError([_failing(step, error)]) from error
        kinds.append(_common_kind(values))
    return Trace(tuple(flags), tuple(kinds))


def _failing(step: Step, error: Exception) -> Problem:
    return Problem(
        f"transform step {step_name(step)} must work on each sample",
        f"{type(error).__name__}: {error}",
        "Try the transform on dataset[0].",
    )


def _common_kind(values: Sequence[Any]) -> Kind | None:
    kinds = {kind_of(value) for value in values}
    return kinds.pop() if len(kinds) == 1 else None


def divide(steps: Sequence[Step], traced: Trace) -> View:
    """Divide a pipeline into what is stored and what is done per batch.

    The stored part ends before the first random step, and earlier where the steps in between have a
    batched form and start from pixels of one byte: what is stored stays small.
    """
    forms = [batch_step(step, kind) for step, kind in zip(steps, traced.kinds, strict=False)]
    cut = _cut(traced, forms)
    last = max((place + 1 for place in range(cut, len(steps)) if forms[place] is None), default=cut)
    stored = traced.kinds[cut]
    batched = [form for form in forms[last:] if form is not None and form != Unchanged()]
    single = [PerSample(tuple(steps[cut:last]), stored)] if stored and last > cut else []
    return View(
        tuple(steps[:cut]),
        stored if stored and stored.storable else None,
        (*single, *batched),
        tuple(steps),
    )


def _cut(traced: Trace, forms: Sequence[BatchStep | None]) -> int:
    end = traced.random.index(True) if True in traced.random else len(forms)
    start = end
    for place in range(end - 1, -1, -1):
        if forms[place] is None:
            break
        kind = traced.kinds[place]
        if kind is not None and kind.is_uint8_image:
            start = place
    return start


def without_random(steps: Sequence[Step], traced: Trace) -> tuple[Step, ...]:
    """Return the deterministic steps of a pipeline."""
    return tuple(step for step, drawn in zip(steps, traced.random, strict=True) if not drawn)
