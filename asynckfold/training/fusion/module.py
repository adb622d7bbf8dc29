"""R replicas of one model as one module: stacked inputs in, stacked outputs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from asynckfold.training import seeding
from asynckfold.training.fusion import compatibility
from asynckfold.training.fusion.backends import Programs
from asynckfold.training.fusion.layouts import NotFusible, Stack
from asynckfold.training.fusion.tracing import Arguments, leaves_of


class FusedModule:
    """Models that compute together; made by `fuse`.

    The parameters and buffers of the models are views of the stack, so that each model can be
    evaluated, saved, loaded or stepped by a separate optimizer at any time. Gradients are in
    the stack's parameters. ``generators`` are what the dropout of each replica draws from, and
    `first` is the number of the first replica among all that were fused.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        programs: Programs,
        stack: Stack,
        generators: Sequence[torch.Generator],
        first: int = 0,
    ) -> None:
        self.models, self.generators = list(models), list(generators)
        self.stack = stack
        self._programs, self._first = programs, first
        self._parts: dict[range, FusedModule] = {}
        self._forwards: dict[bool, Callable[..., Any]] = {}

    @property
    def width(self) -> int:
        """Number of replicas."""
        return len(self.models)

    def __call__(self, *inputs: Any) -> Any:
        """Compute all replicas: inputs, or the tensors of their trees, and outputs (R, B, ...)."""
        training = self.models[0].training
        if training not in self._forwards:
            replicas = range(self._first, self._first + self.width)
            self._forwards[training] = self._programs.forward(training, replicas)
        tensors = self.stack.tensors.values()
        return self._forwards[training](*tensors, self.generators, *leaves_of(inputs))

    def train(self, mode: bool = True) -> FusedModule:
        """Set the mode of all replicas."""
        for model in self.models:
            model.train(mode)
        return self

    def part(self, replicas: range) -> FusedModule:
        """Return consecutive replicas as a module over the same memory, with separate leaves."""
        if replicas == range(self.width):
            return self
        if replicas not in self._parts:
            place = slice(replicas.start, replicas.stop)
            self._parts[replicas] = FusedModule(
                self.models[place],
                self._programs,
                self.stack.part(replicas),
                self.generators[place],
                self._first + replicas.start,
            )
        return self._parts[replicas]

    def beside(self, models: Sequence[nn.Module]) -> FusedModule:
        """Return the same computation over copies of what other replicas hold, in their dtype."""
        stack = Stack.of(models, self._programs.slots, binds=False)
        generators = _generators(self.generators[0].device, len(models))
        return FusedModule(models, self._programs, stack, generators)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the stacked parameters by the name in the plain model, tied ones once."""
        return self.stack.parameters()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters().values():
            parameter.grad = None

    def gradients_of(self, replica: int) -> dict[str, torch.Tensor]:
        """Return one replica's gradients by name, as views; without those that have none."""
        return {
            name: self.stack.plain(name, parameter.grad, replica)
            for name, parameter in self.parameters().items()
            if parameter.grad is not None
        }

    def buffers_of(self, replica: int) -> dict[str, torch.Tensor]:
        """Return one replica's buffers by name, as views."""
        return {
            name: self.stack.plain(name, tensor, replica)
            for name, tensor in self.stack.tensors.items()
            if not self.stack.slots[name].is_parameter
        }


def fuse(models: Sequence[nn.Module], example_inputs: Sequence[Any]) -> FusedModule:
    """Make replicas of one model compute together; raise `NotFusible` with a reason.

    Parameters
    ----------
    models : sequence of nn.Module
        Replicas of one architecture: the same structure and settings, each with separate
        parameters and buffers, which become views of the stack.
    example_inputs : sequence of Tensor, or of a tree of them
        What the forward of one replica takes for one batch, two samples or more. A single dict or
        tuple is passed by name or by position where the forward takes it so.

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
    arguments = Arguments.of(models[0], example_inputs)
    with seeding.preserved():
        compatibility.check(models, arguments)
        programs = Programs(models, arguments)
    stack = Stack.of(models, programs.slots)
    for model, mode in zip(models, modes, strict=True):
        for module, training in zip(model.modules(), mode, strict=True):
            module.training = training
    generators = _generators(arguments.example[0].device, len(models))
    return FusedModule(models, programs, stack, generators)


def _generators(device: torch.device, width: int) -> list[torch.Generator]:
    # Of the kind from which a model on the device draws.
    kind = device if device.type == "cuda" else "cpu"
    return [torch.Generator(kind).manual_seed(index) for index in range(width)]
