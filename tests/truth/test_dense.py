"""A class or a number for each pixel: bits of a plain PyTorch loop, scores of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn import metrics
from torch import nn

from asynckfold import AllJobsFailedError, AsyncKFold, CVResults, InputError
from tests.training.sweeps import epoch_batches, seed_all

Array = npt.NDArray[Any]

COUNT, SIZE, EPOCHS, BATCH = 26, 6, 2, 5
"""13 samples in a fold: its last batch, and that of an evaluation, is smaller."""

IGNORED = 255


def pictures() -> Array:
    return np.random.default_rng(0).normal(size=(COUNT, 2, SIZE, SIZE)).astype(np.float32)


def pixel_classes(inputs: Array, *, ignored: bool = False) -> Array:
    """Classes 0 to 2 by the first channel; some rows are ignored, in unequal numbers."""
    found = np.digitize(inputs[:, 0], [-0.5, 0.5]).astype(np.int64)
    if ignored:
        for row in range(COUNT):
            found[row, : row % 4] = IGNORED
    return found


class Net(nn.Module):
    """Two convolutions."""

    def __init__(self, channels: int = 3, *, squeezed: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.last = nn.Conv2d(4, channels, 1)
        self.squeezed = squeezed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.last(self.first(inputs).relu())
        return found.squeeze(1) if self.squeezed else found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)


def swept(
    root: Path,
    targets: Any,
    criterion: Any,
    make: Callable[[], nn.Module] = Net,
    **settings: Any,
) -> CVResults:
    fixed = {"parallelize": False, "fuse": False, "verbose": 0, "report": False}
    words: dict[str, Any] = {**fixed, "threads_per_job": 1, **settings}
    kfold = AsyncKFold(2, (pictures(), targets), root, criterion, BATCH, **words)
    params = {"epochs": EPOCHS, "eval_batch_size": BATCH, "memory_format": "contiguous"}
    return kfold({"net": make}, ["constant"], sgd, params)


def plain_loop(
    results: CVResults, index: int, targets: Array, criterion: Any, make: Callable[[], nn.Module]
) -> tuple[dict[str, torch.Tensor], Array]:
    """Train one fold; return weights and outputs of the held-out samples."""
    job, fold = results.plan.jobs[index], results.folds[index]
    inputs, wanted = torch.from_numpy(pictures()), torch.from_numpy(targets)
    torch.set_num_threads(results.plan.threads_per_job)
    seed_all(job.seed)
    model = make()
    optimizer = sgd(model)
    for epoch in range(EPOCHS):
        for rows in epoch_batches(fold.train, job.seed, epoch, BATCH):
            optimizer.zero_grad()
            criterion(model(inputs[rows]), wanted[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        outputs = [model(inputs[rows]) for rows in torch.from_numpy(fold.valid).split(BATCH)]
    return model.state_dict(), torch.cat(outputs).numpy()


def assert_same_bits(
    results: CVResults, targets: Array, criterion: Any, make: Callable[[], nn.Module]
) -> list[Array]:
    found = []
    for index, fold in enumerate(results.folds):
        weights, outputs = plain_loop(results, index, targets, criterion, make)
        ours = results.state_dict("net/constant", fold=index)
        assert all(torch.equal(weights[name], ours[name]) for name in weights)
        assert np.array_equal(results.oof["net/constant"][fold.valid], outputs)
        found.append(outputs)
    return found


TARGETS = pixel_classes(pictures(), ignored=True)
CRITERION = nn.CrossEntropyLoss(ignore_index=IGNORED)
SCORING = ["mean_iou", "dice", "pixel_accuracy", "accuracy", "f1_weighted", "jaccard_macro"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> CVResults:
    return swept(tmp_path_factory.mktemp("dense"), TARGETS, CRITERION, scoring=SCORING)


def test_pixel_classes_have_the_bits_of_a_plain_loop_and_the_scores_of_numpy(
    results: CVResults,
) -> None:
    targets, criterion = TARGETS, CRITERION
    for index, outputs in enumerate(assert_same_bits(results, targets, criterion, Net)):
        truth = targets[results.folds[index].valid]
        known = truth != IGNORED
        assert known.mean() < 0.9
        true, guess = truth[known], outputs.argmax(1)[known]
        shares = []
        for label in range(3):
            both = ((true == label) & (guess == label)).sum()
            shares.append((both, ((true == label) | (guess == label)).sum()))
        iou = np.mean([both / either for both, either in shares])
        dice = np.mean([2 * both / (either + both) for both, either in shares])
        scores = results.results[results.plan.jobs[index].id].scores
        assert scores == pytest.approx(
            {
                "mean_iou": iou,
                "dice": dice,
                "pixel_accuracy": (true == guess).mean(),
                "accuracy": (true == guess).mean(),
                "f1_weighted": metrics.f1_score(true, guess, average="weighted"),
                "jaccard_macro": metrics.jaccard_score(true, guess, average="macro"),
            },
            rel=1e-12,
        )
        last = results.results[results.plan.jobs[index].id].epochs[-1]
        assert last.accuracy == scores["pixel_accuracy"]
        whole = criterion(torch.from_numpy(outputs), torch.from_numpy(truth))
        assert last.valid_loss == pytest.approx(float(whole), rel=1e-6)


def test_masks_are_scored_by_their_foreground(tmp_path: Path) -> None:
    targets = (pictures()[:, :1] > 0.8).astype(np.float32)
    criterion = nn.BCEWithLogitsLoss()
    results = swept(tmp_path / "run", targets, criterion, lambda: Net(1))
    found = assert_same_bits(results, targets, criterion, lambda: Net(1))
    for index, outputs in enumerate(found):
        true = targets[results.folds[index].valid].ravel() == 1
        guess = outputs.ravel() > 0
        scores = results.results[results.plan.jobs[index].id].scores
        assert scores == pytest.approx(
            {
                "dice": metrics.f1_score(true, guess),
                "iou": metrics.jaccard_score(true, guess),
                "pixel_accuracy": (true == guess).mean(),
            }
        )


def test_depth_is_scored_over_all_pixels(tmp_path: Path) -> None:
    targets = pictures()[:, 0] * 2 + 1
    criterion = nn.L1Loss()

    def make() -> nn.Module:
        return Net(1, squeezed=True)

    scoring = ["neg_mean_absolute_error", "r2"]
    results = swept(tmp_path / "run", targets, criterion, make, scoring=scoring)
    for index, outputs in enumerate(assert_same_bits(results, targets, criterion, make)):
        truth = targets[results.folds[index].valid]
        scores = results.results[results.plan.jobs[index].id].scores
        assert scores == pytest.approx(
            {
                "neg_mean_absolute_error": -float(np.abs(truth - outputs).mean()),
                "r2": metrics.r2_score(truth.ravel(), outputs.ravel()),
            },
            rel=1e-6,
        )


OUTPUTS = "the criterion must take the outputs of model net"


@pytest.mark.parametrize(
    ("make", "targets", "criterion", "words"),
    [
        (lambda: Net(1), pictures()[:, 0], nn.MSELoss(), OUTPUTS),
        (lambda: Net(2), pixel_classes(pictures()), nn.CrossEntropyLoss(), "score of each class"),
        (
            lambda: Net(3),
            pixel_classes(pictures(), ignored=True),
            nn.CrossEntropyLoss(),
            "ignore_index",
        ),
        (lambda: Net(1), pictures()[:, :1], nn.BCEWithLogitsLoss(), "masks must hold 0 and 1"),
        (Net, pixel_classes(pictures()) - 1, nn.CrossEntropyLoss(), "index from 0"),
    ],
)
def test_shapes_and_values_that_do_not_fit_are_refused(
    tmp_path: Path, make: Any, targets: Array, criterion: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        swept(tmp_path / "run", targets, criterion, make)
    assert not (tmp_path / "run" / "run.db").exists()


def test_scores_that_need_more_than_labels_are_refused(tmp_path: Path) -> None:
    targets = pixel_classes(pictures())
    for name in ("neg_log_loss", "roc_auc_ovr", "r2", "adjusted_rand_score"):
        with pytest.raises(InputError, match=name):
            swept(tmp_path / "run", targets, nn.CrossEntropyLoss(), scoring=name)


def test_fused_folds_of_dense_targets_agree_with_separate_ones(
    tmp_path: Path, results: CVResults
) -> None:
    fused = swept(tmp_path / "fused", TARGETS, CRITERION, fuse=2)
    assert len(fused.plan.groups) == 1
    for index in range(2):
        ours, theirs = (run.state_dict("net/constant", fold=index) for run in (results, fused))
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)


def test_the_ensemble_predicts_a_map_of_classes(results: CVResults) -> None:
    ensemble = results.ensemble()
    labels = ensemble.predict(pictures()[:3])
    assert labels.shape == (3, SIZE, SIZE)
    assert np.array_equal(labels, ensemble.predict_proba(pictures()[:3]).argmax(1))
    assert results.classes_ is None
    assert "mean_iou" in str(results.verdict)


def test_a_job_stopped_in_the_middle_ends_with_the_same_bits(
    tmp_path: Path, results: CVResults
) -> None:
    words: dict[str, Any] = {"scoring": SCORING}
    with pytest.raises(AllJobsFailedError, match="timed out"):
        swept(tmp_path, TARGETS, CRITERION, job_timeout_s=1e-9, **words)
    assert list(tmp_path.rglob("checkpoint-0000-*"))
    assert swept(tmp_path, TARGETS, CRITERION, **words).fingerprint == results.fingerprint
