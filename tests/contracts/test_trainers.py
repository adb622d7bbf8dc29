"""What every trainer promises: the same bits on repeat, after kills, with any number of workers."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import (
    AsyncKFold,
    AsyncKFoldError,
    CVResults,
    RunReader,
    RunStore,
)
from asynckfold.cli.status import state_of
from tests import here
from tests.leftovers import descendants, gone
from tests.started import Nursery, Started
from tests.toy import adam, samples

Start = Callable[[Path, Any], Started]

WIDTHS = {"plain": False, "fused by 3": 3}
"""Of 8 jobs: each by itself, groups of 2 and 3 that mix LR schedules."""

# 62 samples in 4 folds: 46 or 47 of them to train on, in batches of 10.
X, Y = samples(62)

SLOW = """
import os, sys, time, warnings, torch
from torch import nn
from asynckfold import AsyncKFold
from tests.contracts.test_trainers import Net, kfold
from tests.toy import adam

def slow(optimizer):
    def factor(epoch):
        time.sleep(0.15 * os.path.exists(os.environ.get("SLOW", "")))
        return 0.9 ** epoch
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

def bursting(optimizer):
    def factor(epoch):
        time.sleep(0.01 * os.path.exists(os.environ.get("SLOW", "")))
        return 1e30 if epoch > 2 else 1.0
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

warnings.simplefilter("ignore")
results = kfold(sys.argv[1], eval(sys.argv[2]), n_jobs=2)(
    {"net": Net}, {"slow": slow, "bursting": bursting}, adam, {"epochs": 14}
)
print(results.fingerprint)
"""


class Net(nn.Module):
    """A convolution, running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 8)),
            nn.Conv1d(1, 4, 3),
            nn.BatchNorm1d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(24, 3),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs)
        return found


def kfold(root: Any, fuse: Any, **settings: Any) -> AsyncKFold:
    settings = {"verbose": 0, "baseline": None, "threads_per_job": 1, **settings}
    return AsyncKFold(4, (X, Y), root, nn.CrossEntropyLoss(), 10, fuse=fuse, **settings)


def run(root: Path, fuse: Any, **settings: Any) -> CVResults:
    return kfold(root, fuse, **settings)({"net": Net}, ["cosine", "step"], adam, {"epochs": 3})


pytestmark = pytest.mark.usefixtures("no_worker_stays")


@pytest.fixture(params=WIDTHS)
def fuse(request: pytest.FixtureRequest) -> Any:
    return WIDTHS[request.param]


def test_the_same_bits_on_repeat_and_with_any_number_of_workers(tmp_path: Path, fuse: Any) -> None:
    ways: dict[str, dict[str, Any]] = {
        "one": {"n_jobs": 1},
        "two": {"n_jobs": 2},
        "here": {"parallelize": False},
    }
    sweeps = {name: run(tmp_path / name, fuse, **settings) for name, settings in ways.items()}
    taken_over = {"plan_from": tmp_path / "one", "threads_per_job": "auto", "parallelize": False}
    sweeps["taken over"] = run(tmp_path / "taken over", False, **taken_over)
    assert len({results.fingerprint for results in sweeps.values()}) == 1


def test_a_continued_run_keeps_its_groups(tmp_path: Path, fuse: Any) -> None:
    whole = run(tmp_path / "run", fuse, parallelize=False)
    again = run(tmp_path / "run", False if fuse else 3, parallelize=False)
    assert again.fingerprint == whole.fingerprint
    with RunStore.read(tmp_path / "run") as store:
        told = [event.text for event in store.events() if event.kind == "fusing"]
        widths = " + ".join(str(len(group)) for group in store.plan.groups)
    if not fuse:
        assert told == ["net: not fused, as before"]
    else:
        first, later = told
        # With the largest difference that was seen.
        assert re.match(
            rf"net: fused: {re.escape(widths)} of 8 jobs; largest deviation from "
            r"separate training: \d\.\de[-+]\d+ in float64 and \d\.\de-\d+ in float32$",
            first,
        )
        assert later == f"net: fused: {widths} of 8 jobs, as before"
    assert bool(widths) == bool(fuse)


@pytest.fixture
def start(warm: Nursery) -> Start:
    """Starts the script, with time to kill it in."""

    def made(root: Path, fuse: Any) -> Started:
        slow(root).touch()
        environment = {**os.environ, "SLOW": str(slow(root))}
        return warm.start(["-c", SLOW, root, repr(fuse)], root.with_name("printed"), environment)

    return made


def slow(root: Path) -> Path:
    """While it exists, the script takes its time."""
    return root.with_name("slow")


def fingerprint(root: Path, fuse: Any) -> str:
    return here.script(SLOW, root, repr(fuse))


def wait_for(root: Path, found: Callable[[RunReader], bool]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with RunStore.read(root) as store:
                if store.has_plan and found(store):
                    return
        except AsyncKFoldError:
            pass  # there is no run yet
        time.sleep(0.02)
    raise AssertionError("it did not come so far in time")


def has_checkpoint(store: RunReader) -> bool:
    slow = [job.id for job in store.plan.jobs if job.lr_schedule == "slow"]
    return any(store.checkpoints(name) for name in slow)


def at_work(store: RunReader) -> bool:
    return any(job["pid"] for job in state_of(store)["running_jobs"])


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], str]:
    known: dict[Any, str] = {}

    def found(fuse: Any) -> str:
        if fuse not in known:
            known[fuse] = fingerprint(tmp_path_factory.mktemp("golden") / "run", fuse)
        return known[fuse]

    return found


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("moment", [at_work, has_checkpoint])
def test_the_same_bits_after_kill_9_and_resume(
    root: Path,
    start: Start,
    golden: Callable[[Any], str],
    fuse: Any,
    moment: Callable[[RunReader], bool],
) -> None:
    expected = golden(fuse)
    script = start(root, fuse)
    wait_for(root, moment)
    family = descendants(script.pid)
    os.kill(script.pid, signal.SIGKILL)
    script.wait()
    assert gone(family)
    assert fingerprint(root, fuse) == expected


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_the_same_bits_after_kill_9_of_a_worker(
    root: Path, start: Start, golden: Callable[[Any], str], fuse: Any
) -> None:
    expected = golden(fuse)
    script = start(root, fuse)
    wait_for(root, has_checkpoint)
    with RunStore.read(root) as store:
        pids = {job["pid"] for job in state_of(store)["running_jobs"] if job["pid"]}
    os.kill(min(pids), signal.SIGKILL)
    slow(root).unlink()
    assert script.wait(100) == 0, script.printed()
    assert script.printed() == expected
    with RunStore.read(root) as store:
        statuses = {result.status for result in store.results().values()}
        assert any(attempt.outcome == "died" for attempt in store.attempts())
    assert statuses == {"done", "diverged"}


def test_close_to_each_job_by_itself(tmp_path: Path, fuse: Any) -> None:
    # Few steps: Adam makes full steps out of the rounding of a bias that a normalisation takes out.
    found, plain = (
        kfold(tmp_path / name, way, parallelize=False)(
            {"net": Net}, ["cosine", "step"], adam, {"epochs": 1}
        )
        for name, way in (("this", fuse), ("plain", False))
    )
    for name, result in found.results.items():
        other = plain.results[name]
        assert result.status == "done"
        assert result.outputs is not None
        np.testing.assert_allclose(result.outputs, other.outputs, atol=2e-2)
        for mine, theirs in zip(result.epochs, other.epochs, strict=True):
            assert mine.lr == theirs.lr
            assert mine.train_loss == pytest.approx(theirs.train_loss, rel=1e-3)
