"""Scores mean what scikit-learn means by them: of the labels of the data, on the scale of outputs.

References are scikit-learn's scorers on an estimator that is written here, and its metrics.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from sklearn import metrics
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import get_scorer, make_scorer
from torch import nn

from asynckfold import InputError
from asynckfold.data.labels import resolve_labels
from asynckfold.jobs.criteria import NOT_OF_PAIRS, TABLE, criterion_of, why_not_of_pairs
from asynckfold.jobs.objective import (
    Objective,
    pos_label_of,
    probabilities,
)
from asynckfold.results.direction import is_error
from asynckfold.results.scoring import resolve

Array = npt.NDArray[Any]


class Fixed(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Probabilities by row number, of classes in sorted order: the reference."""

    def __init__(self, shares: Any, classes: Any) -> None:
        self.shares = shares
        self.classes = classes
        self.classes_ = np.array(classes)

    def predict_proba(self, rows: Array) -> Array:
        return np.asarray(self.shares[rows])

    def predict(self, rows: Array) -> Array:
        return np.asarray(self.classes_[self.shares[rows].argmax(axis=1)])

    def __sklearn_is_fitted__(self) -> bool:
        return True


def reference(name: Any, shares: Array, classes: Any, labels: Array) -> float:
    scorer = get_scorer(name)
    return float(scorer(Fixed(shares, classes), np.arange(len(labels)), labels))


# Any names of the classes

NAMES = st.one_of(
    st.lists(st.integers(-50, 50), min_size=5, max_size=5, unique=True),
    st.lists(st.text("abcxyz", min_size=1), min_size=5, max_size=5, unique=True),
)
MANY = (
    *("accuracy", "balanced_accuracy", "f1_macro", "f1_micro", "f1_weighted", "jaccard_macro"),
    *("precision_macro", "recall_macro", "matthews_corrcoef", "neg_log_loss", "roc_auc_ovr"),
    *("roc_auc_ovo", "top_k_accuracy", "adjusted_rand_score"),
)
TWO = (*MANY[:-4], "roc_auc", "f1", "precision", "recall", "jaccard", "average_precision")
TWO += ("neg_brier_score",)


def judged(names: list[Any], count: int, seed: int) -> tuple[Array, Array, Array]:
    """Return labels under such names, outputs in float32, and the sorted names."""
    random = np.random.default_rng(seed)
    classes = np.array(sorted(names[:count]))
    codes = np.concatenate([np.arange(count), random.integers(0, count, 40)])
    outputs = random.normal(size=(len(codes), count)).astype(np.float32)
    outputs[np.arange(len(codes)), codes] += 1
    return classes[codes], outputs, classes


@pytest.mark.parametrize(("scorers", "count"), [(MANY, 4), (TWO, 2)])
@settings(max_examples=6, deadline=None)
@given(names=NAMES, seed=st.integers(0, 99))
def test_scores_match_scikit_learn_for_any_class_labels(
    scorers: tuple[str, ...], count: int, names: list[Any], seed: int
) -> None:
    truth, outputs, classes = judged(names, count, seed)
    labels = resolve_labels(truth, task="multiclass")
    labels = labels if labels.objective.labels else labels.numbered()
    shares = softmax(outputs.astype(np.float64), axis=1)
    for name in scorers:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                wanted = reference(name, shares, classes, truth)
            except ValueError:
                # Mostly: pos_label=1 is not a valid label. So it is here.
                with pytest.raises(ValueError):
                    resolve(name, labels.objective)[name](labels.targets, outputs)
                continue
            found = resolve(name, labels.objective)[name](labels.targets, outputs)
        assert found == pytest.approx(wanted, abs=1e-9), name


# The class that is positive


THE_POSITIVE_CLASS_IS_SC: Any = ["f1", "precision", "recall", "jaccard", "average_precision"]


def test_the_positive_class_is_scikit_learns_or_the_users() -> None:
    for name in THE_POSITIVE_CLASS_IS_SC:
        truth, outputs, classes = judged([1, 2, 3, 4, 5], 2, 3)
        shares = softmax(outputs.astype(np.float64), axis=1)
        labels = resolve_labels(truth, task="multiclass").numbered()
        found = resolve(name, labels.objective)[name](labels.targets, outputs)
        assert found == pytest.approx(reference(name, shares, classes, truth))
        label, problems = pos_label_of(2, labels.objective, labels.classes)
        assert not problems
        asked = Objective("multiclass", "logits", (1, 2), pos_label=label)
        other = resolve(name, asked)[name](labels.targets, outputs)
        assert other != pytest.approx(found)
        swapped = np.where(truth == 2, 1, 0)
        assert other == pytest.approx(reference(name, shares, [0, 1], swapped))


PROBABILITIES_ARE_THE_SA: Any = [
    ("logits", lambda shares: np.log(shares) + 3),
    ("log-probabilities", np.log),
    ("probabilities", lambda shares: shares),
]


def test_probabilities_are_the_same_on_every_scale() -> None:
    for scale, outputs_of in PROBABILITIES_ARE_THE_SA:
        truth, outputs, classes = judged([0, 1, 2, 3, 4], 4, 5)
        shares = softmax(outputs.astype(np.float64), axis=1)
        asked = Objective("multiclass", scale)
        for name in ("neg_log_loss", "roc_auc_ovr", "accuracy", "top_k_accuracy"):
            found = resolve(name, asked)[name](truth, outputs_of(shares))
            assert found == pytest.approx(reference(name, shares, classes, truth), rel=1e-6), name


