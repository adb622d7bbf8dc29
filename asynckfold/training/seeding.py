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
    """Seed the global generators of Python, NumPy and torch, of the GPU in use too.

    `torch.manual_seed` would ask every kind of device that torch knows, which takes 0.7 ms on a
    machine that has none of them (2-core Linux, torch 2.13); an epoch of a small model takes 20.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the generator that user code draws from
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


def state() -> dict[str, Any]:
    """Return the state of the global generators as a tree that a checkpoint can hold."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": (version, np.array(words, np.int64), gauss),
        "numpy": np.random.get_state(legacy=True),  # noqa: NPY002
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore(found: dict[str, Any]) -> None:
    """Set the global generators to a state that `state` returned."""
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(found["numpy"])  # noqa: NPY002
    torch.set_rng_state(found["torch"])
    if "cuda" in found and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
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
