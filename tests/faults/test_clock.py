"""The wall clock may jump as it likes, here and in the workers: nothing waits or ends by it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults, RunStore
from asynckfold.engines.warm_pool import close_warm
from asynckfold.system import readers
from tests.toy import Tiny, adam, samples

JUMPS = (0.0, 1.0e9, -86_400.0, 4.0e9, 1.7e9)
"""1970, 2001, before the epoch, 2096, and something like today."""


@pytest.fixture(autouse=True)
def _no_worker_stays() -> Iterator[None]:
    yield
    close_warm()


def jump(patch: pytest.MonkeyPatch | None = None) -> None:
    """Let the wall clock of this process jump at every look."""
    times = itertools.cycle(JUMPS)
    target: Any = patch.setattr if patch is not None else setattr
    target(time, "time", lambda: next(times))
    target(time, "time_ns", lambda: int(next(times) * 1e9))


class Jumping(Tiny):
    """Lets its worker's clock jump, and kills it once."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        jump()
        # The dry run evaluates 8 samples at most; a fold has 20.
        if not self.training and len(inputs) > 8 and not self.mark.exists():
            self.mark.touch()
            os._exit(3)
        return super().forward(inputs)


def run(root: Path, mark: Path) -> CVResults:
    kfold = AsyncKFold(
        3, samples(), root, nn.CrossEntropyLoss(), 10, verbose=0, baseline=None, n_jobs=1
    )
    return kfold({"m": lambda: Jumping(mark)}, ["step"], adam, {"epochs": 2})


@pytest.mark.nightly
def test_a_run_does_not_notice(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inert").touch()
    golden = run(tmp_path / "golden", tmp_path / "inert")
    jump(monkeypatch)
    results = run(root, tmp_path / "mark")
    assert results.fingerprint == golden.fingerprint
    with RunStore.read(root) as store:
        attempts, samples_of_use = store.attempts(), store.samples()
        found = store.results().values()
    assert sorted(item.outcome or "" for item in attempts) == ["died", "ok", "ok", "ok"]
    assert all(0 <= item.started <= (item.ended or -1) < 600 for item in attempts)
    assert all(0 <= item.fit_seconds < 600 for item in found)
    assert [item.at for item in samples_of_use] == sorted(item.at for item in samples_of_use)
    assert 0 < results.seconds < 600


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_the_age_of_a_process_is_not_the_wall_clocks(
    monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """What is subtracted as one's own load depends on it."""
    now: Any = time.time
    before = readers.CounterReaders().age(os.getpid())
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    assert before <= readers.CounterReaders().age(os.getpid()) < before + 60
