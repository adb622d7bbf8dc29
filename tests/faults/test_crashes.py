"""However a worker ends: named, tried again or not as its class says, and nobody else is touched.

Real processes. Each case ends one job of six; the other five are done with one attempt each.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AllJobsFailedError, AsyncKFold, CVResults, RunStore
from asynckfold.api import call as steps
from asynckfold.sweep.tasks import DryRun
from tests.toy import Tiny, adam, samples

X, Y = samples()


pytestmark = pytest.mark.usefixtures("no_worker_stays")


def segfault() -> None:
    ctypes.string_at(0)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate_group() -> None:
    os.killpg(0, signal.SIGKILL)


def exit_now() -> None:
    os._exit(0)


def exit_seven() -> None:
    os._exit(7)


def leave() -> None:
    sys.exit(0)


def system_exit() -> None:
    raise SystemExit


def interrupt() -> None:
    raise KeyboardInterrupt


def lose_device() -> None:
    raise RuntimeError("CUDA error: unspecified launch failure")


class Odd(BaseException):
    """No Exception."""


def odd() -> None:
    raise Odd("on purpose")


@dataclass(frozen=True)
class Case:
    """What is done, what the error names, and how each attempt ends."""

    act: Callable[[], None]
    named: str
    outcomes: tuple[str, ...]


INFRA, USER = ("died", "died", "error"), ("error",)
CASES = [
    Case(segfault, "SIGSEGV", INFRA),
    Case(os.abort, "SIGABRT", INFRA),
    Case(kill, "SIGKILL", INFRA),
    Case(terminate_group, "SIGKILL", INFRA),
    Case(exit_now, "exit code 0 without an answer", INFRA),
    Case(exit_seven, "exit code 7 without an answer", INFRA),
    Case(leave, "SystemExit: 0", USER),
    Case(system_exit, "SystemExit", USER),
    Case(interrupt, "KeyboardInterrupt", USER),
    Case(odd, "Odd: on purpose", USER),
    Case(lose_device, "CUDA error: unspecified", ("device_lost", "device_lost", "error")),
]


class Once:
    """Acts once in the whole run, in a worker that did not do the dry run."""

    def __init__(self, marks: Path, act: Callable[[], None]) -> None:
        self.marks, self.act, self.caller = marks, act, os.getpid()

    def __call__(self) -> None:
        if os.getpid() == self.caller:
            return
        (self.marks / f"process-{os.getpid()}").touch()
        if len(list(self.marks.glob("process-*"))) > 1 and claimed(self.marks / "acted"):
            self.act()


def claimed(mark: Path) -> bool:
    """Take a mark, which only one process ever gets."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def scored_on_7(model: nn.Module, inputs: torch.Tensor) -> bool:
    """Whether this is the held-out fold with sample 7; the dry run evaluates 8 samples at most."""
    if model.training or len(inputs) <= 8:
        return False
    return bool((inputs == torch.from_numpy(X[7])).all(dim=1).any())


