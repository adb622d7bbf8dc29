"""Estimators in scikit-learn's tools: as a plain mean of the same networks, written down here."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import make_column_transformer
from sklearn.ensemble import StackingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.inspection import PartialDependenceDisplay, permutation_importance
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import ConfusionMatrixDisplay, RocCurveDisplay
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler, TargetEncoder
from sklearn.utils import estimator_checks
from torch import nn
from torch.utils.data import TensorDataset

from asynckfold import (
    AsyncKFold,
    AsyncKFoldClassifier,
    AsyncKFoldRegressor,
    CVResults,
    InputError,
    load_results,
)
from tests.toy import adam, samples

X, CODES = samples(classes=2)
Y = np.array(["no", "yes"])[CODES]
SETTINGS = {"engine": "serial", "threads_per_job": 1}
"""Of AsyncKFold: many small fits need no workers."""


def network(**changes: Any) -> AsyncKFoldClassifier:
    words = {"epochs": 2, "batch_size": 10, "cv": 2, "settings": SETTINGS, **changes}
    return AsyncKFoldClassifier(nn.Linear, "cosine", adam, **words)


def run(root: Path | str, data: Any, epochs: int = 2, **changes: Any) -> CVResults:
    words = {"verbose": 0, "report": False, **SETTINGS, **changes}
    kfold = AsyncKFold(2, data, root, nn.CrossEntropyLoss(), 10, **words)
    model = {"Linear": lambda: nn.Linear(data[0].shape[1], 2)}
    return kfold(model, ["cosine"], adam, {"epochs": epochs})


class Plain(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """The mean of the softmax of each fold's network."""

    def __init__(self, epochs: int = 2) -> None:
        self.epochs = epochs

    def fit(self, inputs: Any, labels: Any) -> Plain:
        self.classes_ = np.unique(labels)
        with tempfile.TemporaryDirectory() as root:
            results = run(root, (np.asarray(inputs, np.float32), labels), self.epochs)
            self.networks_ = [results.model(fold=fold) for fold in range(2)]
        return self

    def predict_proba(self, inputs: Any) -> Any:
        rows = torch.from_numpy(np.array(inputs, np.float32))
        with torch.no_grad():
            return np.mean([net(rows).double().softmax(1).numpy() for net in self.networks_], 0)

    def predict(self, inputs: Any) -> Any:
        return self.classes_[self.predict_proba(inputs).argmax(1)]


@pytest.fixture(scope="module")
def ours() -> AsyncKFoldClassifier:
    return network().fit(X, Y)


def dependence(fitted: Any) -> Any:
    display = PartialDependenceDisplay.from_estimator(fitted, X, [0, 5], grid_resolution=5)
    return [one["average"] for one in display.pd_results]


def conformal(fitted: Any) -> Any:
    mapie = pytest.importorskip("mapie.classification")
    sets = mapie.SplitConformalClassifier(fitted, confidence_level=0.9, prefit=True)
    return sets.conformalize(X, Y).predict_set(X)[1]


FITTED = {
    "CalibratedClassifierCV of a FrozenEstimator": lambda fitted: (
        CalibratedClassifierCV(FrozenEstimator(fitted)).fit(X, Y).predict_proba(X)
    ),
    "permutation_importance": lambda fitted: (
        permutation_importance(fitted, X, Y, n_repeats=3, random_state=0).importances
    ),
    "PartialDependenceDisplay": dependence,
    "ConfusionMatrixDisplay": lambda fitted: (
        ConfusionMatrixDisplay.from_estimator(fitted, X, Y).confusion_matrix
    ),
    "RocCurveDisplay": lambda fitted: RocCurveDisplay.from_estimator(fitted, X, Y).tpr,
    "StackingClassifier": lambda fitted: (
        StackingClassifier([("a", fitted), ("b", LogisticRegression().fit(X, Y))], cv="prefit")
        .fit(X, Y)
        .predict_proba(X)
    ),
    "MAPIE": conformal,
}


@pytest.mark.parametrize("tool", FITTED.values(), ids=FITTED)
def test_a_tool_for_fitted_estimators(ours: Any, tool: Any) -> None:
    np.testing.assert_allclose(tool(ours), tool(Plain().fit(X, Y)), atol=1e-6)
    plt.close("all")


