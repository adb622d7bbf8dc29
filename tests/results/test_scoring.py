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
from asynckfold.jobs.objective import ordinary
from asynckfold.results.scoring import resolve
from tests.toy import Tiny, adam, samples

Array = npt.NDArray[Any]
CLASSES, NUMBERS = ordinary(True), ordinary(False)
X, Y = samples()


def swept(root: Path, scoring: Any) -> CVResults:
    kfold = AsyncKFold(
        2, (X, Y), root, nn.CrossEntropyLoss(), 10,
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


@pytest.mark.parametrize("column", [False, True])
def test_numbers_score_as_in_scikit_learn(column: bool) -> None:
    rng = np.random.default_rng(0)
    targets = rng.normal(size=300)
    outputs = (targets + rng.normal(scale=0.3, size=300)).astype(np.float32)
    for name, wanted in (
        ("r2", metrics.r2_score(targets, outputs)),
        ("neg_mean_squared_error", -metrics.mean_squared_error(targets, outputs)),
        ("neg_root_mean_squared_error", -metrics.root_mean_squared_error(targets, outputs)),
        ("neg_mean_absolute_error", -metrics.mean_absolute_error(targets, outputs)),
    ):
        score = resolve(name, NUMBERS)[name](targets, outputs[:, None] if column else outputs)
        assert score == pytest.approx(wanted, rel=1e-5)
        assert type(score) is float
    table = targets.reshape(100, 3), outputs.reshape(100, 3)
    several = resolve(None, NUMBERS)["r2"](*table)
    assert several == pytest.approx(metrics.r2_score(*table), rel=1e-6)


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
