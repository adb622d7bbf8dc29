"""Stands for nvidia-ml-py where its folder is on ``PYTHONPATH``: idle GPUs that torch can use.

Their UUIDs are in ``STAND_IN_GPUS``. Those of slices, such as ``MIG-0``, let all-reduce use gloo.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

_UUIDS = os.environ.get("STAND_IN_GPUS", "").split()

_BYTES = 8 << 30


class NVMLError(Exception):
    """What NVML raises."""


class NVMLError_LibraryNotFound(NVMLError):
    """Where there is no driver."""


def nvmlInit() -> None:
    """Let `asynckfold` believe that torch can use them."""
    from asynckfold.system import gpus

    gpus.torch_cuda = lambda: "12.8"  # type: ignore[assignment]


def nvmlSystemGetCudaDriverVersion() -> int:
    """Return the CUDA version of the driver."""
    return 12040


def nvmlDeviceGetCount() -> int:
    """Return the number of GPUs."""
    return len(_UUIDS)


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    """Return the handle of a GPU: its index."""
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    """Return what names it."""
    return _UUIDS[handle]


def nvmlDeviceGetMigMode(handle: int) -> tuple[int, int]:
    """Return whether it is divided: not further."""
    return (0, 0)


def nvmlDeviceGetName(handle: int) -> str:
    """Return its model."""
    return "Stand-in"


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    """Return free and all bytes."""
    return SimpleNamespace(free=_BYTES, total=_BYTES)


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:
    """Return the per cent of the time in which it computes."""
    return SimpleNamespace(gpu=0)


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    """Return who uses it."""
    return []


def nvmlDeviceGetProcessUtilization(handle: int, since: int) -> list[SimpleNamespace]:
    """Return how much each uses it."""
    return []
