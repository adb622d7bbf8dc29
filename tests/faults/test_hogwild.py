"""Jobs of several processes in a real sweep: whoever is killed, nothing is lost or left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from asynckfold import AsyncKFold, AsyncKFoldError, CVResults, RunReader, RunStore
from asynckfold.cli.status import state_of
from tests.leftovers import descendants, gone, parent_of, until
from tests.started import Nursery, Started
from tests.toy import Tiny, adam, samples

SCRIPT = """
import sys, time
from pathlib import Path
from tests.faults.test_hogwild import kfold
from tests.toy import Tiny, adam

slow = Path(sys.argv[1]).with_name("SLOW")

class Slow(Tiny):
    def forward(self, inputs):
        time.sleep(0.02 if self.training and slow.exists() else 0)
        return super().forward(inputs)

results = kfold(sys.argv[1], stall_timeout=float(sys.argv[2]), trainer=sys.argv[3])(
    {"slow": Slow}, ["cosine"], adam, {"epochs": 12}
)
print(results.best_score_)
"""


def kfold(root: Any, **settings: Any) -> AsyncKFold:
    settings = {"trainer": "hogwild", "processes": 2, **settings}
    settings = {"verbose": 0, "baseline": None, "n_jobs": 1, "batch_size": 8, **settings}
    return AsyncKFold(2, samples(240), root, nn.CrossEntropyLoss(), **settings)


def run(root: Path, **settings: Any) -> CVResults:
    return kfold(root, **settings)({"tiny": Tiny}, ["cosine"], adam, {"epochs": 4})


@pytest.mark.parametrize(
    ("trainer", "how"),
    [
        ("hogwild", "updated each model without locks"),
        ("parameter_server", "pushed to the server of each model when they were ready"),
    ],
)
def test_a_sweep_says_what_it_is_and_promises_no_bits(root: Path, trainer: str, how: str) -> None:
    results = run(root, trainer=trainer)
    assert {item.status for item in results.results.values()} == {"done"}
    assert {(item.threads, len(item.cores)) for item in results.results.values()} == {(2, 2)}
    assert not results.bit_identity.claimed
    assert f"2 processes {how}" in str(results.bit_identity)


def test_one_process_is_the_plain_trainer(tmp_path: Path) -> None:
    one = run(tmp_path / "one", processes=1)
    plain = AsyncKFold(
        2, samples(240), tmp_path / "plain", nn.CrossEntropyLoss(), 8, verbose=0, baseline=None
    )({"tiny": Tiny}, ["cosine"], adam, {"epochs": 4})
    mine, theirs = (
        {name: item.weights for name, item in results.results.items()} for results in (one, plain)
    )
    assert mine == theirs
    assert one.bit_identity.claimed


# Kills


def start(
    warm: Nursery, root: Path, stall_timeout: float = 60.0, trainer: str = "hogwild"
) -> Started:
    """Start the script, with time to kill it in until it is to end well."""
    slow(root).touch()
    words = ["-c", SCRIPT, root, stall_timeout, trainer]
    return warm.start(words, root.with_name("printed"), errors=errors_of(root))


def slow(root: Path) -> Path:
    return root.with_name("SLOW")


def errors_of(root: Path) -> Path:
    return root.with_name("errors")


def wait_for(root: Path, seen: Callable[[RunReader], Any]) -> Any:
    def look() -> Any:
        try:
            with RunStore.read(root) as store:
                return store.has_plan and seen(store)
        except AsyncKFoldError:
            return None  # there is no run yet

    return until(look, 60)


def leads(store: RunReader) -> set[int]:
    """The workers of jobs that have a checkpoint to come back to."""
    return {
        job["pid"]
        for job in state_of(store)["running_jobs"]
        if job["pid"] and store.checkpoints(job["job"]) and members(job["pid"])
    }


def members(lead: int) -> set[int]:
    return {pid for pid in descendants(lead) if parent_of(pid) == lead}


def ended_well(script: Started, root: Path) -> list[str]:
    """The outcomes of all attempts of a run that ended well."""
    slow(root).unlink()
    assert script.wait(100) == 0, errors_of(root).read_text()
    assert float(script.printed()) > 0.8
    with RunStore.read(root) as store:
        results = store.results()
        assert {item.status for item in results.values()} == {"done"}
        assert all(len(item.epochs) == 12 for item in results.values())
        return [item.outcome for item in store.attempts()]


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("trainer", ["hogwild", "parameter_server"])
def test_a_killed_member_costs_its_job_no_more_than_since_the_last_checkpoint(
    root: Path, trainer: str, warm: Nursery
) -> None:
    script = start(warm, root, trainer=trainer)
    (lead,) = wait_for(root, leads)
    family = {lead, *members(lead)}
    os.kill(max(members(lead)), signal.SIGKILL)
    outcomes = ended_well(script, root)
    assert gone(family)
    assert outcomes == ["died", "ok", "ok"]
    with RunStore.read(root) as store:
        (died, *_) = store.attempts()
        assert "process 2 of the job ended (SIGKILL)" in died.error
        log = (root / died.job_id / "log.txt").read_text()
    assert "continues after epoch" in log


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_a_member_that_stands_still_is_found(root: Path, warm: Nursery) -> None:
    script = start(warm, root, stall_timeout=1.5)
    (lead,) = wait_for(root, leads)
    family = {lead, *members(lead)}
    os.kill(max(members(lead)), signal.SIGSTOP)
    outcomes = ended_well(script, root)
    assert gone(family)
    assert outcomes == ["hang", "ok", "ok"]


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_is_killed_or_interrupted_continues(
    root: Path, number: signal.Signals, warm: Nursery
) -> None:
    script = start(warm, root)
    (lead,) = wait_for(root, leads)
    family = descendants(script.pid)
    assert {lead, *members(lead)} <= family
    os.kill(script.pid, number)
    assert script.wait(60) != 0
    assert gone(family)
    ended_well(start(warm, root), root)
