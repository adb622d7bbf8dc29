"""More from the same folds: what is chosen on held-out samples is scored on others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import log_loss
from torch import nn

from asynckfold import AsyncKFold, CVResults, InputError, load_model, load_results
from tests.toy import adam, samples

X, Y = samples()


class Part(nn.Module):
    """Sees some of the eight numbers of a sample, and is sure of what it sees."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.last = nn.Linear(high - low, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 9 * self.last(inputs[:, self.low : self.high])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "none": lambda: Part(3, 8),
    "left": lambda: Part(0, 2),
    "right": lambda: Part(1, 4),
}


def called(
    root: Path,
    models: Any = MODELS,
    data: Any = (X, Y),
    criterion: Any = None,
    kfolds: Any = 2,
    **settings: Any,
) -> CVResults:
    settings = {"verbose": 0, "baseline": None, "parallelize": False, "report": False, **settings}
    kfold = AsyncKFold(kfolds, data, root, criterion or nn.CrossEntropyLoss(), 10, **settings)
    return kfold(models, ["constant"], adam, {"epochs": 8})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> CVResults:
    root = tmp_path_factory.mktemp("folds") / "run"
    return called(root, n_repeats=2, scoring=["neg_log_loss", "accuracy"])


def weights_of(results: CVResults, left_out: Any, rounds: int = 3) -> Any:
    """The weights that greedy selection gives by a plain loop, without some samples."""
    oof = np.array([softmax(item.astype(float), axis=-1) for item in results.oof.values()])
    kept = [(f.repeat, np.setdiff1d(f.valid, left_out)) for f in results.folds]
    chosen: list[int] = []
    tried = []
    for _ in range(rounds):
        losses = []
        for more in range(len(oof)):
            mean = oof[[*chosen, more]].mean(axis=0)
            held = [(Y[rows], mean[at, rows]) for at, rows in kept if len(rows)]
            each = [log_loss(*pair, labels=range(3)) for pair in held]
            losses.append(np.mean(each))
        chosen.append(int(np.argmin(losses)))
        tried.append(min(losses))
    first = chosen[: int(np.argmin(tried)) + 1]
    return np.bincount(first, minlength=len(oof)) / len(first)


def test_a_blend_selects_greedily_and_scores_each_fold_by_weights_of_the_others(
    run: CVResults,
) -> None:
    blend = run.blend(rounds=3)
    weights = weights_of(run, [])
    names = list(run.oof)
    assert blend.weights == {
        name: pytest.approx(each) for name, each in zip(names, weights, strict=True) if each
    }
    assert len(blend.weights) > 1
    oof = {name: softmax(item.astype(float), axis=-1) for name, item in run.oof.items()}
    expected = []
    for fold in run.folds:
        without = weights_of(run, fold.valid)
        held = np.array([oof[name][fold.repeat, fold.valid] for name in names])
        mean = np.average(held, axis=0, weights=without)
        expected.append(-log_loss(Y[fold.valid], mean, labels=range(3)))
    np.testing.assert_allclose(blend.scores, expected, rtol=1e-6)
    assert blend.score == pytest.approx(np.mean(expected))
    shares = sum(each * run.ensemble(name).predict_proba(X) for name, each in blend.weights.items())
    np.testing.assert_allclose(blend.predict_proba(X), shares, rtol=1e-6)
    assert set(run.blend(names[:2], "accuracy", rounds=3).weights) <= set(names[:2])


def test_a_blend_is_saved_with_its_weights(run: CVResults, tmp_path: Path) -> None:
    blend, path = run.blend(rounds=2), tmp_path / "blend.safetensors"
    blend.save(path)
    factories = {name: MODELS[name.split("/")[0]] for name in blend.weights}
    loaded = load_model(path, factories)
    assert loaded.predict_proba(X).tobytes() == blend.predict_proba(X).tobytes()
    with pytest.raises(InputError, match="factory must have the candidate"):
        load_model(path, {"other": MODELS["left"]})


def test_numbers_are_blended(tmp_path: Path) -> None:
    models = {
        "tiny": nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1)),
        "line": nn.Linear(8, 1),
    }
    data = X, X[:, :1] + X[:, 1:2] ** 2
    results = called(tmp_path / "run", models, data, nn.MSELoss())
    with pytest.raises(InputError, match="targets must be one class a sample"):
        results.calibrate()
    blend = results.blend(rounds=5)
    parts = [w * results.ensemble(name).predict(X) for name, w in blend.weights.items()]
    np.testing.assert_allclose(blend.predict(X), np.sum(parts, axis=0), rtol=1e-5, atol=1e-6)
    assert blend.score >= max(row.mean("r2") for row in results.candidates) - 0.2


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"candidates": ["left/constant"]}, "a blend needs two candidates"),
        ({"candidates": ["left/constant", "let/constant"]}, "candidate must be one of"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"metric": "acuracy"}, "scoring must name scikit-learn scorers"),
    ],
)
def test_what_cannot_be_blended_is_refused(run: CVResults, arguments: Any, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        run.blend(**arguments)


def test_a_blend_needs_outputs_of_several_folds(tmp_path: Path, run: CVResults) -> None:
    with pytest.raises(InputError, match="models come from results of a call"):
        load_results(run.root_dir).blend()
    one = [(np.arange(40), np.arange(40, 60))]
    with pytest.raises(InputError, match="chosen on folds is scored on others"):
        called(tmp_path / "one", kfolds=one).blend()
    dropped = called(tmp_path / "none", keep_outputs_gib=0)
    with pytest.raises(InputError, match="out-of-fold outputs must have been kept"):
        dropped.blend()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> CVResults:
    """One output for two classes of unequal size, of which the first is positive."""
    root = tmp_path_factory.mktemp("two") / "run"
    labels = np.array(["no", "yes", "yes"])[Y]
    model = {"linear": lambda: nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))}
    criterion = nn.BCEWithLogitsLoss()
    return called(root, model, (X, labels), criterion, 3, pos_label="no", scoring="roc_auc")


