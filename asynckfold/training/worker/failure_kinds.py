"""Which exceptions of a job are retryable.

Most are errors of user code, which would raise again. Out of memory, a lost GPU and a dead
DataLoader worker are retryable; torch identifies the last two only by their messages.
"""

from __future__ import annotations

import errno

import torch

_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "Cannot allocate memory",
    "std::bad_alloc",
)
"""Messages of torch's allocator and the kernel."""

_NO_GPU_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)

_LOST_DEVICE = ("CUDA error:", "CUDNN_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_EXECUTION_FAILED")
"""After any of these the process cannot use its GPU again (pytorch#17425)."""

_DEAD_CHILD = ("DataLoader worker (pid",)


def outcome_of(error: BaseException, text: str) -> str:
    """Return the outcome of an attempt that raised, as in `asynckfold.scheduling.retries`.

    The message is passed in `text`, since a user's ``__str__`` may raise.

    Examples
    --------
    >>> outcome_of(RuntimeError(), "CUDA error: device-side assert triggered")
    'device_lost'
    >>> outcome_of(ValueError(), "CUDA out of memory")
    'error'
    """
    if isinstance(error, torch.OutOfMemoryError):
        return "gpu_oom"
    if isinstance(error, MemoryError):
        return "oom"
    if isinstance(error, OSError):
        return "oom" if error.errno == errno.ENOMEM else "error"
    if not isinstance(error, RuntimeError):
        return "error"
    for outcome, words in (
        ("oom", _NO_MEMORY),
        ("gpu_oom", _NO_GPU_MEMORY),
        ("device_lost", _LOST_DEVICE),
        ("died", _DEAD_CHILD),
    ):
        if any(word in text for word in words):
            return outcome
    return "error"
