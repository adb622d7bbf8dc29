"""Estimators of scikit-learn on the folds of a run: what a model has to beat."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch

from asynckfold.data.transforms.random_numbers import seeded
from asynckfold.data.transforms.trees import Array
from asynckfold.errors import Problem
from asynckfold.jobs.argument import one_line
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.objective import MULTILABEL, REGRESSION, Objective
from asynckfold.results.estimator_scores import EstimatorScores
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
    example = "Pass for instance [HistGradientBoostingClassifier(), DummyClassifier()]."
    if not pairs:
        yield Problem("there must be an estimator", "none", example)
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            remedy = "Pass a dict of name → estimator."
            yield Problem("names of estimators must differ", f"{name} twice", remedy)
    is_wrong, wanted = is_regressor, "classifiers"
    if objective.kind == REGRESSION:
        is_wrong, wanted = is_classifier, "regressors"
    for _, item in pairs:
        lacking = [part for part in ("fit", "predict", "get_params") if not hasattr(item, part)]
        if lacking or isinstance(item, type):
            rule = "estimators must be those of scikit-learn, or like them"
            what = one_line(item) + (f", without {' and '.join(lacking)}" if lacking else "")
            yield Problem(rule, what, example)
        elif is_wrong(item):
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
) -> list[EstimatorScores]:
    """Fit clones of estimators on the training part of each fold, and score the rest.

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
    """
    scorers = {
        str(name): estimator_scorer(item, objective)
        for name, item in named_scores(scoring, objective.kind)
    }
    truth = _originals(objective, targets)
    by_name = {name: EstimatorScores(name, tuple(scorers), len(folds)) for name, _ in pairs}
    for number, fold in enumerate(folds):
        inputs = _inputs(rows, targets, preprocess, fold)
        for name, estimator in pairs:
            _score(by_name[name], number, estimator, inputs, truth, fold, scorers)
    return list(by_name.values())


def _inputs(
    rows: Array, targets: npt.NDArray[Any], preprocess: Any, fold: Fold
) -> npt.NDArray[Any]:
    if preprocess is None:
        return rows.reshape(len(rows), -1)
    fit = preprocessing.fit_on(preprocess, rows, torch.from_numpy(targets), fold.train)
    return preprocessing.transform(fit, rows).numpy().reshape(len(rows), -1)


def _originals(objective: Objective, targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return targets as scikit-learn takes them: original labels, rows of 0 and 1, or numbers."""
    if objective.kind == REGRESSION:
        return targets.squeeze(-1) if targets.shape[1:] == (1,) else targets
    codes = objective.codes(targets)
    if objective.kind == MULTILABEL:
        return codes
    return objective.all_labels(1 + int(codes.max()))[codes]


def _score(
    estimator_scores: EstimatorScores,
    number: int,
    estimator: Any,
    inputs: npt.NDArray[Any],
    truth: npt.NDArray[Any],
    fold: Fold,
    scorers: Mapping[str, Any],
) -> None:
    from sklearn.base import clone

    try:
        # Without a random_state, an estimator draws from the global generators.
        with seeded(0):
            start = time.perf_counter()
            fit = clone(estimator).fit(inputs[fold.train], truth[fold.train])
            estimator_scores.fit_seconds[number] = time.perf_counter() - start
            scores = {
                name: score(fit, inputs[fold.valid], truth[fold.valid])
                for name, score in scorers.items()
            }
    except Exception as error:  # noqa: BLE001 - a failed fold, as that of a job, stops no other
        estimator_scores.errors.setdefault(
            number, f"{type(error).__name__}: {error}".splitlines()[0]
        )
        return
    for name, score in scores.items():
        estimator_scores.scores[name][number] = score
