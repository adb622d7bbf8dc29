"""Signs of leaks in the samples: copies across a fold, columns standardized before the split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.data.transforms.trees import Array
from asynckfold.jobs.folds import Fold, shares_of_folds

LEAST, SHARE = 3, 0.01
"""Copies to name in a fold, and their share: many data sets have single ones (iris has a pair)."""

SIDE = 8
"""Pixels from which an array of uint8 is taken as an image, which may be mirrored."""

ROOM = 100
"""Times as many different rows as samples, from which equal rows are not chance."""

SHORT = 72
"""Bytes of a record below which equal ones may be chance: its length and eight token ids."""

NOT_LOOKED = (
    "validation samples were not searched for copies of training samples, since samples are read "
    "one by one"
)

SHOWN, TOLERANCE = 100, 1e-6
"""Samples or columns in the evidence; distance from mean 0 and deviation 1, beyond rounding."""


@dataclass(frozen=True)
class LeakCheck:
    """What samples say about one kind of leak."""

    note: str = ""  # what it is; empty if there is no sign of it
    evidence: Mapping[str, Any] = field(default_factory=dict)  # plain data
    why_not: str = ""  # why nothing can be said


def digests(samples: Array) -> npt.NDArray[np.int64]:
    """Return a number per sample, equal for equal samples and for mirrored uint8 images.

    Valid in this process only.

    >>> numbers = digests(np.array([[1, 2], [3, 4], [1, 2]]))
    >>> bool(numbers[0] == numbers[2]), bool(numbers[0] == numbers[1])
    (True, False)
    """
    if _are_images(samples):
        pairs = ((sample, sample[..., ::-1]) for sample in samples)
        both = (min(hash(one.tobytes()), hash(other.tobytes())) for one, other in pairs)
        return np.fromiter(both, np.int64, len(samples))
    return np.fromiter((hash(sample.tobytes()) for sample in samples), np.int64, len(samples))


def _are_images(samples: Array) -> bool:
    return samples.dtype == np.uint8 and samples.ndim > 2 and samples.shape[-1] >= SIDE


def copies(samples: Array | Iterable[bytes] | None, folds: Sequence[Fold]) -> LeakCheck:
    """Look for validation samples that equal training samples; few of them are no sign.

    Rows with few features of few values, and short records, may be equal by chance: they do not
    count.
    """
    if samples is None:
        return LeakCheck(why_not=NOT_LOOKED)
    if isinstance(samples, np.ndarray):
        check = _copies(digests(samples), folds, " or mirror one" * _are_images(samples))
        by_chance = LeakCheck(why_not="samples have so few values that equal ones may be chance")
        return by_chance if check.note and _few_values(samples) else check
    numbers = [hash(item) if len(item) >= SHORT else at for at, item in enumerate(samples)]
    return _copies(np.array(numbers, np.int64), folds, "")


def _copies(numbers: npt.NDArray[np.int64], folds: Sequence[Fold], also: str) -> LeakCheck:
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    several_times = counts[places] > 1
    many: dict[tuple[int, ...], list[int]] = {}  # copies by key of a fold
    for fold in folds:
        train, valid = (rows[several_times[rows]] for rows in (fold.train, fold.valid))
        rows = valid[np.isin(places[valid], places[train])]
        if len(rows) >= max(LEAST, SHARE * len(fold.valid)):
            many[fold.key] = rows.tolist()
    if not many:
        return LeakCheck()
    return LeakCheck(
        f"validation samples that equal a training sample{also}: {shares_of_folds(many, folds)}. "
        "If they are copies, such as augmented or oversampled ones, the scores are too high: pass "
        "groups= with one group for a sample and its copies, or leave the copies out",
        {"samples": sorted({*chain(*many.values())})[:SHOWN]},
    )


def standardized(samples: Array | Iterable[bytes] | None) -> LeakCheck:
    """Look for columns with mean 0 and standard deviation 1 over all samples."""
    if not isinstance(samples, np.ndarray):
        return LeakCheck(why_not="samples are read one by one, or are no arrays of one shape")
    if samples.dtype.kind != "f" or len(samples) < 2:
        return LeakCheck()
    rows = samples.reshape(len(samples), -1)
    # Of a column with an infinite number, NaN.
    with np.errstate(invalid="ignore", over="ignore"):
        means = np.abs(rows.mean(axis=0, dtype=np.float64))
        centred = np.flatnonzero(means < TOLERANCE).tolist()
    columns = [at for at in centred if _has_unit_deviation(rows[:, at])]
    if not columns:
        return LeakCheck()
    note = (
        f"{len(columns)} of {rows.shape[1]} columns have mean 0 and standard deviation 1 over all "
        "samples: they look standardized before the split, by statistics of what is held out, too. "
        "Pass them as they were, and preprocess=StandardScaler()"
    )
    return LeakCheck(note, {"columns": columns[:SHOWN]})


def _has_unit_deviation(column: Array) -> bool:
    # pandas divides by n - 1. A balanced column of -1 and 1 is that by chance.
    deviations = [column.std(dtype=np.float64, ddof=ddof) for ddof in (0, 1)]
    return bool(np.isclose(deviations, 1, 0, TOLERANCE).any() and (np.abs(column) != 1).any())


def random_note(notes: Iterable[str]) -> str:
    """Note that validation samples are random, where the dataset's notes say that it is."""
    if not any("the dataset itself is random" in note for note in notes):
        return ""
    return (
        "the data set also varies validation samples at random, so scores are those of augmented "
        "samples: pass the random steps as train_transform to leave them out of evaluation"
    )


def _few_values(samples: Array) -> bool:
    if samples.ndim > 2:
        return False
    columns = samples.reshape(len(samples), -1).T
    values = (np.log(len(np.unique(column))) for column in columns)
    return all(room <= np.log(ROOM * len(samples)) for room in accumulate(values))
