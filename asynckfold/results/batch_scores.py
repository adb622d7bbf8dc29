"""Scores that accumulate over the batches of a held-out fold.

::

    batch of outputs ─┬─ metrics, of torchmetrics or of that shape: update
                      └─ scores of pixels: counts (classes, classes)

Metrics take probabilities where the scale of outputs is known, numbers for a regression, and class
indices as targets; trees of outputs and targets as they are. A score of pixels treats those of a
fold as one sample.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import Problem
from asynckfold.jobs.criteria import MARGINS, TRANSFORMED, UNKNOWN
from asynckfold.jobs.objective import (
    BINARY,
    MASKS,
    REGRESSION,
    SEGMENTATION,
    Objective,
    Transform,
    predicted,
    probabilities,
)
from asynckfold.jobs.schema import with_leaves

CHUNK = 256
"""Samples that a metric gets at a time."""


def accumulates(item: Any) -> bool:
    """Whether an object is a metric with a state, as those of torchmetrics."""
    names = ("update", "compute", "reset", "higher_is_better")
    return not isinstance(item, type) and all(hasattr(item, name) for name in names)


def name_of(item: Any, name: str = "") -> str:
    """Return the name of its score: greater is better, so that an error is negated."""
    name = name or type(item).__name__
    is_error = item.higher_is_better is False and not name.startswith("neg_")
    return f"neg_{name}" if is_error else name


def _for_metric(
    objective: Objective,
    transform: Transform | None,
    targets: npt.NDArray[Any],
    outputs: npt.NDArray[np.float32],
) -> tuple[Any, Any]:
    if objective.targets is not None:
        return objective.as_returned(outputs), objective.as_in_dataset(targets)
    if objective.outputs and objective.scale != TRANSFORMED:
        return objective.as_returned(outputs), targets
    if objective.kind == REGRESSION:
        predictions = predicted(objective, outputs, transform).astype(np.float32)
        return predictions, targets.reshape(
            predictions.shape
        ) if predictions.size == targets.size else targets
    if objective.scale in (MARGINS, UNKNOWN):
        return outputs, objective.codes(targets)
    shares = probabilities(objective, outputs, transform).astype(np.float32)
    return shares[:, 1] if objective.kind == BINARY else shares, objective.codes(targets)


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
    counts = np.zeros(size * size, np.int64)
    step = max(1, CHUNK_PIXELS // max(1, targets[:1].size))
    for low in range(0, len(targets), step):
        truth = targets[low : low + step]
        guess = predicted(objective, outputs[low : low + step], transform)
        if guess.shape != truth.shape:
            raise ValueError(f"predictions of shape {guess.shape} for targets {truth.shape}")
        true = objective.codes(truth)
        known = true != objective.ignore_index if objective.kind == SEGMENTATION else ...
        counts += np.bincount(true[known].ravel() * size + guess[known].ravel(), minlength=size**2)
    return counts.reshape(size, size)


def pixel_accuracy(counts: Counts) -> float:
    """Return the share of pixels whose class is right."""
    return _mean_ratio(counts.diagonal().sum(), counts.sum())


def mean_iou(counts: Counts, first: int = 0) -> float:
    """Return the mean over classes, from the `first`, of intersection over union.

    Classes that neither truth nor predictions have are left out; NaN if that is all of them.
    """
    hits, sizes = counts.diagonal(), counts.sum(axis=1) + counts.sum(axis=0)
    return _mean_ratio(hits[first:], (sizes - hits)[first:])


def mean_dice(counts: Counts, first: int = 0) -> float:
    """Return the mean over classes of Dice, F1 of their pixels; classes as in `mean_iou`."""
    sizes = counts.sum(axis=1) + counts.sum(axis=0)
    return _mean_ratio(2 * counts.diagonal()[first:], sizes[first:])


def _mean_ratio(part: Any, whole: Any) -> float:
    part, whole = np.atleast_1d(part), np.atleast_1d(whole)
    seen = whole > 0
    return float((part[seen] / whole[seen]).mean()) if seen.any() else float("nan")


PIXEL_SCORES: Mapping[str, Mapping[str, Callable[[Counts], float]]] = {
    SEGMENTATION: {"mean_iou": mean_iou, "dice": mean_dice, "pixel_accuracy": pixel_accuracy},
    # Of the pixels that are 1.
    MASKS: {
        "dice": partial(mean_dice, first=1),
        "iou": partial(mean_iou, first=1),
        "pixel_accuracy": pixel_accuracy,
    },
}
"""Names of scores by kind, beside those of scikit-learn that compare labels."""


def _of_counts(item: Any, kind: str, counts: Counts) -> float:
    """Return a named score, or scikit-learn's score of labels weighted by their pixels."""
    named = PIXEL_SCORES[kind].get(item) if isinstance(item, str) else None
    if named is not None:
        return named(counts)
    from sklearn.metrics import get_scorer

    scorer, (true, guess) = get_scorer(item), counts.nonzero()
    weighted = {**scorer._kwargs, "sample_weight": counts[true, guess]}
    return float(scorer._sign * scorer._score_func(true, guess, **weighted))


