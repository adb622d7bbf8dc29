"""Which worker gets which GPU, and when a server is stale: with fake workers."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from asynckfold.engines import warm_pool
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.server_process import environment, library_variables
from asynckfold.jobs.placement import Placement


def worker(gpu: str = "", bundle: str = "", busy: bool = False) -> Any:
    return SimpleNamespace(alive=True, busy=busy, used=True, gpu=gpu, bundle=bundle)


def idle(workers: list[Any], placement: Placement, bundle: str = "b") -> Any:
    pool: Any = SimpleNamespace(workers=workers, _lock=threading.Lock())
    return WorkerPool.idle_worker(pool, bundle, placement)


def test_a_worker_opens_one_gpu_in_its_life() -> None:
    fresh, first, second = worker(bundle="b"), worker("GPU-a"), worker("GPU-b", "b")
    workers = [fresh, first, second]
    on_a = Placement(("a",), (0,), gpu=0, gpu_uuid="GPU-a")
    assert idle(workers, on_a) is first
    assert idle([second, fresh], on_a) is fresh
    assert idle([second, worker("GPU-a", busy=True)], on_a) is None
    # Jobs on cores leave those with a GPU to the others, if they can.
    on_cores = Placement(("c",), (0,))
    assert idle([first, second, fresh], on_cores) is fresh
    assert idle([first, second], on_cores) is second


class FakePool:
    """A pool that notes that it was closed."""

    owner, healthy = warm_pool.os.getpid(), True

    def __init__(self, nice: int) -> None:
        self.nice, self.closed = nice, False
        self.server = SimpleNamespace(libraries=library_variables())

    def knows(self, modules: object) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUBLAS_WORKSPACE_CONFIG"]
)
def test_the_server_starts_anew_when_a_variable_of_cuda_has_changed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(warm_pool, "WorkerPool", FakePool)
    monkeypatch.setattr(warm_pool, "_warm", warm_pool.Warm())
    monkeypatch.delenv(name, raising=False)
    first: Any = warm_pool.take()
    warm_pool.give_back(first)
    assert warm_pool.take() is first
    warm_pool.give_back(first)
    monkeypatch.setenv(name, "1")
    assert warm_pool.take() is not first
    assert first.closed


def test_cuda_counts_like_nvml_unless_the_user_says_otherwise() -> None:
    assert environment({})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})["CUDA_DEVICE_ORDER"] == (
        "FASTEST_FIRST"
    )
