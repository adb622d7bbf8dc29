"""`callbacks=` and `inner_valid=`: sent, in the plan, refitted, continued, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import (
    AsyncKFold,
    BestWeights,
    EarlyStopping,
    InputError,
    WeightAverage,
    load_results,
)
from tests.toy import Tiny, adam, samples

WATCH = (EarlyStopping(patience=1, min_delta=0.05), BestWeights())


def called(root: Path, params: Any = None, **settings: Any) -> Any:
    given = {"engine": "serial", "verbose": 0, "threads_per_job": 1, "report": False, **settings}
    if given.pop("watched", True):
        given = {"callbacks": WATCH, "inner_valid": 0.2, **given}
    kfold = AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, **given)
    return kfold({"Tiny": Tiny}, ["cosine"], adam, {"epochs": 8, **(params or {})})


def test_workers_give_the_same_bits_and_a_refit_takes_the_mean_of_the_epochs(
    tmp_path: Path,
) -> None:
    results = called(tmp_path / "process", engine="process", n_jobs=1, refit=True)
    assert results.fingerprint == called(tmp_path / "serial").fingerprint
    chosen = [int(item.epochs[-1].logged["best_epoch"]) for item in results.results.values()]
    trained = [len(item.epochs) for item in results.results.values()]
    assert min(trained) < 8
    (refitted,) = results.refitted.results.values()
    assert len(refitted.epochs) == round(np.mean(chosen))
    assert "inner_loss" not in refitted.epochs[-1].logged
    # What is exported and predicts are the best weights.
    valid = results.folds[0].valid
    with torch.no_grad():
        found = results.model("Tiny/cosine", 0)(torch.from_numpy(samples()[0][valid]))
    assert np.array_equal(found, results.oof["Tiny/cosine"][valid])
    assert "up to 8 epochs" in Path(results.report()).read_text()


def test_a_finished_run_is_read_again_and_another_callback_is_another_plan(tmp_path: Path) -> None:
    results = called(tmp_path)
    assert called(tmp_path).counts["pending"] == 0
    read = load_results(tmp_path)
    assert read.fingerprint == results.fingerprint
    assert [len(fold.inner_valid) for fold in read.folds] == [
        len(fold.inner_valid) for fold in results.folds
    ]
    for other in (
        {"callbacks": [EarlyStopping(patience=2, min_delta=0.05), BestWeights()]},
        {"inner_valid": 0.3},
        {"watched": False},
    ):
        with pytest.raises(InputError, match="resume"):
            called(tmp_path, **other)


def test_the_part_is_stratified_and_the_same_for_all_candidates(tmp_path: Path) -> None:
    results = called(tmp_path)
    targets = samples()[1]
    for fold in results.folds:
        assert np.isin(fold.inner_valid, fold.train).all()
        assert len(fold.fitted) + len(fold.inner_valid) == len(fold.train)
        expected = np.bincount(targets[fold.train]) * len(fold.inner_valid) / len(fold.train)
        assert np.abs(np.bincount(targets[fold.inner_valid]) - expected).max() < 1


def test_no_group_is_on_both_sides(tmp_path: Path) -> None:
    groups = np.arange(len(samples()[1])) // 5
    for fold in called(tmp_path, groups=groups).folds:
        assert not {*groups[fold.inner_valid]} & {*groups[fold.fitted]}
        assert len(fold.inner_valid)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner_valid": None}, r"Pass inner_valid=0\.1"),
        ({"inner_valid": 1.5}, "inner_valid"),
        ({"inner_valid": 0.001}, "leave samples of each class on both sides"),
        ({"callbacks": EarlyStopping()}, "callbacks must be a list"),
        ({"callbacks": [EarlyStopping]}, r"Write EarlyStopping\(\)"),
        ({"callbacks": [object()]}, "must have one of the methods on_fit_start"),
        ({"callbacks": [EarlyStopping(patience=0)]}, "patience must be at least 1"),
        ({"callbacks": [BestWeights(mode="up")]}, "mode must be 'min' or 'max'"),
        ({"callbacks": [WeightAverage(1.5)]}, "decay must be above 0 and below 1"),
        ({"callbacks": [EarlyStopping("valid_loss")]}, "not look at the fold that scores"),
        ({"callbacks": [EarlyStopping("hits")]}, "There are 'train_loss', 'lr', 'inner_loss'"),
        ({"trainer": "hogwild", "processes": 2}, "callbacks, inner_valid must go without trainer"),
        ({"baseline": "measure"}, "the serial baseline .* callbacks must go without baseline"),
        ({"fit_fn": lambda context: None}, "fit_fn must go without callbacks"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        called(tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "run.db").exists()


def test_one_method_of_a_state_needs_the_other(tmp_path: Path) -> None:
    class Half:
        def on_epoch_end(self, state: Any) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(InputError, match="both state_dict and load_state_dict, or neither"):
        called(tmp_path, callbacks=[Half()])


def test_a_part_is_set_aside_without_callbacks_too(tmp_path: Path) -> None:
    results = called(tmp_path, watched=False, inner_valid=0.2)
    last = results.results["Tiny/cosine/fold-0"].epochs[-1]
    assert len(results.results) == 3
    assert 0 < last.logged["inner_loss"] < 10