def f1(true: Any, decided: Any) -> float:
    return 2 * float(np.sum(true * decided)) / max(1, np.sum(true) + np.sum(decided))


def test_a_threshold_is_the_best_on_the_other_folds(two: CVResults) -> None:
    threshold = two.threshold("f1")
    shares = expit(-two.oof["linear/constant"].astype(float))
    positive = Y == 0

    def best(rows: Any) -> float:
        cuts = np.convolve(np.unique([0, *shares[rows], 1]), [0.5, 0.5], "valid")
        scores = np.array([f1(positive[rows], shares[rows] >= cut) for cut in cuts])
        ties = cuts[scores == scores.max()]
        return float(ties[np.abs(ties - 0.5).argmin()])

    assert threshold.value == pytest.approx(best(np.arange(60)))
    cuts = [best(fold.train) for fold in two.folds]
    pairs = [
        (positive[f.valid], shares[f.valid] >= c) for f, c in zip(two.folds, cuts, strict=True)
    ]
    np.testing.assert_allclose(threshold.scores, [f1(*pair) for pair in pairs])
    usual = [f1(positive[f.valid], shares[f.valid] >= 0.5) for f in two.folds]
    np.testing.assert_allclose(threshold.default_scores, usual)
    assert threshold.positive == "no"
    labels = threshold.labels([[threshold.value, 1 - threshold.value], [0.0, 1.0]])
    assert labels.tolist() == ["no", "yes"]
    same = load_results(two.root_dir).threshold(f1)
    assert same.value == threshold.value


def recalibrated(rows: Any, shares: Any, later: Any, method: str) -> Any:
    """What isotonic regression, or the best of many temperatures, makes of probabilities."""
    if method == "temperature":
        logits, codes = np.log(shares[rows]), Y[rows]
        tried = np.exp(np.linspace(-4, 4, 2001))
        true = np.arange(len(codes)), codes
        losses = [-np.log(softmax(logits / t, axis=1)[true]).mean() for t in tried]
        return softmax(np.log(shares[later]) / tried[np.argmin(losses)], axis=1)
    fits = [
        IsotonicRegression(out_of_bounds="clip").fit(shares[rows, k], Y[rows] == k)
        for k in range(3)
    ]
    columns = np.stack([fit.predict(shares[later, k]) for k, fit in enumerate(fits)], axis=1)
    total = columns.sum(axis=1, keepdims=True)
    return np.where(total > 0, columns / np.where(total > 0, total, 1), 1 / 3)


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_a_calibration_is_judged_on_folds_that_it_was_not_fitted_on(
    tmp_path: Path, method: Any
) -> None:
    results = called(tmp_path / "run", {"right": MODELS["right"]})
    calibrator = results.calibrate(method=method)
    shares = softmax(results.oof["right/constant"].astype(float), axis=1)
    after = np.zeros_like(shares)
    for fold in results.folds:
        after[fold.valid] = recalibrated(fold.train, shares, fold.valid, method)
    near = {"rtol": 1e-2, "atol": 1e-4}
    losses = log_loss(Y, shares), log_loss(Y, after)
    np.testing.assert_allclose(calibrator.log_loss, losses, **near)
    errors = []
    for each in (shares, after):
        sure, right = each.max(axis=1), each.argmax(axis=1) == Y
        bins = [(sure >= low) & (sure < low + 0.1 + (low == 0.9)) for low in np.arange(10) / 10]
        errors.append(
            sum(abs(right[b].mean() - sure[b].mean()) * b.mean() for b in bins if b.any())
        )
    assert calibrator.ece[0] == pytest.approx(errors[0])
    assert calibrator.ece[1] == pytest.approx(errors[1], abs=0.02)
    rows = np.arange(60)
    np.testing.assert_allclose(calibrator(shares), recalibrated(rows, shares, rows, method), **near)
    if method == "temperature":
        assert calibrator.temperature is not None
        assert calibrator.temperature > 1
        assert calibrator.log_loss[1] < calibrator.log_loss[0]


def test_what_has_no_threshold_is_refused(run: CVResults, two: CVResults) -> None:
    with pytest.raises(InputError, match="a threshold needs two classes"):
        run.threshold("f1")
    with pytest.raises(InputError, match="metric must score decisions"):
        two.threshold("roc_auc")
    with pytest.raises(InputError, match="metric must name a scikit-learn scorer"):
        two.threshold("f11")
    with pytest.raises(InputError, match="method must be 'temperature' or 'isotonic'"):
        two.calibrate(method="platt")  # type: ignore[arg-type]
