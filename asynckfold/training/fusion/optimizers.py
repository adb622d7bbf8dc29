"""Optimizers of fused replicas.

::

    opt_fn(model) for each replica ─┬─ element-wise: one optimizer for each arm, on slices of the
                                    │  stack; an LR schedule of the arm acts on it
                                    └─ any other: each replica's own, on its own row

An arm is a range of replicas under one LR schedule, which take all their steps together. The
optimizer of an arm has the class, the groups and the settings that the user's own function gave to
the plain model, so that nothing of it is repeated here; only its tensors are longer by the number
of replicas.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn, optim
from torch.optim import Optimizer

from asynckfold.training.fused_optimizers import follow_parameters
from asynckfold.training.fusion.module import FusedModule

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
"""Each element's step depends on its own gradients alone."""

SAME = 1e-4
"""Largest difference of parameters after a step with the same gradients, of which sums may be taken
in another order."""

SHARED_STATE = frozenset({"step", "mu_product"})
"""What these keep once for a whole tensor: counts of steps, which are the same within an arm."""


class ReplicaOptimizer(Protocol):
    """Replicas that step together."""

    rows: range
    optimizer: Optimizer

    def step(self, closure: Callable[[int], torch.Tensor] | None = None) -> None:
        """Take one step with the gradients of the fused parameters.

        ``closure(row)`` computes one plain model's loss and gradients anew, for optimizers such as
        LBFGS that ask for it; only an `SeparateOptimizer` can use it.
        """

    def state_dict_of(self, row: int) -> dict[str, Any]:
        """Return what the optimizer of the plain model would return as its ``state_dict``."""

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Load one plain ``state_dict`` for each of the rows."""


def fuse_optimizers(
    fused: FusedModule, optimizers: Sequence[Optimizer], ranges: Iterable[range]
) -> tuple[list[ReplicaOptimizer], str | None]:
    """Return the arms of a fused module.

    Parameters
    ----------
    fused : FusedModule
        The replicas.
    optimizers : sequence of Optimizer
        For each replica what ``opt_fn`` returned for its plain model, without LR schedule yet.
    ranges : iterable of range
        Replicas with the same LR schedule and the same number of steps; together all of them.

    Returns
    -------
    arms : list of ReplicaOptimizer
        One for each range; one for each replica when they cannot be stacked.
    reason : str or None
        Why not.

    Raises
    ------
    ValueError
        The ranges are not a division of the replicas.
    """
    ranges = list(ranges)
    if [row for rows in ranges for row in rows] != list(range(fused.width)):
        raise ValueError(
            f"the ranges of the arms must divide {fused.width} replicas in their order: "
            f"received {ranges}"
        )
    reasons = (why_not_stackable(fused, optimizers, rows) for rows in ranges)
    if (reason := next(filter(None, reasons), None)) is not None:
        return [
            SeparateOptimizer(fused, row, optimizers[row]) for row in range(fused.width)
        ], reason
    return [StackedOptimizer(fused, optimizers, rows) for rows in ranges], None


def why_not_stackable(
    fused: FusedModule, optimizers: Sequence[Optimizer], rows: range
) -> str | None:
    """Return why one optimizer cannot step these replicas, or None when it can."""
    first = optimizers[rows.start]
    kind = type(first).__name__
    if type(first) not in ELEMENTWISE:
        return f"{kind} is not known to step each element by itself"
    if any(value for name, value in vars(first).items() if name.endswith("_hooks")):
        return f"{kind} has hooks"
    if any(group.get("differentiable") for group in first.param_groups):
        return f"{kind} is differentiable"
    try:
        groups = _settings(fused, optimizers, rows.start)
        alike = all(_settings(fused, optimizers, row) == groups for row in rows)
    except KeyError:
        return f"{kind} steps a tensor that is no parameter of the model"
    return None if alike else f"{kind} has other groups or settings for other replicas"


def why_not_on_views(
    fused: FusedModule,
    arms: Sequence[ReplicaOptimizer],
    plain: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
) -> str | None:
    """Return why optimizers of their own do not step replicas as plain models, or None if they do.

    Parameters
    ----------
    fused : FusedModule
        The replicas, with gradients; they are stepped.
    arms : sequence of ReplicaOptimizer
        One for each replica.
    plain : sequence of nn.Module
        The same models by themselves; they are given these gradients, and stepped.
    optimizers : sequence of Optimizer
        Theirs.
    """
    for row, (model, optimizer) in enumerate(zip(plain, optimizers, strict=True)):
        gradients = fused.gradients_of(row)
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].clone(memory_format=torch.contiguous_format)
        # Any optimizer may want a closure, or memory in one row.
        try:
            optimizer.step()
            arms[row].step()
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__} was raised by a step on views: {error}"
        stepped = dict(fused.models[row].named_parameters())
        for name, parameter in model.named_parameters():
            if not torch.allclose(stepped[name], parameter, rtol=SAME, atol=SAME):
                return f"a step on views leads elsewhere ({name})"
    return None


def _settings(
    fused: FusedModule, optimizers: Sequence[Optimizer], row: int
) -> list[dict[str, Any]]:
    """Return the parameter groups of a replica's optimizer, with names for parameters."""
    names = {id(p): name for name, p in fused.models[row].named_parameters()}
    return [
        {**group, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizers[row].param_groups
    ]


class StackedOptimizer:
    """One element-wise optimizer for consecutive replicas.

    Parameters
    ----------
    fused : FusedModule
        All replicas.
    optimizers : sequence of Optimizer
        Those of all plain models.
    rows : range
        Those of this arm.
    """

    def __init__(self, fused: FusedModule, optimizers: Sequence[Optimizer], rows: range) -> None:
        self.rows, self._fused = rows, fused
        groups = _settings(fused, optimizers, rows.start)
        self._names: list[str] = [name for group in groups for name in group["params"]]
        parameters = fused.rows(rows).parameters()
        self._parameters = [parameters[name] for name in self._names]
        self.optimizer = copy.copy(optimizers[rows.start])
        self.optimizer.state = defaultdict(dict)
        self.optimizer.param_groups = [
            {
                **copy.deepcopy({key: group[key] for key in group if key != "params"}),
                "params": [parameters[name] for name in group["params"]],
            }
            for group in groups
        ]
        # Some have a state before their first step.
        self.load([optimizers[row].state_dict() for row in rows])

    def step(self, closure: Callable[[int], torch.Tensor] | None = None) -> None:
        """Take one step with the gradients of the fused parameters."""
        whole = self._fused.parameters()
        part = slice(self.rows.start, self.rows.stop)
        for name, parameter in zip(self._names, self._parameters, strict=True):
            gradient = whole[name].grad
            if parameter is not whole[name]:
                parameter.grad = None if gradient is None else gradient[part]
        self.optimizer.step()

    def state_dict_of(self, row: int) -> dict[str, Any]:
        """Return one replica's part, as the optimizer of the plain model would return it."""
        found: dict[str, Any] = self.optimizer.state_dict()
        place = row - self.rows.start

        def part(name: str, key: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or key in SHARED_STATE:
                return copy.deepcopy(value)
            plain = self._fused.stack.plain(name, value, place)
            return plain.clone(memory_format=torch.contiguous_format)

        state = {
            index: {key: part(self._names[index], key, value) for key, value in entries.items()}
            for index, entries in found["state"].items()
        }
        return {"state": state, "param_groups": copy.deepcopy(found["param_groups"])}

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Load one plain ``state_dict`` for each row.

        Raises
        ------
        ValueError
            The replicas differ in what an arm has once: counts of steps, learning rates.
        """
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
                f"the replicas {self.rows.start} to {self.rows.stop - 1} of an arm must be at the "
                f"same step with the same settings: received {values}. Give them arms of their own"
            )


class SeparateOptimizer:
    """A replica's own optimizer of any kind, on its plain model's views of the stack.

    Parameters
    ----------
    fused : FusedModule
        All replicas.
    row : int
        Which one.
    optimizer : Optimizer
        What ``opt_fn`` returned for its plain model.
    """

    def __init__(self, fused: FusedModule, row: int, optimizer: Optimizer) -> None:
        self.rows, self.optimizer = range(row, row + 1), optimizer
        self._fused = fused
        self._parameters: dict[str, nn.Parameter] = dict(fused.models[row].named_parameters())

    def step(self, closure: Callable[[int], torch.Tensor] | None = None) -> None:
        """Take one step with the row's gradients, or with what the closure computes."""
        row = self.rows.start
        if closure is not None:
            self.optimizer.step(partial(closure, row))  # type: ignore[arg-type]
            return
        gradients = self._fused.gradients_of(row)
        for name, parameter in self._parameters.items():
            parameter.grad = gradients.get(name)
        self.optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_dict_of(self, row: int) -> dict[str, Any]:
        """Return a copy of the optimizer's ``state_dict``."""
        found: dict[str, Any] = copy.deepcopy(self.optimizer.state_dict())
        return found

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the one row's ``state_dict``."""
        self.optimizer.load_state_dict(copy.deepcopy(states[0]))
        follow_parameters(self.optimizer)
