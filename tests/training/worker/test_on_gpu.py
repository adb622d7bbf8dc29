"""What a worker does on a GPU, which is faked: its share of the memory, and where the data are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asynckfold.data.prepare import prepare
from asynckfold.jobs.placement import Command, Placement
from asynckfold.jobs.result import DONE, Result
from asynckfold.training import loop, setup
from asynckfold.training.worker import execute
from tests.toy import samples
from tests.training.tiny import Tiny, never

GIB = 1 << 30


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
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda gpu: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda gpu: 5 * GIB)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, gpu: calls.append(f"{share:g} of {gpu}"),
    )
    return calls


def test_a_worker_keeps_nothing_of_a_gpu_after_a_job(fake_cuda: list[str]) -> None:
    placement = Placement(("a",), (0,))
    with execute._device(replace(placement, gpu=1, jobs_per_gpu=4)) as found:
        assert found == torch.device("cuda", 1)
        made = loop.with_gpu_memory(Result("a", 1, DONE), found)
        assert made.peak_gpu_memory == 5 * GIB
        assert loop.with_gpu_memory(None, found) is None
    with pytest.raises(ZeroDivisionError), execute._device(replace(placement, gpu=0)):
        raise ZeroDivisionError
    with execute._device(placement) as found:
        assert found == torch.device("cpu")
        assert loop.with_gpu_memory(made, found) is made
    shared, whole = ["init", "use 1", "0.1875 of 1", "empty", "leave 1"], ["init", "use 0"]
    assert fake_cuda == [*shared, *whole, "1 of 0", "empty"]


@pytest.mark.parametrize("command", [Command.MEASURE, Command.ESTIMATE])
def test_the_serial_baseline_runs_on_the_gpu_of_its_placement_and_frees_it(
    tmp_path: Path, fake_cuda: list[str], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(
        execute.serial_baseline, command.value, lambda bundle, data, stop, device, *_: device
    )
    tiny = Tiny(tmp_path)
    placement = Placement((), (0,), gpu=1, command=command)
    told: list[Any] = []
    found = execute.execute(tiny.bundle, tiny.batches, placement, [], told.append, never)
    assert found == [torch.device("cuda", 1)]
    assert fake_cuda == ["init", "use 1", "1 of 1", "empty", "leave 1"]


def batches_of(count: int = 60) -> Any:
    return prepare(samples(count), criterion_wants_classes=True)


def test_inputs_reside_on_the_device_where_they_fit() -> None:
    """With a device that holds shapes only."""
    with contextlib.closing(batches_of()) as data:
        handle = data.handle()
        here = handle.open(handle.fds)
        size = 60 * 8 * 4
        meta = torch.device("meta")
        for room, place in ((None, "meta"), (size, "meta"), (size - 1, "cpu"), (0, "cpu")):
            there = here.to(meta, room)
            assert {array.device.type for array in there._train.arrays} == {place}
            assert {array.device.type for array in there._eval.arrays} == {place}
            # Both views are of one array, which is there once.
            assert len({id(view.arrays[0]) for view in (there._train, there._eval)}) == 1
            assert there.targets.device == meta
        # A batch is on the device either way: only where it comes from differs.
        inputs, _ = here.to("cpu", 0).train(np.arange(5), 0, 0)
        assert torch.equal(inputs, here.train(np.arange(5), 0, 0)[0])
        moved = here.to(meta, 0)._train
        assert moved.gather(torch.arange(5), _draw(5)).device == meta
        # What is there already takes no further room.
        assert here.to(meta, size).to(meta, 0)._train.arrays[0].device == meta


def _draw(count: int) -> Any:
    from asynckfold.data.transforms import Draw

    return Draw(0, 0, np.arange(count))


def test_half_of_the_free_memory_is_for_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, int | None]] = []

    class Data:
        def __init__(self) -> None:
            self.moved: dict[Any, Any] = {}

        def bytes_on(self, device: Any) -> int:
            return 0

        def to(self, device: Any, room: int | None = None) -> Data:
            seen.append((device, room))
            return self

    figures: Mapping[int, tuple[int, int]] = {0: (100, 1000), 1: (7, 1000)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: figures[device.index])
    for device in ("cpu", "cuda:0", "cuda:1"):
        setup.to_device(Data(), torch.device(device))  # type: ignore[arg-type]
    assert [room for _, room in seen] == [None, 50, 3]
