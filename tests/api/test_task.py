"""What is asked of the models: found, said, or refused; and who ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.special import expit
from sklearn import metrics
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from asynckfold import AsyncKFold, CVResults, InputError
from tests.plain import BATCH, EPOCHS, adam, plain_loop

Array = npt.NDArray[Any]

COUNT = 40
RANDOM = np.random.default_rng(1)
X = RANDOM.normal(size=(COUNT, 5)).astype(np.float32)
NUMBERS = X[:, 0] * 3 + RANDOM.normal(size=COUNT).astype(np.float32)
CLASSES = np.digitize(X[:, 1], [-0.3, 0.4])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05)


def swept(
    root: Path,
    dataset: Any,
    criterion: Any,
    columns: int,
    params: dict[str, Any] | None = None,
    opt_fn: Any = sgd,
    model: Any = None,
    **settings: Any,
) -> CVResults:
    words: dict[str, Any] = {"parallelize": False, "fuse": False, "verbose": 0, "report": False}
    kfold = AsyncKFold(2, dataset, root, criterion, BATCH, **{**words, **settings})
    models = {"linear": model or (lambda: nn.Linear(5, columns))}
    return kfold(models, ["constant"], opt_fn, {"epochs": 2, **(params or {})})


def two_parts(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss of three columns against the two parts of a target."""
    first = nn.functional.mse_loss(outputs[:, 0], targets[:, 0])
    return first + (outputs[:, 1] - targets[:, 1] + outputs[:, 2]).square().mean()


