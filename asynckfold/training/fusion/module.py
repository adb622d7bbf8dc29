"""R replicas of one model as one: stacked inputs in, stacked outputs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from asynckfold.training import seeding
from asynckfold.training.fusion import compatibility
from asynckfold.training.fusion.backends import Batched, Forward, Programs, Vmapped
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.stacked_parameters import Stack


class FusedModule:
    """Models that compute together; made by `fuse`.

    The models live on: their parameters and buffers are views of the stack, so that each can be
    evaluated, saved, loaded or stepped by an optimizer of its own at any time. Their gradients are
    in the stack's parameters.

    Parameters
    ----------
    models : sequence of nn.Module
        The replicas.
    programs : Programs
        Their forwards.
    stack : Stack
        Their tensors.
    generators : sequence of torch.Generator
        One for each replica: what its dropout draws from.
    first : int
        Number of the first replica, among all that were fused.

    Attributes
    ----------
    way : {"batched", "vmap"}
        How they compute together.
    why_vmap : str
        Why there is no batched graph; empty when there is one.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        programs: Programs,
        stack: Stack,
        generators: Sequence[torch.Generator],
        first: int = 0,
        why_vmap: str = "",
    ) -> None:
        self.models, self.generators = list(models), list(generators)
        self.stack, self.why_vmap = stack, why_vmap
        self._programs, self._first = programs, first
        self._views: dict[range, FusedModule] = {}
        self._forwards: dict[bool, Forward] = {}

    @property
    def way(self) -> str:
        """How they compute together."""
        return "vmap" if self.why_vmap else "batched"

    @property
    def width(self) -> int:
        """Number of replicas."""
        return len(self.models)

    @property
    def training(self) -> bool:
        """Whether in training mode."""
        return self.models[0].training

    def __call__(self, *inputs: Any) -> Any:
        """Compute all replicas.

        Parameters
        ----------
        *inputs : Tensor
            (R, B, ...): for each replica what its forward takes.

        Returns
        -------
        Tensor, or the structure of tensors that the model returns
            (R, B, ...).
        """
        training = self.training
        if training not in self._forwards:
            rows = range(self._first, self._first + self.width)
            self._forwards[training] = self._programs.forward(training, rows)
        return self._forwards[training](self.stack, self.generators, inputs)

    def train(self, mode: bool = True) -> FusedModule:
        """Set the mode of all replicas."""
        for model in self.models:
            model.train(mode)
        return self

    def eval(self) -> FusedModule:
        """Set the evaluation mode of all replicas."""
        return self.train(False)

    def rows(self, rows: range) -> FusedModule:
        """Return consecutive replicas as a module of their own, over the same memory.

        Its parameters are leaves of their own, so that its gradients are.

        Raises
        ------
        ValueError
            They are not consecutive replicas of this module.
        """
        if rows == range(self.width):
            return self
        if rows.step != 1 or not 0 <= rows.start < rows.stop <= self.width:
            raise ValueError(
                f"rows must be consecutive ones of {self.width}: received {rows}. "
                "Divide them into ranges"
            )
        if rows not in self._views:
            part = slice(rows.start, rows.stop)
            self._views[rows] = FusedModule(
                self.models[part],
                self._programs,
                self.stack.rows(rows),
                self.generators[part],
                self._first + rows.start,
                self.why_vmap,
            )
        return self._views[rows]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the stacked parameters by the name in the plain model, tied ones once."""
        return self.stack.parameters()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters().values():
            parameter.grad = None

    def gradients_of(self, row: int) -> dict[str, torch.Tensor]:
        """Return one replica's gradients by name, as views; without those that have none."""
        return {
            name: self.stack.plain(name, parameter.grad, row)
            for name, parameter in self.parameters().items()
            if parameter.grad is not None
        }

    def state_dict_of(self, row: int) -> dict[str, Any]:
        """Return a copy of one replica's ``state_dict``, as the plain model has it."""
        return {
            name: item.detach().clone(memory_format=torch.contiguous_format)
            if isinstance(item, torch.Tensor)
            else item
            for name, item in self.models[row].state_dict().items()
        }

    def load(self, row: int, state: Mapping[str, Any]) -> None:
        """Load one replica's ``state_dict``; the others stay as they are."""
        self.models[row].load_state_dict(state)


def fuse(
    models: Sequence[nn.Module],
    example_inputs: Sequence[torch.Tensor],
    *,
    plain_order: bool = False,
) -> FusedModule:
    """Make replicas of one model compute together.

    Parameters
    ----------
    models : sequence of nn.Module
        Replicas of one architecture: the same structure and settings, each with parameters and
        buffers of its own. They are taken over: their tensors become views of the stack.
    example_inputs : sequence of Tensor
        What the forward of one replica takes for one batch, two samples or more.
    plain_order : bool
        Keep each parameter contiguous in the order of the plain model. It costs a copy of the
        weights in every step, and is for optimizers on single rows that flatten them, as LBFGS.

    Returns
    -------
    FusedModule
        In the mode of the first model.

    Raises
    ------
    NotFusible
        Says why, in one sentence.

    Examples
    --------
    >>> models = [nn.Linear(3, 2) for _ in range(5)]
    >>> fused = fuse(models, [torch.zeros(4, 3)])
    >>> fused(torch.zeros(5, 4, 3)).shape
    torch.Size([5, 4, 2])
    """
    if not models:
        raise NotFusible("there is no model")
    modes = [[module.training for module in model.modules()] for model in models]
    programs, why_vmap = _programs(models, example_inputs, plain_order)
    stack = Stack.of(models, programs.slots)
    for model, mode in zip(models, modes, strict=True):
        for module, training in zip(model.modules(), mode, strict=True):
            module.training = training
    device = next(iter(example_inputs)).device
    generators = [torch.Generator(device).manual_seed(row) for row in range(len(models))]
    return FusedModule(models, programs, stack, generators, why_vmap=why_vmap)


def _programs(
    models: Sequence[nn.Module], inputs: Sequence[Any], plain_order: bool = False
) -> tuple[Programs, str]:
    with seeding.preserved():
        return _found(models, inputs, plain_order)


def _found(
    models: Sequence[nn.Module], inputs: Sequence[Any], plain_order: bool
) -> tuple[Programs, str]:
    own_functions = compatibility.check(models, inputs)
    try:
        for name in own_functions:
            # A trace would look into it, and take the derivative of what it finds.
            raise NotFusible(f"the model uses {name}, an autograd function of its own")
        return Batched(models, inputs, plain_order), ""
    except NotFusible as error:
        if not compatibility.surely_alike(models):
            # vmap would take for all of them what the first one holds.
            raise NotFusible(f"{error}; other replicas hold other objects") from error
        try:
            return Vmapped(models, inputs), str(error)
        except NotFusible as second:
            raise NotFusible(f"{error}; {second}") from error


def why_not_fusible(model: nn.Module, example_inputs: Sequence[torch.Tensor]) -> str | None:
    """Return why replicas of a model cannot compute together, or None when they can.

    The model is not touched.

    Examples
    --------
    >>> why_not_fusible(nn.LSTM(3, 2), [torch.zeros(4, 5, 3)])
    'the model is recurrent, and its kernel has no batched form'
    """
    try:
        _programs([model], example_inputs)
    except NotFusible as error:
        return str(error)
    return None