class InForward(Tiny):
    """Acts in the fold that is scored on sample 7."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if scored_on_7(self, inputs):
            self.act()
        return super().forward(inputs)


class InDel(InForward):
    """Acts when it is thrown away, after the fold that is scored on sample 7."""

    last = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.last = scored_on_7(self, inputs)
        return Tiny.forward(self, inputs)

    def __del__(self) -> None:
        if self.last:
            self.act()


def run(root: Path, models: dict[str, Any], **settings: Any) -> CVResults | None:
    settings = {"verbose": 0, "baseline": None, "n_jobs": 2, "dataset": (X, Y), **settings}
    dataset = settings.pop("dataset")
    kfold = AsyncKFold(3, dataset, root, nn.CrossEntropyLoss(), 10, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return kfold(models, ["step"], adam, {"epochs": 2})
        except AllJobsFailedError:
            return None


def attempts_of(root: Path) -> tuple[dict[str, list[Any]], dict[str, int]]:
    """The attempts by job, and the account, which must add up."""
    found: dict[str, list[Any]] = {}
    with RunStore.read(root) as store:
        for attempt in store.attempts():
            found.setdefault(attempt.job_id, []).append(attempt)
        counts = store.counts()
    assert counts["planned"] == counts["done"] + counts["failed"]
    return found, counts


def check(root: Path, results: CVResults | None, case: Case) -> None:
    assert results is not None
    attempts, counts = attempts_of(root)
    assert (counts["done"], counts["failed"]) == (5, 1)
    (failed,) = [item for item in results.results.values() if item.status == "failed"]
    assert case.named in failed.error
    assert tuple(item.outcome for item in attempts.pop(failed.job_id)) == case.outcomes
    assert [[item.outcome for item in tries] for tries in attempts.values()] == [["ok"]] * 5


@pytest.mark.nightly(but=["segfault", "odd"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.act.__name__)
def test_in_forward(root: Path, case: Case) -> None:
    results = run(root, {"Acts": lambda: InForward(case.act), "Tiny": Tiny})
    check(root, results, case)
    if case.act is segfault:
        # faulthandler left the stack in the log of the job.
        logs = [path.read_text() for path in root.rglob("log.txt")]
        assert any("Fatal Python error: Segmentation fault" in text for text in logs)


@pytest.mark.parametrize("act", [segfault, exit_now])
def test_in_del_after_the_last_checkpoint(root: Path, act: Callable[[], None]) -> None:
    """The second attempt takes the result from there, and has nothing to throw away."""
    results = run(root, {"Acts": lambda: InDel(act), "Tiny": Tiny})
    assert results is not None
    assert results.counts["done"] == 6
    attempts, _ = attempts_of(root)
    outcomes = sorted([item.outcome for item in tries] for tries in attempts.values())
    assert outcomes == [["died", "ok"], *[["ok"]] * 5]


def test_what_is_raised_in_del_harms_nobody(root: Path) -> None:
    """Python itself tells of it and goes on."""
    results = run(root, {"Acts": lambda: InDel(leave), "Tiny": Tiny})
    assert results is not None
    assert results.counts["done"] == 6


# In the data, and on the way to the worker


class RandomData(torch.utils.data.Dataset[Any]):
    """Random by itself, so that the workers read it sample by sample."""

    def __init__(self, once: Once) -> None:
        self.once = once

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 7:
            self.once()
        return torch.from_numpy(X[index]) + 0.01 * torch.rand(8), int(Y[index])


class RandomStep:
    """A random transform."""

    def __init__(self, once: Once) -> None:
        self.once = once

    def __call__(self, sample: Any) -> Any:
        self.once()
        return sample + 0.01 * torch.rand(8).numpy()


class Carrier:
    """A model factory that acts where it is unpacked."""

    def __init__(self, once: Once) -> None:
        self.once = once

    def __call__(self) -> nn.Module:
        return Tiny()

    def __reduce__(self) -> Any:
        return unpacked, (self.once,)


def unpacked(once: Once) -> Carrier:
    once()
    return Carrier(once)


def in_dataset(root: Path, once: Once) -> CVResults | None:
    return run(root, {"A": Tiny, "B": Tiny}, dataset=RandomData(once), targets=Y)


def in_transform(root: Path, once: Once) -> CVResults | None:
    return run(root, {"A": Tiny, "B": Tiny}, train_transform=RandomStep(once))


def at_unpickle(root: Path, once: Once) -> CVResults | None:
    return run(root, {"A": Carrier(once), "B": Tiny})


class OneByOne(DryRun):
    """Does the dry runs in one process."""

    def _side_by_side(self, engine: Any, placements: Any) -> Any:
        return DryRun._side_by_side(replace(self, most=1), engine, placements)


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(steps, "DryRun", OneByOne)
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


@pytest.mark.nightly(but=["in_transform-segfault", "at_unpickle-exit_now", "in_dataset-segfault"])
@pytest.mark.parametrize("act", [segfault, exit_now])
@pytest.mark.parametrize("where", [in_dataset, in_transform, at_unpickle])
def test_a_death_elsewhere_costs_one_attempt(
    root: Path, marks: Path, where: Callable[[Path, Once], CVResults | None], act: Any
) -> None:
    results = where(root, Once(marks, act))
    assert results is not None
    assert results.counts["done"] == 6
    attempts, _ = attempts_of(root)
    outcomes = sorted([item.outcome for item in tries] for tries in attempts.values())
    assert outcomes == [["died", "ok"], *[["ok"]] * 5]


@pytest.mark.parametrize("act", [system_exit, interrupt])
@pytest.mark.parametrize("where", [in_dataset, in_transform, at_unpickle])
def test_what_is_raised_elsewhere_is_not_tried_again(
    root: Path, marks: Path, where: Callable[[Path, Once], CVResults | None], act: Any
) -> None:
    results = where(root, Once(marks, act))
    assert results is not None
    failed = [item for item in results.results.values() if item.status == "failed"]
    names = {system_exit: "SystemExit", interrupt: "KeyboardInterrupt"}
    assert failed
    # What a worker could not unpack is not unpacked again for its next job.
    assert len(failed) == 1 or where is at_unpickle
    assert all(names[act] in item.error for item in failed)
    attempts, _ = attempts_of(root)
    assert all(len(tries) == 1 for tries in attempts.values())


# Around the answer


class AroundTheAnswer(InForward):
    """Arranges for its worker's death just before its answer is sent, or just after."""

    def __init__(self, mark: Path, after: bool) -> None:
        super().__init__(self.arrange)
        self.mark, self.after = mark, after

    def arrange(self) -> None:
        from multiprocessing.connection import Connection

        send, mark, after = Connection.send, self.mark, self.after

        def deadly(pipe: Any, item: Any) -> None:
            dies = item[0] == "answer" and claimed(mark)
            if dies and not after:
                kill()
            send(pipe, item)
            if dies:
                kill()

        Connection.send = deadly  # type: ignore[method-assign, assignment]


@pytest.mark.nightly(but=["True"])
@pytest.mark.parametrize("after", [False, True])
def test_a_death_around_the_answer_recomputes_nothing(
    root: Path, tmp_path: Path, marks: Path, close_workers: Callable[[], None], after: bool
) -> None:
    models = {"Acts": lambda: AroundTheAnswer(marks / "acted", after), "Tiny": Tiny}
    results = run(root, models)
    assert (marks / "acted").exists()  # from here on it is inert
    golden = run(tmp_path / "golden", models)
    assert results is not None
    close_workers()  # they still die where they find no mark
    assert golden is not None
    assert results.counts["done"] == 6
    assert results.fingerprint == golden.fingerprint
    attempts, _ = attempts_of(root)
    for name, tries in attempts.items():
        log = (root / name / "log.txt").read_text()
        assert [log.count(f"epoch {number} train_loss") for number in (1, 2)] == [1, 1]
        assert tries[-1].outcome == "ok"
    extra = [item.outcome for tries in attempts.values() for item in tries[:-1]]
    if after:
        # The answer counts; at most the job that was just being sent to the dead worker waits.
        assert extra in ([], ["died"])
    else:
        assert extra == ["died"]
