"""Want of memory: recognised whoever notices it, tried again alone, then failed with its peak."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults, JobsFailedWarning, RunStore
from asynckfold.system.limits import Host, oom_kills, was_short_of_memory
from asynckfold.training.worker.execute import outcome_of
from tests.toy import Tiny, adam, samples

X, Y = samples()
HOME = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("no_worker_stays")


# What is raised


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(10**15),
        lambda: np.empty(10**15),
        lambda: bytearray(10**15),
    ],
)
def test_a_real_refusal_is_want_of_memory(call: Callable[[], object]) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        call()
    assert outcome_of(caught.value, str(caught.value)) == "oom"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "gpu_oom"),
        (RuntimeError("CUDA error: out of memory"), "gpu_oom"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "gpu_oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: 8 bytes"), "oom"),
        (OSError(12, "Cannot allocate memory"), "oom"),
        (OSError(28, "No space left on device"), "error"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "device_lost"),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), "died"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (10x9 and 8x3)"), "error"),
        (ValueError("CUDA out of memory"), "error"),
        (SystemExit(1), "error"),
    ],
)
def test_words_are_read_where_torch_has_nothing_better(error: BaseException, outcome: str) -> None:
    assert outcome_of(error, str(error)) == outcome


# Who was killed for it

V1 = {"proc/self/cgroup": "4:memory:/group\n"}
V2 = {"proc/self/cgroup": "0::/group\n"}


def host(folder: Path, files: dict[str, str]) -> Host:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(folder / "proc", folder / "cgroup", {}, lambda: {0})


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({}, None),
        ({**V2, "cgroup/group/memory.events": "oom 3\noom_kill 2\noom_group_kill 0\n"}, 2),
        ({**V2, "cgroup/memory.events": "oom_kill 5\n"}, 5),
        ({**V1, "cgroup/memory/group/memory.oom_control": "under_oom 0\noom_kill 4\n"}, 4),
        ({**V1, "cgroup/memory/group/memory.oom_control": "under_oom 0\n"}, None),
        ({**V2, "cgroup/group/memory.events": "oom_kill many\n", "proc/vmstat": "oom_kill 1"}, 1),
        ({"proc/vmstat": "nr_free_pages 7\noom_kill 9\n"}, 9),
    ],
)
def test_the_nearest_counter_of_kills_is_read(
    tmp_path: Path, files: dict[str, str], kills: int | None
) -> None:
    assert oom_kills(host(tmp_path, files)) == kills


LIMIT = {"cgroup/group/memory.max": "1000", "cgroup/group/memory.current": "10"}


@pytest.mark.parametrize(
    ("files", "before", "peak", "short"),
    [
        ({"proc/vmstat": "oom_kill 3"}, 2, 0, True),
        ({"proc/vmstat": "oom_kill 3"}, 3, 0, False),
        ({"proc/vmstat": "oom_kill 3"}, None, 0, False),
        ({}, 3, 0, False),
        ({**V2, **LIMIT}, None, 950, True),
        ({**V2, **LIMIT}, None, 500, False),
        ({**V2, **LIMIT, "proc/vmstat": "oom_kill 3"}, 3, 950, True),
        ({"proc/meminfo": "MemTotal:  2 kB\nMemFree: 1 kB\n"}, None, 2000, True),
        ({"proc/meminfo": "MemTotal:  2 kB\nMemFree: 1 kB\n"}, None, 0, False),
        ({}, None, 1 << 60, False),
    ],
)
def test_a_killed_process_was_short_of_memory(
    tmp_path: Path, files: dict[str, str], before: int | None, peak: int, short: bool
) -> None:
    assert was_short_of_memory(before, peak, host(tmp_path, files)) is short


# Real workers


class Greedy(Tiny):
    """Asks for more than there is the first ``times`` times that it is evaluated."""

    def __init__(self, marks: Path, times: int, ask: Callable[[], object]) -> None:
        super().__init__()
        self.marks, self.times, self.ask = marks, times, ask

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # The dry run evaluates 8 samples at most.
        if self.training or len(inputs) <= 8:
            return super().forward(inputs)
        if any(self.claim(number) for number in range(self.times)):
            self.ask()
        return super().forward(inputs)

    def claim(self, number: int) -> bool:
        """Take one of the times, which no other process gets."""
        try:
            (self.marks / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def limited() -> object:
    """What a small RLIMIT_AS refuses; lifted again, since the worker lives on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
    try:
        return torch.empty(1 << 28)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run(root: Path, **models: Any) -> CVResults:
    kfold = AsyncKFold(
        3, (X, Y), root, nn.CrossEntropyLoss(), 10, verbose=0, baseline=None, n_jobs=2
    )
    return kfold(models, ["step"], adam, {"epochs": 2})


@pytest.mark.parametrize("ask", [lambda: torch.empty(10**15), limited])
def test_it_is_tried_again_once_and_alone(
    root: Path, tmp_path: Path, ask: Callable[[], object]
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    results = run(root, Greedy=lambda: Greedy(marks, 1, ask), Tiny=Tiny)
    assert results.counts["done"] == 6
    with RunStore.read(root) as store:
        attempts, events = store.attempts(), store.events()
    (event,) = [event for event in events if event.kind == "oom_retry"]
    assert "alone on the machine" in event.text
    assert [item.outcome for item in attempts].count("oom") == 1
    (alone,) = [item for item in attempts if item.attempt == 2]
    assert alone.job_id == event.job_id
    others = [item for item in attempts if item is not alone]
    assert all(item.ended is not None and item.ended <= alone.started for item in others)


def test_the_second_time_it_fails_with_its_peak(root: Path, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    greedy = lambda: Greedy(marks, 100, lambda: torch.empty(10**15))  # noqa: E731
    with pytest.warns(JobsFailedWarning):
        results = run(root, Greedy=greedy, Tiny=Tiny)
    assert (results.counts["done"], results.counts["failed"]) == (3, 3)
    for result in results.results.values():
        if result.status == "failed":
            assert "DefaultCPUAllocator" in result.error
            assert "2 attempts: oom, oom; peak memory" in result.error
            assert f"peak memory {result.peak_memory / 2**20:.0f} MiB" in result.error
            assert "in forward" in result.traceback
    with RunStore.read(root) as store:
        tries = [item.job_id for item in store.attempts()]
    assert len(tries) == 9
