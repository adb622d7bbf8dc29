"""The user's own steps: flattening a pipeline; which steps are random, which are equal."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch

from asynckfold.data.transforms.generators import varies
from asynckfold.data.transforms.samples import Records, copied, native

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
    """Return whether a step is torchvision's own code, or this package's, throughout.

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

    Torchvision's own transforms are judged by class and settings, anything else by trying it on
    `samples` under different seeds.
    """
    if isinstance(step, Records):
        return False
    if not is_torchvision(step) or is_torchvision(step, "Lambda"):
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
    """Return a text that equal steps share in any process, and others most likely do not.

    `depth` limits how deep attributes are followed; they may refer back.

    >>> describe(lambda x: x + 1) == describe(lambda x: x + 2)
    False
    """
    name = f"{type(step).__module__}.{getattr(step, '__qualname__', type(step).__qualname__)}"
    parts = [name, re.sub(r" at 0x[0-9a-f]+", "", repr(step))]
    return "|".join(parts + [describe(inner, depth - 1) for inner in _inside(step) if depth])


def _inside(step: Any) -> list[Any]:
    """Return what a step's repr does not show: code, settings, parts."""
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
    plain = is_torchvision(one) and not is_torchvision(one, "Lambda")
    return plain and type(one) is type(other) and describe(one) == describe(other)
