"""What a named source gives to the shell: samples, class names, and which transforms suit them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynckfold.data.sources.columns import Column
from asynckfold.errors import InputError, Problem

if TYPE_CHECKING:
    from torch.utils.data import Dataset

IMAGE, TABLE = "image", "table"


@dataclass(frozen=True)
class TableOptions:
    """Options for a table; columns by name, or by position from 0, negative from the end."""

    target: str | None = None  # ``csv:`` only: column of the class labels; None: the last
    header: str = "auto"  # ``csv:`` only: does the first row name the columns: auto, yes, no
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()  # features, although they look like row numbers or identifiers
    category: tuple[str, ...] = ()  # categorical, even where the values are numbers
    groups: tuple[str, ...] = ()  # at most one, of which no value is divided between folds
    fold_column: tuple[str, ...] = ()  # at most one, of which each value is a fold
    regression: bool = field(default=False, kw_only=True)  # the target is a number, not a class

    @property
    def columns(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Columns by flag."""
        return (
            ("--drop", self.drop),
            ("--keep", self.keep),
            ("--category", self.category),
            ("--groups", self.groups),
            ("--fold-column", self.fold_column),
        )


@dataclass(frozen=True, eq=False)
class Source:
    """Labelled samples under a name.

    ``dataset.targets`` and ``dataset.classes`` hold all class indices and names, so that no sample
    has to be read for them.
    """

    name: str  # as the caller spelled it: ``"digits"``, ``"csv:glass.csv"``
    dataset: Dataset[Any]  # map-style: (PIL image or float row, class index or number)
    classes: tuple[str, ...]  # empty for numbers
    sample_shape: tuple[int, ...]  # (channels, height, width) of the first image, or (features,)
    kind: str  # ``"image"`` or ``"table"``
    notes: tuple[str, ...] = ()
    photographs: bool = False  # crops and flips keep the class
    mean: tuple[float, ...] = ()  # of each channel, for values in [0, 1]; empty: no normalisation
    std: tuple[float, ...] = ()
    columns: tuple[Column, ...] = ()  # every column of a table, in order; empty for images
    groups: npt.NDArray[np.int64] | None = None  # group of each row
    fold_of: npt.NDArray[np.int64] | None = None  # fold that holds each row out

    @property
    def standardize(self) -> bool:
        """Whether features are standardised on each training fold."""
        return self.kind == TABLE

    @property
    def features(self) -> tuple[str, ...]:
        """Names of a row's numbers; empty for images."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def targets(self) -> npt.NDArray[Any]:
        """Class index, or number, of every sample, shape (n_samples,)."""
        kind = np.int64 if self.classes else np.float64
        return np.asarray(self.dataset.targets, dtype=kind)  # type: ignore[attr-defined]

    @property
    def text(self) -> str:
        """Describe the samples: ``"digits (scikit-learn), 1,797 samples of 8×8"``."""
        # These 8×8 images are not MNIST.
        origin = " (scikit-learn)" if self.name == "digits" else ""
        shape = self.sample_shape[1:] if self.sample_shape[:1] == (1,) else self.sample_shape
        sizes = "×".join(map(str, shape))
        unit = " numbers" if len(shape) == 1 else ""
        return f"{self.name}{origin}, {len(self.targets):,} samples of {sizes}{unit}"


@dataclass(frozen=True, eq=False)
class Inspection:
    """What a run would read."""

    name: str
    kind: str
    samples: int
    sample_shape: tuple[int, ...]  # (channels, height, width) of the first image, or (features,)
    class_names: tuple[str, ...]
    targets: npt.NDArray[Any]  # class index, or number, of each labelled sample
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()  # why a run would be refused
    columns: tuple[Column, ...] = ()  # of a table, with their numbers
    repeated: int = 0  # samples that equal an earlier one
    groups: npt.NDArray[np.int64] | None = None  # group of each row
    fold_of: npt.NDArray[np.int64] | None = None  # fold that holds each row out

    @property
    def classes(self) -> dict[str, int]:
        """Number of samples of each class."""
        if not self.class_names:
            return {}
        counts = np.bincount(self.targets, minlength=len(self.class_names)).tolist()
        return dict(zip(self.class_names, counts, strict=True))

    def with_repeats(self, contents: Iterable[bytes]) -> Inspection:
        """Return this inspection with the number of equal samples."""
        repeats = Counter(contents)
        return replace(self, repeated=repeats.total() - len(repeats))

    def limited(self, limit: int, random_state: int) -> Inspection:
        """Return this inspection of a balanced subset."""
        chosen, note = _part(self.targets, limit, len(self.class_names), random_state)
        targets, notes = self.targets[chosen], (*self.notes, *note)
        return replace(self, samples=min(limit, self.samples), targets=targets, notes=notes)


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples to predict; labels may be missing. The dataset's targets mean nothing."""

    dataset: Dataset[Any]
    labels: tuple[str, ...] | None = None  # class names, where every sample has one
    names: tuple[str, ...] = ()  # of the samples; empty where they only have numbers
    notes: tuple[str, ...] = ()


def balanced_subset(
    targets: npt.NDArray[Any], limit: int, random_state: int
) -> npt.NDArray[np.int64]:
    """Return `limit` sample numbers, ascending, with class counts as equal as possible.

    Takes one sample of each class in turn, in seeded random order, until a class runs out.

    >>> balanced_subset(np.array([0, 0, 0, 0, 1, 1]), 4, random_state=0).tolist()
    [2, 3, 4, 5]
    """
    shuffled = np.random.default_rng(random_state).permutation(len(targets))
    turn = np.empty(len(targets), np.int64)
    for label in np.unique(targets):
        members = np.flatnonzero(targets[shuffled] == label)
        turn[members] = np.arange(len(members))
    chosen = shuffled[np.argsort(turn, kind="stable")[:limit]]
    return np.sort(chosen).astype(np.int64)


def limited(source: Source, limit: int, random_state: int) -> Source:
    """Return a source of at most `limit` samples with balanced classes."""
    from asynckfold.data.sources.datasets import Selection

    chosen, note = _part(source.targets, limit, len(source.classes), random_state)
    if not note:
        return source
    return replace(
        source,
        groups=None if source.groups is None else source.groups[chosen],
        fold_of=None if source.fold_of is None else source.fold_of[chosen],
        dataset=Selection(source.dataset, chosen, source.targets[chosen], source.classes),
        notes=(*source.notes, *note),
    )


def _part(
    targets: npt.NDArray[Any], limit: int, n_classes: int, random_state: int
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Return the numbers of a balanced subset, and how it was drawn if it is one.

    Raises `InputError` where there are more classes than `limit`.
    """
    if limit < n_classes:
        rule = f"limit must leave a sample of each of the {n_classes} classes"
        remedy = f"Pass {n_classes} or more; each fold needs one of each class, too."
        raise InputError.one(rule, str(limit), remedy)
    how = "classes balanced, drawn" if n_classes else "drawn"
    note = f"{limit} of {len(targets)} samples, {how} with seed {random_state}"
    classes = targets if n_classes else np.zeros(len(targets), np.int64)
    chosen = balanced_subset(classes, limit, random_state)
    return chosen, (note,) * (limit < len(targets))
