"""The GPUs that this run may use. NVML is used only here."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from asynckfold.jobs.placement import Gpu
from asynckfold.system.readers import UNREADABLE


def load_nvml() -> tuple[Any, str]:
    """Return the initialised NVML module, or None and the reason."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, "nvidia-ml-py is not installed: pip install 'asynckfold[gpu]'"
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, *UNREADABLE) as error:
        return None, f"NVML does not start: {error}"
    return nvml, ""


@dataclass(frozen=True)
class GpuReading:
    """The GPUs that this run may use, their names, and why others are missing."""

    gpus: tuple[Gpu, ...] = ()
    names: tuple[str, ...] = ()
    reason: str = ""


def read_gpus(
    nvml: Any, devices: str | Sequence[int], visible: str | None, own: Collection[int] = ()
) -> GpuReading:
    """Read each GPU that torch would see, without a CUDA context.

    A GPU that fails does not hide the others.

    Torch's index is the position in ``CUDA_VISIBLE_DEVICES`` (`visible`), in NVML's order, which is
    CUDA's for GPUs of one kind. The memory of `own` processes becomes ``Gpu.own``.
    """
    if devices == "cpu":
        return GpuReading(reason="devices is 'cpu'")
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except (nvml.NVMLError, *UNREADABLE) as error:
        return GpuReading(reason=f"NVML cannot list the GPUs: {error}")
    order = visible_order(visible, uuids)
    asked = range(len(order)) if isinstance(devices, str) else devices
    found, names, reasons = [], [], []
    for index in asked:
        if not 0 <= index < len(order):
            reasons.append(f"GPU {index} is not there: {len(order)} visible")
            continue
        try:
            found.append(_read_gpu(nvml, handles[order[index]], index, own))
            names.append(_text(nvml.nvmlDeviceGetName(handles[order[index]])))
        except (nvml.NVMLError, *UNREADABLE) as error:
            reasons.append(f"GPU {index} cannot be read: {error}")
    if not order:
        reasons.append(_none_visible(len(uuids), visible))
    return GpuReading(tuple(found), tuple(names), "; ".join(reasons))


def _read_gpu(nvml: Any, handle: Any, index: int, own: Collection[int]) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    free, total = int(memory.free), int(memory.total)
    if not 0 <= free <= total:
        raise ValueError(f"{free} of {total} bytes are free")
    try:
        use = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except (nvml.NVMLError, *UNREADABLE):
        use = 0.0  # not reported by some GPUs; memory decides
    held = min(_held_by(nvml, handle, own), total - free) if own else 0
    return Gpu(index, free, total, use if 0 <= use <= 1 else 0.0, held)


def _held_by(nvml: Any, handle: Any, own: Collection[int]) -> int:
    """Return the bytes that own processes hold; 0 if NVML does not know, as in a container."""
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        sizes = [int(item.usedGpuMemory or 0) for item in running if item.pid in own]
    except (nvml.NVMLError, *UNREADABLE):
        return 0
    return sum(size for size in sizes if size > 0)


def _none_visible(count: int, visible: str | None) -> str:
    if not count:
        return "NVML sees no GPU"
    return f"CUDA_VISIBLE_DEVICES={visible!r} hides all {count} GPUs"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_order(visible: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Return NVML's index of each GPU that CUDA shows, in CUDA's order.

    Like CUDA: entries are numbers or prefixes of UUIDs; the first invalid entry ends the list; a
    duplicate hides all GPUs.

    Examples
    --------
    >>> visible_order("1,GPU-a", ["GPU-abc", "GPU-def"]), visible_order("0,-1,1", ["x", "y"])
    ((1, 0), (0,))
    """
    if visible is None:
        return tuple(range(len(uuids)))
    order: list[int] = []
    for entry in visible.split(","):
        found = _by_entry(entry.strip(), uuids)
        if found is None:
            break
        order.append(found)
    return tuple(order) if len(set(order)) == len(order) else ()


def _by_entry(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    matches = [number for number, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