def columns(estimator: Any) -> Any:
    table = pd.DataFrame({"size": X[:, 0], "kind": np.where(X[:, 1] > 0, "a", "b")})
    pairs = [(OneHotEncoder(sparse_output=False), ["kind"])]
    first = make_column_transformer(*pairs, remainder=StandardScaler())
    pipeline = make_pipeline(first, estimator).set_output(transform="pandas").fit(table, Y)
    if isinstance(estimator, AsyncKFoldClassifier):
        assert [*estimator.feature_names_in_] == [*first.get_feature_names_out()]
        assert estimator.n_features_in_ == 3
    return pipeline.predict_proba(table)


def searched(estimator: Any) -> Any:
    search = GridSearchCV(estimator, {"epochs": [1, 4]}, cv=2, scoring="neg_log_loss").fit(X, Y)
    return np.append(search.cv_results_["mean_test_score"], search.predict_proba(X)[:, 0])


FITTING = {
    "cross_val_score": lambda each: cross_val_score(each, X, Y, cv=2, scoring="neg_log_loss"),
    "GridSearchCV": searched,
    "ColumnTransformer, Pipeline and set_output": columns,
}


@pytest.mark.parametrize("tool", FITTING.values(), ids=FITTING)
def test_a_tool_that_fits(tool: Any) -> None:
    np.testing.assert_allclose(tool(network()), tool(Plain()), atol=1e-6)


def test_it_is_the_run_that_asynckfold_makes(ours: Any, root: Path) -> None:
    results = run(root, (X, Y), refit=True)
    assert ours.results_.fingerprint == results.fingerprint
    assert network().fit(X, Y, np.ones(60)).results_.fingerprint == results.fingerprint
    assert (ours.best_params_, ours.best_score_) == (results.best_params_, results.best_score_)
    assert ours.score(X, Y) == np.mean(results.ensemble().predict(X) == Y)
    expected = results.best_estimator_(torch.from_numpy(X)).softmax(1).detach()
    alone = network(ensemble=False).fit(X, Y)
    np.testing.assert_allclose(alone.predict_proba(X), expected, atol=1e-6)


@pytest.mark.parametrize("labels", [CODES * 4 + 1, CODES == 1, CODES - 0.0, Y.astype("O")])
def test_labels_come_back_as_they_are(ours: Any, labels: Any) -> None:
    other = network().fit(X, labels)
    assert other.classes_.tolist() == np.unique(labels).tolist()
    assert other.predict(X).dtype == labels.dtype
    np.testing.assert_array_equal(other.predict(X) == labels, ours.predict(X) == Y)


def test_numbers_one_or_several_of_a_sample() -> None:
    words = {"epochs": 30, "cv": 3, "settings": SETTINGS, "params": {"lr": [0.3]}}
    targets = X @ np.arange(8) + 1
    for y in targets, np.stack([targets, X[:, 0]], axis=1):
        one = AsyncKFoldRegressor(nn.Linear, **words).fit(X, y)
        models = [one.results_.model(fold=fold) for fold in range(3)]
        expected = np.mean([model(torch.from_numpy(X)).detach() for model in models], axis=0)
        np.testing.assert_allclose(one.predict(X), expected.reshape(y.shape), atol=1e-4)
        assert one.score(X, y) > 0.9
        np.testing.assert_array_equal(one.results_.estimator().predict(X), one.predict(X))


def test_groups_stay_together() -> None:
    groups = np.arange(60) // 6
    for fold in network(cv=GroupKFold(2)).fit(X, Y, groups=groups).results_.folds:
        assert not {*groups[fold.train]} & {*groups[fold.valid]}


def test_a_copy_predicts_the_same_bits_without_the_run(ours: Any) -> None:
    for twin in pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours):
        np.testing.assert_array_equal(twin.predict_proba(X), ours.predict_proba(X))
        assert not hasattr(twin, "results_")
    assert clone(ours).set_params(epochs=7).get_params() == ours.get_params() | {"epochs": 7}


