"""Objects of torch, torchvision and scikit-learn as JSON and arrays: by class name and settings.

Reading makes objects of these libraries' own classes only, from plain values: nothing in a file can
name other code. What cannot be written so is refused when it is saved.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asynckfold.data.transforms import Step, describe, is_known, step_name
from asynckfold.errors import InputError

Arrays = dict[str, torch.Tensor]

_LAYERS = "torch.nn.functional"
_FUNCTIONS = ("torch", "torch.special", _LAYERS)
_CLASSES = ("torchvision.transforms", "torchvision.transforms.v2", "torch.nn")

SCALERS = {
    "sklearn.decomposition": ("PCA", "TruncatedSVD"),
    "sklearn.impute": ("SimpleImputer",),
    "sklearn.feature_selection": ("VarianceThreshold",),
    "sklearn.preprocessing": (
        *("Binarizer", "MaxAbsScaler", "MinMaxScaler", "Normalizer", "PowerTransformer"),
        *("QuantileTransformer", "RobustScaler", "StandardScaler"),
    ),
}
"""Transformers that are arrays and numbers throughout; a ``Pipeline`` of them is one, too."""

_SCALER_MODULES = {name: module for module, names in SCALERS.items() for name in names}


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
        found = _stored_instance(step)
        return found if found and describe(restored_step(found)) == describe(step) else None
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
        if place not in _FUNCTIONS or (found := _function(place, name)) is None:
            raise ValueError(f"{stored['function']} is no function of torch")
        return found
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
    found = getattr(importlib.import_module(place), name, None)
    # torch.load, torch.compile and their like are written in Python.
    is_plain = inspect.isbuiltin(found) or (place == _LAYERS and inspect.isfunction(found))
    return found if is_plain and not name.startswith("_") else None


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


def stored_fit(fit: Any, arrays: Arrays, place: str) -> Any:
    """Return a fitted transformer as JSON; its arrays are added to `arrays`, below `place`.

    Raises
    ------
    ValueError
        It is none of `SCALERS`, or holds something else than numbers.
    """
    if fit is None:
        return None
    name = type(fit).__name__
    if _is_from(fit, "sklearn.pipeline", "Pipeline"):
        steps = [
            [label, stored_fit(None if step == "passthrough" else step, arrays, f"{place}.{label}")]
            for label, step in fit.steps
        ]
        return {"class": "Pipeline", "steps": steps}
    if not _is_from(fit, _SCALER_MODULES.get(name, "?"), name):
        raise ValueError(f"{name} is none of {', '.join(sorted(_SCALER_MODULES))}, Pipeline")
    settings = fit.get_params(deep=False)
    fitted = {key: value for key, value in vars(fit).items() if key not in settings}
    try:
        return {
            "class": name,
            "settings": {key: _plain_number(value) for key, value in settings.items()},
            "fitted": {
                key: _stored_value(value, arrays, f"{place}.{key}") for key, value in fitted.items()
            },
        }
    except _NotPlainError as error:
        raise ValueError(f"{name} with a setting or result that is {error}") from error


def _is_from(item: Any, module: str, name: str) -> bool:
    kind = type(item)
    return kind.__module__.startswith("sklearn.") and (
        getattr(importlib.import_module(module), name, None) is kind if module != "?" else False
    )


def _plain_number(value: Any) -> Any:
    return _plain(value.item() if isinstance(value, np.generic) else value)


def _stored_value(value: Any, arrays: Arrays, place: str) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in "biuf" or value.dtype == np.longdouble:
            raise _NotPlainError(f"an array of {value.dtype}")
        arrays[place] = torch.from_numpy(np.array(value))
        return {"scalar" if isinstance(value, np.generic) else "array": place}
    if type(value).__module__.startswith("sklearn."):
        return {"fit": stored_fit(value, arrays, place)}
    return _plain(value)


def restored_fit(stored: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    """Return the transformer that `stored_fit` wrote; raise ValueError if it is something else."""
    if stored is None:
        return None
    name = stored["class"]
    if name == "Pipeline":
        from sklearn.pipeline import Pipeline

        steps: Sequence[Any] = stored["steps"]
        return Pipeline(
            [
                (label, "passthrough" if step is None else restored_fit(step, arrays))
                for label, step in steps
            ]
        )
    if name not in _SCALER_MODULES:
        raise ValueError(f"{name} is no known transformer")
    kind = getattr(importlib.import_module(_SCALER_MODULES[name]), name)
    fit = kind(**{key: _value(item) for key, item in stored["settings"].items()})
    for key, item in stored["fitted"].items():
        setattr(fit, key, _fitted_value(item, arrays))
    return fit


def _fitted_value(stored: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(stored, Mapping):
        (kind, place), *_ = stored.items()
        if kind == "array":
            return arrays[place].numpy()
        if kind == "scalar":
            return arrays[place].numpy()[()]
        if kind == "fit":
            return restored_fit(place, arrays)
    return _value(stored)
