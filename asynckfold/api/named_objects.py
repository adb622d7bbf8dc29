"""Objects of torch, torchvision and scikit-learn in files, without pickle.

Transforms of torch and torchvision are JSON: a class by name, and its settings. Transformers of
scikit-learn are written and read by skops. Reading makes objects of classes of these libraries
only: nothing in a file can name other code. What cannot be written so is refused when it is saved.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from asynckfold.data.transforms.steps import Step, is_known, step_name
from asynckfold.errors import InputError
from asynckfold.jobs.argument import one_line
from asynckfold.jobs.digests.run import digest_of

_LAYERS = "torch.nn.functional"
_FUNCTIONS = ("torch", "torch.special", _LAYERS)
_CLASSES = ("torchvision.transforms", "torchvision.transforms.v2", "torch.nn")

TRUSTED = (
    "numpy.dtype",
    *(
        f"sklearn.feature_selection._{name}"
        for name in (
            *("univariate_selection.chi2", "univariate_selection.f_classif"),
            *("univariate_selection.f_regression", "univariate_selection.r_regression"),
            *("mutual_info.mutual_info_classif", "mutual_info.mutual_info_regression"),
        )
    ),
    "scipy.interpolate._bsplines.BSpline",
)
"""Types that files may hold besides those that skops itself trusts, which are classes of
scikit-learn, and functions of NumPy and SciPy on arrays."""


class _NotPlainError(ValueError):
    """A value that has no plain form."""


# Transforms


def stored_step(step: Step) -> dict[str, Any] | None:
    """Return a step as JSON; None if it is no function or class of torch or torchvision."""
    name = getattr(step, "__name__", "")
    for place in _FUNCTIONS:
        if name and _function(place, name) is step:
            return {"function": f"{place}.{name}"}
    try:
        stored = _stored_instance(step)
        return stored if stored and digest_of(restored_step(stored)) == digest_of(step) else None
    except (_NotPlainError, AttributeError, InputError, TypeError, ValueError):
        return None


def _stored_instance(step: Step) -> dict[str, Any] | None:
    kind = type(step)
    for place in _CLASSES:
        if not kind.__module__.startswith(place):
            continue
        if getattr(importlib.import_module(place), kind.__name__, None) is kind:
            names = inspect.signature(kind).parameters
            settings = {name: _plain(getattr(step, name)) for name in names}
            return {"class": f"{place}.{kind.__name__}", "settings": settings}
    return None


def restored_step(stored: Any) -> Step:
    """Return the step of such JSON; raise ValueError if it names anything else."""
    if "function" in stored:
        place, _, name = str(stored["function"]).rpartition(".")
        if place not in _FUNCTIONS or (function := _function(place, name)) is None:
            raise ValueError(f"{stored['function']} is no function of torch")
        return function
    place, _, name = str(stored["class"]).rpartition(".")
    kind = getattr(importlib.import_module(place), name, None) if place in _CLASSES else None
    if not isinstance(kind, type):
        raise ValueError(f"{stored['class']} is no class of torch or torchvision")
    step: Step = kind(**{key: _value(item) for key, item in stored["settings"].items()})
    if place != "torch.nn" and not is_known(step):
        raise ValueError(f"{step_name(step)} is no transform of torchvision")
    return step


def _function(place: str, name: str) -> Step | None:
    """Return a function of tensors; None if there is none of this name."""
    function = getattr(importlib.import_module(place), name, None)
    # torch.load, torch.compile and their like are written in Python.
    is_plain = inspect.isbuiltin(function) or (place == _LAYERS and inspect.isfunction(function))
    return function if is_plain and not name.startswith("_") else None


def _plain(value: Any) -> Any:
    """Return a setting as JSON that `_value` reads back with its type."""
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [_plain(item) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(item) for key, item in value.items()}}
    if isinstance(value, torch.dtype):
        return {"torch.dtype": str(value)[6:]}
    if isinstance(value, np.dtype):
        return {"dtype": value.str}
    if type(value).__name__ == "InterpolationMode":
        return {"interpolation": value.value}
    raise _NotPlainError(f"{type(value).__name__} is no plain value")


def _value(stored: Any) -> Any:
    if not isinstance(stored, Mapping):
        return stored
    (kind, value), *_ = stored.items()
    if kind in ("tuple", "list"):
        items = [_value(item) for item in value]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {key: _value(item) for key, item in value.items()}
    if kind == "torch.dtype":
        return getattr(torch, value)
    if kind == "dtype":
        return np.dtype(value)
    if kind == "interpolation":
        from torchvision.transforms import InterpolationMode

        return InterpolationMode(value)
    raise ValueError(f"unknown value {kind!r}")


# Fitted transformers


def packed_fit(fit: Any) -> torch.Tensor:
    """Return a fitted transformer as bytes, written by skops.

    Raises
    ------
    ValueError
        It holds a function or a class that is none of scikit-learn, NumPy or SciPy.
    """
    import skops.io

    try:
        data = skops.io.dumps(fit)
        others = set(skops.io.get_untrusted_types(data=data)) - {*TRUSTED}
    except Exception as error:
        # It calls objects of the user, which may raise anything.
        raise ValueError(f"{type(fit).__name__}, which raised {one_line(error)}") from error
    if others:
        raise ValueError(f"{type(fit).__name__} with {', '.join(sorted(others))}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpacked_fit(data: torch.Tensor) -> Any:
    """Return the transformer of such bytes; skops raises if they name another type."""
    import skops.io

    return skops.io.loads(data.numpy().tobytes(), trusted=[*TRUSTED])


def fit_text(fit: Any) -> str:
    """Describe a fitted transformer as JSON, with its numbers."""
    return json.dumps(_described(fit), default=str)


def _described(item: Any) -> Any:
    if isinstance(item, (np.ndarray, np.generic)):
        return item.tolist()
    if isinstance(item, (list, tuple)):
        return [_described(part) for part in item]
    if not hasattr(item, "get_params"):
        return item if item is None or isinstance(item, (bool, int, float, str)) else str(item)
    # What was fitted ends in an underscore.
    public = {name: value for name, value in vars(item).items() if not name.startswith("_")}
    return {"class": type(item).__name__} | {key: _described(part) for key, part in public.items()}
