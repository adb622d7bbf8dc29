"""A worker that makes no progress is found, leaves its stacks, is killed; its job is tried again.

Real processes that really hang. What a healthy run gives, a run with a hang gives too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asynckfold import AsyncKFold, CVResults, JobsFailedWarning, RunStore
from asynckfold.engines import warm_pool
from asynckfold.engines.pool import WorkerPool
from tests.leftovers import descendants, gone, until
from tests.started import Nursery
from tests.toy import Tiny, adam, samples

TIMEOUT = 1.5


def loop_for_ever() -> None:
    while True:
        pass


def sleep_for_ever() -> None:
    time.sleep(1e9)


def hold_the_interpreter() -> None:
    sum(range(10**12))


def be_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Hangs(Tiny):
    """Hangs in the fourth batch of its training, if nobody did before.

    The dry run of the candidates takes three steps at most on more than 8 samples.
    """

    def __init__(self, how: Callable[[], None], marker: Path) -> None:
        super().__init__()
        self.how, self.marker, self.steps = how, marker, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += self.training and len(inputs) > 8
        if self.steps == 4 and first(self.marker):
            self.how()
        return super().forward(inputs)

    def extra_repr(self) -> str:
        return ""


def first(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def train(root: Path, models: dict[str, Any], timeout: float = TIMEOUT) -> CVResults:
    kfold = AsyncKFold(
        2, samples(), root, torch.nn.CrossEntropyLoss(), 10,
        baseline=None, verbose=0, n_jobs=2, stall_timeout=timeout,
    )  # fmt: skip
    return kfold(models, ["cosine"], adam, {"epochs": 3})


def hanging(root: Path, how: Callable[[], None]) -> dict[str, Any]:
    return {"hangs": lambda: Hangs(how, root.with_name("marker")), "fine": Tiny}


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("golden") / "run"
    root.with_name("marker").touch()
    return train(root, hanging(root, loop_for_ever)).fingerprint


@pytest.fixture(autouse=True, scope="module")
def nothing_stays() -> Iterator[None]:
    """The pool is warm from test to test; with it goes everything."""
    warm_pool.close_warm()
    before = descendants()
    yield
    warm_pool.close_warm()
    assert gone(descendants() - before)


@pytest.mark.nightly(but=["hold_the_interpreter"])
@pytest.mark.parametrize("how", [loop_for_ever, sleep_for_ever, hold_the_interpreter, be_stopped])
def test_a_hang_is_ended_and_the_job_tried_again(
    root: Path, golden: str, how: Callable[[], None]
) -> None:
    results = train(root, hanging(root, how))
    assert results.fingerprint == golden
    with RunStore.read(root) as store:
        (lost,) = [attempt for attempt in store.attempts() if attempt.outcome != "ok"]
        (event,) = [event for event in store.events() if event.kind == "hang"]
    assert (lost.outcome, lost.attempt) == ("hang", 1)
    assert "no batch was finished for" in lost.error
    assert lost.error in event.text
    assert f"its stacks, if it could give them, are in {lost.job_id}/log.txt" in lost.error
    if how is not be_stopped:
        assert f"in {how.__name__}" in (root / lost.job_id / "log.txt").read_text()
    seconds = float(lost.error.split(" s; ")[0].rsplit(" ", 1)[1])
    assert seconds >= TIMEOUT


class AlwaysHangs(Tiny):
    """Hangs in every attempt: in its dry run, or in training where it knows the dry run is over."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps -= self.training and len(inputs) > 8
        if self.steps <= 0:
            sleep_for_ever()
        return super().forward(inputs)


@pytest.mark.nightly
@pytest.mark.parametrize(("steps", "attempts"), [(3, [1, 1, 2, 2, 3, 3]), (0, [])])
def test_one_that_always_hangs_fails_and_the_others_do_not(
    root: Path, steps: int, attempts: list[int]
) -> None:
    """In a dry run nothing ever runs, so each look takes the tenfold time of a start."""
    timeout = TIMEOUT if steps else 0.3
    with pytest.warns(JobsFailedWarning, match="no batch was finished"):
        results = train(root, {"hangs": lambda: AlwaysHangs(steps), "fine": Tiny}, timeout)
    status = {name: item.status for name, item in results.results.items()}
    assert status == {
        f"{model}/cosine/fold-{fold}": state
        for model, state in (("hangs", "failed"), ("fine", "done"))
        for fold in range(2)
    }
    with RunStore.read(root) as store:
        hung = [item.attempt for item in store.attempts() if item.job_id.startswith("hangs")]
    assert sorted(hung) == attempts or not attempts


@pytest.mark.nightly
def test_a_worker_that_cannot_be_killed_is_left_behind(root: Path, golden: str) -> None:
    warm_pool.close_warm()
    warm_pool.give_back(WorkerPool(["tests.engines.servers.unkillable"]))
    results = train(root, hanging(root, sleep_for_ever))
    warm_pool.close_warm()
    assert results.fingerprint == golden
    with RunStore.read(root) as store:
        (event,) = [event for event in store.events() if event.kind == "hang"]
    assert "it cannot be killed (stuck in the kernel) and is left behind" in event.text


SCRIPT = """
import sys, time, torch
from pathlib import Path
from asynckfold import AsyncKFold
from tests.toy import Tiny, adam, samples

class Slow(Tiny):
    def forward(self, inputs):
        time.sleep(0.1 * self.training * SLOW.exists())
        return super().forward(inputs)

SLOW = Path(sys.argv[1]).with_name("SLOW")

kfold = AsyncKFold(
    2, samples(), sys.argv[1], torch.nn.CrossEntropyLoss(), 10,
    baseline=None, verbose=0, n_jobs=2, stall_timeout=1.5, report=False,
)
print(kfold({"slow": Slow}, ["cosine", "step"], adam, {"epochs": 12}).counts["done"])
"""


@pytest.mark.nightly
@pytest.mark.parametrize("everyone", [False, True], ids=["the sweep", "everyone"])
def test_our_own_sleep_kills_nobody(root: Path, warm: Nursery, everyone: bool) -> None:
    """Ctrl-Z stops the sweep; a laptop that is shut, or a frozen container, its workers too."""
    slow = root.with_name("SLOW")
    slow.touch()
    script = warm.start(["-c", SCRIPT, root], root.with_name("printed"))
    until(lambda: any("epoch 1 " in path.read_text() for path in root.rglob("log.txt")), 60)
    stopped = [script.pid, *(sorted(descendants(script.pid)) if everyone else ())]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * TIMEOUT)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    with RunStore.read(root) as store:
        assert len(store.finished()) < 4
    slow.unlink()
    script.wait(100)
    assert script.printed() == "4"
    with RunStore.read(root) as store:
        assert [item.outcome for item in store.attempts()] == ["ok"] * 4
