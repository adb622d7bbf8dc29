"""Labels: class indices or regression targets, checked, in one form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from asynckfold.errors import InputError, Problem, refuse
from asynckfold.transforms import Array


@dataclass(frozen=True, eq=False)
class Labels:
    """Targets as jobs use them.

    Parameters
    ----------
    targets : ndarray
        int64 class indices (n,), or float32 regression targets (n,) or (n, m).
    classes : tuple of str
        Class names by index; empty for regression.
    classification : bool
        Whether the targets are classes.
    notes : tuple of str
        What was done to them.
    """

    targets: Array
    classes: tuple[str, ...]
    classification: bool
    notes: tuple[str, ...] = ()


def resolve_labels(
    values: Any, wants_classes: bool | None = None, names: Sequence[str] = ()
) -> Labels:
    """Check labels and bring them into one form.

    Parameters
    ----------
    values : array, tensor or sequence of n labels
        Integers, booleans or strings are classes; numbers with a fraction part are regression
        targets.
    wants_classes : bool or None
        Whether the criterion needs class indices; None: told by the labels' type.
    names : sequence of str
        The dataset's class names, if it has any.

    Raises
    ------
    InputError
        All problems, each naming the first offending index and value.

    Examples
    --------
    >>> labels = resolve_labels(["dog", "cat", "dog"])
    >>> labels.targets.tolist(), labels.classes
    ([1, 0, 1], ('cat', 'dog'))
    """
    array = label_array(values)
    if wants_classes is None:
        wants_classes = array.dtype.kind in "biuU"
    if not wants_classes:
        return _regression(array)
    notes = []
    if array.ndim == 2 and array.shape[1] == 1:
        notes.append(f"labels of shape {array.shape} were squeezed to ({len(array)},)")
        array = array[:, 0]
    refuse(_class_problems(array))
    return _classes(array, tuple(names), notes)


def label_array(values: Any) -> Array:
    """Return labels as one array of numbers or strings."""
    array = _stacked(values)
    if array.dtype.kind == "O" and all(isinstance(item, str) for item in array.ravel()):
        array = array.astype(str)
    if array.dtype.kind not in "biufU":
        raise InputError(
            [
                Problem(
                    "labels must be numbers or strings, all of one shape",
                    f"an array of {array.dtype} of shape {array.shape}",
                    "Pass targets= with one class index or name per sample.",
                )
            ]
        )
    return array


def _stacked(values: Any) -> Array:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    if isinstance(values, np.ndarray):
        return values
    items = [_stacked(item) if isinstance(item, Tensor) else item for item in values]
    ragged = len({np.shape(item) for item in items}) > 1
    return np.empty(len(items), object) if ragged else np.array(items)


def _regression(array: Array) -> Labels:
    if array.dtype.kind == "U" or array.ndim not in (1, 2):
        raise InputError(
            [
                Problem(
                    "regression targets must be numbers of shape (n,) or (n, m)",
                    f"{_first(array)}, shape {array.shape}",
                    "Use a class criterion such as CrossEntropyLoss, or pass targets=.",
                )
            ]
        )
    finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
    if not finite.all():
        at = int(np.flatnonzero(~finite)[0])
        raise InputError(
            [
                Problem(
                    "regression targets must be finite",
                    f"{array[at]} at index {at}, {int((~finite).sum())} in all",
                    "Remove these samples or fill in their targets.",
                )
            ]
        )
    return Labels(np.ascontiguousarray(array, dtype=np.float32), (), False)


def _first(array: Array) -> str:
    flat = array.ravel()
    return f"{array.dtype} such as {flat[0]!s}" if flat.size else f"{array.dtype}"


def _class_problems(array: Array) -> list[Problem]:
    if array.ndim != 1:
        received, remedy = f"shape {array.shape}", "Pass targets= of shape (n,)."
        if array.ndim == 2 and array.dtype.kind != "U":
            received += ", which looks like one-hot or probabilities"
            remedy = "Pass targets.argmax(axis=1)."
        return [Problem("class labels must be one index per sample", received, remedy)]
    if array.dtype.kind == "f":
        return _float_problems(array)
    if array.dtype.kind == "i" and (array < 0).any():
        at = int(np.flatnonzero(array < 0)[0])
        hint = (
            "Samples to be ignored (-100) cannot be scored: leave them out with Subset."
            if array[at] == -100
            else "Count the classes from 0."
        )
        return [Problem("class labels must not be negative", f"{array[at]} at index {at}", hint)]
    return []


def _float_problems(array: Array) -> list[Problem]:
    problems = []
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        problems.append(
            Problem(
                "class labels must not be NaN or infinite",
                f"{array[bad[0]]} at index {bad[0]}, {bad.size} in all",
                "Remove these samples or label them.",
            )
        )
    fractions = np.flatnonzero(np.isfinite(array) & (array != np.floor(array)))
    at = int(fractions[0]) if fractions.size else 0
    remedy = (
        "For regression use a criterion such as MSELoss."
        if fractions.size
        else f"{'Then cast' if bad.size else 'Cast'} them: targets.long() for a tensor, "
        "targets.astype('int64') for an array, target_transform=int for a dataset."
    )
    received = f"{array.dtype}, such as {array[at]} at index {at}"
    return [*problems, Problem("labels for a class criterion must be integers", received, remedy)]


def _classes(array: Array, names: tuple[str, ...], notes: list[str]) -> Labels:
    found = np.unique(array)
    numeric = array.dtype.kind in "biu"
    if numeric and int(found[-1]) < len(names):
        return Labels(array.astype(np.int64), names, True, tuple(notes))
    labels = tuple(str(value) for value in found.tolist())
    if not numeric or not np.array_equal(found, np.arange(len(found))):
        shown = ", ".join(f"{name} = {index}" for index, name in enumerate(labels[:20]))
        more = f" and {len(labels) - 20} more" if len(labels) > 20 else ""
        notes = [*notes, f"labels were numbered by sorted order: {shown}{more}"]
    targets = np.searchsorted(found, array).astype(np.int64)
    if len(found) == 1:
        notes = [*notes, f"all labels are of one class, {labels[0]}"]
    return Labels(targets, labels, True, tuple(notes))
