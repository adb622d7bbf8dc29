"""Scores are scikit-learn's own, or the user's; see also `tests.truth.test_scoring`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import softmax
from sklearn import metrics
from sklearn.metrics import make_scorer
from torch import nn

from asynckfold import AsyncKFold, CVResults, InputError
from tests.toy import Tiny, adam, samples

Array = npt.NDArray[Any]
X, Y = samples()


def swept(
    root: Path, scoring: Any, targets: Array = Y, loss: Any = nn.CrossEntropyLoss
) -> CVResults:
    kfold = AsyncKFold(
        2, (X, targets), root, loss(), 10,
        scoring=scoring, engine="serial", baseline=None, report=False, verbose=0,
    )  # fmt: skip
    return kfold([Tiny], ["step"], adam, {"epochs": 1})


def agreement(targets: Array, outputs: Array) -> float:
    return float((outputs.argmax(1) == targets).mean())


def test_scores_are_names_scorers_and_functions_of_targets_and_outputs(root: Path) -> None:
    results = swept(
        root,
        {
            "agreement": agreement,
            "accuracy": "accuracy",
            "f1": "f1_macro",
            "mine": lambda y, o: 0.5,
            "fbeta": make_scorer(metrics.fbeta_score, beta=2, average="macro"),
            "neg_log_loss": make_scorer(
                metrics.log_loss, response_method="predict_proba", greater_is_better=False
            ),
        },
    )
    (oof,) = results.oof.values()
    for job, fold in zip(results.plan.jobs, results.folds, strict=True):
        said, shares = oof[fold.valid].argmax(1), softmax(oof[fold.valid].astype(float), axis=1)
        truth = Y[fold.valid]
        assert results.results[job.id].scores == pytest.approx(
            {
                "agreement": np.mean(said == truth),
                "accuracy": np.mean(said == truth),
                "f1": metrics.f1_score(truth, said, average="macro"),
                "mine": 0.5,
                "fbeta": metrics.fbeta_score(truth, said, beta=2, average="macro"),
                "neg_log_loss": -metrics.log_loss(truth, shares),
            }
        )


def test_numbers_score_as_in_scikit_learn(root: Path) -> None:
    ours = {
        "r2": metrics.r2_score,
        "neg_mean_squared_error": lambda *both: -metrics.mean_squared_error(*both),
        "neg_root_mean_squared_error": lambda *both: -metrics.root_mean_squared_error(*both),
        "neg_mean_absolute_error": lambda *both: -metrics.mean_absolute_error(*both),
    }
    results = swept(root, [*ours], X[:, :3], nn.MSELoss)
    (oof,) = results.oof.values()
    for job, fold in zip(results.plan.jobs, results.folds, strict=True):
        both = X[fold.valid, :3], oof[fold.valid]
        wanted = {name: score(*both) for name, score in ours.items()}
        assert results.results[job.id].scores == pytest.approx(wanted, rel=1e-5)


INVALID = (
    ("acuracy", "received 'acuracy'. Did you mean 'accuracy'?"),
    ("f1_makro", "Did you mean 'f1_macro'?"),
    (3, "scoring must be names or functions (targets, outputs) → float: received 3."),
    ([None], "received None."),
    ([], "there must be a score"),
    ({}, "there must be a score"),
    (["accuracy", "accuracy"], "score names must differ: received 'accuracy' twice."),
    ([lambda y, o: 0.0, lambda y, o: 1.0], "received '<lambda>' twice."),
    (["acuracy", "f1_makro", 3], "3 problems, nothing was started"),
)


def test_invalid_scores_are_refused(root: Path) -> None:
    for scoring, text in INVALID:
        with pytest.raises(InputError) as raised:
            swept(root, scoring)
        assert text in str(raised.value)
        assert not root.exists()
