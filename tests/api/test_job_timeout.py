"""Real runs with a job that trains longer than it may: it fails alone, and more continues it.

What is slow waits in the steps of its LR schedule for longer than a job may train, so that it is
late on any machine; what is not slow takes less than a twentieth of that.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from asynckfold import AllJobsFailedError, AsyncKFold, CVResults, JobsFailedWarning, RunStore, fit
from tests.toy import Tiny, adam, samples

LIMIT = 3.0
"""More than a toy job takes on a slow machine, imports of a first worker included."""

CORES = len(os.sched_getaffinity(0))
TOLD = re.compile(
    r"timed out: trained (\d+\.\d\d) s, at epoch (\d) of 3, batch \d of 4; "
    r"job_timeout_s is 3\. Pass more to continue it"
)


def waits(marker: Path, seconds: float) -> Callable[[Any], Any]:
    """An LR schedule that waits in its third step while there is a marker; its rate is constant."""

    def factor(step: int) -> float:
        if step == 3 and marker.exists():
            time.sleep(seconds)
        return 1.0

    return lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, factor)


def called(root: Path, marker: Path, *, jobs: int = 1, **settings: Any) -> CVResults:
    """Two folds of a slow LR schedule, and of one that is not."""
    given = {"verbose": 0, "baseline": None, "n_jobs": 2, "fuse": False, **settings}
    kfold = AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 8, **given)
    schedules = {"slow": waits(marker, 1.2 * LIMIT * jobs), "quick": waits(marker, 0)}
    rounds = {"steps_per_round": 1} if given.get("trainer") == "averaging" else {}
    params = {"epochs": 3, "lr_step": "batch", **rounds}
    return kfold({"toy": Tiny}, schedules, adam, params)


SLOW = {"toy/slow/fold-0", "toy/slow/fold-1"}
QUICK = {"toy/quick/fold-0", "toy/quick/fold-1"}

WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "in worker processes": ({}, True),
    "in this process": ({"parallelize": False}, True),
    "fused": ({"fuse": 2, "jobs": 2}, True),
    "allreduce": ({"trainer": "allreduce", "processes": 2}, True),
    "averaging": ({"trainer": "averaging", "processes": 2}, True),
    "hogwild": ({"trainer": "hogwild", "processes": 2}, False),
    "parameter_server": ({"trainer": "parameter_server", "processes": 2}, False),
}
"""Settings, and whether the same bits are promised."""


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_it_fails_alone_and_the_same_call_with_more_continues_it(tmp_path: Path, way: str) -> None:
    given, same_bits = WAYS[way]
    if given.get("processes", 1) > CORES:
        pytest.skip("needs a core for each process of a job")
    root, marker = tmp_path / "run", tmp_path / "slow"
    marker.touch()
    with pytest.warns(JobsFailedWarning, match=r"2 × timed out: job_timeout_s is 3\. Pass more"):
        results = called(root, marker, job_timeout_s=LIMIT, error_score=-1.0, **given)
    found = {name: item.status for name, item in results.results.items()}
    assert found == {**dict.fromkeys(SLOW, "failed"), **dict.fromkeys(QUICK, "done")}
    assert results.counts["failed"] == 2
    for name in SLOW:
        told = TOLD.fullmatch(results.results[name].error)
        assert told is not None, results.results[name].error
        assert float(told[1]) >= LIMIT
        # Of Hogwild, one process may begin the next epoch while another waits.
        assert told[2] == "1" or not same_bits
    candidates = dict(
        zip(results.cv_results_["param_scheduler"], results.cv_results_["split0_test_accuracy"],
            strict=True)
    )  # fmt: skip
    assert candidates["slow"] == -1.0
    assert candidates["quick"] > 0
    assert results.best_params_["scheduler"] == "quick"
    with RunStore.read(root) as store:
        assert [item.attempt for item in store.attempts()] == [1] * 4
        assert all(store.checkpoints(name) for name in SLOW)
    assert "timed out: job_timeout_s is 3." in Path(results.report()).read_text()
    marker.unlink()
    continued = called(root, marker, **given)
    assert {item.status for item in continued.results.values()} == {"done"}
    assert {name: item.attempt for name, item in continued.results.items()} == {
        **dict.fromkeys(SLOW, 2),
        **dict.fromkeys(QUICK, 1),
    }
    assert all("continues after epoch 0, batch " in log_of(root, name) for name in SLOW)
    if same_bits:
        whole = called(tmp_path / "whole", marker, **given)
        assert continued.fingerprint == whole.fingerprint


def log_of(root: Path, job: str) -> str:
    return (root / job / "log.txt").read_text()


def test_one_model_alone_that_is_late_is_continued_with_more(tmp_path: Path) -> None:
    marker = tmp_path / "slow"
    marker.touch()

    def train(**settings: Any) -> Any:
        X, y = samples()
        return fit(
            Tiny, (torch.from_numpy(X), torch.from_numpy(y)), adam, nn.CrossEntropyLoss(),
            tmp_path / "run", 10, scheduler={"slow": waits(marker, 1.0)}, epochs=4, verbose=0,
            parallelize=False, **settings,
        )  # fmt: skip

    with pytest.raises(AllJobsFailedError, match=r"timed out: job_timeout_s is 1\. Pass more"):
        train(job_timeout_s=1)
    marker.unlink()
    assert len(train(job_timeout_s=600).epochs) == 4
