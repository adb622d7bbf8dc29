"""A job that has trained for as long as it may saves itself, and more seconds continue it.

The clock is a fake one that only training and pauses move, so that it is known after which batch
the seconds are over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim

from asynckfold import Result
from asynckfold.jobs.messages import CheckpointRef, RunEvent
from asynckfold.jobs.result import DONE, FAILED
from asynckfold.jobs.trainer_params import SEVERAL
from asynckfold.training import checkpoint, setup
from asynckfold.training.fusion import group as fused
from asynckfold.training.stopwatch import Stopwatch
from tests.training.fusion.test_trainer import digests, grouped, refs_of
from tests.training.multiprocess.attempts import (
    OPTIMIZERS,
    attempt,
    each_sample,
    noting,
    params,
    samples_in,
)
from tests.training.tiny import Plain, Tiny, checkpoints, never

MOMENT = 1e-9
"""Over after every batch, whatever the clock says."""


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def waits(self, seconds: float) -> Callable[[], bool]:
        """What is asked between batches, and takes so long: a pause."""

        def rest() -> bool:
            self.now += seconds
            return False

        return rest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all jobs that are built."""
    made = Clock()
    for module in (setup, fused):
        monkeypatch.setattr(module, "Stopwatch", partial(Stopwatch, clock=made))
    return made


def stepping(clock: Clock, seconds: float) -> Callable[[nn.Module], optim.Optimizer]:
    """SGD, a step of which takes so long."""

    class Taking(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            clock.now += seconds
            return super().step(closure)

    return lambda model: Taking(model.parameters(), lr=0.1, momentum=0.9)


def with_limit(tiny: Any, limit_s: float | None) -> Any:
    """The same sweep with another limit."""
    return replace(tiny, job_timeout_s=limit_s)


@pytest.mark.parametrize("jobs", [1, 3])
def test_it_counts_training_and_nothing_else(jobs: int) -> None:
    clock, trained = Clock(), 0.0
    watch = Stopwatch(100, jobs, clock)
    for what, seconds in [("train", 30), ("pause", 500), ("continue", 900), ("train", 80)] * 3:
        if what == "pause":
            assert not watch.call_uncounted(clock.waits(seconds))
        elif what == "train":
            clock.now += seconds
            trained += seconds / jobs
        else:
            saved = watch.seconds
            clock.now += seconds  # between two sessions
            watch = Stopwatch(100, jobs, clock)
            watch.continue_from(saved)
            watch.continue_from(saved / 2)  # of a neighbour that was saved before
        assert watch.seconds == pytest.approx(trained)
        assert watch.expired == (watch.seconds >= 100)
    assert not Stopwatch(None, jobs, clock).expired


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
    result, events = with_limit(tiny, 450).attempt(attempt=2, refs=refs)
    assert result is not None
    assert "trained 500.00 s, at epoch 2 of 2, batch 1 of 4" in result.error
    # With no more than before it comes to its next batch.
    result, events = with_limit(tiny, 450).attempt(attempt=3, refs=checkpoints(events))
    assert result is not None
    assert "trained 600.00 s, at epoch 2 of 2, batch 2 of 4" in result.error
    whole, _ = with_limit(tiny, 1000).attempt(attempt=4, refs=checkpoints(events))
    assert whole is not None
    plain = Tiny(tmp_path / "plain", opt_fn=stepping(clock, 0)).train()
    assert whole.digest == plain.digest


Attempt = Callable[
    [float | None, int, Sequence[CheckpointRef]], tuple[Result | None, list[RunEvent]]
]


def ended_by_limits(train: Attempt) -> tuple[Result, int]:
    """A job timed out after each batch; what it comes to, and in how many attempts."""
    refs: list[CheckpointRef] = []
    for number in range(1, 100):
        result, events = train(MOMENT, number, refs)
        assert result is not None
        if result.status == DONE:
            return result, number
        assert result.status == FAILED
        assert result.error.startswith("timed out: trained ")
        refs = checkpoints(events)
        assert refs
    raise AssertionError("the training makes no progress")


@pytest.mark.nightly(but=["averaging"])
@pytest.mark.parametrize("trainer", SEVERAL)
def test_a_job_of_several_processes_times_out_and_leaves_no_process(
    tmp_path: Path, trainer: str
) -> None:
    def tiny(name: str) -> Tiny:
        models = {"m": noting(tmp_path / f"noted by {name}", Plain)}
        return Tiny(
            tmp_path / name,
            models,
            opt_fn=OPTIMIZERS["adam"],
            params=params(trainer),
            batch_size=3,
        )

    late, whole = tiny("late"), tiny("whole")
    result, attempts = ended_by_limits(
        lambda limit, number, refs: attempt(with_limit(late, limit), number, refs)
    )
    assert attempts > 3
    assert samples_in(tmp_path / "noted by late") == each_sample(late)
    if trainer in ("allreduce", "averaging"):
        found, _ = attempt(whole)
        assert found is not None
        assert result.digest == found.digest


def test_a_fusion_group_times_out_together_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, _ = grouped(tmp_path / "whole").group()
    late = grouped(tmp_path / "late", job_timeout_s=MOMENT)
    refs: dict[str, list[CheckpointRef]] = {}
    for number in range(1, 100):
        results, events = late.group(refs, never, attempt=number)
        found = {result.status for result in results.values() if result is not None}
        assert found in ({FAILED}, {DONE})
        if found == {DONE}:
            break
        refs = refs_of(events)
    assert number >= 8
    assert digests(results) == digests(whole)
