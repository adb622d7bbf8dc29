"""Denormals are flushed to zero in every job.

They are many times slower on some processors, and Adam makes them: its moments decay by a factor
per step wherever the gradient is zero. With them, 10 epochs of an MLP 784-128-10 on MNIST took 1.5
times as long, and 30 epochs 1.65 times (Adam, 4,800 samples, 1 core of an Intel Xeon; no difference
on an AMD EPYC).
"""

from __future__ import annotations

import torch

SHARE = 1 << 16
"""Elements per thread: torch divides no fewer among threads."""


def flush() -> None:
    """Flush denormals in this thread and those that it starts: in a worker, in all threads."""
    torch.set_flush_denormal(True)


def flushed(elements: int = 1) -> bool:
    """Whether all threads that share a computation on `elements` flush denormals."""
    tiny = torch.full((elements,), 1, dtype=torch.int32).view(torch.float32)
    # By their bits: a thread that flushes denormals compares them as 0.
    return not (tiny * 1.0).view(torch.int32).any()


def flushing(threads: int = 1) -> bool:
    """Whether `flush` would reach this thread and `threads` of torch's pool.

    Threads of the pool that were started earlier keep their mode. This thread's mode is restored.
    """
    before, count = flushed(), torch.get_num_threads()
    try:
        flush()
        torch.set_num_threads(threads)
        return flushed(threads * SHARE)
    finally:
        torch.set_num_threads(count)
        torch.set_flush_denormal(before)
