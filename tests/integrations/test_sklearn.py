"""Estimators of scikit-learn on a run's folds: the same as scikit-learn's own cross-validation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import make_classification
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import cross_validate
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from torch import nn

from asynckfold import CVResults, InputError, load_results
from tests.api.test_fold_models import Numbers, trained
from tests.toy import samples

X, Y = samples()
NAMES = np.array(["red", "green", "blue"])[Y]


class Watched(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Memorises the training part; of other samples it says the first class."""

    seen: list[tuple[Any, Any, Any]] = []  # noqa: RUF012 - shared by all clones

    def fit(self, inputs: Any, labels: Any) -> Watched:
        self.classes_ = np.unique(labels)
        self.known_ = {row.tobytes(): label for row, label in zip(inputs, labels, strict=True)}
        self.seen.append((inputs, labels, None))
        return self

    def predict(self, inputs: Any) -> Any:
        inputs_before, labels, _ = self.seen[-1]
        self.seen[-1] = inputs_before, labels, inputs
        return np.array([self.known_.get(row.tobytes(), self.classes_[0]) for row in inputs])


class Broken(LogisticRegression):  # type: ignore[misc]
    """Fails on the training part without the first sample."""

    def fit(self, inputs: Any, labels: Any) -> Any:
        if not (inputs == X[0]).all(axis=1).any():
            raise RuntimeError("no such\nsample")
        return super().fit(inputs, labels)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> CVResults:
    root = tmp_path_factory.mktemp("estimators") / "run"
    return trained(root, dataset=(X, NAMES), scoring=["balanced_accuracy", "neg_log_loss"])


def test_it_is_scikit_learns_cross_validation_on_these_folds(run: CVResults) -> None:
    estimators = [LogisticRegression(), RandomForestClassifier(10, random_state=1)]
    found = run.compare_with(estimators)
    folds = [(fold.train, fold.valid) for fold in run.folds]
    for estimator, ours in zip(estimators, found.estimators, strict=True):
        theirs = cross_validate(estimator, X, NAMES, cv=folds, scoring=run.plan.scoring)
        for metric in run.plan.scoring:
            np.testing.assert_array_equal(ours.scores[metric], theirs[f"test_{metric}"])
    frame = found.to_frame()
    assert sorted(frame["kind"]) == ["candidate", "estimator", "estimator"]
    assert set(frame["name"]) == {"tiny/step", "LogisticRegression", "RandomForestClassifier"}
    assert frame["mean_balanced_accuracy"].is_monotonic_decreasing
    own = frame[frame["kind"] == "candidate"].iloc[0]
    assert own["mean_neg_log_loss"] == pytest.approx(run.cv_results_["mean_test_neg_log_loss"][0])
    assert own["ci_low"] == run.to_frame().iloc[0]["ci_low"]


def test_the_folds_are_the_runs_and_nothing_leaks(tmp_path: Path) -> None:
    data, labels = make_classification(60, random_state=0)
    data = data.astype(np.float32)[:, :8]
    results = trained(tmp_path / "run", dataset=(data, labels), preprocess=StandardScaler())
    Watched.seen.clear()
    found = results.compare_with(Watched())
    for fold, (trained_on, told, scored_on) in zip(results.folds, Watched.seen, strict=True):
        scaler = StandardScaler().fit(data[fold.train])
        np.testing.assert_allclose(trained_on, scaler.transform(data[fold.train]), rtol=1e-5)
        np.testing.assert_allclose(scored_on, scaler.transform(data[fold.valid]), rtol=1e-5)
        np.testing.assert_array_equal(told, labels[fold.train])
    # Whoever knows the training part by heart knows nothing of the rest.
    chance = [np.mean(labels[fold.valid] == 0) for fold in results.folds]
    np.testing.assert_allclose(found.estimators[0].scores["accuracy"], chance)


def test_each_candidate_is_tested_against_each_estimator(run: CVResults) -> None:
    found = run.compare_with({"guess": DummyClassifier(), "line": LogisticRegression()})
    table = found.compare()
    assert list(table.columns) == list(run.compare().columns)
    assert {frozenset(pair) for pair in zip(table["first"], table["second"], strict=True)} == {
        frozenset(("tiny/step", name)) for name in ("guess", "line")
    }
    guess = next(item for item in found.differences if "guess" in (item.first, item.second))
    mine = run.candidates[0].scores["balanced_accuracy"]
    assert guess.mean == pytest.approx(np.mean(mine - 1 / 3))
    assert guess.folds == 3
    text = str(found)
    assert re.search(r"tiny/step (beats guess by [\d.]+ points|against guess: undecided)", text)
    assert re.search(r"candidate +tiny/step +0\.\d{4}", text)


def test_what_fails_is_named_and_the_others_are_fitted(tmp_path: Path) -> None:
    results = trained(tmp_path / "run", scoring=["accuracy", "neg_log_loss"])
    found = results.compare_with([Broken(), LinearSVC(), DummyClassifier(strategy="stratified")])
    assert found.errors["Broken"].endswith(": RuntimeError: no such")
    assert found.errors["Broken"].startswith("1 of 3 folds failed, first fold ")
    assert "predict_proba" in found.errors["LinearSVC"]
    assert "DummyClassifier" not in found.errors
    frame = found.to_frame().set_index("name")
    assert frame.loc["Broken", "folds_done"] == 2
    assert np.isnan(frame.loc["Broken", "ci_low"])
    assert frame.loc["LinearSVC", "folds_done"] == 0
    assert "LinearSVC: 3 of 3 folds failed" in str(found)
    assert "no fold has a score of both" in str(found)
    # Without a random_state, too, the numbers are the same each time.
    again = results.compare_with(DummyClassifier(strategy="stratified"))
    np.testing.assert_array_equal(
        again.estimators[0].scores["accuracy"], found.estimators[2].scores["accuracy"]
    )


def test_numbers_and_repeats(tmp_path: Path) -> None:
    pair = X, X[:, :1] * 2
    results = trained(tmp_path / "run", Numbers, pair, nn.MSELoss(), n_repeats=2)
    found = results.compare_with([Ridge(), DummyRegressor()])
    folds = [(fold.train, fold.valid) for fold in results.folds]
    assert len(folds) == 6
    theirs = cross_validate(Ridge(), X, pair[1][:, 0], cv=folds, scoring="r2")["test_score"]
    np.testing.assert_allclose(found.estimators[0].scores["r2"], theirs)
    with pytest.raises(InputError, match="must be regressors, as the run's models are: received L"):
        results.compare_with(LogisticRegression())


@pytest.mark.parametrize(
    ("estimators", "told"),
    [
        ([KNeighborsClassifier(1), KNeighborsClassifier(2)], "must differ: received KNeighborsCl"),
        (Ridge(), "estimators must be classifiers, as the run's models are: received Ridge"),
        (make_pipeline(StandardScaler(), Ridge()), "must be classifiers"),
    ],
)
def test_what_is_no_estimator_is_refused(run: CVResults, estimators: Any, told: str) -> None:
    with pytest.raises(InputError, match=re.escape(told)):
        run.compare_with(estimators)


def test_scores_of_outputs_and_runs_from_disk_are_refused(tmp_path: Path) -> None:
    results = trained(tmp_path / "run", scoring=lambda labels, outputs: float(outputs.mean()))
    with pytest.raises(
        InputError, match=r"scored by scikit-learn's scorers, since .* received <la"
    ):
        results.compare_with(DummyClassifier())
    with pytest.raises(InputError, match="models come from results of a call"):
        load_results(tmp_path / "run").compare_with(DummyClassifier())
