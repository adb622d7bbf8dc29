"""A run that grows: the same folder, nothing trained twice, and the bits of a run begun so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from asynckfold import AsyncKFold, CVResults, InputError, PlanMismatchError, RunStore, load_results
from asynckfold.results.compare import compare_runs
from asynckfold.store import splits
from tests.toy import Tiny, adam, samples


def linear() -> nn.Module:
    return nn.Linear(8, 3)


def call(
    root: Path,
    models: Any = (Tiny,),
    schedulers: Any = ("step",),
    epochs: int = 2,
    folds: int = 3,
    **settings: Any,
) -> CVResults:
    """A quick run in this process, of jobs that are trained one by one."""
    settings = {"verbose": 0, "report": False, "threads_per_job": 1, "fuse": False, **settings}
    kfold = AsyncKFold(
        folds, samples(), root, nn.CrossEntropyLoss(), 10, parallelize=False, **settings
    )
    models = models if isinstance(models, dict) else list(models)
    return kfold(models, list(schedulers), adam, {"epochs": epochs})


def assert_equal_bits(one: Path, other: Path) -> None:
    with RunStore.read(one) as first, RunStore.read(other) as second:
        found = compare_runs(first, second)
    assert (found.plan, found.results, found.identical) == ("", "", True)


def trained(root: Path) -> list[str]:
    """The jobs of each attempt, in their order."""
    with RunStore.read(root) as store:
        return [attempt.job_id for attempt in store.attempts()]


def test_repeats_are_added(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = call(root)
    write = splits.write

    def killed(*args: Any) -> None:
        write(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(splits, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            call(root, n_repeats=3)
    assert load_results(root).fingerprint == begun.fingerprint
    grown = call(root, n_repeats=3)
    assert {*begun.results} < {*grown.results}
    call(tmp_path / "whole", n_repeats=3)
    assert_equal_bits(root, tmp_path / "whole")
    again = call(root, schedulers=["step", "cosine"], n_repeats=3)
    assert len(trained(root)) == len({*trained(root)}) == len(again.plan.jobs) == 18
    (shape,) = {item.shape for item in again.oof.values()}
    assert shape == (3, 60, 3) == np.load(root / "oof/Tiny-step.npz")["outputs"].shape


def forget(root: Path, like: str) -> None:
    """Take results away, as if the run had been killed before these jobs."""
    with RunStore.hold(root) as store, store.file.transaction():
        store.file.execute("DELETE FROM results WHERE job_id LIKE ?", (like,))


def test_a_call_of_fewer_candidates_sees_these_alone(root: Path) -> None:
    models, both = {"Tiny": Tiny, "linear": linear}, ["step", "cosine"]
    whole = call(root, models, both)
    view = call(root, {"linear": linear}, ["step"])
    assert [row.name for row in view.candidates] == ["linear/step"]
    assert view.best_params_ == {"model": "linear", "scheduler": "step"}
    assert view.model().weight.shape == (3, 8)
    assert {*view.results} < {*whole.results}
    assert load_results(root).fingerprint == whole.fingerprint
    assert len(trained(root)) == 12
    forget(root, "%/step/%")
    assert call(root, {"linear": linear}, ["step"]).fingerprint == view.fingerprint
    assert {*trained(root)[12:]} == {*view.results}
    with RunStore.read(root) as store:
        assert store.counts()["pending"] == 3
    assert call(root, models, both).fingerprint == whole.fingerprint


def test_a_fusion_group_is_trained_whole(root: Path) -> None:
    both = ["step", "cosine"]
    whole = call(root, {"linear": linear}, both, fuse=6)
    assert [len(group) for group in whole.plan.groups] == [6]
    assert call(root, {"linear": linear}, ["step"]).counts["done"] == 3
    forget(root, "%/step/%")
    with pytest.raises(InputError, match="the others of their fusion group"):
        call(root, {"linear": linear}, ["step"])
    assert call(root, {"linear": linear}, both).fingerprint == whole.fingerprint


def test_more_folds_are_other_folds(root: Path) -> None:
    call(root)
    with pytest.raises(PlanMismatchError) as caught:
        call(root, folds=4)
    assert "another number of folds divides the samples anew" in str(caught.value)
    assert "received folds: 3 there, 4 here" in str(caught.value)
    assert "se another folder" in str(caught.value)
