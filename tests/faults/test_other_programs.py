"""Somebody else works on the machine: their core is left alone, and taken when they stop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, RunStore
from asynckfold.system.limits import allowed_cores
from asynckfold.system.machine import Machine
from tests.toy import adam, samples

HOG = "import os\nos.sched_setaffinity(0, {%d})\nprint(1, flush=True)\nwhile True: pass"
HOG_SECONDS = 6.0


class Works(nn.Linear):
    """Keeps its core busy for 20 ms a step."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            until = time.process_time() + 0.02
            while time.process_time() < until:
                pass
        return super().forward(inputs)


@pytest.fixture
def quiet_machine() -> None:
    if len(allowed_cores()) < 2:
        pytest.skip("needs two cores, one for somebody else")
    skip_beside_others()


def skip_beside_others() -> None:
    machine = Machine("cpu")
    for _ in range(6):
        time.sleep(0.25)
        machine.sample()
    if machine.describe()["cpu"]["busy"]:
        pytest.skip("needs a quiet machine: somebody else uses a core already")


def skip_if_others_came(root: Path, since: float) -> None:
    """Skip where others used cores in a run, from a second of it on."""
    with RunStore.read(root) as store:
        samples = [item for item in store.samples() if item.at > since]
    others = sum(item.used - item.own for item in samples) / max(1, len(samples))
    if others > 0.2:
        pytest.skip("somebody else came while it ran")


@pytest.fixture
def hog() -> Iterator[subprocess.Popen[str]]:
    core = max(os.sched_getaffinity(0))
    process = subprocess.Popen(
        [sys.executable, "-c", HOG % core], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def most_at_once(root: Path, since: float, until: float) -> int:
    """Return the largest number of jobs that ran together in a span of run seconds."""
    with RunStore.read(root) as store:
        spans = [(item.started, item.ended or 1e9) for item in store.attempts()]
    moments = [since, *(start for start, _ in spans if since <= start < until)]
    return max(sum(start <= moment < end for start, end in spans) for moment in moments)


@pytest.mark.usefixtures("quiet_machine")
def test_one_job_at_a_time_beside_a_busy_core_and_two_when_it_is_idle(
    root: Path, hog: subprocess.Popen[str]
) -> None:
    cores = len(allowed_cores())
    stopper = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep({HOG_SECONDS}); os.kill({hog.pid}, 9)"]
    )
    inputs, targets = samples(60)
    kfold = AsyncKFold(
        6, (inputs, targets), root, nn.CrossEntropyLoss(), 10, baseline=None, verbose=0
    )
    begun = time.monotonic()
    kfold({"works": lambda: Works(8, 3)}, ["constant", "cosine"], adam, {"epochs": 20})
    ended = time.monotonic() - begun
    stopper.wait()
    with RunStore.read(root) as store:
        first = store.attempts()[0].started
        whole = store.attempts()[-1].ended or 0.0
    # Run seconds start when the plan is written, some time after the call.
    late = ended - whole
    assert most_at_once(root, first, HOG_SECONDS - late - 0.5) <= cores - 1
    skip_if_others_came(root, HOG_SECONDS + 1)
    # Smoothing forgets the neighbour within three seconds.
    assert most_at_once(root, HOG_SECONDS + 3.0, whole) == cores


@pytest.mark.nightly(but=["measure"])
@pytest.mark.usefixtures("quiet_machine")
@pytest.mark.parametrize("kind", ["measure", "estimate"])
def test_the_serial_loop_has_no_thread_on_a_core_that_somebody_else_uses(
    root: Path, hog: subprocess.Popen[str], kind: str
) -> None:
    cores, before = len(allowed_cores()), torch.get_num_threads()
    torch.set_num_threads(cores)

    def threads(folder: Path) -> int:
        kfold = AsyncKFold(
            2, samples(60), folder, nn.CrossEntropyLoss(), 10, baseline=kind, verbose=0
        )
        results = kfold({"linear": lambda: nn.Linear(8, 3)}, ["constant"], adam, {"epochs": 1})
        assert results.baseline is not None
        return results.baseline.threads

    try:
        assert threads(root / "busy") == cores - 1
        with RunStore.read(root / "busy") as store:
            told = [item.text for item in store.events() if item.kind == "baseline"]
        assert any(f"in place of {cores}" in text for text in told)
        hog.kill()
        hog.wait()
        idle = threads(root / "idle")
        if idle != cores:
            # The run was too short to tell who was there: perhaps they still are.
            skip_beside_others()
        assert idle == cores
    finally:
        torch.set_num_threads(before)
