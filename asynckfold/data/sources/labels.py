"""Class labels of any kind to class names and class indices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal, InvalidOperation

import numpy as np
import numpy.typing as npt

from asynckfold.errors import Problem

_MOST_FRACTIONAL_CLASSES = 50
# Digits are ten; counts, such as of rings, are more.
_FEW_NUMBERS = 10
_LEADING_ZERO = re.compile(r"\s*[+-]?0\d")


def class_indices(labels: Sequence[str]) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """Return the class names in order, and the index of each label.

    Sorted by value if all are numbers, else as text. Equal numbers are one class, named by its
    first spelling.

    >>> classes, indices = class_indices(["10", "2", "2.0", "10"])
    >>> classes, indices.tolist()
    (('2', '10'), [1, 0, 0, 1])
    """
    spellings = dict.fromkeys(labels)
    numbers = {label: number(label) for label in spellings}
    numeric = all(value is not None for value in numbers.values())
    keys: dict[str, Decimal | str] = {
        label: value if numeric and value is not None else label for label, value in numbers.items()
    }
    names: dict[Decimal | str, str] = {}
    for label in spellings:
        names.setdefault(keys[label], label)
    order = {key: index for index, key in enumerate(sorted(names))}
    indices = np.array([order[keys[label]] for label in labels], np.int64)
    return tuple(names[key] for key in order), indices


def indices_in(classes: Sequence[str], labels: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the index of each label in `classes`, -1 if missing; equal numbers are one class.

    >>> indices_in(("2", "10"), ["10", "2.0", "3"]).tolist()
    [1, 0, -1]
    """
    known = {_key(name): index for index, name in enumerate(classes)}
    return np.array([known.get(_key(label), -1) for label in labels], np.int64)


def _key(label: str) -> Decimal | str:
    value = number(label)
    return label if value is None else value


def number(text: str) -> Decimal | None:
    """Return the finite number that a text spells, or None.

    >>> number(" 1.50 "), number("1e3"), number("nan"), number("1_000"), number("one")
    (Decimal('1.50'), Decimal('1E+3'), None, None, None)
    """
    if "_" in text:
        return None
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def class_note(what: str, classes: Sequence[str]) -> Iterator[str]:
    """Yield a note where numbers that may be quantities were taken as classes.

    >>> list(class_note("rings", ["1", "2.5"]))
    ['the 2 different numbers of rings are taken as classes, not as amounts']
    """
    values = [number(name) for name in classes]
    fractions = any(value is not None and value != value.to_integral_value() for value in values)
    if None not in values and (len(classes) > _FEW_NUMBERS or fractions):
        yield f"the {len(classes)} different numbers of {what} are taken as classes, not as amounts"


def spelling_problems(what: str, labels: Iterable[str]) -> Iterator[Problem]:
    """Yield that two labels are equal as numbers but may be different codes: 07 and 7.

    >>> [problem.received for problem in spelling_problems("kind", ["7", "07", "1", "1.0"])]
    ["'7' and '07'"]
    """
    spellings: dict[Decimal | str, str] = {}
    for label in dict.fromkeys(labels):
        other = spellings.setdefault(_key(label), label)
        if other != label and (_LEADING_ZERO.match(label) or _LEADING_ZERO.match(other)):
            yield Problem(
                f"classes of {what} must differ as numbers, too",
                f"{other!r} and {label!r}",
                "Put a letter before codes, such as c07, or spell equal numbers alike.",
            )
            return


def label_problems(what: str, classes: Sequence[str], n_samples: int) -> Iterator[Problem]:
    """Yield what keeps labels from being classes: a single class, or continuous values."""
    if len(classes) < 2:
        yield Problem(
            f"{what} must hold two classes or more",
            f"{', '.join(map(repr, classes)) or 'none'} in all {n_samples} rows",
            "Choose another target.",
        )
    elif len(classes) > max(2, n_samples / 2) or _looks_continuous(classes):
        yield Problem(
            f"{what} must hold class labels",
            f"{len(classes)} different values in {n_samples} rows",
            "Choose another target, or group its values into classes first.",
        )


def _looks_continuous(classes: Sequence[str]) -> bool:
    values = [number(label) for label in classes]
    fractional = any(value is not None and value != value.to_integral_value() for value in values)
    return len(classes) > _MOST_FRACTIONAL_CLASSES and fractional and None not in values
