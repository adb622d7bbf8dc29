"""``engine="auto"``: a sweep of a few seconds trains in this process, with the bits of workers."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn

from asynckfold import AsyncKFold, CVResults, RunStore
from asynckfold.engines import warm_pool
from asynckfold.engines.server_process import ServerProcess
from asynckfold.planning import process_rule
from asynckfold.system.machine import Machine
from tests import leftovers
from tests.toy import Tiny, adam, samples

pytestmark = pytest.mark.chooses_process


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers could start in ten seconds."""
    monkeypatch.setattr(ServerProcess, "seconds_to_serve", 10.0)


def swept(root: Path, **settings: Any) -> CVResults:
    kfold = AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 10, verbose=0, **settings)
    return kfold([Tiny], ["cosine", "step"], adam, {"epochs": 2})


def processes(results: CVResults) -> set[int]:
    return {item.pid for item in results.results.values()}


def notes(root: Path) -> list[str]:
    with RunStore.read(root) as store:
        return [event.text for event in store.events() if event.kind == "note"]


@pytest.mark.parametrize("fuse", [False, True])
def test_a_small_sweep_trains_here_with_the_bits_of_workers_and_says_so(
    root: Path, *, fuse: bool
) -> None:
    here = swept(root, fuse=fuse)
    assert processes(here) == {os.getpid()}
    (note,) = [text for text in notes(root) if text.startswith("trains in this process: ")]
    assert "engine='process' asks for workers" in note
    workers = swept(root.with_name("workers"), fuse=fuse, engine="process")
    assert os.getpid() not in processes(workers)
    assert here.fingerprint == workers.fingerprint


@pytest.mark.parametrize(
    "settings", [{"nice": 1}, {"yield_to_others": True}, {"stall_timeout": 60}]
)
def test_what_only_workers_can_do_gets_workers(root: Path, settings: dict[str, Any]) -> None:
    assert os.getpid() not in processes(swept(root, **settings))


@pytest.mark.parametrize(
    ("place", "value"),
    [(process_rule, ("MOST_SECONDS", 1e-6)), (ServerProcess, ("seconds_to_serve", 0.0))],
)
def test_a_sweep_that_workers_end_first_gets_them(
    root: Path, monkeypatch: pytest.MonkeyPatch, place: Any, value: tuple[str, float]
) -> None:
    monkeypatch.setattr(place, *value)
    assert os.getpid() not in processes(swept(root))


def test_a_sweep_here_prepares_workers_for_the_next_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also their libraries, which they lacked when it began."""
    warm_pool.close_warm()
    monkeypatch.setattr("asynckfold.api.process_choice.preloads", lambda *_, **__: ["torchvision"])
    swept(root)
    pool = warm_pool.take()
    assert not pool.lacking(["torchvision"])
    # The fixture's ten seconds are over.
    leftovers.until(lambda: pool.server.serving)
    warm_pool.give_back(pool)


def test_what_warm_workers_used_before_a_call_is_not_taken_for_others(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the cores on which they read the data set count as busy for seconds."""
    swept(root, engine="process")
    pool = warm_pool.take()
    workers = {worker.pid for worker in pool.workers}
    warm_pool.give_back(pool)
    samples, sample = list[set[int]](), Machine.sample

    def noted(machine: Machine, processes: dict[int, tuple[int, ...]] | None = None) -> None:
        samples.append({*(processes or {})})
        sample(machine, processes)

    monkeypatch.setattr(Machine, "sample", noted)
    swept(root.with_name("second"), engine="process")
    assert workers
    assert workers <= samples[0]


def test_a_call_beside_other_threads_gets_workers(root: Path) -> None:
    made: list[CVResults] = []
    thread = threading.Thread(target=lambda: made.append(swept(root)))
    thread.start()
    thread.join()
    assert os.getpid() not in processes(made[0])


def test_a_run_goes_on_wherever_it_was_begun(root: Path) -> None:
    def call(folder: Path, schedules: list[str], engine: str) -> CVResults:
        kfold = AsyncKFold(
            2, samples(), folder, nn.CrossEntropyLoss(), 10, verbose=0, engine=engine
        )
        return kfold([Tiny], schedules, adam, {"epochs": 2})

    begun = call(root, ["cosine"], "process")
    both = call(root, ["cosine", "step"], "auto")
    assert processes(both) == processes(begun) | {os.getpid()}
    whole = call(root.with_name("whole"), ["cosine", "step"], "process")
    assert both.fingerprint == whole.fingerprint


def test_linear_algebra_has_the_threads_of_a_worker(root: Path) -> None:
    X = np.random.default_rng(0).normal(size=(600, 400)).astype(np.float32)
    y = (X[:, 0] > 0).astype(np.int64)

    def call(folder: Path, engine: str) -> CVResults:
        kfold = AsyncKFold(
            2, (X, y), folder, nn.CrossEntropyLoss(), 100, verbose=0, engine=engine,
            preprocess=PCA(20, svd_solver="full"),
        )  # fmt: skip
        return kfold({"m": lambda: nn.Linear(20, 2)}, ["constant"], adam, {"epochs": 1})

    here, workers = call(root, "auto"), call(root.with_name("workers"), "process")
    assert processes(here) == {os.getpid()}
    assert here.fingerprint == workers.fingerprint


def test_what_a_job_has_done_is_durable_while_it_goes_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLUSH_SECONDS", "TICK_SECONDS"):
        monkeypatch.setattr(f"asynckfold.sweep.loop.{name}", 0.0)
    durable = set()

    class Looking(Tiny):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with RunStore.read(root) as store:
                durable.add(len(store.epochs()))
            return super().forward(inputs)

    kfold = AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 10, verbose=0, engine="serial")
    kfold([Looking], ["constant"], adam, {"epochs": 2})
    assert durable >= {0, 1, 2, 3}


def test_workers_go_on_where_this_process_loses_its_gpu(root: Path) -> None:
    caller = os.getpid()

    class Losing(Tiny):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            is_job = any(root.rglob("log.txt"))
            if os.getpid() == caller and is_job and self.training:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return super().forward(inputs)

    kfold = AsyncKFold(
        2, samples(), root, nn.CrossEntropyLoss(), 10, verbose=0, baseline=None, fuse=False
    )
    results = kfold([Losing], ["cosine"], adam, {"epochs": 2})
    assert results.counts["done"] == 2
    assert caller not in processes(results)
    with RunStore.read(root) as store:
        assert [item.outcome for item in store.attempts()].count("device_lost") == 1
