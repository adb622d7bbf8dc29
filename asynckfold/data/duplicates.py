"""Notes on validation samples that equal training samples, or are random."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from asynckfold.data.transforms.trees import Array
from asynckfold.jobs.folds import Fold

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


def copies_note(samples: Array | Iterable[bytes] | None, folds: Sequence[Fold]) -> str:
    """Note validation samples that equal training samples; ``""`` where there are few.

    Rows with few features of few values, and short records, may be equal by chance: they do not
    count.
    """
    if samples is None:
        return NOT_LOOKED
    if isinstance(samples, np.ndarray):
        note = _note(digests(samples), folds, " or mirror one" * _are_images(samples))
        return "" if note and _few_values(samples) else note
    numbers = [hash(item) if len(item) >= SHORT else at for at, item in enumerate(samples)]
    return _note(np.array(numbers, np.int64), folds, "")


def _note(numbers: npt.NDArray[np.int64], folds: Sequence[Fold], also: str) -> str:
    _, places, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    several_times = counts[places] > 1
    many: list[tuple[tuple[int, ...], int, int]] = []  # key of a fold, copies, validation samples
    for fold in folds:
        train, valid = (rows[several_times[rows]] for rows in (fold.train, fold.valid))
        count = int(np.isin(places[valid], places[train]).sum())
        if count >= max(LEAST, SHARE * len(fold.valid)):
            many.append((fold.key, count, len(fold.valid)))
    if not many:
        return ""
    shown = [
        f"{count} of {size} in fold {index}" + f" of repeat {repeat}" * bool(repeat)
        for (repeat, index), count, size in many[:5]
    ]
    more = f" and more in {len(many) - 5} other folds" if len(many) > 5 else ""
    return (
        f"validation samples that equal a training sample{also}: {', '.join(shown)}{more}. "
        "If they are copies, such as augmented or oversampled ones, the scores are too high: pass "
        "groups= with one group for a sample and its copies, or leave the copies out"
    )


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
