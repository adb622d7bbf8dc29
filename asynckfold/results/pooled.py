"""Scores of all out-of-fold outputs of a candidate at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.jobs.folds import Fold
from asynckfold.jobs.objective import Transform
from asynckfold.jobs.plan import Plan
from asynckfold.results.candidates import Candidate
from asynckfold.results.out_of_fold import Outputs, layers_of
from asynckfold.results.scoring import reported_names, resolve, score_of_rows
from asynckfold.results.tables import Row, names_of, parameters_of


def pooled_rows(
    plan: Plan,
    folds: Sequence[Fold],
    rows: Sequence[Candidate],
    outputs: Mapping[str, Outputs],
    targets: npt.NDArray[Any],
    weights: npt.NDArray[np.float64] | None,
    scoring: Any,
    transform: Transform | None,
) -> Iterator[Row]:
    """Yield a row per candidate; `outputs` are those of `out_of_fold`."""
    layers, parameters = layers_of(folds), parameters_of(rows)
    by_layer: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(1 + max(layers))]
    for fold, layer in zip(folds, layers, strict=True):
        by_layer[layer].append(fold.valid)
    held = [np.concatenate(each) for each in by_layer]
    for row in rows:
        objective = plan.objective_of(row.model)
        reported = reported_names(scoring, objective.kind)
        scores = resolve(scoring, objective, transform)
        entry = names_of(row.model, row.lr_schedule, parameters)
        for metric in plan.scoring:
            pooled = math.nan
            if row.complete and metric not in reported:
                parts = outputs[row.name] if len(held) > 1 else outputs[row.name][None]
                each = [
                    score_of_rows(scores[metric], part[at], targets, weights, at)
                    for part, at in zip(parts, held, strict=True)
                ]
                pooled = float(np.mean(each))
            entry |= {f"pooled_{metric}": pooled, f"mean_{metric}": row.mean(metric)}
        yield entry
