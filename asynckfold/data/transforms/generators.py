"""The global generators of Python, NumPy and torch: seeded, put back, watched."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asynckfold.data.transforms.samples import same_sample


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch (CPU); restore them afterwards."""
    with generators_kept():
        seed_generators(seed)
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch (CPU) afterwards."""
    kept = _generator_states()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002  users' transforms draw from it
        torch.set_rng_state(kept[2])


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (CPU)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  users' transforms draw from it
    # torch.manual_seed would also touch every other device.
    torch.default_generator.manual_seed(seed % 2**64)


def _generator_states() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def _drew(before: tuple[Any, Any, Tensor], after: tuple[Any, Any, Tensor]) -> bool:
    numpy_same = before[1][2] == after[1][2] and np.array_equal(before[1][1], after[1][1])
    return before[0] != after[0] or not numpy_same or not torch.equal(before[2], after[2])


def varies(call: Callable[[], Any]) -> bool:
    """Return whether a call is random: it draws from a global generator, or two results differ.

    A call that draws is random even if both results are equal: a rare event (a flip in one of a
    hundred samples) does not show in a few results.
    """
    results = []
    for seed in (1, 2):
        with seeded(seed):
            before = _generator_states()
            results.append(call())
            if _drew(before, _generator_states()):
                return True
    return not same_sample(*results)
