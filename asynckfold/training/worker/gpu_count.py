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


def settle_autograd() -> None:
    """Let autograd look for GPUs now, if there are none.

    It looks in the first backward pass of a process. Without a GPU, torch.compile, which a model
    may use, puts something in the place of one that counts as one; autograd then starts a thread
    for it, and processes forked afterwards can run no backward pass.
    """
    if torch.cuda.device_count() == 0:
        torch.autograd.backward(torch.ones(1, requires_grad=True))


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
