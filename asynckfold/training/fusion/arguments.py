"""The arguments of a forward as a flat list of tensors, which is what a fused one takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from asynckfold.training.calls import POSITIONS, call_by, way_of
from asynckfold.training.fusion.layouts import NotFusible


def leaves_of(arguments: Sequence[Any]) -> Sequence[Any]:
    """Return the tensors of arguments that may be dicts, tuples and lists of tensors, in order."""
    if all(isinstance(item, torch.Tensor) for item in arguments):
        return arguments
    leaves: list[Any] = pytree.tree_leaves(tuple(arguments))
    return leaves


@dataclass(frozen=True)
class Arguments:
    """How the plain models take what a fused forward gets as tensors.

    ``example`` are the tensors for one batch of one replica; ``spec`` and ``way`` say how a plain
    forward gets them.
    """

    example: Sequence[torch.Tensor]
    spec: pytree.TreeSpec
    way: str

    @classmethod
    def of(cls, model: nn.Module, arguments: Sequence[Any]) -> Arguments:
        """Flatten the arguments; a single tree is passed as `calls.call_model` does."""
        inputs: Any = tuple(arguments)
        way = POSITIONS
        if len(inputs) == 1 and not isinstance(inputs[0], torch.Tensor):
            (inputs,) = inputs
            way = way_of(model, inputs)
        leaves, spec = pytree.tree_flatten(inputs)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise NotFusible(f"an input is no tensor but a {type(leaf).__name__}")
        return cls(leaves, spec, way)

    def call(self, forward: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """Call a plain forward with tensors, or with what stands for them."""
        return call_by(self.way, forward, pytree.tree_unflatten(list(leaves), self.spec))