def test_scores_use_the_output_transform() -> None:
    truth, outputs, classes = judged([0, 1, 2, 3, 4], 3, 7)
    # Distances: the least is the class.
    asked = Objective("multiclass", "transformed", transform="d")
    scores = resolve(["accuracy", "neg_log_loss"], asked, lambda found: softmax(-found, axis=1))
    shares = softmax(outputs.astype(np.float64), axis=1)
    for name, score in scores.items():
        assert score(truth, -outputs) == pytest.approx(
            reference(name, shares, classes, truth), rel=1e-5
        )
    with pytest.raises(ValueError, match="must give probabilities, from 0 to 1"):
        probabilities(asked, outputs, lambda found: 7 * found)


# Folds without some class


def test_a_fold_without_a_class_has_a_log_loss_but_no_roc_auc() -> None:
    truth, outputs, _ = judged([0, 1, 2, 3, 4], 4, 9)
    kept = truth != 2
    truth, outputs = truth[kept], outputs[kept]
    shares = softmax(outputs.astype(np.float64), axis=1)
    asked = Objective("multiclass", "logits")
    found = resolve("neg_log_loss", asked)["neg_log_loss"](truth, outputs)
    assert found == pytest.approx(-metrics.log_loss(truth, shares, labels=[0, 1, 2, 3]))
    with pytest.raises(ValueError, match=r"[Nn]umber of"):
        resolve("roc_auc_ovr", asked)["roc_auc_ovr"](truth, outputs)


# Losses in place of scores


def my_loss(targets: Array, outputs: Array) -> float:
    return 0.5


def rmse(targets: Array, outputs: Array) -> float:
    return 0.5


def judge(targets: Array, outputs: Array) -> float:
    return float(metrics.mean_squared_error(targets, outputs) ** 0.5)


ERRORS_PASSED_AS_SCORES: Any = [
    (metrics.mean_squared_error, "scoring='neg_mean_squared_error'"),
    (metrics.log_loss, "scoring='neg_log_loss'"),
    (metrics.max_error, "scoring='neg_max_error'"),
    (metrics.hamming_loss, "greater_is_better=False"),
    (metrics.brier_score_loss, "scoring='neg_brier_score'"),
    (metrics.mean_tweedie_deviance, "greater_is_better=False"),
    (functools.partial(metrics.mean_pinball_loss, alpha=0.1), "greater_is_better=False"),
    (my_loss, "'neg_my_loss': lambda labels, outputs: -my_loss"),
    ([rmse], "-rmse(labels, outputs)"),
    ({"score": my_loss}, "-my_loss"),
    ({"error": lambda y, o: 1.0}, "-error"),
    (judge, "scoring='neg_mean_squared_error'"),
    (lambda y, o: metrics.log_loss(y, o), "scoring='neg_log_loss'"),
    (lambda y, o: float(nn.functional.mse_loss(o, y)), "-mse_loss"),
    (make_scorer(metrics.mean_absolute_error), "scoring='neg_mean_absolute_error'"),
    (make_scorer(my_loss), "greater_is_better=False"),
    (nn.MSELoss(), "-MSELoss"),
]


def test_errors_passed_as_scores_are_refused() -> None:
    for scoring, remedy in ERRORS_PASSED_AS_SCORES:
        with pytest.raises(InputError, match="greater is better") as raised:
            resolve(scoring, Objective("regression", "values"))
        (problem,) = raised.value.problems
        assert remedy in problem.remedy


def kappa(targets: Array, outputs: Array) -> float:
    return 0.5


def cost_sensitive_accuracy(targets: Array, outputs: Array) -> float:
    return 0.5


def checked(targets: Array, outputs: Array) -> float:
    if len(targets) == 0:
        raise ValueError("no error is a score")
    with np.errstate(all="ignore"):
        return 0.5


SCORES_ARE_NOT_TAKEN_FOR: Any = [
    "neg_mean_squared_error",
    "r2",
    kappa,
    cost_sensitive_accuracy,
    checked,
    metrics.r2_score,
    metrics.d2_pinball_score,
    make_scorer(metrics.mean_squared_error, greater_is_better=False),
    {"my_loss": make_scorer(my_loss, greater_is_better=False)},
    {"neg_mse": lambda y, o: -metrics.mean_squared_error(y, o)},
    {"neg_loss": lambda y, o: -my_loss(y, o)},
    lambda y, o: 1 - metrics.hamming_loss(y, o > 0),
    lambda y, o: -1 * metrics.mean_squared_error(y, o),
    lambda y, o: np.negative(metrics.mean_squared_error(y, o)),
    lambda y, o: 1 / (1 + metrics.mean_squared_error(y, o)),
    lambda y, o: float((o > 0).mean()),
]


def test_scores_are_not_taken_for_errors() -> None:
    for scoring in SCORES_ARE_NOT_TAKEN_FOR:
        assert len(resolve(scoring, Objective("regression", "values"))) == 1


def test_every_error_of_scikit_learn_is_known() -> None:
    less = {
        name
        for name in metrics.__all__
        if name.endswith(("_error", "_loss", "_deviance")) and callable(getattr(metrics, name))
    }
    assert all(map(is_error, less))


# The table of criteria


def test_every_loss_of_torch_is_in_the_table() -> None:
    losses = {*torch.nn.modules.loss.__all__, "AdaptiveLogSoftmaxWithLoss"} - {"NLLLoss2d"}
    assert losses - {"LinearCrossEntropyLoss"} <= set(TABLE) | set(NOT_OF_PAIRS)
    assert losses <= set(TABLE) | set(NOT_OF_PAIRS)
    assert not set(TABLE) & set(NOT_OF_PAIRS)
    for name in dir(nn.functional):
        function = getattr(nn.functional, name)
        if name.endswith(("_loss", "entropy")) and callable(function):
            assert criterion_of(function) or why_not_of_pairs(function), name
