"""Count GPUs once per placement, not in every optimizer step.

An optimizer asks torch in each step whether there is a GPU, since the step might be captured in a
graph. Until CUDA is in use, torch loads NVML for each answer: 35 µs on a machine without GPUs, as
much as a step of Adam on a small model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_REMEMBERED = "_cached_device_count"
"""Torch's cache, which it uses once CUDA is in use. Versions without it are left alone."""


@contextmanager
def counted_once() -> Iterator[None]:
    """Let torch cache the number of visible GPUs, which must not change meanwhile."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if used or getattr(torch.cuda, _REMEMBERED, 0) is not None:
        yield
        return
    setattr(torch.cuda, _REMEMBERED, torch.cuda.device_count())
    try:
        yield
    finally:
        setattr(torch.cuda, _REMEMBERED, None)