def pixel_problems(pairs: Sequence[tuple[Any, Any]], objective: Objective) -> Iterator[Problem]:
    """Yield the scores of scikit-learn that no confusion matrix gives."""
    from sklearn.metrics import get_scorer

    for name, item in pairs:
        if isinstance(item, str) and item in PIXEL_SCORES[objective.kind]:
            continue
        scorer = get_scorer(item)
        has_weights = "sample_weight" in inspect.signature(scorer._score_func).parameters
        is_of_labels = getattr(scorer, "_response_method", "predict") == "predict"
        is_of_numbers = scorer._score_func.__module__ == "sklearn.metrics._regression"
        if not (has_weights and is_of_labels) or is_of_numbers:
            named = ", ".join(map(repr, PIXEL_SCORES[objective.kind]))
            yield Problem(
                "scores of pixels must weight labels by their number, which are counted in place "
                "of being kept",
                f"{name!r}, which cannot",
                f"Choose of {named} and scikit-learn's names for labels such as 'f1_macro', or "
                "pass a function (targets, outputs) → float.",
            )


class BatchScores:
    """Accumulates some scores of one fold."""

    def __init__(
        self, pairs: Sequence[tuple[str, Any]], objective: Objective, transform: Transform | None
    ) -> None:
        self._pairs, self._objective, self._transform = pairs, objective, transform
        # A copy of each metric: no state is shared.
        self._metrics = {name: copy.deepcopy(item) for name, item in pairs if accumulates(item)}
        for metric in self._metrics.values():
            metric.reset()
        self._counts: Counts | None = None

    def update(self, targets: npt.NDArray[Any], outputs: npt.NDArray[np.float32]) -> None:
        """Add the targets (b, ...) and outputs (b, ...) of a batch."""
        if self._metrics:
            import torch

            arrays = _for_metric(self._objective, self._transform, targets, outputs)
            tensors = with_leaves(lambda part: torch.from_numpy(np.ascontiguousarray(part)), arrays)
            with torch.no_grad():
                for metric in self._metrics.values():
                    metric.update(*tensors)
        if len(self._metrics) < len(self._pairs):
            counts = count_pixels(self._objective, targets, outputs, self._transform)
            self._counts = counts if self._counts is None else self._counts + counts

    def scores(self) -> dict[str, float]:
        """Return the scores over all batches; greater is better."""
        scores = {}
        for name, item in self._pairs:
            if name in self._metrics:
                scores[name] = _computed(name, self._metrics[name])
            else:
                assert self._counts is not None
                scores[name] = _of_counts(item, self._objective.kind, self._counts)
        return scores


def _computed(name: str, metric: Any) -> float:
    """Return the value of a metric, negated if less is better.

    Of several numbers that it computes, the one of the score's name.
    """
    value, kind = metric.compute(), type(metric).__name__
    if isinstance(value, Mapping):
        if (key := name if name in value else name.removeprefix("neg_")) not in value:
            raise ValueError(
                f"{kind} computes several numbers: name one of them, "
                f"scoring={{{next(iter(value))!r}: metric}}; there are {', '.join(value)}"
            )
        value = value[key]
    return -float(value) if metric.higher_is_better is False else float(value)


def batch_score(
    name: str, item: Any, objective: Objective, transform: Transform | None
) -> Callable[[npt.NDArray[Any], npt.NDArray[np.float32]], float]:
    """Return the function (targets, outputs) → float of a score that accumulates."""

    def score(targets: npt.NDArray[Any], outputs: npt.NDArray[np.float32]) -> float:
        batches = BatchScores([(name, item)], objective, transform)
        step = CHUNK if accumulates(item) else len(targets)
        for low in range(0, len(targets), step):
            batches.update(targets[low : low + step], outputs[low : low + step])
        return batches.scores()[name]

    return score
