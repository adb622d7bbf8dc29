"""A probe: real steps of a model, timed; nothing of it stays."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import ProcessEngine
from asynckfold.jobs.cost import Timing
from asynckfold.jobs.placement import Load, Placement
from asynckfold.jobs.plan import Job
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.training import probe
from tests.toy import Tiny as Perceptron
from tests.toy import toy_bundle
from tests.training.tiny import Noisy, Plain, Seen, Tiny, watched


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.01)


def probed(tiny: Tiny, model: str = "plain", threads: int = 1) -> Timing:
    return probed_jobs(tiny, [next(job for job in tiny.jobs if job.model == model)], threads)


def probed_jobs(tiny: Tiny, jobs: Sequence[Job], threads: int = 1) -> Timing:
    placement = Placement(tuple(job.id for job in jobs), (0,), threads, trainer="probe")
    from asynckfold.training.worker.execute import execute

    (found,) = execute(tiny.bundle, tiny.batches, placement, [], lambda events: None, lambda: False)
    assert isinstance(found, Timing)
    return found


def test_it_times_steps_and_evaluations(tiny: Tiny) -> None:
    found = probed(tiny)
    assert not found.failure
    assert 0 < found.step_seconds < 5
    assert 0 < found.eval_seconds < 5
    assert found.memory >= 0
    assert found.gpu_memory == 0


def test_a_fusion_group_is_timed_beyond_an_epoch_and_leaves_nothing(tmp_path: Path) -> None:
    tiny = Tiny(
        tmp_path / "run",
        {"plain": Plain},
        {"onecycle": "onecycle", "cosine": "cosine"},
        params=TrainerParams(1, lr_step="batch"),
    )
    found = probed_jobs(tiny, tiny.jobs)
    assert not found.failure
    assert 0 < found.step_seconds < 5
    assert not list((tmp_path / "run").rglob("log.txt"))


def test_it_trains_on_the_training_fold_and_evaluates_the_other(tmp_path: Path) -> None:
    seen = Seen()
    tiny = Tiny(tmp_path / "run", {"plain": watched(Plain, seen)})
    assert not probed(tiny).failure
    fold = tiny.bundle.fold_of(tiny.jobs[0])
    assert seen.numbers(training=True) <= set(fold.train.tolist())
    assert seen.numbers(training=False) == set(fold.valid.tolist())
    assert len(seen.of(training=False)) == 3
    assert len(seen.of(training=True)) >= 3


def test_a_long_step_is_taken_once(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LONG_SECONDS", 0.0)
    seen = Seen()
    tiny.models = {"plain": watched(Plain, seen)}
    assert probed(tiny).step_seconds > 0
    assert [len(seen.of(training)) for training in (True, False)] == [1, 1]


def test_it_leaves_nothing_behind(tiny: Tiny) -> None:
    assert not probed(tiny).failure
    assert not tiny.root.exists() or not any(tiny.root.iterdir())


def test_jobs_give_the_same_bits_after_a_probe_as_before(tmp_path: Path) -> None:
    shared = Noisy()
    before = {name: value.clone() for name, value in shared.state_dict().items()}
    tiny = Tiny(tmp_path / "run", {"noisy": Noisy})
    first = tiny.train().digest
    assert not probed(tiny, "noisy").failure
    assert tiny.train().digest == first
    assert all(torch.equal(value, before[name]) for name, value in shared.state_dict().items())


class Meddles(Plain):
    """A model that changes settings of its process."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(3)
        os.environ["MEDDLED"] = "yes"
        np.seterr(all="ignore")


def test_a_probe_restores_what_a_model_changes_in_its_process(tmp_path: Path) -> None:
    before = torch.get_num_threads(), np.geterr()
    assert not probed(Tiny(tmp_path / "run", {"meddles": Meddles}), "meddles").failure
    assert (torch.get_num_threads(), np.geterr()) == before
    assert "MEDDLED" not in os.environ


def raises() -> nn.Module:
    raise ZeroDivisionError("on purpose")


def leaves() -> nn.Module:
    raise SystemExit(3)


@pytest.mark.parametrize(("make", "name"), [(raises, "ZeroDivisionError"), (leaves, "SystemExit")])
def test_a_probe_returns_the_traceback_of_user_code(tmp_path: Path, make: Any, name: str) -> None:
    found = probed(Tiny(tmp_path / "run", {"bad": make}), "bad")
    assert name in found.failure
    assert make.__name__ in found.failure


# In workers, side by side


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


def test_two_probes_at_once_in_real_workers(tmp_path: Path, pool: WorkerPool) -> None:
    state = random.getstate()
    cores = sorted(os.sched_getaffinity(0))
    with toy_bundle(tmp_path / "run", {"Tiny": Perceptron}) as (bundle, data):
        load = Load(tuple(cores), tuple(cores), 1 << 40)
        engine = ProcessEngine(
            bundle, data.handle().fds, lambda running, own: load, lambda events: None, pool
        )
        job = bundle.plan.jobs[0]
        futures = [
            engine.submit(Placement((job.id,), (core,), 1, trainer="probe"), [])
            for core in (cores[0], cores[-1])
        ]
        answers = [future.result(60) for future in futures]
        engine.close()
    assert len({answer.pid for answer in answers}) == 2
    assert all(answer.results[0].step_seconds > 0 for answer in answers)
    assert random.getstate() == state
