"""Optimizers of fused replicas against the user's own, each on its plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from asynckfold.training.fusion.backward import backward, clip_gradients, fuse_criterion, parts_of
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.module import FusedModule, fuse
from asynckfold.training.fusion.optimizers import StackedOptimizer, fuse_optimizers
from tests.training.fusion.zoo import ZOO, state_of

REPLICAS = 4

OptFn = Callable[[nn.Module], optim.Optimizer]


def over_all(kind: Any, **settings: Any) -> OptFn:
    return lambda model: kind(model.parameters(), **settings)


def by_group(model: nn.Module) -> optim.Optimizer:
    """No decay for what has one dimension, a rate of its own for the last layer."""
    last = {id(p) for p in list(model.parameters())[-2:]}
    rest = [p for p in model.parameters() if id(p) not in last]
    return optim.AdamW(
        [
            {"params": [p for p in rest if p.dim() > 1]},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
            {"params": [p for p in model.parameters() if id(p) in last], "lr": 3e-2},
        ],
        lr=1e-2,
        weight_decay=0.2,
        amsgrad=True,
    )


STACKED: dict[str, OptFn] = {
    "SGD": over_all(optim.SGD, lr=0.1),
    "SGD with momentum": over_all(
        optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "fused Adam": over_all(optim.Adam, lr=1e-2, fused=True, weight_decay=0.1),
    "AdamW in groups": by_group,
    "RMSprop": over_all(optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "Adagrad": over_all(optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1, lr_decay=0.1),
    "Adadelta": over_all(optim.Adadelta, lr=1.0),
    "NAdam": over_all(optim.NAdam, lr=1e-2),
    "RAdam": over_all(optim.RAdam, lr=1e-2),
    "Rprop": over_all(optim.Rprop, lr=1e-2),
    "rate in a tensor": over_all(optim.Adam, lr=torch.tensor(1e-2), foreach=False),
}


class Race:
    """The same work for plain models and for fused ones."""

    def __init__(self, name: str, opt_fn: OptFn, ranges: list[range]) -> None:
        self.animal = ZOO[name]
        torch.manual_seed(3)
        self.plain = [self.animal.make().double().train() for _ in range(REPLICAS)]
        models = copy.deepcopy(self.plain)
        self.optimizers = [opt_fn(model) for model in self.plain]
        inputs, targets = self.batch(0, 0)
        optimizers = [opt_fn(model) for model in models]
        self.fused: FusedModule = fuse(models, [inputs])
        outputs = torch.zeros(len(targets), self.animal.classes).double()
        self.criterion = fuse_criterion(nn.CrossEntropyLoss(), REPLICAS, outputs, targets)
        self.stepping = fuse_optimizers(self.fused, optimizers, ranges)

    def batch(self, replica: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        # The replicas' batches differ in size at every second step.
        inputs, targets = self.animal.batch(5 + (step % 2) * (replica > 1), 100 * step + replica)
        return inputs if self.animal.vocabulary else inputs.double(), targets

    def step(self, number: int, clip: float | None = None) -> None:
        batches = [self.batch(replica, number) for replica in range(REPLICAS)]
        states = [generator.get_state() for generator in self.fused.generators]
        backward(self.fused, self.criterion, parts_of(batches))
        if clip is not None:
            clip_gradients(self.fused, clip)
        for optimizer in self.stepping:
            optimizer.step()
        for replica, model in enumerate(self.plain):
            torch.set_rng_state(states[replica])
            self.optimizers[replica].zero_grad()
            nn.functional.cross_entropy(model(batches[replica][0]), batches[replica][1]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            self.optimizers[replica].step()

    def optimizer(self, replica: int) -> StackedOptimizer:
        return next(optimizer for optimizer in self.stepping if replica in optimizer.replicas)

    def check(self) -> None:
        for replica, model in enumerate(self.plain):
            mine = self.optimizer(replica).state_dict_of(replica)
            theirs = self.optimizers[replica].state_dict()
            assert mine["param_groups"] == theirs["param_groups"]
            pairs = (
                (state_of(self.fused, replica), model.state_dict()),
                (mine["state"], theirs["state"]),
            )
            for one, other in pairs:
                torch.testing.assert_close(dict(one), dict(other), rtol=1e-7, atol=1e-9)


def state_at(race: Race) -> tuple[list[dict], list[dict]]:
    """Weights and optimizer states of all replicas, as plain ones have them."""
    replicas = range(REPLICAS)
    weights = [state_of(race.fused, replica) for replica in replicas]
    return weights, [race.optimizer(replica).state_dict_of(replica) for replica in replicas]


AT_NIGHT = ("Adadelta", "NAdam", "RAdam", "Rprop")


@pytest.mark.nightly(
    but=["frozen-SGD", *(f"lists-{kind}" for kind in STACKED if kind not in ("SGD", *AT_NIGHT))]
)
@pytest.mark.parametrize(
    ("name", "kind"), [("frozen" if kind == "SGD" else "lists", kind) for kind in STACKED]
)
def test_fused_optimizers_are_the_plain_ones_also_after_a_checkpoint(name: str, kind: str) -> None:
    race = Race(name, STACKED[kind], [range(0, 1), range(1, 4)])
    assert [item.replicas for item in race.stepping] == [range(0, 1), range(1, 4)]
    race.step(0)
    race.step(1, clip=0.3)
    race.check()
    weights, states = state_at(race)
    again = Race(name, STACKED[kind], [range(4)])
    for replica, (weight, state) in enumerate(zip(weights, states, strict=True)):
        again.plain[replica].load_state_dict(weight)
        again.optimizers[replica].load_state_dict(copy.deepcopy(state))
        again.fused.models[replica].load_state_dict(weight)
    for optimizer in again.stepping:
        optimizer.load([states[replica] for replica in optimizer.replicas])
    again.step(2)
    again.check()


def test_a_stacked_optimizer_refuses_replicas_at_different_steps() -> None:
    race = Race("grouped", STACKED["fused Adam"], [range(0, 2), range(2, 4)])
    race.step(0)
    states = [race.stepping[0].state_dict_of(0), race.stepping[0].state_dict_of(1)]
    for entries in states[1]["state"].values():
        entries["step"] += 1
    with pytest.raises(ValueError, match="same step with the same settings"):
        race.stepping[0].load(states)


def test_replicas_with_different_settings_are_stepped_apart() -> None:
    rates = iter([0.1, 0.2] * REPLICAS)
    race = Race("lists", lambda m: optim.SGD(m.parameters(), lr=next(rates)), [range(4)])
    assert len(race.stepping) == 4
    race.step(0)
    race.check()


def hooked(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def foreign(model: nn.Module) -> optim.Optimizer:
    return optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("opt_fn", "reason"),
    [
        (over_all(optim.Adafactor, lr=1e-2), "Adafactor is not known to step each element"),
        (hooked, "SGD has hooks"),
        (over_all(optim.SGD, lr=0.1, differentiable=True), "SGD is differentiable"),
        (foreign, "SGD steps a tensor that is no parameter of the model"),
    ],
)
def test_other_optimizers_are_not_stacked(opt_fn: OptFn, reason: str) -> None:
    with pytest.raises(NotFusible, match=reason):
        Race("lists", opt_fn, [range(4)])
