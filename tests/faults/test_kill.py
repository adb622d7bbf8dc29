"""A whole run is killed, interrupted, moved to other cores: the end is the same, bit for bit."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynckfold import RunStore
from asynckfold.cli.status import state_of
from tests import here
from tests.leftovers import descendants, gone, parent_of, until
from tests.started import Nursery, Started, finished

Start = Callable[..., Started]

SCRIPT = """
import os, sys, time, torch
from torch import nn
from asynckfold import AsyncKFold

random = torch.Generator().manual_seed(0)
X = torch.randn(120, 16, generator=random)
y = (X[:, 0] > 0).long()

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    def forward(self, inputs):
        if self.training and "SLOW" in os.environ:
            time.sleep(0.03)
        return self.layers(inputs)

kfold = AsyncKFold(
    3, (X, y), sys.argv[1], nn.CrossEntropyLoss(), 16, baseline=None, verbose=0, n_jobs=2,
    report=False,
)
results = kfold(
    {"slow": Slow}, ["cosine", "step"], lambda model: torch.optim.Adam(model.parameters(), 1e-2),
    {"epochs": 8},
)
print(results.fingerprint)
"""


@pytest.fixture
def start(warm: Nursery) -> Start:
    """Starts the script, with time to kill it in."""
    slow, numbers = {**os.environ, "SLOW": "1"}, itertools.count()

    def made(root: Path, script: str = SCRIPT) -> Started:
        output = root.with_name(f"printed-{next(numbers)}")
        return warm.start(["-c", script, root], output, slow)

    return made


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> str:
    return here.script(SCRIPT, tmp_path_factory.mktemp("golden") / "run")


def wait_for(root: Path, results: int) -> None:
    """Wait until the store holds so many results."""
    until(lambda: finished(root) >= results, 60)


def at_work(root: Path) -> list[dict[str, Any]]:
    """Wait until every running job is known to be in the hands of a process."""

    def look() -> list[dict[str, Any]]:
        with RunStore.read(root) as store:
            jobs = list(state_of(store)["running_jobs"])
        return jobs if all(item["pid"] for item in jobs) else []

    return list(until(look, 60))


def test_kill_9_in_the_middle_and_again_the_same_command(
    root: Path, start: Start, golden: str
) -> None:
    script = start(root)
    wait_for(root, 2)
    family = descendants(script.pid)
    # Whoever aims at a worker finds it: one that runs, and that has the attempt in hand.
    running = at_work(root)
    assert {item["pid"] for item in running} <= family
    assert len({item["pid"] for item in running}) == len(running)
    for pid in [script.pid, *family]:
        os.kill(pid, signal.SIGKILL)
    script.wait()
    assert gone(family)
    with RunStore.read(root) as store:
        kept = store.results()
        state = state_of(store)
    assert len(kept) >= 2
    assert state["holder"] is None
    assert re.fullmatch(r"killed while (1 job was|2 jobs were) running", state["ended"])
    assert state["continue_with"] == "the same call (-c ...)"
    assert here.script(SCRIPT, root) == golden
    with RunStore.read(root) as store:
        assert store.counts()["done"] == 6
        tries = [attempt.job_id for attempt in store.attempts() if attempt.attempt > 1]
    assert not set(tries) & set(kept)  # finished jobs are not trained again


@pytest.mark.nightly
def test_a_worker_that_wakes_up_after_its_sweep_was_killed_changes_nothing(
    root: Path, start: Start, golden: str
) -> None:
    """It was stopped together with the server that would have taken it along."""
    script = start(root)
    wait_for(root, 1)
    parents = {pid: parent_of(pid) for pid in descendants(script.pid)}
    server = next(pid for pid, parent in parents.items() if parent == script.pid)
    workers = [pid for pid, parent in parents.items() if parent == server]
    assert workers
    for pid in (server, *workers):
        os.kill(pid, signal.SIGSTOP)
    try:
        script.kill()
        script.wait()
        again = start(root)
        until(lambda: _holder(root) == again.pid, 60)
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        assert again.wait(100) == 0, again.printed()
    finally:
        # It finds its sweep gone, and takes the workers along.
        os.kill(server, signal.SIGCONT)
    assert again.printed() == golden
    assert gone({server, *workers})
    with RunStore.read(root) as store:
        attempts = [item for item in store.attempts() if item.outcome != "ok"]
        refs = [ref for job in store.plan.jobs for ref in store.checkpoints(job.id)]
        assert store.counts()["done"] == 6
    assert {item.outcome for item in attempts} == {"lost"}
    assert [ref.file for ref in refs if sha256(root / ref.file) != ref.sha256] == []
    assert here.script(SCRIPT, root) == golden
    left = {str(path.relative_to(root)) for path in root.rglob("checkpoint-*")}
    assert left == {ref.file for ref in refs}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _holder(root: Path) -> int:
    with RunStore.read(root) as store:
        return int((store.holder() or {}).get("pid", 0))
