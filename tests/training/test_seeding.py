"""Random streams: the same from the same seed, kept and put back whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.training import checkpoint, seeding


def draw() -> list[float]:
    """Numbers from each generator, those that keep one in reserve included."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),  # noqa: NPY002
        float(np.random.normal()),  # noqa: NPY002
        float(torch.rand(())),
        float(torch.randn(())),
    ]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_a_seed_starts_all_generators(seed: int) -> None:
    seeding.seed_all(seed)
    first = draw()
    draw()
    seeding.seed_all(seed)
    assert draw() == first
    seeding.seed_all(seed ^ 1)
    assert not set(draw()) & set(first)


@given(st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_epochs_have_their_own_streams(seed: int, epoch: int) -> None:
    found = seeding.stream(seed, epoch)
    assert 0 <= found < 2**64
    assert found == seeding.stream(seed, epoch)
    assert len({found, seeding.stream(seed, epoch + 1), seeding.stream(seed + 1, epoch)}) == 3


def test_a_state_survives_a_checkpoint(tmp_path: Path) -> None:
    seeding.seed_all(3)
    draw()
    digest, _ = checkpoint.save(tmp_path / "c", {"random": seeding.state()})
    expected = [draw(), draw()]
    seeding.seed_all(4)
    found: Any = checkpoint.load(tmp_path / "c", digest)["random"]
    seeding.restore(found)
    assert [draw(), draw()] == expected
