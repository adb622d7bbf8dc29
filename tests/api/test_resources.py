"""What a run leaves to others: what is refused before it starts, and what holds while it runs."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, InputError, NoRoomError, RunStore
from tests.toy import Tiny, adam, samples

CORES = len(os.sched_getaffinity(0))


def kfold(root: Path, **settings: Any) -> AsyncKFold:
    settings = {"verbose": 0, "baseline": None, **settings}
    return AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 10, **settings)


# What is refused


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"reserve_cores": -1}, "at least 0: received -1"),
        ({"reserve_cores": 0.5}, "at least 0: received 0.5"),
        ({"reserve_cores": True}, "at least 0: received True"),
        ({"reserve_cores": CORES}, f"at least one core to the run: received {CORES} of the"),
        ({"max_memory": "much"}, "max_memory must be a share of the memory up to 1, or bytes"),
        ({"min_free_memory": None}, "min_free_memory must be a share"),
        ({"min_free_memory": 1}, "min_free_memory must be less than the memory"),
        ({"min_free_memory": "900TiB"}, "which is 921600.00 GiB of"),
        ({"jobs_per_gpu": 0}, "jobs_per_gpu must be a whole number of at least 1, or 'auto'"),
        ({"nice": 20}, "from 0 to 19: received 20"),
        ({"nice": "low"}, "from 0 to 19: received 'low'"),
        ({"max_wait": 0}, "max_wait must be a number of seconds above 0, or None: received 0"),
        ({"max_wait": float("nan")}, "max_wait must be"),
        ({"nice": 5, "parallelize": False}, "nice=5 and parallelize=False"),
        pytest.param(
            {"reserve_cores": 1, "threads_per_job": CORES},
            "less 1 reserved",
            marks=pytest.mark.skipif(CORES < 2, reason="needs two cores, one to reserve"),
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_numbers(
    root: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError) as caught:
        kfold(root, **settings)
    (problem,) = caught.value.problems
    assert told in str(problem)


def test_max_memory_must_be_enough_for_a_job_of_each_model(root: Path) -> None:
    for limit in ("0B", "1B"):
        with pytest.raises(
            InputError, match=r"received . bytes, and .* expected for a job of Tiny"
        ):
            kfold(root, max_memory=limit)([Tiny], ["step"], adam, {"epochs": 1})
    assert not root.exists()


# While it runs


class Floor:
    """A machine that has no room from a moment on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.looks, self.after = 0, after
        blocked = lambda machine, free: self.blocked()  # noqa: E731
        monkeypatch.setattr("asynckfold.system.machine.Machine._blocked", blocked)

    def blocked(self) -> str:
        self.looks += 1
        return "the floor is near" if self.looks > self.after else ""


@pytest.mark.nightly(but=["False"])
@pytest.mark.parametrize("parallelize", [True, False])
def test_a_run_without_room_ends_and_is_continued(
    root: Path, monkeypatch: pytest.MonkeyPatch, parallelize: bool
) -> None:
    with monkeypatch.context() as patch:
        Floor(patch, 2)
        with pytest.raises(NoRoomError, match="the floor is near"):
            kfold(root, max_wait=0.3, parallelize=parallelize)(
                [Tiny], ["step"], adam, {"epochs": 1}
            )
    results = kfold(root, parallelize=parallelize)([Tiny], ["step"], adam, {"epochs": 1})
    assert results.counts["done"] == 2


@pytest.mark.skipif(CORES < 2, reason="needs two cores, one to reserve")
def test_a_run_that_leaves_something_to_others_has_the_same_bits(tmp_path: Path) -> None:
    train = ([Tiny], ["step", "cosine"], adam, {"epochs": 2})
    usual = kfold(tmp_path / "usual", threads_per_job=1)(*train)
    polite = kfold(
        tmp_path / "polite", threads_per_job=1, reserve_cores=CORES - 1, nice=3, max_memory=0.5
    )(*train)
    assert polite.fingerprint == usual.fingerprint
    with RunStore.read(tmp_path / "polite") as store:
        spans = sorted((item.started, item.ended) for item in store.attempts())
    # One core is left: one job after another.
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


class Levelled(Tiny):
    """Notes the niceness of its process and of its session while it trains."""

    path: Path

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            level = os.getpriority(os.PRIO_PROCESS, 0)
            group = Path("/proc/self/autogroup")
            session = group.read_text().split()[-1] if group.exists() else level
            self.path.write_text(f"{level} {session}")
        return super().forward(inputs)


def test_workers_and_their_sessions_have_the_level_that_was_asked_for(root: Path) -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    level, model = min(here + 3, 19), Levelled()
    model.path = root.with_name("noted")
    kfold(root, nice=level)([model], ["step"], adam, {"epochs": 1})
    assert model.path.read_text() == f"{level} {level}"
    assert os.getpriority(os.PRIO_PROCESS, 0) == here


def test_the_peak_of_a_job_does_not_count_what_another_model_used(root: Path) -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 1 << 19), nn.Linear(1 << 19, 3))

    run = kfold(root, n_jobs=1, engine="process", fuse=False, report=False)
    results = run({"wide": wide, "narrow": Tiny}, ["constant"], adam, {"epochs": 1}).results
    peaks = [
        results[f"{name}/constant/fold-{fold}"] for name in ("wide", "narrow") for fold in (0, 1)
    ]
    first, second, *others = (result.peak_memory for result in peaks)
    # 24 MiB of weights, gradients and two moments.
    assert min(first, second) > max(others) + (48 << 20)
