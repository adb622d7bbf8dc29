"""Scores that accumulate over the batches of a held-out fold.

::

    batch of outputs ─┬─ metrics, of torchmetrics or of that shape: update
                      └─ scores of pixels: counts (classes, classes)

A fold gets a copy of each metric, reset: no state is shared. Metrics take probabilities where the
scale of outputs is known, numbers for a regression, and class indices as targets; trees of outputs
and targets as they are. A score of pixels treats those of a fold as one sample.
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


class BatchedMetric:
    """A copy of a metric, reset, which gets outputs batch by batch; `name` is that of its score."""

    def __init__(
        self, item: Any, objective: Objective, transform: Transform | None, name: str = ""
    ) -> None:
        self._name = name
        self._metric, self._objective, self._transform = copy.deepcopy(item), objective, transform
        self._metric.reset()

    def update(self, targets: npt.NDArray[Any], outputs: npt.NDArray[np.float32]) -> None:
        """Add the targets (b, ...) and outputs (b, ...) of some samples."""
        import torch

        arrays = _for_metric(self._objective, self._transform, targets, outputs)
        tensors = with_leaves(lambda part: torch.from_numpy(np.ascontiguousarray(part)), arrays)
        with torch.no_grad():
            self._metric.update(*tensors)

    def value(self) -> float:
        """Return the value over all samples, negated if less is better."""
        import torch

        value = self._metric.compute()
        if isinstance(value, Mapping):
            value = self._named(value)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{type(self._metric).__name__} must compute one number, not {shape}")
        return -float(value) if self._metric.higher_is_better is False else float(value)

    def _named(self, values: Mapping[str, Any]) -> Any:
        """Return the value of the score's name, of a metric that computes several."""
        name = self._name if self._name in values else self._name.removeprefix("neg_")
        if name not in values:
            raise ValueError(
                f"{type(self._metric).__name__} computes several numbers: name one of them, "
                f"scoring={{{next(iter(values))!r}: metric}}; there are {', '.join(values)}"
            )
        return values[name]


def accumulated_score(
    name: str,
    item: Any,
    objective: Objective,
    transform: Transform | None,
    targets: npt.NDArray[Any],
    outputs: npt.NDArray[np.float32],
) -> float:
    """Return the value over all samples, negated if less is better."""
    metric = BatchedMetric(item, objective, transform, name)
    for low in range(0, len(targets), CHUNK):
        rows = slice(low, low + CHUNK)
        metric.update(targets[rows], outputs[rows])
    return metric.value()


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


def metric_problems(name: str, item: Any) -> Iterator[Problem]:
    """Yield that a metric does not say whether more or less of it is better."""
    if item.higher_is_better is None:
        yield Problem(
            "a metric must say by higher_is_better whether more of it is better",
            f"{name}, whose higher_is_better is None",
            "Pass a function (targets, outputs) → float, or set higher_is_better on a subclass.",
        )


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


def score_of_counts(item: Any, kind: str, counts: Counts) -> float:
    """Return a named score, or scikit-learn's scorer of labels weighted by their pixels."""
    named = PIXEL_SCORES[kind].get(item) if isinstance(item, str) else None
    if named is not None:
        return named(counts)
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.metrics import get_scorer

    true, guess = counts.nonzero()

    class FixedClasses(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        classes_ = np.arange(len(counts))

        def predict(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            return guess[rows]

        def __sklearn_is_fitted__(self) -> bool:
            return True

    rows = np.arange(len(true))
    return float(get_scorer(item)(FixedClasses(), rows, true, sample_weight=counts[true, guess]))


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
        self._metrics = {
            name: BatchedMetric(item, objective, transform, name)
            for name, item in pairs
            if accumulates(item)
        }
        self._counts: npt.NDArray[np.int64] | None = None

    def update(self, targets: npt.NDArray[Any], outputs: npt.NDArray[np.float32]) -> None:
        """Add the targets (b, ...) and outputs (b, ...) of a batch."""
        for metric in self._metrics.values():
            metric.update(targets, outputs)
        if len(self._metrics) < len(self._pairs):
            counts = count_pixels(self._objective, targets, outputs, self._transform)
            self._counts = counts if self._counts is None else self._counts + counts

    def scores(self) -> dict[str, float]:
        """Return the scores over all batches; greater is better."""
        scores = {}
        for name, item in self._pairs:
            if name in self._metrics:
                scores[name] = self._metrics[name].value()
            else:
                assert self._counts is not None
                scores[name] = score_of_counts(item, self._objective.kind, self._counts)
        return scores
