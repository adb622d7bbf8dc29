"""Targets and outputs whose number differs between samples, such as boxes: detection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asynckfold import AsyncKFold, CVResults, InputError
from tests.plain import adam, train
from tests.several_outputs import Boxes, Detector, collate, detection_step, found_share

SCORING = {"found": found_share}


def swept(root: Path, dataset: Any = None, model: Any = Detector, **settings: Any) -> CVResults:
    usual: dict[str, Any] = {
        "engine": "serial", "collate_fn": collate, "training_step": detection_step,
        "scoring": SCORING, "criterion": None,
    }  # fmt: skip
    settings = usual | settings
    params = {"epochs": 3, **settings.pop("params", {})}
    schedulers = settings.pop("schedulers", ["constant"])
    kfold = AsyncKFold(
        2, dataset or Boxes(), root, batch_size=4, verbose=0, report=False, threads_per_job=1,
        **settings,
    )  # fmt: skip
    return kfold([model], schedulers, adam, params)


def scores_of(results: CVResults) -> dict[str, Any]:
    return {name: item.scores for name, item in results.results.items()}


def state_of(results: CVResults, fold: int = 0) -> dict[str, Tensor]:
    return results.state_dict(results.candidates[0].name, fold=fold)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> CVResults:
    """What others must equal."""
    return swept(tmp_path_factory.mktemp("plain") / "run")


def test_outputs_are_those_of_the_models_and_scores_are_of_them(root: Path) -> None:
    results = swept(root, params={"epochs": 30})
    (found,) = results.oof.values()
    name, data = results.candidates[0].name, Boxes()
    for fold in results.folds:
        model = results.model(name, fold.index).eval()
        with torch.no_grad():
            expected = model([data[index][0] for index in fold.valid])
        for index, given in zip(fold.valid, expected, strict=True):
            for part in ("boxes", "scores", "labels"):
                np.testing.assert_allclose(found[index][part], given[part], rtol=1e-5, atol=1e-6)
        targets = [
            {key: part.numpy() for key, part in data[index][1].items()} for index in fold.valid
        ]
        outputs = [{key: part.numpy() for key, part in one.items()} for one in expected]
        item = results.results[results.plan.jobs[fold.index].id]
        assert item.scores["found"] == pytest.approx(found_share(targets, outputs))
        assert np.isnan(item.epochs[-1].valid_loss)
    assert min(results.candidates[0].scores["found"]) > 0.4


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "process", "n_jobs": 2},
        {"random_samples": True},
        # Pictures of one size need no collate_fn.
        {"collate_fn": None},
    ],
    ids=["processes", "streamed", "stacked"],
)
def test_the_engine_and_the_way_the_data_come_change_no_bit(
    root: Path, plain: CVResults, settings: dict[str, Any]
) -> None:
    other = swept(root, **settings)
    for fold in range(2):
        mine, theirs = state_of(plain, fold), state_of(other, fold)
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert scores_of(plain) == scores_of(other)


class Found:
    """A metric of lists of dicts, in the manner of mean average precision."""

    higher_is_better = True

    def __call__(self, outputs: Any, targets: Any) -> None:
        raise AssertionError("it accumulates")

    def reset(self) -> None:
        self.outputs: list[Any] = []
        self.targets: list[Any] = []

    def update(self, outputs: Any, targets: Any) -> None:
        assert outputs[0].keys() == {"boxes", "scores", "labels"}
        assert targets[0]["labels"].dtype == torch.int64
        self.outputs += outputs
        self.targets += targets

    def compute(self) -> Any:
        arrays = (
            [{key: part.numpy() for key, part in one.items()} for one in every]
            for every in (self.targets, self.outputs)
        )
        return {"found": torch.tensor(found_share(*arrays)), "n": torch.tensor(len(self.outputs))}


@pytest.mark.parametrize("kept", [2.0, 0.0], ids=["kept", "by batch"])
def test_a_metric_of_lists_gets_all_samples(root: Path, plain: CVResults, kept: float) -> None:
    scoring = {"found": Found(), "n": Found()}
    results = swept(root, scoring=scoring, keep_outputs_gib=kept, params={"eval_batch_size": 5})
    assert results.plan.by_batch == (kept == 0)
    for name, item in results.results.items():
        assert item.scores["found"] == pytest.approx(plain.results[name].scores["found"])
        assert item.scores["n"] == 12
    with pytest.raises(InputError, match="computes several numbers: name one of them"):
        swept(root / "wrong", scoring={"else": Found()})


class Jittered(Boxes):
    """Drops a box at random, and then must not read more of them than were read at first."""

    def __getitem__(self, index: int) -> Any:
        picture, target = super().__getitem__(index)
        if len(target["boxes"]) > 1 and torch.rand(()) < 0.5:
            target = {name: part[1:] for name, part in target.items()}
        return picture + 0.01 * torch.randn(()), target


def test_targets_that_change_with_each_read_come_with_their_pictures(root: Path) -> None:
    one, again = swept(root / "one", Jittered()), swept(root / "again", Jittered())
    assert scores_of(one) == scores_of(again)


def test_a_validation_step_gives_the_loss_where_there_is_no_criterion(root: Path) -> None:
    def validation_step(model: nn.Module, batch: Any, state: Any) -> Any:
        return {"loss": sum(model(*batch).values())}

    results = swept(root, validation_step=validation_step)
    for item in results.results.values():
        assert all(np.isfinite(epoch.valid_loss) for epoch in item.epochs)


def test_one_model_predicts_lists_and_an_ensemble_of_them_has_no_mean(
    root: Path, plain: CVResults
) -> None:
    results = plain
    with pytest.raises(InputError, match="no mean of outputs whose number differs"):
        results.ensemble().outputs(Boxes())
    with pytest.raises(InputError, match="no mean of outputs whose number differs"):
        _ = swept(root, n_repeats=2).oof_mean
    name = results.candidates[0].name
    assert len(results.model(name, 0)([Boxes()[0][0]])) == 1


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scoring": None}, "targets of several parts need scores of your own"),
        ({"training_step": None}, "criterion must be callable: received None"),
        ({"inner_valid": 0.2}, "inner_valid needs a criterion"),
        ({"schedulers": ["reduce"]}, "LR schedules that react to a loss need a criterion"),
        (
            {"collate_fn": lambda samples: collate(samples[::-1])},
            "collate_fn must return one target for",
        ),
        (
            {"scoring": {"n": lambda targets, outputs: float(len(outputs["boxes"]))}},
            "TypeError: list indices must be integers",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    root: Path, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        swept(root, **settings)


def test_it_equals_a_plain_loop_to_the_bit(plain: CVResults) -> None:
    model = train(
        plain,
        Detector,
        Boxes(),
        lambda model, pictures, targets: sum(model(pictures, targets).values()),
        collate=collate,
        batch=4,
        epochs=3,
    )
    found = state_of(plain)
    assert all(torch.equal(found[name], item) for name, item in model.state_dict().items())
