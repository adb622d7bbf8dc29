"""What a named source of data gives to the shell: samples, class names, and what suits them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynckfold.data.sources.columns import Column
from asynckfold.errors import Problem, refuse

if TYPE_CHECKING:
    from torch.utils.data import Dataset

IMAGE, TABLE = "image", "table"


@dataclass(frozen=True)
class Choice:
    """What the caller says of a table.

    Parameters
    ----------
    target : str or None
        ``csv:`` only: column of the class labels, by name or by position from 0, negative from the
        end; a name goes before a position. None: the last.
    header : {"auto", "yes", "no"}
        ``csv:`` only: whether the first row names the columns.
    drop : tuple of str
        Columns to leave out, by name or position.
    keep : tuple of str
        Columns to use as features, though they seem to count or to identify the rows.
    category : tuple of str
        Columns of names, even where these are numbers.
    """

    target: str | None = None
    header: str = "auto"
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    category: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Source:
    """Labelled samples under a name.

    Parameters
    ----------
    name : str
        What the caller asked for: ``"digits"``, ``"csv:glass.csv"``.
    dataset : torch Dataset
        Map-style; sample *i* is (x, class index). x is a PIL image, or a float64 row of a table.
        ``dataset.targets`` and ``dataset.classes`` tell all class indices and names without reading
        a sample.
    classes : tuple of str
        Class names by index.
    sample_shape : tuple of int
        (channels, height, width) of an image, of the first one where they differ; (features,) of a
        row.
    kind : {"image", "table"}
        What a sample is.
    standardize : bool
        Whether features should be standardised on each training fold, as tables should.
    features : tuple of str
        Names of a row's numbers; empty for images.
    notes : tuple of str
        What was decided about the data and should be said once.
    photographs : bool
        Whether crops and flips keep the class, so that augmentation makes sense.
    mean, std : tuple of float
        Statistics of each channel, for values from 0 to 1; empty where images are not normalised.
    columns : tuple of Column
        All columns of a table, in order, and what each of them is; empty for images.
    """

    name: str
    dataset: Dataset[Any]
    classes: tuple[str, ...]
    sample_shape: tuple[int, ...]
    kind: str
    standardize: bool = False
    features: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    photographs: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    columns: tuple[Column, ...] = ()

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """Class index of every sample, shape (n_samples,)."""
        return np.asarray(self.dataset.targets, dtype=np.int64)  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples to be predicted, whose labels may be missing.

    Parameters
    ----------
    dataset : torch Dataset
        Map-style, of samples as a `Source` has them; what targets it has mean nothing.
    labels : tuple of str or None
        The class of each, where all have one.
    names : tuple of str
        Of each sample; empty where it has none but its number.
    notes : tuple of str
        What should be said once.
    """

    dataset: Dataset[Any]
    labels: tuple[str, ...] | None = None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def balanced_subset(
    targets: npt.NDArray[Any], limit: int, random_state: int
) -> npt.NDArray[np.int64]:
    """Return `limit` sample numbers, ascending, with classes as equal in number as they can be.

    Samples are drawn from a seeded shuffle, one of each class in turn, until a class has no more.

    Examples
    --------
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
    """Return a source of at most `limit` samples, classes balanced.

    Raises
    ------
    InputError
        There are more classes than `limit`.
    """
    refuse(limit_problems(limit, len(source.classes)))
    total = len(source.targets)
    if limit >= total:
        return source
    from asynckfold.data.sources.datasets import Selection

    chosen = balanced_subset(source.targets, limit, random_state)
    note = part_note(limit, total, random_state)
    return replace(
        source,
        dataset=Selection(source.dataset, chosen, source.targets[chosen], source.classes),
        notes=(*source.notes, note),
    )


def part_note(limit: int, total: int, random_state: int) -> str:
    """Return how a part of the samples was chosen."""
    return f"{limit} of {total} samples, classes balanced, drawn with seed {random_state}"


def limit_problems(limit: int, n_classes: int) -> Iterator[Problem]:
    """Yield that so few samples cannot hold one of each class."""
    if limit < n_classes:
        yield Problem(
            f"limit must leave a sample of each of the {n_classes} classes",
            str(limit),
            f"Pass {n_classes} or more; each fold needs one of each class, too.",
        )
