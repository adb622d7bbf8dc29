"""What a worker does on a GPU, which is faked: its share of the memory, and where the data are."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from asynckfold import Result
from asynckfold.jobs.placement import Placement
from asynckfold.jobs.result import DONE
from asynckfold.training import loop
from asynckfold.training.worker import execute

GIB = 1 << 30


@pytest.fixture
def _worker() -> Iterator[None]:
    """What tells a worker from the process of the caller."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        calls.append(f"use {index}")
        yield
        calls.append(f"leave {index}")

    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda gpu: f"state of {gpu}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, gpu: calls.append(state))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda gpu: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda gpu: 5 * GIB)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, gpu: calls.append(f"{share:g} of {gpu}"),
    )
    return calls


@pytest.mark.usefixtures("_worker")
def test_a_worker_keeps_nothing_of_a_gpu_after_a_job(fake_cuda: list[str]) -> None:
    placement = Placement(("a",), (0,))
    with execute._device(replace(placement, gpu=1, gpu_memory=2 * GIB, gpu_share=0.2)) as found:
        assert found == torch.device("cuda", 1)
        made = loop.with_gpu_memory(Result("a", 1, DONE), found)
        assert made.peak_gpu_memory == 5 * GIB
        assert loop.with_gpu_memory(None, found) is None
    with pytest.raises(ZeroDivisionError), execute._device(replace(placement, gpu=0)):
        raise ZeroDivisionError
    with execute._device(placement) as found:
        assert found == torch.device("cpu")
        assert loop.with_gpu_memory(made, found) is made
    shared = ["init", "use 1", "0.1875 of 1", "state of 1", "empty", "leave 1"]
    assert fake_cuda == [*shared, "init", "use 0", "1 of 0", "state of 0", "empty"]


def test_the_process_of_the_caller_has_its_generator_back_and_no_limit(
    fake_cuda: list[str],
) -> None:
    with execute._device(Placement(("a",), (0,), gpu=0, gpu_memory=2 * GIB, gpu_share=0.2)):
        pass
    assert fake_cuda == ["init", "use 0", "state of 0", "empty", "leave 0"]


def test_a_lost_gpu_hides_no_error(fake_cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    with pytest.raises(ZeroDivisionError), execute._device(Placement(("a",), (0,), gpu=0)):
        raise ZeroDivisionError
