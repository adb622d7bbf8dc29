"""How long threads spin depends on whether their cores are shared; what they compute does not."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from asynckfold.training.worker import spinning
from asynckfold.training.worker.spinning import (
    CALM,
    CORES,
    CROWDED,
    LOOK_BATCHES,
    LOOK_SECONDS,
    WHILE,
    SpinSwitch,
)

BATCH = 10 * LOOK_SECONDS
"""Seconds of which two are more than a look."""


class Machine:
    """A clock, what the threads waited, and who was lent threads."""

    def __init__(self, refuses: bool = False) -> None:
        self.now = self.waited = 0.0
        self.lent: list[int] = []
        self.refuses = refuses

    def lend(self, count: int) -> Any:
        self.lent.append(count)
        return None if self.refuses else lambda: self.lent.append(-count)

    def watch(self) -> SpinSwitch:
        return SpinSwitch(lambda: self.now, lambda: self.waited, self.lend)

    def train(self, watch: SpinSwitch, share: float, batch_s: float = BATCH) -> None:
        """Train for a look."""
        for _ in range(max(LOOK_BATCHES, math.ceil(LOOK_SECONDS / batch_s))):
            self.now += batch_s
            self.waited += share * batch_s
            watch.look()


@pytest.fixture(autouse=True)
def _two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_that_wait_for_cores_spin_little_until_they_do_not() -> None:
    machine = Machine()
    watch = machine.watch()
    machine.train(watch, CALM / 2)
    assert not watch.little
    machine.train(watch, 2 * CROWDED)
    assert watch.little
    machine.train(watch, (CALM + CROWDED) / 2)
    machine.train(watch, 2 * CROWDED)
    assert watch.little
    machine.train(watch, CALM / 2)
    assert not watch.little
    assert machine.lent == [CORES, -CORES]


@pytest.mark.parametrize(("spinning_s", "little_s"), [(0.1, 0.5), (0.5, 0.1)])
def test_the_faster_way_to_wait_is_kept(spinning_s: float, little_s: float) -> None:
    machine = Machine()
    watch = machine.watch()
    spent = {True: 0.0, False: 0.0}
    for _ in range(10 * WHILE):
        little, before = watch.little, machine.now
        machine.train(watch, 2 * CROWDED, little_s if little else spinning_s)
        spent[little] += machine.now - before
    assert spent[little_s < spinning_s] > 0.8 * sum(spent.values())


ON_ONE_CORE = """
import json, os, sys, time
import torch
from asynckfold.training.worker.spinning import add_sleeping_threads

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
torch.set_num_threads(2)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
inputs = torch.randn(256, 256)

def threads():
    return len(os.listdir("/proc/self/task"))

def settled(count):
    # The kernel ends a thread some time after Python has joined it.
    until = time.monotonic() + 60
    while threads() != count and time.monotonic() < until:
        time.sleep(0.01)
    return threads()

def used():
    begun = time.process_time()
    model.zero_grad()
    model(inputs).square().mean().backward()
    return time.process_time() - begun, float(model[0].weight.grad.double().sum())

def steps(way):
    found = [used() for _ in range(3)]
    told[way] += [seconds for seconds, _ in found]
    told["gradients"] += [gradient for _, gradient in found]

used()
count = int(sys.argv[1])
told = {"before": threads(), "spinning": [], "little": [], "gradients": []}
for _ in range(3):
    steps("spinning")
    end_threads = add_sleeping_threads(count)
    told["during"] = settled(told["before"] + count + 1)
    steps("little")
    end_threads()
    told["after"] = settled(told["before"])
print(json.dumps(told))
"""


@pytest.mark.nightly
def test_with_more_threads_than_cores_libgomp_spins_little() -> None:
    """By seconds of the processor, not of the clock: two threads on one core, 20 times and more."""
    if spinning._libgomp() is None:
        pytest.skip("torch computes with another library than GNU's libgomp here")
    if CORES == 1:
        pytest.skip("two threads on a machine of one core always spin little")
    ended = subprocess.run(
        [sys.executable, "-c", ON_ONE_CORE, str(CORES)],
        capture_output=True,
        text=True,
        env={key: text for key, text in os.environ.items() if not key.startswith(("GOMP", "OMP"))},
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    # The pool's threads, and the one that they belong to.
    assert told["during"] == told["before"] + CORES + 1
    assert told["after"] == told["before"]
    assert len(set(told["gradients"])) == 1
    assert min(told["spinning"]) > 2 * min(told["little"]), told
