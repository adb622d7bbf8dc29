"""Numbers so near to 0 that they lose digits are 0 in every job.

Some processors take them many times slower than others, and Adam makes them: its moments
decay by a factor a step wherever a gradient stays away. With them, 10 epochs of an MLP 784-128-10
on MNIST took 1.5 times as long, and 30 epochs 1.65 times (Adam, 4,800 samples, 1 core of an Intel
Xeon; on an AMD EPYC it was no slower).
"""

from __future__ import annotations

import torch

SHARE = 1 << 16
"""Elements for a thread: torch divides no less among threads."""


def flush() -> None:
    """Let this thread take them for 0, and each that it starts from now on.

    Of a worker these are all: its server tells it before any thread exists.
    """
    torch.set_flush_denormal(True)


def flushed(elements: int = 1) -> bool:
    """Whether they are 0 to all threads that share so many elements."""
    tiny = torch.full((elements,), 1, dtype=torch.int32).view(torch.float32)
    # By their bits: to whoever takes them for 0, they are equal to 0.
    return not (tiny * 1.0).view(torch.int32).any()


def flushing(threads: int = 1) -> bool:
    """Whether they are 0 to this thread and so many of torch's pool, once it is told to `flush`.

    Threads of the pool that were there before keep to what they were started with. This thread does
    afterwards what it did.
    """
    before, count = flushed(), torch.get_num_threads()
    try:
        flush()
        torch.set_num_threads(threads)
        return flushed(threads * SHARE)
    finally:
        torch.set_num_threads(count)
        torch.set_flush_denormal(before)
