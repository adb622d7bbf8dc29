"""The GPUs that this run may use, slices (MIG) among them. NVML is used only here.

A device is known by its UUID, and has the index of its place in ``CUDA_VISIBLE_DEVICES``, or in the
order of the PCI bus; the slices of a GPU follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

from asynckfold.jobs.placement import Gpu
from asynckfold.system.cpu_load import BusyCores, CoreState, next_state, with_hysteresis
from asynckfold.system.readers import UNREADABLE


def load_nvml() -> tuple[Any, str]:
    """Return the initialised NVML module, or None and the reason."""
    built = torch_cuda()
    if built is None:
        return None, "torch was built without CUDA: install a build with it"
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return None, "no NVIDIA driver was found: its library, NVML, is missing"
    except (pynvml.NVMLError, *UNREADABLE) as error:
        return None, f"NVML does not start: {error}"
    version = _or(pynvml, 0, "nvmlSystemGetCudaDriverVersion") // 1000
    if 0 < version < int(built.partition(".")[0]):
        return (
            None,
            f"torch is built for CUDA {built}, the driver for {version}: update the driver",
        )
    return pynvml, ""


@cache
def torch_cuda() -> str | None:
    """Return the version of CUDA that torch was built for, None for CPUs; imports no torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version: str | None = run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")
    return version


@dataclass(frozen=True)
class GpuReading:
    """The GPUs that this run may use, their names, and why others are missing.

    `failures` counts the visible GPUs that cannot be used.
    """

    gpus: tuple[Gpu, ...] = ()
    names: tuple[str, ...] = ()
    reason: str = ""
    failures: int = 0


class _Device(NamedTuple):
    """A GPU or a slice: its handle, None where it cannot be read, and the number of its GPU."""

    handle: Any
    number: int
    uuid: str = ""
    failure: str = ""


def read_gpus(
    nvml: Any, devices: str | Sequence[int | str], visible: str | None, pids: Collection[int] = ()
) -> GpuReading:
    """Read each GPU that torch would see, without a CUDA context.

    A GPU that fails does not hide the others.

    Parameters
    ----------
    nvml : module
        An initialised NVML.
    devices : str, or sequence of int and "cpu"
        What the user chose.
    visible : str or None
        ``CUDA_VISIBLE_DEVICES``; numbers count in the order of the PCI bus.
    pids : collection of int
        Processes of this run, whose memory becomes ``Gpu.own``.
    """
    if devices == "cpu":
        return GpuReading(reason="devices is 'cpu'")
    errors = (nvml.NVMLError, *UNREADABLE)
    try:
        all_devices = [item for n in range(nvml.nvmlDeviceGetCount()) for item in _devices(nvml, n)]
    except errors as error:
        return GpuReading(reason=f"NVML cannot list the GPUs: {error}", failures=1)
    uuids, numbers = [item.uuid for item in all_devices], [item.number for item in all_devices]
    order = visible_order(visible, uuids, numbers)
    indices = range(len(order)) if isinstance(devices, str) else dict.fromkeys(devices)
    gpus, names, reasons, failures = [], [], [], 0
    for index in indices:
        if isinstance(index, str):
            continue
        if not 0 <= index < len(order):
            reasons.append(f"GPU {index} is not there: {len(order)} visible")
            continue
        device = all_devices[order[index]]
        try:
            if device.failure:
                raise ValueError(device.failure)
            gpu = _read_gpu(nvml, device, index, pids)
            names.append(_text(nvml.nvmlDeviceGetName(device.handle)))
            gpus.append(gpu)
        except errors as error:
            reasons.append(f"GPU {index} cannot be read: {error}")
            failures += 1
    if not order:
        reasons.append(f"{len(all_devices)} GPUs, and CUDA_VISIBLE_DEVICES={visible!r}")
    return GpuReading(tuple(gpus), tuple(names), "; ".join(reasons), failures)


