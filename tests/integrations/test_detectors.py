"""A detector of torchvision, scored by the mean average precision of torchmetrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from asynckfold import AsyncKFold
from tests.several_outputs import Boxes, Detector, collate, detection_step

pytestmark = pytest.mark.nightly
pytest.importorskip("pycocotools")
detection = pytest.importorskip("torchmetrics.detection")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-3)


def swept(root: Path, model: Any, dataset: Any, **settings: Any) -> Any:
    scoring = {name: detection.MeanAveragePrecision() for name in ("map_50", "map")}
    kfold = AsyncKFold(
        2, dataset, root, None, 4, collate_fn=collate, training_step=detection_step,
        scoring=scoring, verbose=0, report=False, **settings,
    )  # fmt: skip
    return kfold({"net": model}, ["constant"], sgd, {"epochs": 1})


def test_mean_average_precision_is_that_of_all_outputs_at_once(root: Path) -> None:
    results = swept(root / "kept", Detector, Boxes())
    small = swept(root / "batches", Detector, Boxes(), keep_outputs_gib=0)
    (found,) = results.oof.values()
    for job, fold in zip(results.plan.jobs, results.folds, strict=True):
        metric = detection.MeanAveragePrecision()
        for index in fold.valid.tolist():
            given = {name: torch.from_numpy(part) for name, part in found[index].items()}
            metric.update([given], [Boxes()[index][1]])
        expected = metric.compute()
        for results_of in (results, small):
            scores = results_of.results[job.id].scores
            assert scores["map_50"] == pytest.approx(float(expected["map_50"]), abs=1e-6)
            assert scores["map"] == pytest.approx(float(expected["map"]), abs=1e-6)


def test_a_detector_of_torchvision_trains_as_it_is(root: Path) -> None:
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    def make() -> nn.Module:
        return ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)  # type: ignore[no-any-return]

    results = swept(root, make, Subset(Boxes(), range(8)))
    assert results.candidates[0].complete
    (found,) = results.oof.values()
    assert all(set(one) == {"boxes", "scores", "labels"} for one in found)
    epochs = results.to_frame("epoch")
    assert {"bbox_regression", "classification"} <= set(epochs)