def tags(count: int = COUNT) -> npt.NDArray[np.float32]:
    """Rows of four labels: on half, a fourth, and a tenth of the samples, and on one of them."""
    places = np.random.default_rng(2).permuted(np.tile(np.arange(count), (4, 1)), axis=1)
    wanted = np.array([count // 2, count // 4, count // 10, 1])
    return (places < wanted[:, None]).T.astype(np.float32)


def scores(results: CVResults) -> list[dict[str, float]]:
    return [dict(results.results[job.id].scores) for job in results.plan.jobs]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> CVResults:
    """A run with the inputs as targets."""
    root = tmp_path_factory.mktemp("pairs") / "run"
    return swept(root, (X, X), nn.MSELoss(), 5, scoring="neg_mean_squared_error")


class Alone(Dataset[Any]):
    """Samples without targets."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(X[index])


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (X, None),
        (torch.from_numpy(X), None),
        (TensorDataset(torch.from_numpy(X)), None),
        (Alone(), "reconstruction"),
        ((X, CLASSES), "reconstruction"),
    ],
)
def test_without_targets_the_input_is_reconstructed(
    tmp_path: Path, pairs: CVResults, dataset: Any, said: str | None
) -> None:
    results = swept(tmp_path / "run", dataset, nn.MSELoss(), 5, task=said)
    outputs = results.oof["linear/constant"]
    for fold, found in zip(results.folds, scores(results), strict=True):
        error = np.mean((outputs[fold.valid].astype(np.float64) - X[fold.valid]) ** 2)
        assert found == {"neg_mean_squared_error": pytest.approx(-error, rel=1e-5)}
    assert scores(results) == scores(pairs)
    assert np.array_equal(outputs, pairs.oof["linear/constant"])


def test_a_dataset_of_samples_alone_needs_the_task_to_be_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="task='reconstruction'"):
        swept(tmp_path / "run", Alone(), nn.MSELoss(), 5)


@pytest.mark.parametrize(
    ("words", "criterion", "targets", "match"),
    [
        ({"task": "regression"}, nn.CrossEntropyLoss(), CLASSES, "which are multiclass"),
        ({"task": "binary"}, nn.CrossEntropyLoss(), CLASSES, "which are multiclass"),
        ({"task": "multiclass"}, nn.MSELoss(), NUMBERS, "which are regression"),
        ({"task": "segmentation"}, nn.CrossEntropyLoss(), CLASSES, "which are multiclass"),
        ({"task": "clustering"}, nn.CrossEntropyLoss(), CLASSES, "task must be one of"),
        ({"task": "custom"}, nn.CrossEntropyLoss(), CLASSES, "needs functions"),
        (
            {"task": "custom", "scoring": "accuracy"},
            nn.CrossEntropyLoss(),
            CLASSES,
            "needs functions",
        ),
        ({"rank_by": "f1_macro"}, nn.CrossEntropyLoss(), CLASSES, "rank_by must name one"),
        ({"stratify": CLASSES[:-1]}, nn.CrossEntropyLoss(), CLASSES, "stratify must hold"),
        ({"stratify": tags() + 1}, nn.CrossEntropyLoss(), CLASSES, "a row of 0 and 1"),
        ({"stratify": "quantile"}, nn.CrossEntropyLoss(), CLASSES, "one number per sample"),
        ({"stratify": 1}, nn.MSELoss(), NUMBERS, "at least 2 bins"),
        ({"stratify": "deciles"}, nn.MSELoss(), NUMBERS, "one number per sample"),
        (
            {},
            two_parts,
            np.stack([NUMBERS, NUMBERS], axis=1),
            "scoring must fit the labels: received .r2., which says: ",
        ),
        (
            {"task": "reconstruction", "targets": CLASSES},
            nn.MSELoss(),
            NUMBERS,
            "takes the input as the target",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, words: dict[str, Any], criterion: Any, targets: Array, match: str
) -> None:
    with pytest.raises(InputError, match=match):
        swept(tmp_path / "run", (X, targets), criterion, 3, **words)
    assert not (tmp_path / "run" / "run.db").exists()


def test_a_task_says_what_an_own_criterion_does_not(tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.float())

    targets = (X[:, 0] > 0).astype(np.float32)
    words = {"output_transform": torch.sigmoid, "scoring": "accuracy"}
    results = swept(tmp_path / "run", (X, targets), loss, 1, task="binary", **words)
    for fold, found in zip(results.folds, scores(results), strict=True):
        guess = results.oof["linear/constant"][fold.valid][:, 0] > 0
        assert found["accuracy"] == np.mean(guess == (targets[fold.valid] == 1))


def test_steps_of_a_sequence_have_a_class_each(tmp_path: Path) -> None:
    inputs = RANDOM.normal(size=(COUNT, 5, 7)).astype(np.float32)
    targets = np.digitize(inputs[:, 0], [-0.4, 0.4])
    words = {"task": "segmentation", "model": lambda: nn.Conv1d(5, 3, 1)}
    results = swept(tmp_path / "run", (inputs, targets), nn.CrossEntropyLoss(), 3, **words)
    for fold, found in zip(results.folds, scores(results), strict=True):
        guess = results.oof["linear/constant"][fold.valid].argmax(1)
        assert found["pixel_accuracy"] == np.mean(guess == targets[fold.valid])


def test_rank_by_puts_another_score_first(tmp_path: Path) -> None:
    words = {"scoring": ["accuracy", "neg_log_loss"], "rank_by": "neg_log_loss"}
    results = swept(tmp_path / "run", (X, CLASSES), nn.CrossEntropyLoss(), 3, **words)
    assert results.plan.scoring == ("neg_log_loss", "accuracy")
    assert results.best_score_ == results.cv_results_["mean_test_neg_log_loss"][0]
    plain = swept(
        tmp_path / "plain", (X, CLASSES), nn.CrossEntropyLoss(), 3, scoring=words["scoring"]
    )
    assert results.fingerprint == plain.fingerprint


# Strata


def test_folds_keep_the_proportions_of_an_array(tmp_path: Path) -> None:
    sites = np.array(["north", "south", "south", "south"])[np.arange(COUNT) % 4]
    results = swept(tmp_path / "run", (X, NUMBERS[:, None]), nn.MSELoss(), 1, stratify=sites)
    for fold in results.folds:
        assert (sites[fold.valid] == "north").sum() == COUNT // 8


def test_folds_keep_the_proportions_of_quantiles(tmp_path: Path) -> None:
    order = np.sort(NUMBERS)
    for stratify, bins in (("quantile", 10), (4, 4)):
        results = swept(
            tmp_path / str(bins), (X, NUMBERS[:, None]), nn.MSELoss(), 1, stratify=stratify
        )
        place = np.searchsorted(order, NUMBERS) * bins // COUNT
        for fold in results.folds:
            counts = np.bincount(place[fold.valid], minlength=bins)
            assert counts.tolist() == [COUNT // bins // 2] * bins


def test_folds_keep_the_proportions_of_labels(tmp_path: Path) -> None:
    labels, criterion = tags(), nn.BCEWithLogitsLoss()
    results = swept(tmp_path / "run", (X, labels), criterion, 4, inner_valid=0.5)
    for fold in results.folds:
        counts = labels[fold.valid].sum(axis=0)
        assert counts[:3].tolist() == [COUNT // 4, COUNT // 8, COUNT // 20]
        assert counts[3] in (0, 1)
        inner = labels[fold.inner_valid].sum(axis=0)
        assert (np.abs(inner[:3] - counts[:3] / 2) <= 1).all()
    again = swept(tmp_path / "again", (X, labels), criterion, 4, inner_valid=0.5)
    assert again.fingerprint == results.fingerprint
    given = swept(tmp_path / "array", (X, NUMBERS[:, None]), nn.MSELoss(), 1, stratify=labels)
    for fold, same in zip(given.folds, results.folds, strict=True):
        assert fold.valid.tolist() == same.valid.tolist()


def test_labels_have_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    labels, criterion = tags()[:, :3], nn.BCEWithLogitsLoss()
    words: dict[str, Any] = {"scoring": ["average_precision", "f1_macro"], "opt_fn": adam}
    words |= {"params": {"epochs": EPOCHS}, "threads_per_job": 1}
    results = swept(tmp_path / "run", (X, labels), criterion, 3, **words)
    data = TensorDataset(torch.from_numpy(X), torch.from_numpy(labels))
    _, expected = plain_loop(
        lambda: nn.Linear(5, 3), data, results, nn.Module.__call__, criterion=criterion
    )
    (found,) = results.oof.values()
    assert np.array_equal(found[results.folds[0].valid], expected.numpy())
    for job, fold in zip(results.plan.jobs, results.folds, strict=True):
        true, likely = labels[fold.valid], expit(found[fold.valid].astype(float))
        assert results.results[job.id].scores == pytest.approx(
            {
                "average_precision": metrics.average_precision_score(true, likely),
                "f1_macro": metrics.f1_score(true, likely > 0.5, average="macro", zero_division=0),
            }
        )


def test_with_groups_labels_are_not_stratified(tmp_path: Path) -> None:
    groups = np.arange(COUNT) // 4
    data, criterion = (X, tags()), nn.BCEWithLogitsLoss()
    results = swept(tmp_path / "run", data, criterion, 4, groups=groups, inner_valid=0.4)
    for fold in results.folds:
        assert not {*groups[fold.valid]} & {*groups[fold.train]}
        assert not {*groups[fold.inner_valid]} & {*groups[fold.fitted]}


# Metrics of torchmetrics


def test_metrics_of_torchmetrics_see_each_fold_alone(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    kinds, squared = torchmetrics.classification, "neg_mean_squared_error"
    accuracy, classes = kinds.MulticlassAccuracy(3, average="micro"), nn.CrossEntropyLoss()
    truth, whether = NUMBERS[:, None], (X[:, :1] > 0).astype(np.float32)
    for targets, criterion, columns, metric, name, ours in (
        (CLASSES, classes, 3, accuracy, "MulticlassAccuracy", "accuracy"),
        (CLASSES, classes, 3, kinds.MulticlassAUROC(3), "MulticlassAUROC", "roc_auc_ovr"),
        (whether, nn.BCEWithLogitsLoss(), 1, kinds.BinaryAUROC(), "BinaryAUROC", "roc_auc"),
        (truth, nn.MSELoss(), 1, torchmetrics.MeanSquaredError(), "neg_MeanSquaredError", squared),
    ):
        data, scoring = (X, targets), [metric, ours]
        for found in scores(swept(tmp_path / name, data, criterion, columns, scoring=scoring)):
            assert found[name] == pytest.approx(found[ours])
    # The user's own object stays as it was.
    assert accuracy.update_count == 0


def test_a_metric_that_cannot_be_computed_is_refused_before_the_start(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    for metric, words in (
        (torchmetrics.classification.MulticlassAccuracy(2), "must take these outputs"),
        (torchmetrics.classification.MulticlassConfusionMatrix(3), "higher_is_better"),
        (
            torchmetrics.classification.MulticlassAccuracy(3, average=None),
            "only one element|cannot be",
        ),
    ):
        with pytest.raises(InputError, match=words):
            swept(tmp_path / "run", (X, CLASSES), nn.CrossEntropyLoss(), 3, scoring=metric)
        assert not (tmp_path / "run" / "run.db").exists()
