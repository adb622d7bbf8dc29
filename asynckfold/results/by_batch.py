"""Scores of a held-out fold whose outputs are not held: accumulated batch by batch.

::

    batch of outputs ─┬─ metrics of torchmetrics: update
                      └─ scores of pixels: counts (classes, classes)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.accumulator import MakeAccumulator
from asynckfold.jobs.objective import Objective, Transform
from asynckfold.results import pixels
from asynckfold.results.accumulated import Accumulating, accumulates
from asynckfold.results.scoring import is_custom, named_scores


class BatchScores:
    """Accumulates some scores of one fold, see `asynckfold.jobs.accumulator.Accumulator`."""

    def __init__(
        self, pairs: Sequence[tuple[str, Any]], objective: Objective, transform: Transform | None
    ) -> None:
        self._pairs, self._objective, self._transform = pairs, objective, transform
        self._metrics = {
            name: Accumulating(item, objective, transform, name)
            for name, item in pairs
            if accumulates(item)
        }
        self._counts: npt.NDArray[np.int64] | None = None

    def update(self, targets: npt.NDArray[Any], outputs: npt.NDArray[np.float32]) -> None:
        """Add the targets (b, ...) and outputs (b, ...) of a batch."""
        for metric in self._metrics.values():
            metric.update(targets, outputs)
        if len(self._metrics) < len(self._pairs):
            found = pixels.count_pixels(self._objective, targets, outputs, self._transform)
            self._counts = found if self._counts is None else self._counts + found

    def scores(self) -> dict[str, float]:
        """Return the scores over all batches; greater is better."""
        found = {}
        for name, item in self._pairs:
            if name in self._metrics:
                found[name] = self._metrics[name].value()
            else:
                assert self._counts is not None
                found[name] = pixels.score_of_counts(item, self._objective.kind, self._counts)
        return found


def why_not_by_batch(scoring: Any, objective: Objective, measured: Collection[str] = ()) -> str:
    """Return which scores need all outputs of a fold at once; ``""`` if none.

    `measured` are the scores that a `validation_step` computes.

    Examples
    --------
    >>> why_not_by_batch(["dice", "f1_macro"], Objective("segmentation", "logits"))
    ''
    >>> why_not_by_batch(["accuracy", "roc_auc"], Objective("binary", "logits"), {"accuracy"})
    'roc_auc'
    """
    return ", ".join(
        str(name)
        for name, item in named_scores(scoring, objective.kind)
        if name not in measured
        and not accumulates(item)
        and (is_custom(item) or not objective.is_dense)
    )


def accumulator_of(
    scoring: Any,
    objective: Objective,
    transform: Transform | None = None,
    measured: Collection[str] = (),
) -> MakeAccumulator:
    """Return what makes the accumulators of the jobs of a model; parameters as in `resolve`."""
    pairs = [
        (str(name), item)
        for name, item in named_scores(scoring, objective.kind)
        if name not in measured
    ]
    return partial(BatchScores, pairs, objective, transform)
