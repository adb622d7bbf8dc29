"""More from the same folds: what is chosen on held-out samples is scored on others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
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


def weights_of(results: CVResults, left_out: Any, rounds: int = 4) -> Any:
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
    blend = run.blend(rounds=4)
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
