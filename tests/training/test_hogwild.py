"""Several processes on one model; what they share with other trainers is in tests/contracts."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from asynckfold.messages import EpochEnded
from asynckfold.plan import TrainerParams
from asynckfold.result import DIVERGED
from asynckfold.training import hogwild, preflight
from asynckfold.training.shared import share_model, share_state, shared
from tests.training import teams
from tests.training.teams import OPTIMIZERS, Fragile, attempt, noted, noting, train
from tests.training.tiny import FEATURES, Tiny

params = partial(teams.params, "hogwild")


@pytest.mark.parametrize("shared_state", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_together_see_each_sample_once_an_epoch(
    tmp_path: Path, optimizer: str, shared_state: bool
) -> None:
    path = tmp_path / "noted"
    tiny = Tiny(
        tmp_path / "run",
        {"m": noting(path)},
        opt_fn=OPTIMIZERS[optimizer],
        params=params(3, shared_state=shared_state),
    )
    result = train(tiny)
    lines = noted(path)
    found = Counter(number for _, numbers in lines for number in numbers)
    assert found == Counter({int(number): 3 for number in tiny.bundle.folds[0].train})
    assert len({pid for pid, _ in lines}) == 3
    assert max(len(numbers) for _, numbers in lines) == tiny.batch_size
    assert [item.number for item in result.epochs] == [1, 2, 3]
    assert all(np.isfinite(item.train_loss) for item in result.epochs)


@pytest.mark.parametrize("step", ["epoch", "batch"])
def test_the_learning_rate_follows_what_all_have_done(tmp_path: Path, step: str) -> None:
    def rates(name: str, given: TrainerParams) -> list[float]:
        tiny = Tiny(tmp_path / name, lr_schedules={"exponential": "exponential"}, params=given)
        news = attempt(tiny)[1] if given.trainer == "hogwild" else tiny.attempt()[1]
        return [item.epoch.lr for item in news if isinstance(item, EpochEnded)]

    found = rates("two", params(2, lr_step=step))
    assert found == pytest.approx(rates("plain", TrainerParams(3, lr_step=step)))
    assert len(set(found)) == 3


def test_a_checkpoint_has_what_each_optimizer_keeps(tmp_path: Path) -> None:
    def kept(shared_state: bool) -> int:
        tiny = Tiny(tmp_path / str(shared_state), params=params(2, shared_state=shared_state))
        seen: list[int] = []
        original = hogwild.Hogwild.optimizer_state

        def look(self: hogwild.Hogwild) -> dict[str, Any]:
            found = original(self)
            seen.append(len(found["ranks"]))
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hogwild.Hogwild, "optimizer_state", look)
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
    class Counting(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for item in group["params"]:
                    self.state[item]["seen"] = self.state[item].get("seen", 0) + 1
            return super().step(closure)

    def problems(name: str, opt_fn: Any, **given: Any) -> list[tuple[str, str, str]]:
        tiny = Tiny(tmp_path / name, opt_fn=opt_fn, params=params(2, **given))
        return list(preflight.check(tiny.bundle, tiny.batches).problems)

    def counting(model: nn.Module) -> optim.Optimizer:
        return Counting(model.parameters(), 0.1)

    assert problems("adam", OPTIMIZERS["adam"], shared_state=True) == []
    assert problems("own", counting) == []
    ((rule, received, _),) = problems("counting", counting, shared_state=True)
    assert "tensors only" in rule
    assert "Counting, whose seen is a int" in received
    ((rule, received, _),) = problems("lbfgs", lambda model: optim.LBFGS(model.parameters()))
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


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_shared_model_is_what_it_was_and_seen_from_elsewhere() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[2].weight
    tied = nn.Sequential(model, model[0])
    before = {name: value.clone() for name, value in tied.state_dict().items()}
    parameter = model[0].weight
    share_model(tied)
    assert tied[1].weight is parameter
    assert all(torch.equal(value, before[name]) for name, value in tied.state_dict().items())
    pid = os.fork()
    if pid == 0:
        with torch.no_grad():
            tied[1].weight.fill_(3.0)
            model[1].running_mean.fill_(2.0)
        os._exit(0)
    os.waitpid(pid, 0)
    assert torch.equal(parameter, torch.full_like(parameter, 3.0))
    assert torch.equal(tied.state_dict()["0.1.running_mean"], torch.full((4,), 2.0))


def test_the_state_of_an_optimizer_is_copied_and_the_rest_stays() -> None:
    item = torch.zeros(2)
    state = {item: {"moment": torch.ones(2), "count": 3}}
    found = share_state(state)
    assert found[item]["count"] == 3
    assert torch.equal(found[item]["moment"], torch.ones(2))  # type: ignore[arg-type]
    assert found[item]["moment"] is not state[item]["moment"]