def _devices(nvml: Any, number: int) -> Iterator[_Device]:
    """Yield a GPU, or the slices that it is divided into."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    except (nvml.NVMLError, *UNREADABLE) as error:
        yield _Device(None, number, failure=str(error))
        return
    if not _or(nvml, (0, 0), "nvmlDeviceGetMigMode", handle)[0]:
        yield _Device(handle, number, uuid)
        return
    for part in range(_or(nvml, 0, "nvmlDeviceGetMaxMigDeviceCount", handle)):
        # Not each number has a slice.
        piece = _or(nvml, None, "nvmlDeviceGetMigDeviceHandleByIndex", handle, part)
        if piece is not None and (slice_uuid := _or(nvml, "", "nvmlDeviceGetUUID", piece)):
            yield _Device(piece, number, _text(slice_uuid))


def _or(nvml: Any, default: Any, name: str, *arguments: Any) -> Any:
    """Return what NVML answers, or a default where it does not know or must not say."""
    try:
        return getattr(nvml, name)(*arguments)
    except (nvml.NVMLError, *UNREADABLE):
        return default


def _read_gpu(nvml: Any, device: _Device, index: int, pids: Collection[int]) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(device.handle)
    free, total = int(memory.free), int(memory.total)
    # Not reported by some GPUs, nor by slices; memory decides.
    rates = _or(nvml, None, "nvmlDeviceGetUtilizationRates", device.handle)
    use = rates.gpu / 100 if rates else 0.0
    # Nor by whom memory is held, as in a container.
    running = _or(nvml, [], "nvmlDeviceGetComputeRunningProcesses", device.handle)
    sizes = [int(item.usedGpuMemory or 0) for item in running if item.pid in pids]
    held = min(sum(max(0, size) for size in sizes), total - free)
    return Gpu(index, free, total, use, held, device.uuid)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_order(
    visible: str | None, uuids: Sequence[str], numbers: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return NVML's index of each device that CUDA shows, in CUDA's order.

    Like CUDA: entries are numbers or prefixes of UUIDs; the first invalid entry ends the list; a
    duplicate hides all GPUs. A number stands for all slices of that GPU (`numbers`, by device).

    Examples
    --------
    >>> visible_order("1,GPU-a", ["GPU-abc", "GPU-def"]), visible_order("0,-1,1", ["x", "y"])
    ((1, 0), (0,))
    >>> visible_order("1", ["GPU-abc", "MIG-1", "MIG-2"], [0, 1, 1])
    (1, 2)
    """
    if visible is None:
        return tuple(range(len(uuids)))
    order: list[int] = []
    for entry in visible.split(","):
        devices = _by_entry(entry.strip(), uuids, numbers or range(len(uuids)))
        if not devices:
            break
        order += devices
    return tuple(order) if len(set(order)) == len(order) else ()


def _by_entry(entry: str, uuids: Sequence[str], numbers: Sequence[int]) -> list[int]:
    if entry.isdecimal():
        return [at for at, number in enumerate(numbers) if number == int(entry)]
    matches = [at for at, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    return matches if len(matches) == 1 else []


SETTLE_SECONDS = 2.0
"""The driver reports the use of up to a second ago: so long an ended job may still be seen."""


class GpuLoad:
    """The GPUs that are left to others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: dict[int, CoreState] = {}
        self._held_at: dict[int, float] = {}
        self._busy: BusyCores | None = None

    def marked(self, reading: GpuReading, held: Collection[int]) -> tuple[Gpu, ...]:
        """Return the GPUs, those that others keep busy marked; jobs of this run hold `held`."""
        now = self._clock()
        for gpu in reading.gpus:
            if gpu.index in held:
                self._held_at[gpu.index] = now
            if now - self._held_at.get(gpu.index, -SETTLE_SECONDS) < SETTLE_SECONDS:
                continue  # it is unknown who uses it: its last state stays
            before = self._states.get(gpu.index)
            window = 0.0 if before is None else now - before.known_at
            self._states[gpu.index] = next_state(before, gpu.use, window, now)
        busy = frozenset(index for index, state in self._states.items() if state.busy)
        self._busy = with_hysteresis(self._busy, busy, now)
        return tuple(replace(gpu, busy=gpu.index in self._busy.busy) for gpu in reading.gpus)
