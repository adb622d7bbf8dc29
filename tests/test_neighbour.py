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

from asynckfold import AsyncKFold
from asynckfold.engines.limits import allowed_cores
from asynckfold.engines.machine import Machine
from asynckfold.store import RunStore
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
    machine = Machine("cpu")
    for _ in range(6):
        time.sleep(0.25)
        machine.sample()
    if machine.describe()["cpu"]["busy"]:
        pytest.skip("needs a quiet machine: somebody else uses a core already")


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
        others = [item.used - item.own for item in store.samples() if item.at > HOG_SECONDS + 1]
    # Run seconds start when the plan is written, some time after the call.
    late = ended - whole
    assert most_at_once(root, first, HOG_SECONDS - late - 0.5) <= cores - 1
    if sum(others) / len(others) > 0.2:
        pytest.skip("somebody else came while it ran")
    # Smoothing forgets the neighbour within three seconds.
    assert most_at_once(root, HOG_SECONDS + 3.0, whole) == cores
