"""Outputs that are too large are scored and dropped: the same scores, and nothing silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults, InputError, load_results
from asynckfold.cli import main

COUNT, SIDE = 24, 8
RANDOM = np.random.default_rng(5)
PICTURES = RANDOM.normal(size=(COUNT, 1, SIDE, SIDE)).astype(np.float32)
MASKS = (PICTURES[:, 0] > 0.3).astype(np.int64)
OUTPUT_BYTES = 4 * COUNT * 2 * SIDE * SIDE
GIB = 1 << 30


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def swept(root: Path, most: float, **settings: Any) -> CVResults:
    torchmetrics = pytest.importorskip("torchmetrics")
    dice = torchmetrics.classification.MulticlassF1Score(2)
    words: dict[str, Any] = {"parallelize": False, "verbose": 1, "report": False}
    words |= {"scoring": {"pixel_accuracy": "pixel_accuracy", "dice": dice, "own": of_all}}
    criterion = nn.CrossEntropyLoss()
    kfold = AsyncKFold(
        3, (PICTURES, MASKS), root, criterion, 8, keep_outputs_gib=most, **words | settings
    )
    models = {"net": lambda: nn.Conv2d(1, 2, 3, padding=1)}
    return kfold(models, ["constant", "cosine"], sgd, {"epochs": 2})


def of_all(targets: Any, outputs: Any) -> float:
    """A score that needs all the outputs of a fold at once."""
    return float(np.corrcoef(targets.ravel(), outputs[:, 1].ravel())[0, 1])


@pytest.mark.reports
def test_scores_are_the_same_and_what_needs_outputs_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = 2 * OUTPUT_BYTES / GIB
    kept = swept(tmp_path / "kept", exact)
    assert "not kept" not in capsys.readouterr().err
    assert kept.oof["net/constant"].shape == (COUNT, 2, SIDE, SIDE)

    dropped = swept(tmp_path / "dropped", exact * 0.99, report=True)
    told = capsys.readouterr().err
    assert "outputs of held-out samples are not kept: they would take 2.29e-05 GiB" in told
    assert "each fold is scored all the same" in told
    assert not dropped.plan.by_batch
    for name, result in kept.results.items():
        other = dropped.results[name]
        assert other.outputs is None
        assert other.scores == result.scores
        assert other.weights == result.weights
        for mine, theirs in zip(other.epochs, result.epochs, strict=True):
            assert (mine.train_loss, mine.valid_loss) == (theirs.train_loss, theirs.valid_loss)
    for results in (dropped, load_results(tmp_path / "dropped")):
        with pytest.raises(InputError, match="larger keep_outputs_gib"):
            _ = results.oof
        with pytest.raises(InputError, match="those of 6 finished jobs were not"):
            _ = results.oof_mean
    assert not list((tmp_path / "dropped" / "oof").glob("net-*.npz"))
    page = (tmp_path / "dropped" / "report" / "index.html").read_text()
    assert "outputs of held-out samples are not kept" in page
    assert main(["compare", "--bits", str(tmp_path / "kept"), str(tmp_path / "dropped")]) in (0, 1)
    assert "other scores or outputs from equal weights" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="kept no outputs"):
        predicted = dropped.ensemble("net/constant").predict(PICTURES)
    assert np.array_equal(predicted, kept.ensemble("net/constant").predict(PICTURES))
