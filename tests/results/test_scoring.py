"""Scores are scikit-learn's own, computed from what a network says."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import softmax
from sklearn import metrics
from sklearn.datasets import load_diabetes, load_digits
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import get_scorer, make_scorer
from sklearn.preprocessing import StandardScaler

from asynckfold import InputError
from asynckfold.jobs.objective import Objective, ordinary
from asynckfold.results.scoring import resolve

Array = npt.NDArray[Any]
CLASSES, NUMBERS = ordinary(True), ordinary(False)


@pytest.fixture(scope="module")
def digits() -> tuple[Array, Array, Any, Array]:
    """Targets, outputs in float32, the fitted model that gives them, and its inputs."""
    return _classes(10)


@pytest.fixture(scope="module")
def two() -> tuple[Array, Array, Any, Array]:
    return _classes(2)


def _classes(count: int) -> tuple[Array, Array, Any, Array]:
    inputs, targets = load_digits(n_class=count, return_X_y=True)
    inputs = StandardScaler().fit_transform(inputs)
    inputs += np.random.default_rng(0).normal(scale=3, size=inputs.shape)
    model = LogisticRegression(max_iter=200, C=0.01).fit(inputs[::3], targets[::3])
    outputs = model.decision_function(inputs)
    if outputs.ndim == 1:
        outputs = np.stack([0 * outputs, outputs], axis=1)
    return targets, outputs.astype(np.float32), model, inputs


@pytest.mark.parametrize(
    "name",
    [
        "accuracy",
        "balanced_accuracy",
        "f1_macro",
        "f1_micro",
        "f1_weighted",
        "precision_macro",
        "recall_macro",
        "jaccard_macro",
        "matthews_corrcoef",
        "neg_log_loss",
        "roc_auc_ovr",
        "roc_auc_ovo",
        "top_k_accuracy",
    ],
)
def test_many_classes_score_as_in_scikit_learn(
    digits: tuple[Array, Array, Any, Array], name: str
) -> None:
    targets, outputs, model, inputs = digits
    found = resolve(name, CLASSES)[name](targets, outputs)
    assert found == pytest.approx(get_scorer(name)(model, inputs, targets), abs=1e-5)
    assert type(found) is float
    assert found not in (0.0, 1.0)


@pytest.mark.parametrize(
    "name", ["accuracy", "f1", "roc_auc", "average_precision", "neg_brier_score", "neg_log_loss"]
)
def test_two_classes_score_as_in_scikit_learn(
    two: tuple[Array, Array, Any, Array], name: str
) -> None:
    targets, outputs, model, inputs = two
    found = resolve([name], CLASSES)[name](targets, outputs)
    assert found == pytest.approx(get_scorer(name)(model, inputs, targets), abs=1e-5)


@pytest.mark.parametrize(
    "name",
    ["r2", "neg_mean_squared_error", "neg_root_mean_squared_error", "neg_mean_absolute_error"],
)
@pytest.mark.parametrize("column", [False, True])
def test_numbers_score_as_in_scikit_learn(name: str, column: bool) -> None:
    inputs, targets = load_diabetes(return_X_y=True)
    model = Ridge().fit(inputs, targets)
    outputs = model.predict(inputs).astype(np.float32)
    found = resolve(name, NUMBERS)[name](targets, outputs[:, None] if column else outputs)
    assert found == pytest.approx(get_scorer(name)(model, inputs, targets), rel=1e-5)


def test_several_numbers_at_once() -> None:
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(50, 3))
    outputs = (targets + rng.normal(scale=0.1, size=targets.shape)).astype(np.float32)
    found = resolve(None, NUMBERS)["r2"](targets, outputs)
    assert found == pytest.approx(metrics.r2_score(targets, outputs), rel=1e-6)


@pytest.mark.parametrize(("objective", "name"), [(CLASSES, "accuracy"), (NUMBERS, "r2")])
def test_default_scores_fit_the_targets(objective: Objective, name: str) -> None:
    assert list(resolve(None, objective)) == [name]


def test_large_logits_do_not_overflow() -> None:
    outputs = np.array([[1000.0, -1000.0], [-1000.0, 1000.0], [0.0, 0.5]], np.float32)
    targets = np.array([0, 1, 0])
    found = resolve("neg_log_loss", CLASSES)["neg_log_loss"](targets, outputs)
    assert found == pytest.approx(np.log(softmax([0.0, 0.5])[0]) / 3, rel=1e-5)


def test_models_may_have_more_outputs_than_classes() -> None:
    outputs = np.eye(5, dtype=np.float32)[[0, 1, 2, 2]]
    assert resolve("accuracy", CLASSES)["accuracy"](np.array([0, 1, 2, 1]), outputs) == 0.75


# ---- own scores ----


def agreement(targets: Array, outputs: Array) -> float:
    return float((outputs.argmax(1) == targets).mean())


def test_user_functions_get_targets_and_outputs(
    digits: tuple[Array, Array, Any, Array],
) -> None:
    targets, outputs, *_ = digits
    scores = resolve([agreement, "accuracy"], CLASSES)
    assert list(scores) == ["agreement", "accuracy"]
    assert scores["agreement"] is agreement
    assert agreement(targets, outputs) == scores["accuracy"](targets, outputs)


def test_scores_may_be_named(digits: tuple[Array, Array, Any, Array]) -> None:
    targets, outputs, *_ = digits
    scores = resolve({"mine": lambda y, o: 0.5, "f1": "f1_macro"}, CLASSES)
    assert list(scores) == ["mine", "f1"]
    assert scores["mine"](targets, outputs) == 0.5
    assert scores["f1"](targets, outputs) == pytest.approx(
        metrics.f1_score(targets, outputs.argmax(1), average="macro")
    )


def test_sklearn_scorers_are_accepted(digits: tuple[Array, Array, Any, Array]) -> None:
    targets, outputs, model, inputs = digits
    given = {
        "fbeta_score": make_scorer(metrics.fbeta_score, beta=2, average="macro"),
        "log_loss": make_scorer(
            metrics.log_loss, response_method="predict_proba", greater_is_better=False
        ),
    }
    scores = resolve(list(given.values()), CLASSES)
    assert list(scores) == list(given)
    for name, scorer in given.items():
        assert scores[name](targets, outputs) == pytest.approx(
            scorer(model, inputs, targets), abs=1e-5
        )


# ---- refusals ----


@pytest.mark.parametrize(
    ("scoring", "text"),
    [
        ("acuracy", "received 'acuracy'. Did you mean 'accuracy'?"),
        ("f1_makro", "Did you mean 'f1_macro'?"),
        ("xyzzy", "received 'xyzzy'. See sklearn.metrics.get_scorer_names()."),
        (3, "scoring must be names or functions (targets, outputs) → float: received 3."),
        ([None], "received None."),
        ([], "there must be a score"),
        ({}, "there must be a score"),
        (["accuracy", "accuracy"], "score names must differ: received 'accuracy' twice."),
        ([lambda y, o: 0.0, lambda y, o: 1.0], "received '<lambda>' twice."),
    ],
)
def test_invalid_scores_are_refused(scoring: Any, text: str) -> None:
    with pytest.raises(InputError) as raised:
        resolve(scoring, CLASSES)
    assert text in str(raised.value)
    assert len(raised.value.problems) == 1


def test_all_invalid_scores_are_listed_at_once() -> None:
    with pytest.raises(InputError) as raised:
        resolve(["acuracy", "f1_makro", 3], CLASSES)
    assert len(raised.value.problems) == 3
