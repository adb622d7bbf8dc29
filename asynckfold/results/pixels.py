"""Scores of a class for each pixel, from a confusion matrix over all pixels of a fold.

::

    targets, outputs ── some samples at a time ──► counts (classes, classes) ──► scores
        pixels of `ignore_index` are left out

A score is that of the fold's pixels as one sample, not the mean of the scores of images or batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import Problem
from asynckfold.jobs.objective import MASKS, SEGMENTATION, Objective, Transform, predicted

Counts = npt.NDArray[np.int64]

CHUNK_PIXELS = 1 << 22
"""Pixels that are counted at a time."""


def count_pixels(
    objective: Objective,
    targets: npt.NDArray[Any],
    outputs: npt.NDArray[np.float32],
    transform: Transform | None = None,
) -> Counts:
    """Return a row per true class and a column per predicted class.

    Examples
    --------
    >>> targets = np.array([[[0, 1], [1, -100]]])
    >>> outputs = np.zeros((1, 2, 2, 2), np.float32)
    >>> count_pixels(Objective("segmentation", "logits", ignore_index=-100), targets, outputs)
    array([[1, 0],
           [2, 0]])
    """
    size = 2 if objective.kind == MASKS else outputs.shape[1]
    found = np.zeros(size * size, np.int64)
    step = max(1, CHUNK_PIXELS // max(1, targets[:1].size))
    for low in range(0, len(targets), step):
        given = targets[low : low + step]
        guess = predicted(objective, outputs[low : low + step], transform)
        if guess.shape != given.shape:
            raise ValueError(f"predictions of shape {guess.shape} for targets {given.shape}")
        true = objective.codes(given)
        known = true != objective.ignore_index if objective.kind == SEGMENTATION else ...
        found += np.bincount(true[known].ravel() * size + guess[known].ravel(), minlength=size**2)
    return found.reshape(size, size)


def pixel_accuracy(counts: Counts) -> float:
    """Return the share of pixels whose class is right."""
    return _mean_ratio(counts.diagonal().sum(), counts.sum())


def mean_iou(counts: Counts) -> float:
    """Return the mean over classes of intersection over union.

    Classes that neither truth nor predictions have are left out.
    """
    hits, true, guess = _parts(counts)
    return _mean_ratio(hits, true + guess - hits)


def mean_dice(counts: Counts) -> float:
    """Return the mean over classes of Dice, F1 of their pixels; classes as in `mean_iou`."""
    hits, true, guess = _parts(counts)
    return _mean_ratio(2 * hits, true + guess)


def foreground_iou(counts: Counts) -> float:
    """Return intersection over union of the pixels that are 1; NaN if there are none."""
    hits, true, guess = _parts(counts)
    return _mean_ratio(hits[1:], (true + guess - hits)[1:])


def foreground_dice(counts: Counts) -> float:
    """Return Dice of the pixels that are 1; NaN if there are none."""
    hits, true, guess = _parts(counts)
    return _mean_ratio(2 * hits[1:], (true + guess)[1:])


def _parts(counts: Counts) -> tuple[Counts, Counts, Counts]:
    return counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0)


def _mean_ratio(part: Any, whole: Any) -> float:
    part, whole = np.atleast_1d(part), np.atleast_1d(whole)
    seen = whole > 0
    return float((part[seen] / whole[seen]).mean()) if seen.any() else float("nan")


SCORES: Mapping[str, Mapping[str, Callable[[Counts], float]]] = {
    SEGMENTATION: {
        "mean_iou": mean_iou,
        "dice": mean_dice,
        "pixel_accuracy": pixel_accuracy,
    },
    MASKS: {
        "dice": foreground_dice,
        "iou": foreground_iou,
        "pixel_accuracy": pixel_accuracy,
    },
}
"""Names of scores by kind, beside those of scikit-learn that compare labels."""


def score_of_counts(item: Any, kind: str, counts: Counts) -> float:
    """Return a named score, or scikit-learn's scorer of labels weighted by their pixels."""
    named = SCORES[kind].get(item) if isinstance(item, str) else None
    if named is not None:
        return named(counts)
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.metrics import get_scorer

    true, guess = counts.nonzero()

    class Fixed(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        classes_ = np.arange(len(counts))

        def predict(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            return guess[rows]

        def __sklearn_is_fitted__(self) -> bool:
            return True

    rows = np.arange(len(true))
    return float(get_scorer(item)(Fixed(), rows, true, sample_weight=counts[true, guess]))


def pixel_problems(pairs: Sequence[tuple[Any, Any]], objective: Objective) -> Iterator[Problem]:
    """Yield the scores of scikit-learn that no confusion matrix gives."""
    from sklearn.metrics import get_scorer

    for name, item in pairs:
        if isinstance(item, str) and item in SCORES[objective.kind]:
            continue
        scorer = get_scorer(item)
        weighs = "sample_weight" in inspect.signature(scorer._score_func).parameters
        if getattr(scorer, "_response_method", "predict") != "predict":
            yield Problem(
                "scores of pixels need labels, which are counted in place of being kept",
                f"{name!r}, which needs probabilities or a ranking",
                _remedy(objective.kind),
            )
        elif not weighs or scorer._score_func.__module__ == "sklearn.metrics._regression":
            yield Problem(
                "scores of pixels must weight labels by their number",
                f"{name!r}, which cannot",
                _remedy(objective.kind),
            )


def _remedy(kind: str) -> str:
    return (
        f"Choose of {', '.join(map(repr, SCORES[kind]))} and scikit-learn's names for labels such "
        "as 'f1_macro', or pass a function (targets, outputs) → float."
    )
