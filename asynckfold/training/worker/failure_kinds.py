"""What an exception from a job says about its next attempt: nothing, or that one may succeed.

Most of it is the user's own code, which would raise again. Want of memory, a GPU that answers no
more and a dead DataLoader worker are not; torch tells the last two by words only.
"""

from __future__ import annotations

import errno

import torch

_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",
    "std::bad_alloc",
)
"""What torch's allocators on CPU and GPU, its libraries, and the kernel say."""

_LOST_DEVICE = ("CUDA error:", "CUDNN_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_EXECUTION_FAILED")
"""After any of these the process cannot use its GPU again (pytorch#17425)."""

_DEAD_CHILD = ("DataLoader worker (pid",)


def outcome_of(error: BaseException, text: str) -> str:
    """Return how an attempt ended whose code raised.

    Parameters
    ----------
    error : BaseException
        What was raised.
    text : str
        Its message; asked for, since the user may have defined ``__str__``, which may raise.

    Returns
    -------
    {"error", "oom", "device_lost", "died"}
        As in `asynckfold.scheduling.retries`.

    Examples
    --------
    >>> outcome_of(MemoryError(), "")
    'oom'
    >>> outcome_of(RuntimeError(), "CUDA error: device-side assert triggered")
    'device_lost'
    >>> outcome_of(ValueError(), "CUDA out of memory")
    'error'
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "oom"
    if isinstance(error, OSError):
        return "oom" if error.errno == errno.ENOMEM else "error"
    if not isinstance(error, RuntimeError):
        return "error"
    for outcome, words in (
        ("oom", _NO_MEMORY),
        ("device_lost", _LOST_DEVICE),
        ("died", _DEAD_CHILD),
    ):
        if any(word in text for word in words):
            return outcome
    return "error"
