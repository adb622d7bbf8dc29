"""All random streams of a job, started from its seed and kept in its checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def stream(seed: int, *path: int) -> int:
    """Return a 64-bit seed for a place in a job, such as an epoch.

    NumPy's ``SeedSequence`` keeps near inputs apart (O'Neill 2015).
    """
    return int(np.random.SeedSequence([seed, *path]).generate_state(1, np.uint64)[0])


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, of every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the generator that user code draws from
    torch.manual_seed(seed)


def state() -> dict[str, Any]:
    """Return the state of the global generators as a tree that a checkpoint can hold."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),  # noqa: NPY002
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore(found: dict[str, Any]) -> None:
    """Set the global generators to a state that `state` returned."""
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])  # noqa: NPY002
    torch.set_rng_state(found["torch"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])


@contextmanager
def preserved() -> Iterator[None]:
    """Leave the caller's generators and thread count as they were."""
    before, threads = state(), torch.get_num_threads()
    try:
        yield
    finally:
        restore(before)
        torch.set_num_threads(threads)