def test_clones_share_a_folder_and_train_nothing_twice(root: Path) -> None:
    first = network(root_dir=root).fit(X, Y).results_
    again = network(root_dir=root).fit(X, Y).results_
    assert again.to_frame("fold").equals(first.to_frame("fold"))  # with the seconds
    other = network(root_dir=root).fit(X[:40], Y[:40]).results_
    assert {first.root_dir, other.root_dir} == {*root.iterdir()}
    # Without a folder, it is a temporary one that goes with the results.
    results = network().fit(X, Y).results_
    temporary = results.root_dir
    assert results.ensemble().predict(X).shape == Y.shape
    del results
    assert not temporary.exists()


def test_the_estimator_of_a_candidate(root: Path) -> None:
    data = pd.DataFrame(X, columns=list("abcdefgh")), Y
    results = run(root, data, preprocess=StandardScaler())
    fitted = results.estimator("Linear/cosine")
    np.testing.assert_array_equal(
        fitted.predict_proba(data[0]), results.ensemble().predict_proba(X)
    )
    assert (fitted.n_features_in_, [*fitted.feature_names_in_]) == (8, [*"abcdefgh"])
    # A clone trains as the run did.
    assert clone(fitted).fit(*data).results_.fingerprint == results.fingerprint
    with pytest.raises(InputError, match="models come from results of a call"):
        load_results(root).estimator()
    dataset = TensorDataset(torch.from_numpy(X), torch.eye(2)[CODES])
    several = AsyncKFold(2, dataset, root / "2", nn.BCEWithLogitsLoss(), 10, **SETTINGS, verbose=0)
    with pytest.raises(InputError, match="one label or number for each sample: received multilab"):
        several({"net": lambda: nn.Linear(8, 2)}, ["cosine"], adam, {"epochs": 1}).estimator()


@pytest.mark.parametrize(
    ("words", "params", "data"),
    [
        ("not hold what the estimator takes itself: received 'cv'", {"settings": {"cv": 3}}, {}),
        ("received 'refit'. Use ensemble=False", {"settings": {"refit": True}}, {}),
        ("received 'epochs'. Use epochs", {"trainer_params": {"epochs": 3}}, {}),
        ("keyword argument 'engin'. Did you mean", {"settings": {"engin": "serial"}}, {}),
        ("must suit AsyncKFoldClassifier", {"criterion": nn.MSELoss()}, {"y": CODES}),
        ("for each of the 60 samples", {}, {"sample_weight": np.ones(9)}),
        ("y must have at least two classes", {}, {"y": np.zeros(60, int)}),
    ],
)
def test_what_is_wrong_is_refused_before_the_start(
    root: Path, words: str, params: dict[str, Any], data: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        network(root_dir=root).set_params(**params).fit(**{"X": X, "y": Y, **data})
    assert not root.exists()


FEW = ("check_estimators_unfitted", "check_methods_subset_invariance", "check_dict_unchanged")


@pytest.mark.nightly(but=["few-AsyncKFoldClassifier", "few-AsyncKFoldRegressor"])
@pytest.mark.parametrize("kind", [AsyncKFoldClassifier, AsyncKFoldRegressor])
@pytest.mark.parametrize("which", ["few", "all"])
def test_checks_of_scikit_learn(kind: Any, which: str) -> None:
    estimator = kind(opt_fn=adam, epochs=20, cv=2, settings=SETTINGS)
    names, left = set(), {"check_array_api_input", "check_sample_weight_equivalence_on_dense_data"}
    for one, check in estimator_checks.estimator_checks_generator(estimator):
        names.add(name := check.func.__name__)
        # What is left out, and why, is in the how-to guide.
        if name in FEW or (which == "all" and name not in left):
            check(one)
    assert {*FEW} < names


def test_a_transformer_that_takes_targets_gets_them_without_a_warning() -> None:
    table = pd.DataFrame({"town": np.array(["a", "b", "c"] * 10)})
    settings = {**SETTINGS, "preprocess": make_pipeline(TargetEncoder(), StandardScaler())}
    words = {"epochs": 1, "cv": 2, "dtype": None, "settings": settings}
    fitted = AsyncKFoldRegressor(nn.Linear, **words).fit(table, np.linspace(0, 1, 30))
    assert len(set(fitted.predict(table).tolist())) == 3
