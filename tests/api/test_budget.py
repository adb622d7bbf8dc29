"""A time budget: the call ends in time, what it has is returned, and the same call continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from asynckfold import AsyncKFold, CVResults, InterruptedRunError, RunStore
from tests.started import Nursery
from tests.toy import Slow, Tiny, adam, samples

BUDGET_SECONDS = 2.5
"""Half of what all jobs take one after another, and far more than what comes before the first."""


class Brief(Slow):
    """Takes half of that."""

    seconds = 0.05


def called(root: Path, model: Any = Brief, **settings: Any) -> CVResults:
    settings = {"verbose": 0, "baseline": None, "n_jobs": 1, "fuse": False, **settings}
    kfold = AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, **settings)
    return kfold({"slow": model}, ["step", "cosine"], adam, {"epochs": 4})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> CVResults:
    """The same run, without a limit and in no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Brief, "seconds", 0.0)
        return called(tmp_path_factory.mktemp("whole") / "run", parallelize=False, report=False)


@pytest.mark.nightly(but=["False"])
@pytest.mark.parametrize("parallelize", [True, False])
def test_the_results_so_far_come_back_and_the_same_call_continues(
    tmp_path: Path, parallelize: bool, whole: CVResults
) -> None:
    root = tmp_path / "budget"
    called(tmp_path / "warm up", Tiny, parallelize=parallelize)
    results = called(root, parallelize=parallelize, time_budget_s=BUDGET_SECONDS)
    assert results.counts["pending"] > 0
    assert results.counts["failed"] == 0
    assert results.speedup is None
    with RunStore.read(root) as store:
        told = [event.text for event in store.events() if event.kind == "interrupted"]
        outcomes = {item.outcome for item in store.attempts()}
    assert told == ["the time budget of 2.5 s is over"]
    assert outcomes <= {"ok", "interrupted"}
    assert Path(results.report()).is_file()
    done = {name for name, item in results.results.items() if item.status == "done"}
    continued = called(root, parallelize=parallelize)
    assert continued.counts["pending"] == 0
    assert {continued.results[name].attempt for name in done} == {1}
    assert continued.fingerprint == whole.fingerprint


def test_a_budget_that_is_enough_changes_nothing(tmp_path: Path) -> None:
    enough = {"time_budget_s": 600, "job_timeout_s": np.float64(600)}
    limited = called(tmp_path / "limited", Tiny, parallelize=False, **enough)
    assert limited.counts["pending"] == 0
    free = called(tmp_path / "free", Tiny, parallelize=False)
    assert limited.plan.fingerprint == free.plan.fingerprint
    assert limited.fingerprint == free.fingerprint


def test_a_budget_over_before_there_is_a_plan_is_an_interruption(root: Path) -> None:
    with pytest.raises(InterruptedRunError, match="the time budget of 1e-06 s is over") as raised:
        called(root, parallelize=False, time_budget_s=1e-6)
    assert raised.value.exit_code == 124
    assert not root.exists()


@pytest.mark.nightly
def test_the_command_ends_with_the_code_of_timeout(root: Path, warm: Nursery) -> None:
    words = ["-m", "asynckfold", "run", "--data", "digits", "--models", "mlp", "--schedulers"]
    words += ["cosine,step", "--folds", "3", "--epochs", "2000", "--fuse", "no", "--n-jobs", "1"]
    words += ["--baseline", "none", "--root", str(root)]
    run = warm.start([*words, "--time-budget", "4"], root.with_name("printed"))
    assert run.wait(100) == 124, run.printed()
    assert "the time budget is over; continue with: asynckfold run" in run.printed()
    assert "pending" in run.printed()
    assert (root / "report" / "index.html").is_file()
