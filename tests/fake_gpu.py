"""A GPU where there is none: NVML tells of it, and who takes it into use computes on a CPU."""

from __future__ import annotations

import os
from typing import Any

import torch

from asynckfold.training.process_group.gpu_handoff import HiddenGpu
from tests.system.test_gpus import FakeNvml
from tests.toy import Tiny

GIB = 1 << 30

KINDS = {"partition_size": {"cpu": 40, "gpu": 100}, "epochs_per_round": {"cpu": 1, "gpu": 2}}


def load_nvml() -> tuple[Any, str]:
    """What `asynckfold.system.machine` loads."""
    return FakeNvml((8 * GIB, 8 * GIB, 0)), ""


def take(gpu: HiddenGpu) -> torch.device:
    """Say so in the log of the job."""
    print(f"GPU {gpu.index} taken by {os.getpid()}, a child of {os.getppid()}", flush=True)
    return torch.device("cpu")


class OnFakeGpu(Tiny):
    """Lets the process that makes it, and those forked from it, take a fake for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        HiddenGpu.take = take  # type: ignore[method-assign]
