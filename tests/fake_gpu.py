"""A GPU where there is none: NVML tells of it, and who takes it into use computes on a CPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system.test_gpus import FakeNvml
from tests.toy import Tiny

GIB = 1 << 30

KINDS = {"partition_size": {"cpu": 40, "gpu": 100}, "epochs_per_round": {"cpu": 1, "gpu": 2}}


@dataclass(frozen=True)
class CpuToTake:
    """A GPU that is a CPU, and notes who takes it."""

    path: Path

    def take(self) -> torch.device:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return torch.device("cpu")


def load_nvml() -> tuple[Any, str]:
    """What `asynckfold.system.machine` loads."""
    return FakeNvml((8 * GIB, 8 * GIB, 0)), ""


def install(monkeypatch: pytest.MonkeyPatch, load: Any = load_nvml) -> None:
    """Let this process see the fake, and take it for one that torch can use."""
    monkeypatch.setattr("asynckfold.system.machine.load_nvml", load)
    monkeypatch.setattr("asynckfold.system.gpus.torch_cuda", lambda: "12.8")
    monkeypatch.setattr("asynckfold.planning.gpu_rule.START_SECONDS", 0.0)


@contextmanager
def on_stand_in(placement: Any) -> Iterator[torch.device]:
    """What `execute._device` does, on a core; says so in the log of the job."""
    if placement.gpu is not None:
        print(f"GPU {placement.gpu} is {placement.gpu_uuid}", flush=True)
    yield torch.device("cpu")


class StandIn(torch.nn.CrossEntropyLoss):
    """A criterion that makes the process in which it is unpacked compute on a stand-in.

    With `spares_caller`, not the process in which it was made.
    """

    def __init__(self, *, spares_caller: bool = False) -> None:
        super().__init__()
        self.spared = os.getpid() if spares_caller else 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if os.getpid() == self.spared:
            return
        worker: Any = importlib.import_module("asynckfold.training.worker.execute")
        worker._device = on_stand_in


def take(gpu: Any) -> torch.device:
    """Say so in the log of the job."""
    uuid = gpu.environment.get("CUDA_VISIBLE_DEVICES")
    print(f"GPU {gpu.index} taken by {os.getpid()}, a child of {os.getppid()}: {uuid}", flush=True)
    return torch.device("cpu")


class OnFakeGpu(Tiny):
    """Lets the process that makes it, and those forked from it, take a fake for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        handoff: Any = importlib.import_module("asynckfold.training.process_group.gpu_handoff")
        handoff.HiddenGpu.take = take
