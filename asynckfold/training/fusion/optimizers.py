"""Optimizers of fused replicas, on slices of the stacked parameters.

A stacked optimizer steps consecutive replicas under one LR schedule. It has the class, the groups
and the settings of the optimizer that ``opt_fn`` made for the plain model; only its tensors have
the replicas as a further dimension.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.module import FusedModule
from asynckfold.training.step_graph import GraphOptimizer

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.RMSprop,
        optim.Adagrad,
        optim.Adadelta,
        optim.NAdam,
        optim.RAdam,
        optim.Adamax,
        optim.Rprop,
    }
)
"""The step of each element depends on its gradients alone."""

SHARED_STATE = frozenset({"step", "mu_product"})
"""State entries kept once per tensor: step counts, equal for all replicas of an optimizer."""


def fuse_optimizers(
    fused: FusedModule, optimizers: Sequence[Optimizer], ranges: Iterable[range]
) -> list[StackedOptimizer]:
    """Return the optimizers of a fused module; raise `NotFusible` where they cannot be stacked.

    Parameters
    ----------
    fused : FusedModule
        The replicas.
    optimizers : sequence of Optimizer
        What ``opt_fn`` returned for each plain model, without an LR schedule yet.
    ranges : iterable of range
        Replicas with the same LR schedule and number of steps; together all of them, in order. Each
        gets an optimizer; where the settings of its replicas differ, each of these has one.
    """
    stacked = []
    for part in ranges:
        settings = [_settings(fused, optimizers, replica) for replica in part]
        alike = all(item == settings[0] for item in settings)
        parts = [part] if alike else [range(replica, replica + 1) for replica in part]
        stacked += [StackedOptimizer(fused, optimizers, replicas) for replicas in parts]
    return stacked


def _refuse_unstackable(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        raise NotFusible(f"{kind} is not known to step each element separately")
    if any(value for name, value in vars(optimizer).items() if name.endswith("_hooks")):
        raise NotFusible(f"{kind} has hooks")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise NotFusible(f"{kind} is differentiable")


def _settings(
    fused: FusedModule, optimizers: Sequence[Optimizer], replica: int
) -> list[dict[str, Any]]:
    """Return the parameter groups of a replica's optimizer, with names for parameters."""
    optimizer = optimizers[replica]
    _refuse_unstackable(optimizer)
    names = {id(p): name for name, p in fused.models[replica].named_parameters()}
    if any(id(p) not in names for group in optimizer.param_groups for p in group["params"]):
        kind = type(optimizer).__name__
        raise NotFusible(f"{kind} steps a tensor that is no parameter of the model")
    return [
        {**group, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]


class StackedOptimizer(GraphOptimizer):
    """One element-wise optimizer for consecutive replicas, made from those of all plain models."""

    def __init__(
        self, fused: FusedModule, optimizers: Sequence[Optimizer], replicas: range
    ) -> None:
        self.replicas, self._fused = replicas, fused
        groups = _settings(fused, optimizers, replicas.start)
        self._names: list[str] = [name for group in groups for name in group["params"]]
        parameters = fused.part(replicas).parameters()
        whole, part = fused.parameters(), slice(replicas.start, replicas.stop)
        self._parts = [
            (parameters[name], whole[name], part)
            for name in self._names
            if parameters[name] is not whole[name]
        ]
        super().__init__(copy.copy(optimizers[replicas.start]))
        self.optimizer.state = defaultdict(dict)
        self.optimizer.param_groups = [
            {
                **copy.deepcopy({key: group[key] for key in group if key != "params"}),
                "params": [parameters[name] for name in group["params"]],
            }
            for group in groups
        ]
        # Some have a state before their first step.
        self.load([optimizers[replica].state_dict() for replica in replicas])

    def step(self, *, capturing: bool = False) -> None:
        """Take one step with the gradients of the fused parameters."""
        for parameter, whole, part in self._parts:
            parameter.grad = None if whole.grad is None else whole.grad[part]
        super().step(capturing=capturing)

    def state_dict_of(self, replica: int) -> dict[str, Any]:
        """Return one replica's state, as the optimizer of the plain model would."""
        whole: dict[str, Any] = self.optimizer.state_dict()
        place = replica - self.replicas.start

        def part(name: str, key: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or key in SHARED_STATE:
                return copy.deepcopy(value)
            plain = self._fused.stack.plain(name, value, place)
            return plain.clone(memory_format=torch.contiguous_format)

        state = {
            index: {key: part(self._names[index], key, value) for key, value in entries.items()}
            for index, entries in whole["state"].items()
        }
        return {"state": state, "param_groups": copy.deepcopy(whole["param_groups"])}

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Load one plain ``state_dict`` for each replica, at the same step and learning rate."""
        first = states[0]
        self._check([state["param_groups"] for state in states])
        merged: dict[int, dict[str, Any]] = {}
        for index, entries in first["state"].items():
            order = self._fused.stack.slots[self._names[index]].order
            merged[index] = {}
            for key in entries:
                values = [state["state"][index][key] for state in states]
                if isinstance(values[0], torch.Tensor) and key not in SHARED_STATE:
                    merged[index][key] = torch.stack([value.permute(order) for value in values])
                else:
                    self._check(values)
                    merged[index][key] = copy.deepcopy(values[0])
        self.optimizer.load_state_dict(
            {"state": merged, "param_groups": copy.deepcopy(first["param_groups"])}
        )

    def _check(self, values: Sequence[Any]) -> None:
        if any(value != values[0] for value in values[1:]):
            raise ValueError(
                f"replicas {self.replicas.start} to {self.replicas.stop - 1} share an optimizer "
                f"and must be at the same step with the same settings: received {values}. Give "
                "them optimizers of their own"
            )
