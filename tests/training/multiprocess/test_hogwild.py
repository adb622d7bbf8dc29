"""Several processes on one model; what they share with other trainers is in tests/contracts."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from asynckfold import TrainerParams
from asynckfold.jobs.result import DIVERGED
from asynckfold.training import checkpoint
from asynckfold.training.multiprocess import hogwild
from asynckfold.training.process_group.shared_tensors import shared
from tests.training.multiprocess import attempts
from tests.training.multiprocess.attempts import (
    OPTIMIZERS,
    Fragile,
    attempt,
    check_that_the_learning_rate_is_that_of_one,
    counting,
    problems,
    train,
)
from tests.training.tiny import Tiny

params = partial(attempts.params, "hogwild")


def test_the_learning_rate_follows_what_all_have_done(tmp_path: Path) -> None:
    alone = TrainerParams(3, lr_step="batch")
    check_that_the_learning_rate_is_that_of_one(tmp_path, params(2, lr_step="batch"), alone)


def test_a_checkpoint_has_what_each_optimizer_keeps(tmp_path: Path) -> None:
    def kept(shared_state: bool) -> int:
        tiny = Tiny(tmp_path / str(shared_state), params=params(2, shared_state=shared_state))
        seen: list[int] = []
        original = hogwild.HogwildTraining.optimizer_state

        def look(self: hogwild.HogwildTraining) -> dict[str, Any]:
            found = original(self)
            seen.append(len(found["ranks"]))
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hogwild.HogwildTraining, "optimizer_state", look)
            # Also after the first epoch: after the last, no step will want it.
            patch.setattr(checkpoint, "EPOCH_SECONDS", 0.0)
            patch.setattr(checkpoint, "SHARE", math.inf)
            train(tiny)
        return seen[-1]

    assert (kept(shared_state=False), kept(shared_state=True)) == (2, 1)


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


def test_one_that_diverges_says_where(tmp_path: Path) -> None:
    tiny = Tiny(
        tmp_path, opt_fn=lambda model: optim.SGD(model.parameters(), 1e38), params=params(2)
    )
    result, _ = attempt(tiny)
    assert result is not None
    assert result.status == DIVERGED
    assert "learning rate 1e+38" in result.error


def test_what_cannot_be_shared_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def tiny(name: str, opt_fn: Any, **given: Any) -> Tiny:
        return Tiny(tmp_path / name, opt_fn=opt_fn, params=params(2, **given))

    assert problems(tiny("adam", OPTIMIZERS["adam"], shared_state=True)) == []
    assert problems(tiny("own", counting)) == []
    ((rule, received, _),) = problems(tiny("counting", counting, shared_state=True))
    assert "tensors only" in rule
    assert "Counting, whose seen is a int" in received
    ((rule, received, _),) = problems(tiny("lbfgs", lambda model: optim.LBFGS(model.parameters())))
    assert "LBFGS" in received


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
