"""`sample_weight=`: the means of a plain loop that weighs by hand, and scikit-learn's scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.nn import functional as F

from asynckfold import AsyncKFold, CVResults, InputError
from tests.api.test_sampler import PAIRS, X, Y
from tests.plain import BATCH, EPOCHS, adam, plain_loop

W = np.random.default_rng(0).integers(0, 4, 60)
ITEMS = [(x, (y, int(weight))) for (x, y), weight in zip(PAIRS, W, strict=True)]
FOLDS = [(np.arange(20, 60), np.arange(20)), (np.arange(30), np.arange(30, 60))]
MODELS = {"linear": lambda: nn.Linear(4, 2)}
CLASSES = torch.tensor([1.0, 3.0])
ALLREDUCE = {"trainer": "allreduce", "processes": 2, "engine": "process"}
MEAN = {"forward": lambda self, *pair: F.cross_entropy(*pair)}  # whatever its reduction


def swept(root: Path, weights: Any = W, criterion: Any = None, **words: Any) -> CVResults:
    params = {name: words.pop(name) for name in {"trainer", "processes"} & words.keys()}
    words = {"engine": "serial", "threads_per_job": 1, "verbose": 0, "report": False, **words}
    words = {"batch_size": BATCH, "criterion": criterion or nn.CrossEntropyLoss(), **words}
    params |= {"epochs": EPOCHS, "accumulate": BATCH // words["batch_size"]}
    kfold = AsyncKFold(FOLDS, (X, Y), root, sample_weight=weights, **words)
    return kfold(MODELS, ["constant"], adam, params)


def weighted_mean(outputs: Tensor, targets: Any, classes: Any) -> tuple[Tensor, Tensor]:
    """The mean by hand, and what it is divided by: class weights multiply those of samples."""
    labels, weights = targets
    total = (weights * (1 if classes is None else classes[labels])).sum()
    losses = F.cross_entropy(outputs, labels, classes, reduction="none")
    return (losses * weights).sum() / total.clamp(min=1), total


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (None, {"baseline": "measure", "refit": True}),
        (CLASSES, {"batch_size": BATCH // 2}),
        pytest.param(CLASSES, ALLREDUCE, marks=pytest.mark.nightly),
    ],
)
def test_means_and_scores_are_those_of_a_plain_loop(root: Path, classes: Any, words: Any) -> None:
    words = {"scoring": ["accuracy", "neg_log_loss"], **words}
    results = swept(root, criterion=nn.CrossEntropyLoss(classes), **words)
    seen: list[tuple[Tensor, Tensor]] = []

    def by_hand(outputs: Tensor, targets: Any) -> Tensor:
        seen.append(weighted_mean(outputs, targets, classes))
        return seen[-1][0]

    call: Any = nn.Module.__call__
    plain, outputs = plain_loop(MODELS["linear"], ITEMS, results, call, criterion=by_hand)
    found, valid = results.results[results.plan.jobs[0].id], results.folds[0].valid
    for name, item in results.state_dict(results.candidates[0].name).items():
        torch.testing.assert_close(item, plain[name], rtol=1e-4, atol=1e-6)
    last = torch.tensor([[item.item() for item in pair] for pair in seen[len(seen) // EPOCHS :]])
    held_out = weighted_mean(outputs, [*map(torch.from_numpy, (Y[valid], W[valid]))], classes)
    means = [float(last[:, 0] @ last[:, 1] / last[:, 1].sum()), float(held_out[0])]
    epoch = found.epochs[-1]
    assert [epoch.train_loss, epoch.valid_loss] == pytest.approx(means, rel=1e-5)
    # A weight of 3 is that of three samples.
    pair = Y[valid], outputs.softmax(1).numpy()
    labels, shares = (np.repeat(item, W[valid], 0) for item in pair)
    expected = accuracy_score(labels, shares.argmax(1)), -log_loss(labels, shares)
    assert [*found.scores.values()] == pytest.approx(expected, rel=1e-4)
    assert epoch.accuracy == pytest.approx(expected[0])
    if results.baseline is not None and results.refitted is not None:
        theirs = [mean for _, mean in results.baseline.epochs[found.job_id]]
        assert theirs == pytest.approx([item.train_loss for item in found.epochs], rel=1e-5)
        assert "sample_weight" in results.refitted.plan.recipe


def test_equal_weights_are_none_and_others_are_part_of_the_data(root: Path) -> None:
    plain, weighted = swept(root, None), swept(root / "2")
    assert swept(root, np.full(60, 2.5)).fingerprint == plain.fingerprint
    assert swept(root / "2", W.tolist()).fingerprint == weighted.fingerprint
    for folder, weights in (root, W), (root / "2", W + 1), (root / "2", None):
        with pytest.raises(InputError, match="dataset"):
            swept(folder, weights)
    others = weighted.compare_with([LogisticRegression(), KNeighborsClassifier()])
    (train, valid), scores = FOLDS[0], others.estimators[0].scores["accuracy"]
    fit = LogisticRegression().fit(X[train], Y[train], W[train])
    assert scores[0] == fit.score(X[valid], Y[valid], W[valid])
    assert "sample_weight" in others.errors["KNeighborsClassifier"]
    with pytest.raises(InputError, match="a run with sample_weight"):
        weighted.calibrate()


@pytest.mark.parametrize(
    ("weights", "words", "match"),
    [
        (W[:9], {}, r"each of the 60 samples: received an array of int64 of shape \(9,\)"),
        (np.arange(60) >= 20, {}, "all 20 held-out samples of fold 0 weigh 0"),
        (W, {"criterion": F.cross_entropy}, "reduction='none': received function of model linear"),
        (W, {"criterion": nn.CrossEntropyLoss(reduction="sum")}, "received CrossEntropyLoss of"),
        (W, {"criterion": type("Mean", (nn.CrossEntropyLoss,), MEAN)()}, "received Mean of"),
        (W, {"scoring": {"mine": lambda y, outputs: 0.0}}, "received mine, which takes none"),
        (W, {"training_step": len}, "must go without training_step"),
        (W, {"fuse": 2}, "its samples have weights"),
    ],
)
def test_bad_input_is_refused(root: Path, weights: Any, words: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        swept(root, weights, **words)
    assert not (root / "run.db").exists()
