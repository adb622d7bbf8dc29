"""More from the same folds: what is chosen on held-out samples is scored on others."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax
from sklearn.base import clone
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LinearRegression
from sklearn.metrics import log_loss, r2_score, roc_auc_score
from sklearn.model_selection import KFold
from torch import nn

from asynckfold import AsyncKFold, CVResults, InputError, load_model, load_results
from asynckfold.results.intervals import bounds, sets
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


# Intervals, train scores, pooled scores

NEW = X[:7] + np.float32(0.2)
NUMBERS = (100 + 20 * X[:, :1] + 10 * X[:, 1:2] ** 2).astype(np.float32)


def outputs_of(results: CVResults, fold: int, rows: Any) -> Any:
    """What the model of a fold of the first repeat gives."""
    model = results.model(results.candidates[0].name, fold)
    return model(torch.from_numpy(rows)).detach().double().numpy()


def numbers_of(results: CVResults, fold: int, rows: Any) -> Any:
    trained = NUMBERS[results.folds[fold].train]
    return outputs_of(results, fold, rows) * trained.std() + trained.mean()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> CVResults:
    words = {"n_repeats": 2, "target_transform": "standardize", "return_train_score": True}
    root, model = tmp_path_factory.mktemp("lines") / "run", {"line": lambda: nn.Linear(8, 1)}
    return called(root, model, (X, NUMBERS), nn.MSELoss(), 3, **words)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.01])
def test_intervals_of_numbers_are_cv_plus_in_the_units_of_the_targets(
    lines: CVResults, alpha: float
) -> None:
    lower, upper = [], []
    for k, fold in enumerate(lines.folds[:3]):
        new = numbers_of(lines, k, NEW)[:, 0]
        for residual in np.abs(numbers_of(lines, k, X[fold.valid]) - NUMBERS[fold.valid]):
            lower.append(residual - new)
            upper.append(residual + new)
    low, high = lines.intervals(NEW, alpha=alpha)
    if (place := math.ceil((1 - alpha) * 61)) > 60:
        assert (high - low == np.inf).all()
    else:
        np.testing.assert_allclose(low, -np.sort(lower, axis=0)[place - 1], rtol=1e-4)
        np.testing.assert_allclose(high, np.sort(upper, axis=0)[place - 1], rtol=1e-4)


@pytest.mark.parametrize("alpha", [0.4, 0.6, 0.01])
def test_sets_of_classes_are_cross_conformal(run: CVResults, two: CVResults, alpha: float) -> None:
    """A class is in a set where its p value (Vovk 2015) is above alpha."""
    kinds: list[tuple[CVResults, Any, Any]] = [
        (run, lambda each: softmax(each, axis=1), Y),
        (two, lambda each: np.stack([expit(-each), expit(each)], axis=1), np.minimum(Y, 1)),
    ]
    for results, shares_of, codes in kinds:
        above = np.ones((len(NEW), codes.max() + 1))
        for k, fold in enumerate(each for each in results.folds if each.repeat == 0):
            held, new = (shares_of(outputs_of(results, k, rows)) for rows in (X[fold.valid], NEW))
            for share, code in zip(held, codes[fold.valid], strict=True):
                above += new >= share[code]
        found = results.intervals(NEW, results.candidates[0].name, alpha)
        np.testing.assert_array_equal(found, above / 61 > alpha)
        assert found.all() == (alpha == 0.01)


def test_intervals_hold_as_many_new_samples_as_they_say() -> None:
    random, folds, within = np.random.default_rng(0), np.arange(40) % 4, []
    for _ in range(200):
        x, noise = random.normal(size=(2, 90))
        y = np.sin(2 * x) + noise**3 / 3
        fits = [np.polyfit(x[:40][folds != k], y[:40][folds != k], 1) for k in range(4)]
        line = np.array([np.polyval(fit, x) for fit in fits])
        parts = [np.abs(y[:40] - line[k, :40])[folds == k] for k in range(4)]
        low, high = bounds(parts, line[:, 40:], 0.2)
        codes, shares = (y > 0).astype(int), np.stack([expit(-line), expit(line)], axis=2)
        scores = 1 - shares[folds, np.arange(40), codes[:40]]
        chosen = sets([scores[folds == k] for k in range(4)], shares[:, 40:], 0.2)
        in_set = chosen[np.arange(50), codes[40:]]
        within.append([((low <= y[40:]) & (y[40:] <= high)).mean(), in_set.mean()])
    assert ((np.mean(within, axis=0) > 0.79) & (np.mean(within, axis=0) < 0.86)).all()


def test_bounds_are_those_of_mapie() -> None:
    mapie = pytest.importorskip("mapie.regression")
    model, splits, y = LinearRegression(), KFold(5), NUMBERS[:, 0].astype(float)
    fits = [(held, clone(model).fit(X[train], y[train])) for train, held in splits.split(X)]
    residuals = [np.abs(y[held] - fit.predict(X[held])) for held, fit in fits]
    new = np.array([fit.predict(NEW) for _, fit in fits])
    words = {"confidence_level": 0.85, "method": "plus", "cv": splits}
    theirs = mapie.CrossConformalRegressor(model, **words).fit_conformalize(X, y)
    expected = theirs.predict_interval(NEW)[1][..., 0]
    np.testing.assert_allclose(np.transpose(bounds(residuals, new, 0.15)), expected)


def test_what_has_no_intervals_is_refused(lines: CVResults, tmp_path: Path) -> None:
    for alpha in (0, 1, float("nan"), "0.1"):
        with pytest.raises(InputError, match="alpha must be a number above 0 and below 1"):
            lines.intervals(NEW, alpha=alpha)  # type: ignore[arg-type]
    pairs = called(tmp_path / "run", {"a": nn.Linear(8, 2)}, (X, X[:, :2]), nn.MSELoss())
    with pytest.raises(InputError, match="targets must be one number or class a sample"):
        pairs.intervals(NEW)


def test_train_scores_are_of_the_model_of_the_fold_on_its_training_part(
    lines: CVResults, run: CVResults
) -> None:
    table = lines.cv_results_
    for k, fold in enumerate(lines.folds[:3]):
        expected = r2_score(NUMBERS[fold.train], numbers_of(lines, k, X[fold.train]))
        np.testing.assert_allclose(table[f"split{k}_train_r2"], expected, atol=1e-5)
    splits = [table[f"split{k}_train_r2"][0] for k in range(6)]
    assert table["mean_train_r2"][0] == pytest.approx(np.mean(splits))
    assert table["std_train_r2"][0] == pytest.approx(np.std(splits))
    assert not [key for key in run.cv_results_ if "train" in key]


def test_pooled_scores_are_of_all_held_out_samples_at_once(
    lines: CVResults, two: CVResults
) -> None:
    (row,) = lines.pooled_scores().to_dict("records")
    expected = np.mean([r2_score(NUMBERS, each) for each in lines.oof["line/constant"]])
    assert row["pooled_r2"] == pytest.approx(expected, abs=1e-5)
    assert row["mean_r2"] == lines.best_score_ != row["pooled_r2"]
    for results in (two, load_results(two.root_dir)):
        (row,) = results.pooled_scores().to_dict("records")
        expected = roc_auc_score(Y == 0, -two.oof["linear/constant"])
        assert row["pooled_roc_auc"] == pytest.approx(expected)
