"""GPUs from a fake NVML."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.jobs.placement import Gpu
from asynckfold.system.gpus import load_nvml, visible_order
from asynckfold.system.machine import Machine
from tests.system.fakes import FakeMachine, fake_host


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """NVML with GPUs of (free, total, use); None is a GPU that fell off the bus."""

    NVMLError = FakeNvmlError

    def __init__(self, *gpus: tuple[int, int, int] | None) -> None:
        self.gpus = gpus

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'abc'[handle]}00"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"Fake"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        gpu = self.gpus[handle]
        if gpu is None:
            raise FakeNvmlError("GPU is lost")
        return SimpleNamespace(free=gpu[0], total=gpu[1])

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        gpu = self.gpus[handle]
        if gpu is None or gpu[2] < 0:
            raise FakeNvmlError("Not Supported")
        return SimpleNamespace(gpu=gpu[2])


def gpu_machine(tmp_path: Path, nvml: FakeNvml, devices: Any = "auto", **environ: str) -> Machine:
    fake = FakeMachine()
    host = fake_host(tmp_path, (0, 1), **environ)
    return Machine(devices, host=host, readers=fake.readers(), clock=fake.clock, nvml=nvml)


THREE = FakeNvml((1, 10, 0), (2, 10, 50), (3, 10, -1))


def test_gpus_have_free_memory_and_use(tmp_path: Path) -> None:
    expected = (Gpu(0, 1, 10, 0.0), Gpu(1, 2, 10, 0.5), Gpu(2, 3, 10, 0.0))
    assert gpu_machine(tmp_path, THREE).load().gpus == expected


class Crowded(FakeNvml):
    """Its first GPU is held by processes with these bytes; the second does not know by whom."""

    holders: ClassVar[list[tuple[int, Any]]] = [(7, 3), (8, 2), (9, None), (10, -5)]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        if handle:
            raise FakeNvmlError("Not Supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.holders]


def test_what_own_processes_hold_of_a_gpu_is_known_where_nvml_says_so(tmp_path: Path) -> None:
    found = gpu_machine(tmp_path, Crowded((4, 10, 0), (4, 10, 0)))
    own: dict[int, tuple[int, ...]] = {7: (), 9: (), 10: ()}
    assert [(gpu.free, gpu.own) for gpu in found.load(own=own).gpus] == [(4, 3), (4, 0)]
    assert [gpu.own for gpu in found.load().gpus] == [0, 0]
    # Never more than is taken at all.
    full = gpu_machine(tmp_path, Crowded((9, 10, 0)))
    assert [gpu.own for gpu in full.load(own=own).gpus] == [1]
    # Without the call, as in an old NVML.
    assert [gpu.own for gpu in gpu_machine(tmp_path, THREE).load(own=own).gpus] == [0, 0, 0]


@pytest.mark.parametrize(
    ("visible", "free"),
    [
        ("2,0", [3, 1]),
        ("GPU-b, GPU-c00", [2, 3]),
        ("", []),
        ("-1", []),
        ("1,-1,0", [2]),
        ("1,9,0", [2]),
        ("1,1", []),
        ("GPU-", []),
        ("none", []),
    ],
)
def test_only_gpus_that_cuda_shows_are_used_under_its_index(
    tmp_path: Path, visible: str, free: list[int]
) -> None:
    found = gpu_machine(tmp_path, THREE, CUDA_VISIBLE_DEVICES=visible).gpus()
    assert [(gpu.index, gpu.free) for gpu in found.gpus] == list(enumerate(free))
    assert bool(found.reason) == (not free)
    if not free:
        assert "CUDA_VISIBLE_DEVICES" in found.reason


@pytest.mark.parametrize(
    ("devices", "indices", "reason"),
    [
        ("cuda", [0, 1, 2], ""),
        ("cpu", [], "devices is 'cpu'"),
        ([2, 0], [2, 0], ""),
        ([1, 7], [1], "GPU 7 is not there: 3 visible"),
    ],
)
def test_devices_choose_among_the_visible_gpus(
    tmp_path: Path, devices: Any, indices: list[int], reason: str
) -> None:
    found = gpu_machine(tmp_path, THREE, devices).gpus()
    assert [gpu.index for gpu in found.gpus] == indices
    assert found.reason == reason


def test_a_lost_gpu_hides_no_other(tmp_path: Path) -> None:
    found = gpu_machine(tmp_path, FakeNvml(None, (2, 10, 0))).gpus()
    assert [gpu.index for gpu in found.gpus] == [1]
    assert found.reason == "GPU 0 cannot be read: GPU is lost"


def test_nvml_that_fails_is_no_gpu_with_a_reason(tmp_path: Path) -> None:
    class Failing(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:
            raise FakeNvmlError("driver mismatch")

    found = gpu_machine(tmp_path, Failing()).gpus()
    assert found.gpus == ()
    assert "driver mismatch" in found.reason
    assert gpu_machine(tmp_path, FakeNvml()).gpus().reason == "NVML sees no GPU"


def test_missing_nvml_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert load_nvml() == (
        None,
        "nvidia-ml-py is not installed: pip install 'asynckfold[gpu]'",
    )


@given(st.lists(st.sampled_from(["0", "1", "2", "-1", "GPU-a", "GPU-", "x", ""]), max_size=5))
def test_visible_gpus_exist_and_are_named_once(entries: list[str]) -> None:
    order = visible_order(",".join(entries), ["GPU-aa", "GPU-bb"])
    assert len(set(order)) == len(order) <= 2
    assert set(order) <= {0, 1}


@pytest.mark.parametrize(
    ("free", "total"), [(-1, 10), (11, 10), (math.nan, 10), (5, math.inf), (None, 10), ("5", None)]
)
def test_a_gpu_whose_memory_makes_no_sense_is_not_used_and_hides_no_other(
    tmp_path: Path, free: Any, total: Any
) -> None:
    found = gpu_machine(tmp_path, FakeNvml((free, total, 0), (2, 10, 0))).gpus()
    assert [gpu.index for gpu in found.gpus] == [1]
    assert found.reason.startswith("GPU 0 cannot be read")


@pytest.mark.parametrize("use", [math.nan, 101, 1e9, "busy", None])
def test_the_use_of_a_gpu_that_makes_no_sense_is_unknown(tmp_path: Path, use: Any) -> None:
    class Odd(FakeNvml):
        def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
            return SimpleNamespace(gpu=use)

    assert [gpu.use for gpu in gpu_machine(tmp_path, Odd((2, 10, 0))).gpus().gpus] == [0.0]


@pytest.mark.parametrize("error", [OSError("gone"), AttributeError("old"), TypeError("odd")])
@pytest.mark.parametrize("call", ["nvmlDeviceGetCount", "nvmlDeviceGetUUID"])
def test_nvml_that_disappears_is_no_gpu_with_a_reason(
    tmp_path: Path, call: str, error: Exception
) -> None:
    found = gpu_machine(tmp_path, FakeNvml((2, 10, 0)))
    assert len(found.load().gpus) == 1

    def broken(*arguments: Any) -> Any:
        raise error

    setattr(found._nvml, call, broken)
    assert found.load().gpus == ()
    assert str(error) in found.gpus().reason
