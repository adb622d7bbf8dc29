"""Estimators of scikit-learn on the folds of a run: what a model has to beat."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asynckfold.data.table_codes import TableCodes
from asynckfold.data.transforms.random_numbers import seeded
from asynckfold.data.transforms.trees import Array
from asynckfold.errors import Problem
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.objective import MULTILABEL, REGRESSION, Objective
from asynckfold.jobs.result import DONE, FAILED
from asynckfold.results.candidates import Candidate
from asynckfold.results.scoring import estimator_scorer, is_custom, named_scores
from asynckfold.training import preprocessing


def named_estimators(estimators: Any) -> list[tuple[str, Any]]:
    """Return (name, estimator) pairs: of one, of several, or of a dict by name."""
    if isinstance(estimators, Mapping):
        return [(str(name), item) for name, item in estimators.items()]
    many = isinstance(estimators, (list, tuple))
    return [(type(item).__name__, item) for item in (estimators if many else [estimators])]


def estimator_problems(
    pairs: Sequence[tuple[str, Any]], scoring: Any, objective: Objective
) -> Iterator[Problem]:
    """Yield why estimators cannot be compared with the candidates of a run."""
    from sklearn.base import is_classifier, is_regressor

    names = [name for name, _ in pairs]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            remedy = "Pass a dict of name → estimator."
            yield Problem("names of estimators must differ", f"{name} twice", remedy)
    is_wrong, wanted = is_regressor, "classifiers"
    if objective.kind == REGRESSION:
        is_wrong, wanted = is_classifier, "regressors"
    for _, item in pairs:
        if is_wrong(item):
            received = type(item).__name__
            rule = f"estimators must be {wanted}, as the run's models are"
            yield Problem(rule, received, f"Pass {wanted} only.")
    functions = [name for name, item in named_scores(scoring, objective.kind) if is_custom(item)]
    if functions:
        yield Problem(
            "estimators are scored by scikit-learn's scorers, since a function of your own takes "
            "outputs of a model",
            ", ".join(map(str, functions)),
            "Make the run with scoring='accuracy' or sklearn.metrics.make_scorer.",
        )


def on_folds(
    pairs: Sequence[tuple[str, Any]],
    rows: Array,
    targets: npt.NDArray[Any],
    folds: Sequence[Fold],
    preprocess: Any,
    scoring: Any,
    objective: Objective,
    codes: TableCodes | None = None,
    weights: npt.NDArray[np.float64] | None = None,
) -> tuple[list[Candidate], dict[str, str]]:
    """Fit clones of estimators on the training part of each fold, and score the rest.

    Returns them as candidates without an LR schedule, and the first failed fold of each that fails.

    Parameters
    ----------
    pairs : sequence of (name, estimator)
        What is fitted, in this process.
    rows : ndarray of shape (n_samples, ...)
        Samples after the eval transform; flattened here.
    targets : ndarray
        As the run stores them; estimators get the original labels.
    folds : sequence of Fold
        Those of the run.
    preprocess : transformer or None
        Fitted anew on each training part.
    scoring, objective
        Of the run.
    codes : TableCodes, optional
        What the rows stand for, where `preprocess` gets a table.
    weights : ndarray of shape (n_samples,), optional
        The ``sample_weight`` of ``fit`` and of scores.
    """
    from sklearn.base import clone

    scorers = {
        str(name): estimator_scorer(item, objective)
        for name, item in named_scores(scoring, objective.kind)
    }
    truth = _originals(objective, targets)
    scores = {name: np.full((len(scorers), len(folds)), np.nan) for name, _ in pairs}
    seconds = {name: np.full(len(folds), np.nan) for name, _ in pairs}
    failed: dict[str, dict[int, str]] = {name: {} for name, _ in pairs}
    for number, fold in enumerate(folds):
        inputs = _inputs(rows, targets, preprocess, fold, codes)
        train, valid = (
            {} if weights is None else {"sample_weight": weights[part]}
            for part in (fold.train, fold.valid)
        )
        for name, estimator in pairs:
            try:
                # Without a random_state, an estimator draws from the global generators.
                with seeded(0):
                    start = time.perf_counter()
                    fit = clone(estimator).fit(inputs[fold.train], truth[fold.train], **train)
                    seconds[name][number] = time.perf_counter() - start
                    scores[name][:, number] = [
                        score(fit, inputs[fold.valid], truth[fold.valid], **valid)
                        for score in scorers.values()
                    ]
            except Exception as error:  # noqa: BLE001 - as a failed job, it stops no other
                failed[name][number] = f"{type(error).__name__}: {error}".splitlines()[0]
    count = len(folds)
    estimators = [
        Candidate(
            name,
            "",
            dict(zip(scorers, table, strict=True)),
            seconds[name],
            np.full(count, np.nan),
            count - len(failed[name]),
            count,
            FAILED if failed[name] else DONE,
        )
        for name, table in scores.items()
    ]
    return estimators, {
        name: f"{len(texts)} of {count} folds failed, first fold {number}: {text}"
        for name, texts in failed.items()
        for number, text in list(texts.items())[:1]
    }


def _inputs(
    rows: Array, targets: npt.NDArray[Any], preprocess: Any, fold: Fold, codes: TableCodes | None
) -> npt.NDArray[Any]:
    if preprocess is None:
        return rows.reshape(len(rows), -1)
    fit = preprocessing.fit_on(preprocess, rows, torch.from_numpy(targets), fold.train, codes)
    return preprocessing.transform(fit, rows).numpy().reshape(len(rows), -1)


def _originals(objective: Objective, targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return targets as scikit-learn takes them: original labels, rows of 0 and 1, or numbers."""
    if objective.kind == REGRESSION:
        return targets.squeeze(-1) if targets.shape[1:] == (1,) else targets
    codes = objective.codes(targets)
    if objective.kind == MULTILABEL:
        return codes
    return objective.all_labels(1 + int(codes.max()))[codes]
