"""Hide GPUs from a forking worker; a rank of its job initialises CUDA when it takes its GPU.

::

    worker  sees no GPU ── build ── fork ── train on a core, fork the other ranks …
                                     └─ the last ranks: take the GPU, compute on it

A forked process can use CUDA only if its parent did not. torch looks for GPUs at the first
backward pass, and opens one for some optimizers' steps on a CPU; where it finds one, it starts
threads, without which no process forked afterwards can run a backward pass. The worker therefore
sees no GPU, and ends after the job, because torch caches that there is none. Pretraining is part of
the build, and must not differentiate (`preflight`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_HIDDEN = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "-1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""The second precedes the first, and ``ROCR_VISIBLE_DEVICES``, for AMD GPUs, whose runtime ignores
an empty value. The third lets torch report that there is no GPU without initialising CUDA."""


@dataclass(frozen=True)
class HiddenGpu:
    """A GPU by torch's index, and the environment in which it has that index."""

    index: int
    environment: Mapping[str, str | None]

    def take(self) -> torch.device:
        """Make it visible, and use it until this process ends."""
        _set(self.environment)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(self.index)
        return torch.device("cuda", self.index)


_opened: list[str] = []
"""The UUID of the only GPU that this process sees, if it was narrowed to one."""


def open_gpu(index: int, uuid: str, *, narrow: bool) -> int:
    """Initialise CUDA; return torch's index of a GPU, whose `index` counts if it has no UUID.

    If `narrow`, this process shall see no other GPU from now on: a worker opens one only, and a
    process sees a slice (MIG) in no other way.
    """
    fresh = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if uuid and fresh and narrow:
        before = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
        _set({"CUDA_VISIBLE_DEVICES": uuid})
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.device_count()  # torch caches it now
        finally:
            _set(before)
        _opened[:] = [uuid]
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if not uuid:
        return index
    if _opened:
        seen = _opened
    else:
        count = torch.cuda.device_count()
        seen = [f"GPU-{torch.cuda.get_device_properties(at).uuid}" for at in range(count)]
    if uuid not in seen:
        raise RuntimeError(f"CUDA shows no GPU {uuid}, only {', '.join(seen) or 'none'}")
    return seen.index(uuid)


@contextmanager
def hide_gpus(gpu: int | None = None, uuid: str = "") -> Iterator[HiddenGpu | None]:
    """Hide all GPUs from this process; yield the one that its ranks take inside the block.

    Without a UUID, the index counts.
    """
    before = {name: os.environ.get(name) for name in _HIDDEN}
    _set(_HIDDEN)
    try:
        if gpu is None:
            yield None
        elif uuid:
            yield HiddenGpu(0, {**before, "CUDA_VISIBLE_DEVICES": uuid})
        else:
            yield HiddenGpu(gpu, before)
    finally:
        _set(before)


def _set(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
