"""A job that has trained for as long as it may saves itself, and more seconds continue it.

The clock is a fake one that only training moves, so that it is known after which batch
the seconds are over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim

from asynckfold.jobs.result import FAILED
from asynckfold.training import checkpoint, setup
from asynckfold.training.stopwatch import Stopwatch
from tests.training.tiny import Tiny, checkpoints


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all jobs that are built."""
    made = Clock()
    monkeypatch.setattr(setup, "Stopwatch", partial(Stopwatch, clock=made))
    return made


def stepping(clock: Clock, seconds: float) -> Callable[[nn.Module], optim.Optimizer]:
    """SGD, a step of which takes so long."""

    class Taking(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            clock.now += seconds
            return super().step(closure)

    return lambda model: Taking(model.parameters(), lr=0.1, momentum=0.9)


def test_it_ends_at_the_first_batch_after_its_seconds(tmp_path: Path, clock: Clock) -> None:
    tiny = Tiny(tmp_path, opt_fn=stepping(clock, 100), job_timeout_s=450)
    result, events = tiny.attempt()
    assert result is not None
    assert result.status == FAILED
    assert result.error == (
        "timed out: trained 500.00 s, at epoch 2 of 2, batch 1 of 4; job_timeout_s is 450. "
        "Pass more to continue it"
    )
    assert result.error in tiny.log()
    (newest, *_) = checkpoints(events)
    assert (newest.epoch, newest.batch) == (1, 1)
    assert checkpoint.load(tiny.root / newest.file, newest.sha256)["seconds"] == 500


def test_the_seconds_of_all_attempts_count(tmp_path: Path, clock: Clock) -> None:
    tiny = Tiny(tmp_path, opt_fn=stepping(clock, 100))
    left = iter(range(2))
    none, events = tiny.attempt(stop=lambda: next(left, None) is None)
    assert none is None
    refs = checkpoints(events)
    result, events = replace(tiny, job_timeout_s=450).attempt(attempt=2, refs=refs)
    assert result is not None
    assert "trained 500.00 s, at epoch 2 of 2, batch 1 of 4" in result.error
    # With no more than before it comes to its next batch.
    result, events = replace(tiny, job_timeout_s=450).attempt(attempt=3, refs=checkpoints(events))
    assert result is not None
    assert "trained 600.00 s, at epoch 2 of 2, batch 2 of 4" in result.error
    whole, _ = replace(tiny, job_timeout_s=1000).attempt(attempt=4, refs=checkpoints(events))
    assert whole is not None
    plain = Tiny(tmp_path / "plain", opt_fn=stepping(clock, 0)).train()
    assert whole.digest == plain.digest
