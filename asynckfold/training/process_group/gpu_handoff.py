"""GPUs are kept from a worker that forks, and one is left to the last process of its job.

::

    worker   sees no GPU ── build ── fork ── train on a core, fork the others …
                                      └─ the last process: takes the GPU, and computes on it

A process can use CUDA only if the one that it was forked from did not; and torch looks for GPUs as
soon as anything is differentiated, and opens one for some optimizers' steps on a CPU. Where it
finds one, it starts threads, and differentiates nothing in processes that are forked afterwards. So
the worker is shown none, and is not used again after the job: it has noted then that there are
none. A stage of pretraining is a part of the build, and must not differentiate (`preflight`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

_HIDDEN = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "-1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""The second is taken before the first, and before ``ROCR_VISIBLE_DEVICES``, for GPUs of AMD, whose
runtime takes an empty one for none given. The third lets torch say that there is no GPU without
asking CUDA, which would be a use."""


class GpuToTake(Protocol):
    """What one process of a job takes into use."""

    def take(self) -> torch.device:
        """Take it, in the process that is to compute on it."""


@dataclass(frozen=True)
class HiddenGpu:
    """A GPU by torch's index, and what the environment was when it had that index."""

    index: int
    environment: Mapping[str, str | None]

    def take(self) -> torch.device:
        """See it again, and use it for the rest of this process's life.

        Raises
        ------
        RuntimeError
            The process that forked this one had used CUDA.
        """
        _set(self.environment)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(self.index)
        return torch.device("cuda", self.index)


@contextmanager
def hide_gpus(gpu: int | None) -> Iterator[HiddenGpu | None]:
    """Show this process no GPU, and leave that of an index to one that is forked meanwhile.

    Examples
    --------
    >>> with hide_gpus(0) as gpu:
    ...     gpu.index, os.environ["CUDA_VISIBLE_DEVICES"]
    (0, '')
    """
    before = {name: os.environ.get(name) for name in _HIDDEN}
    _set(_HIDDEN)
    try:
        yield None if gpu is None else HiddenGpu(gpu, before)
    finally:
        _set(before)


def _set(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
