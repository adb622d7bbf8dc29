"""Count floating-point operations: unlike seconds, they are reproducible.

Counted are operations whose work grows faster than their data: matrix products, convolutions,
attention and recurrent layers, by the shapes that reach ATen. A multiply-add counts as two. (The
module `torch.utils.flop_counter` imports a compiler, and overcounts grouped convolutions.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from asynckfold.planning.memory_format import Convolution
from asynckfold.training.torch_internals import OperationWatch

_Formula = Callable[[Sequence[Any], Any], int]


def _product(first: int) -> _Formula:
    """Matrix product of arguments `first` and `first` + 1."""
    return lambda args, out: int(2 * args[first].numel() * args[first + 1].shape[-1])


def _convolution(args: Sequence[Any], out: Any) -> int:
    inputs, weight, transposed = args[0], args[1], args[6]
    return int(2 * (inputs if transposed else out).numel() * _per_element(weight))


def _convolution_backward(args: Sequence[Any], out: Any) -> int:
    grad, inputs, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    # The gradients of input and weight cost a forward pass each; a bias costs little.
    once = 2 * (inputs if transposed else grad).numel() * _per_element(weight)
    return int(once * sum(map(bool, wanted[:2])))


def _per_element(weight: torch.Tensor) -> int:
    return weight.numel() // max(1, len(weight))


def _attention(first: int, products: int) -> _Formula:
    """Queries and keys start at argument `first`; each product is queries × keys × width."""
    return lambda args, out: int(2 * products * args[first].numel() * args[first + 1].shape[-2])


def _recurrent(first: int, passes: int) -> _Formula:
    """Inputs are argument 0; input and hidden weights start at argument `first`."""

    def count(args: Sequence[Any], out: Any) -> int:
        rows = args[0].numel() // max(1, args[0].shape[-1])
        return int(2 * passes * rows * sum(weight.numel() for weight in args[first : first + 2]))

    return count


_FORMULAS: Mapping[str, _Formula] = {
    "aten::mm": _product(0),
    "aten::bmm": _product(0),
    "aten::addmm": _product(1),
    "aten::baddbmm": _product(1),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(0, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, 5),
    "aten::mkldnn_rnn_layer": _recurrent(1, 1),
    "aten::mkldnn_rnn_layer_backward": _recurrent(1, 2),
}


class FlopCounter(OperationWatch):
    """Context that counts operations, in ``flops``; unknown ones count nothing.

    ``products`` are the calls among which they are divided; a convolution's backward pass is two.
    ``convolutions`` are forward convolutions of images.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.products = 0
        self.convolutions: list[Convolution] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count it."""
        out = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func._schema.name)
        if formula is not None:
            self.flops += _counted(formula, args, out)
            self.products += 2 if func._schema.name == "aten::convolution_backward" else 1
        if func._schema.name == "aten::convolution" and out.dim() == 4:
            self.convolutions.append(Convolution(tuple(out.shape), tuple(args[1].shape)))
        return out


def _counted(formula: _Formula, args: Sequence[Any], out: Any) -> int:
    # Other versions of torch may pass other arguments: then the count is lower, nothing fails.
    try:
        return formula(args, out)
    except (IndexError, TypeError, AttributeError):
        return 0
