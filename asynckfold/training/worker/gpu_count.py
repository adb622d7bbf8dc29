"""How many GPUs there are is asked once a placement, and not by every step of an optimizer.

An optimizer asks torch at each step whether there is a GPU, for there it might be captured in a
graph. Where the answer comes from NVML, as in workers, torch loads that library for each question
until CUDA is in use: 35 µs on a machine that has none, as much as a step of Adam on a small model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_REMEMBERED = "_cached_device_count"
"""Where torch keeps the count once CUDA is in use; without this name in it, all stays as it is."""


@contextmanager
def counted_once() -> Iterator[None]:
    """Let torch remember how many GPUs this process sees, which must not change meanwhile.

    Examples
    --------
    >>> with counted_once():
    ...     torch.cuda.is_available() == (torch.cuda.device_count() > 0)
    True
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if used or getattr(torch.cuda, _REMEMBERED, 0) is not None:
        yield
        return
    setattr(torch.cuda, _REMEMBERED, torch.cuda.device_count())
    try:
        yield
    finally:
        setattr(torch.cuda, _REMEMBERED, None)
