"""The rules of `asynckfold.engines.engine.Engine`, held by every implementation."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import joblib
import pytest
import torch
from joblib.parallel import ParallelBackendBase
from torch import nn

from asynckfold import Result
from asynckfold.engines import joblib_backend
from asynckfold.engines.engine import Engine
from asynckfold.engines.joblib_backend import joblib_engine
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import ProcessEngine
from asynckfold.engines.ray_engine import RayEngine
from asynckfold.engines.serial import SerialEngine
from asynckfold.jobs.messages import EpochEnd, NewCheckpoint
from asynckfold.jobs.placement import Load, Placement
from asynckfold.jobs.result import DONE, FAILED
from tests.engines import fake_ray
from tests.engines.ray_start import needs_ray, started
from tests.toy import Tiny, task, toy_bundle

Make = Callable[..., AbstractContextManager[tuple[Engine, Any, "queue.SimpleQueue[Any]"]]]


def look(running: Sequence[Placement], own: Mapping[int, tuple[int, ...]]) -> Load:
    return Load((0,), (0,), 1 << 30)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


ENGINES = ("serial", "process", "lent", "threading")
"""The engines; the last two are backends of the engine "joblib", see also
`tests.engines.test_joblib_backend`."""

RAY = [
    pytest.param("stand-in", id="stand-in for ray"),
    pytest.param("ray", marks=[pytest.mark.nightly, needs_ray, pytest.mark.timeout(600)]),
]
"""Each test starts a Ray of its own, so that nothing of it may be left."""


class Lent(ParallelBackendBase):
    """A joblib backend whose processes are threads that pass for processes."""

    supports_retrieve_callback = True

    def effective_n_jobs(self, n_jobs: int) -> int:
        return 2

    def submit(self, func: Callable[[], Any], callback: Callable[[Any], None]) -> Any:
        future: Future[Any] = Future()
        future.add_done_callback(callback)

        def run() -> None:
            try:
                future.set_result(func())
            except RuntimeError as error:
                future.set_exception(error)

        threading.Thread(target=run).start()
        return future

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        return out.result()


joblib.register_parallel_backend("lent", Lent)

NOBODY = 1 << 30
"""Greater than any process number."""


@pytest.fixture(autouse=True)
def threads_pass_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joblib_backend, "_pid", lambda: NOBODY)


@pytest.fixture(params=[*ENGINES, *RAY])
def make(request: pytest.FixtureRequest, root: Path, pool: WorkerPool) -> Make:
    @contextmanager
    def engine(**changes: Any) -> Iterator[tuple[Engine, Any, queue.SimpleQueue[Any]]]:
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with (
            toy_bundle(root, **changes) as (bundle, data),
            opened(request.param, bundle, data, events.put, pool) as made,
        ):
            yield made, bundle, events

    return engine


@contextmanager
def opened(name: str, bundle: Any, data: Any, tell: Any, pool: WorkerPool) -> Iterator[Engine]:
    handle = data.handle()
    context: Any = nullcontext()
    if name == "serial":
        made: Any = nullcontext(SerialEngine(bundle, handle.open(handle.fds), look, tell))
    elif name == "process":
        made = closing(ProcessEngine(bundle, handle.fds, look, tell, pool))
    elif name in ("ray", "stand-in"):
        with (
            fake_ray.installed() if name == "stand-in" else nullcontext(),
            started() as cluster,
            closing(RayEngine(cluster, bundle, data, tell)) as engine,
        ):
            yield engine
        return
    else:
        context = joblib.parallel_config(name, n_jobs=2)
        made = joblib_engine(bundle, handle, look, tell)
    with context, made as engine:
        yield engine


def place(bundle: Any, index: int = 0) -> Placement:
    return Placement((bundle.plan.jobs[index].id,), (min(os.sched_getaffinity(0)),))


def is_ray(engine: Engine) -> bool:
    return isinstance(engine, RayEngine)


def heard(events: queue.SimpleQueue[Any]) -> list[Any]:
    found = []
    while not events.empty():
        found.append(events.get())
    return found


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the first job, trained here by the serial engine."""
    with toy_bundle(tmp_path_factory.mktemp("golden")) as (bundle, data):
        handle = data.handle()
        engine = SerialEngine(bundle, handle.open(handle.fds), look, lambda event: None)
        answer = engine.submit(place(bundle), [task(bundle.plan.jobs[0])]).result(0)
    digest: str = answer.results[0].digest
    return digest


def test_a_job_has_the_same_bits_in_every_engine_and_leaves_the_caller_alone(
    make: Make, golden: str
) -> None:
    with make() as (engine, bundle, events):
        torch.manual_seed(7)
        before, threads = torch.get_rng_state(), torch.get_num_threads()
        answer = engine.submit(place(bundle), [task(bundle.plan.jobs[0])]).result(60)
        news = heard(events)
        assert torch.equal(before, torch.get_rng_state())
        assert torch.get_num_threads() == threads
        cores = engine.load([]).cores
        # What Ray's nodes read is the machine itself.
        assert cores == (tuple(sorted(os.sched_getaffinity(0))) if is_ray(engine) else (0,))
        engine.close()
        engine.close()
    (result,) = answer.results
    assert isinstance(result, Result)
    assert (result.status, result.digest) == (DONE, golden)
    assert result.outputs is not None
    assert result.outputs.shape == (20, 3)
    assert [item.epoch.number for item in news if isinstance(item, EpochEnd)] == [1, 2, 3]
    (saved,) = [item.ref for item in news if isinstance(item, NewCheckpoint)]
    assert (bundle.root / saved.file).stat().st_size == saved.bytes


class Raises(Tiny):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("on purpose")


def test_lambdas_and_local_classes_travel_and_what_they_raise_is_a_result(make: Make) -> None:
    class Local(nn.Linear):
        pass

    models = {"local": lambda: Local(8, 3), "Raises": Raises}
    with make(models=models) as (engine, bundle, _):
        done, failed = (
            engine.submit(place(bundle, index), [task(bundle.plan.jobs[index])]).result(60)
            for index in (0, len(bundle.plan.jobs) - 1)
        )
    assert done.results[0].status == DONE, done.results[0].traceback
    (result,) = failed.results
    assert result.status == FAILED
    assert result.error == "ZeroDivisionError: on purpose (epoch 1, batch 1 of 4)"
    assert "in forward" in result.traceback


def test_close_lets_a_running_job_save_itself(make: Make) -> None:
    with make(epochs=10**6) as (engine, bundle, events):
        if engine.runs_in_submit:
            pytest.skip("nothing runs outside submit")
        future = engine.submit(place(bundle), [task(bundle.plan.jobs[0])])
        while not isinstance(events.get(timeout=60), EpochEnd):
            pass
        engine.close(60)
        assert future.result(0).results == [None]
        assert [item for item in heard(events) if isinstance(item, NewCheckpoint)]
