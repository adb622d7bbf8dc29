"""Several processes on one model; what they share with other trainers is in tests/contracts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asynckfold import TrainerParams
from asynckfold.training.process_group.shared_tensors import shared
from tests.training.multiprocess import attempts
from tests.training.multiprocess.attempts import (
    Fragile,
    attempt,
    check_that_the_learning_rate_is_that_of_one,
)
from tests.training.tiny import Tiny

params = partial(attempts.params, "hogwild")


def test_the_learning_rate_follows_what_all_have_done(tmp_path: Path) -> None:
    alone = TrainerParams(3, lr_step="batch")
    check_that_the_learning_rate_is_that_of_one(tmp_path, params(2, lr_step="batch"), alone)


# What goes wrong


class Unsendable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


def _raise_unsendable() -> None:
    raise Unsendable("what it said")


def test_what_cannot_be_sent_is_told(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, {"m": lambda: Fragile(_raise_unsendable)}, params=params(2))
    with pytest.raises(RuntimeError, match="what it said"):
        attempt(tiny)


# Shared memory


def test_shared_tensors_keep_shape_layout_and_values() -> None:
    given = [
        torch.arange(6).reshape(2, 3).T,
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor(1.5, dtype=torch.float64),
        torch.empty(0, 3),
        torch.tensor([True, False, True]),
    ]
    found = shared(given)
    for mine, theirs in zip(found, given, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype == theirs.dtype
        assert mine.stride() == theirs.stride()
