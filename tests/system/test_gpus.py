"""GPUs from a fake NVML."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from asynckfold.jobs.placement import Gpu, Placement, Request
from asynckfold.scheduling.place import place
from asynckfold.scheduling.reservations import Reservations
from asynckfold.scheduling.wait_reasons import obstacle
from asynckfold.system.gpus import load_nvml, torch_cuda
from asynckfold.system.machine import Machine
from tests.system.fakes import FakeMachine, fake_host


@pytest.fixture(autouse=True)
def _torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynckfold.system.gpus.torch_cuda", lambda: "12.8")


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """NVML with GPUs of (free, total, use); None is a GPU that fell off the bus."""

    NVMLError = FakeNvmlError

    def __init__(self, *gpus: tuple[int, int, int] | None) -> None:
        self.gpus = gpus

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12040

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


def watch(
    tmp_path: Path, nvml: FakeNvml, devices: Any = "auto", **environ: str
) -> tuple[Machine, FakeMachine]:
    fake = FakeMachine()
    host = fake_host(tmp_path, (0, 1), **environ)
    return Machine(devices, host=host, readers=fake, clock=fake.clock, nvml=nvml), fake


def gpu_machine(*given: Any, **environ: str) -> Machine:
    return watch(*given, **environ)[0]


THREE = FakeNvml((1, 10, 0), (2, 10, 50), (3, 10, -1))


def test_gpus_have_free_memory_and_use(tmp_path: Path) -> None:
    expected = (
        Gpu(0, 1, 10, 0.0, uuid="GPU-a00"),
        Gpu(1, 2, 10, 0.5, uuid="GPU-b00", busy=True),
        Gpu(2, 3, 10, 0.0, uuid="GPU-c00"),
    )
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
    assert [(gpu.free, gpu.own) for gpu in found.load(workers=own).gpus] == [(4, 3), (4, 0)]
    assert [gpu.own for gpu in found.load().gpus] == [0, 0]
    # Never more than is taken at all.
    full = gpu_machine(tmp_path, Crowded((9, 10, 0)))
    assert [gpu.own for gpu in full.load(workers=own).gpus] == [1]
    # Without the call, as in an old NVML.
    assert [gpu.own for gpu in gpu_machine(tmp_path, THREE).load(workers=own).gpus] == [0, 0, 0]


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


def test_nvml_that_fails_is_no_gpu_with_a_reason(tmp_path: Path) -> None:
    class Failing(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:
            raise FakeNvmlError("driver mismatch")

    found = gpu_machine(tmp_path, Failing()).gpus()
    assert found.gpus == ()
    assert "driver mismatch" in found.reason
    assert (
        gpu_machine(tmp_path, FakeNvml()).gpus().reason == "0 GPUs, and CUDA_VISIBLE_DEVICES=None"
    )


@pytest.mark.parametrize(
    ("built", "raised", "reason"),
    [
        ("13.0", "LibraryNotFound", "no NVIDIA driver was found: its library, NVML, is missing"),
        ("13.0", "DriverNotLoaded", "NVML does not start: Driver Not Loaded"),
        ("13.0", "", "torch is built for CUDA 13.0, the driver for 12: update the driver"),
        ("12.8", "", ""),
    ],
)
def test_a_driver_that_torch_cannot_use_says_why(
    monkeypatch: pytest.MonkeyPatch, built: str, raised: str, reason: str
) -> None:
    import pynvml

    def start() -> None:
        if raised:
            raise getattr(pynvml, f"NVMLError_{raised}")

    monkeypatch.setattr("asynckfold.system.gpus.torch_cuda", lambda: built)
    monkeypatch.setattr(pynvml, "nvmlInit", start)
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion", lambda: 12040)
    nvml, found = load_nvml()
    assert (nvml is None, found) == (bool(reason), reason)


# Which GPU is which


class Divided(FakeNvml):
    """Three GPUs, of which the second is divided into two slices (MIG)."""

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if handle == 0:
            raise FakeNvmlError("Not Supported")
        return (int(handle == 1), 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, part: int) -> int:
        if part not in (0, 3):
            raise FakeNvmlError("Not Found")
        return 10 + part

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"MIG-{handle}" if handle >= 10 else super().nvmlDeviceGetUUID(handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if handle >= 10:
            return SimpleNamespace(free=handle, total=20)
        return super().nvmlDeviceGetMemoryInfo(handle)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle >= 10:
            raise FakeNvmlError("Not Supported")
        return super().nvmlDeviceGetUtilizationRates(handle)


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-a00", "MIG-10", "MIG-13", "GPU-c00"]),
        ("1", ["MIG-10", "MIG-13"]),
        ("MIG-13,0", ["MIG-13", "GPU-a00"]),
        ("MIG-1", []),
    ],
)
def test_slices_of_a_gpu_are_devices(tmp_path: Path, visible: str | None, uuids: list[str]) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    nvml = Divided((1, 20, 0), (2, 20, 0), (3, 20, 0))
    found = gpu_machine(tmp_path, nvml, **environ).gpus()
    assert [gpu.uuid for gpu in found.gpus] == uuids
    assert [gpu.index for gpu in found.gpus] == list(range(len(uuids)))
    assert [gpu.free for gpu in found.gpus if gpu.uuid.startswith("MIG")] == [
        int(uuid[4:]) for uuid in uuids if uuid.startswith("MIG")
    ]


@pytest.mark.parametrize(
    ("call", "left"),
    [
        ("nvmlDeviceGetHandleByIndex", [1]),
        ("nvmlDeviceGetUUID", [1]),
        ("nvmlDeviceGetMemoryInfo", [1]),
        ("nvmlDeviceGetName", [1]),
        ("nvmlDeviceGetUtilizationRates", [0, 1]),
        ("nvmlDeviceGetMigMode", [0, 1]),
        ("nvmlDeviceGetComputeRunningProcesses", [0, 1]),
    ],
)
def test_a_call_that_is_not_permitted_for_one_gpu_hides_no_other(
    tmp_path: Path, call: str, left: list[int]
) -> None:
    refusals: list[int] = []

    class Guarded(FakeNvml):
        def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
            return []

        def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
            return (0, 0)

        def __getattribute__(self, name: str) -> Any:
            real = object.__getattribute__(self, name)
            if name != call:
                return real

            def guarded(handle: int, *more: int) -> Any:
                if handle == 0:
                    refusals.append(handle)
                    raise FakeNvmlError("Insufficient Permissions")
                return real(handle, *more)

            return guarded

    machine = gpu_machine(tmp_path, Guarded((1, 10, 0), (2, 10, 0)))
    load = machine.load(workers={7: ()})
    assert refusals
    assert [(gpu.index, gpu.uuid) for gpu in load.gpus] == [
        (index, f"GPU-{'ab'[index]}00") for index in left
    ]
    refused = "" if 0 in left else "GPU 0 cannot be read: Insufficient Permissions"
    assert machine.gpus().reason == machine.gpu_note == refused
    assert machine.gpus().failures == bool(refused)
    # Nothing is missing of what was asked for.
    assert gpu_machine(tmp_path, Guarded((1, 10, 0), (2, 10, 0)), ["cpu", 1]).gpus().reason == ""
    assert place([Request("a", 1.0, gpu=True)], [], load)[0].gpu_uuid == "GPU-b00"


# GPUs that others use


def busy(machine: Machine, *running: Placement) -> list[int]:
    own: dict[int, tuple[int, ...]] = {7: ()}
    return [gpu.index for gpu in machine.load(None, running, own).gpus if gpu.busy]


def test_a_gpu_that_others_keep_busy_is_left_alone_until_it_is_idle(tmp_path: Path) -> None:
    nvml = FakeNvml((9, 10, 0), (9, 10, 0))
    machine, fake = watch(tmp_path, nvml)
    assert busy(machine) == []
    nvml.gpus = ((9, 10, 0), (9, 10, 95))
    fake.now += 0.1
    assert busy(machine) == []  # a burst
    fake.now += 5
    assert busy(machine) == [1]
    load = machine.load()
    asked = [Request(name, 1.0, gpu=True) for name in "ab"]
    assert [(item.gpu, item.gpu_uuid) for item in place(asked, [], load)] == [(0, "GPU-a00")]
    first = Placement(("a",), (0,), gpu=0)
    assert place(asked[1:], [first], load) == []
    assert obstacle(asked[1], Reservations([first]), load).text == (
        "a GPU: other processes keep GPU 1 busy"
    )
    nvml.gpus = ((9, 10, 0), (9, 10, 0))
    fake.now += 60
    assert busy(machine) == []


def test_one_gpu_job_runs_where_all_gpus_are_busy(tmp_path: Path) -> None:
    machine, _ = watch(tmp_path, FakeNvml((9, 10, 90), (5, 10, 40)))
    load, asked = machine.load(), [Request("a", 1.0, gpu=True), Request("b", 1.0, gpu=True)]
    assert [item.gpu for item in place(asked, [], load)] == [1]  # the least used
    cpu = Request("c", 1.0)
    assert [item.jobs for item in place([*asked, cpu], [], load)] == [("c",)]


def test_where_nobody_says_whose_use_it_is_own_jobs_are_not_taken_for_others(
    tmp_path: Path,
) -> None:
    nvml, job = FakeNvml((5, 10, 99)), Placement(("a",), (0,), gpu=0)
    machine, fake = watch(tmp_path, FakeNvml((9, 10, 0)))
    machine._nvml = nvml
    for _ in range(3):
        fake.now += 5
        assert busy(machine, job) == []
    fake.now += 1  # it has ended; the driver still reports its use
    assert busy(machine) == []
    fake.now += 5
    assert busy(machine) == [0]


# GPUs that torch cannot use


def test_gpus_for_which_torch_was_not_built_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynckfold.system.machine.has_gpu", lambda: True)
    monkeypatch.setattr("asynckfold.system.gpus.torch_cuda", lambda: None)
    machine = Machine()
    assert machine.gpus().gpus == ()
    assert machine.gpu_note.startswith("no GPU is used: torch was built without CUDA")


def test_the_version_of_torch_is_read_without_its_import() -> None:
    import torch

    assert torch_cuda() == torch.version.cuda
