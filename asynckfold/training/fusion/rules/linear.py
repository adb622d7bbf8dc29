"""Matrix products: STACKED in, STACKED out, one batched product for all replicas."""

from __future__ import annotations

import operator
import string
from typing import Any

import torch
from torch.nn import functional as F

from asynckfold.training.fusion.layouts import Layout, NotFusible, Value
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule


def linear(low: Lowering, input: Value, weight: Value, bias: Value | None = None) -> Emitted:
    """Emit ``input @ weight.T + bias``, the weight as (R, in, out)."""
    if weight.name and low.slots[weight.name].order == (1, 0):
        transposed = low.storage[weight.name]
    else:
        transposed = low.emit_method("transpose", low.stacked(weight), 1, 2)
    shift = None if bias is None else low.stacked(bias)
    return low.on_stacked(affine, input, transposed, shift)


def affine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight + bias`` for x (R, ..., in), weight (R, in, out), bias (R, out)."""
    rows = x if x.dim() == 3 else x.reshape(x.shape[0], -1, x.shape[-1])
    if bias is None:
        found = torch.bmm(rows, weight)
    else:
        found = torch.baddbmm(bias.unsqueeze(1), rows, weight)
    return found if x.dim() == 3 else found.reshape(*x.shape[:-1], found.shape[-1])


def matmul(low: Lowering, input: Value, other: Value) -> Emitted:
    """Emit a product whose plain factors are vectors, matrices or batches of matrices."""
    if other.rank == 2 and other.layout is not Layout.SHARED and input.rank >= 2:
        return low.on_stacked(affine, input, low.stacked(other), None)
    nodes = [low.stacked(input), low.stacked(other)]
    ranks = [input.rank, other.rank]
    return Layout.STACKED, low.emit(_matmul, *nodes, *ranks)


def _matmul(x: torch.Tensor, y: torch.Tensor, x_rank: int, y_rank: int) -> torch.Tensor:
    left = x.unsqueeze(1) if x_rank == 1 else x
    right = y.unsqueeze(-1) if y_rank == 1 else y
    missing = left.dim() - right.dim()
    left = left.reshape(left.shape[0], *(1,) * -missing, *left.shape[1:])
    right = right.reshape(right.shape[0], *(1,) * missing, *right.shape[1:])
    product = left @ right
    if y_rank == 1:
        product = product.squeeze(-1)
    return product.squeeze(-1 if y_rank == 1 else -2) if x_rank == 1 else product


def addmm(
    low: Lowering, input: Value, mat1: Value, mat2: Value, *, beta: float = 1, alpha: float = 1
) -> Emitted:
    """Emit ``beta * input + alpha * mat1 @ mat2``."""
    rank = max(mat1.rank, mat2.rank)
    parts = [low.aligned(input, rank), low.stacked(mat1), low.stacked(mat2)]
    return Layout.STACKED, low.emit(_addmm, *parts, beta, alpha)


def _addmm(
    shift: torch.Tensor, x: torch.Tensor, y: torch.Tensor, beta: float, alpha: float
) -> torch.Tensor:
    return beta * shift + alpha * (x @ y)


def einsum(low: Lowering, equation: str, *operands: Any) -> Emitted:
    """Give each operand, and the result, one more letter in front."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    equation = equation.replace(" ", "")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    if "->" not in equation or not free:
        raise NotFusible("einsum without an arrow has no batched form")
    terms, result = equation.split("->")
    stacked = ",".join(free[0] + term for term in terms.split(","))
    nodes = [low.stacked(operand) for operand in operands]
    return Layout.STACKED, low.emit(torch.einsum, f"{stacked}->{free[0]}{result}", *nodes)


FUNCTIONS: dict[Any, Rule] = {
    F.linear: linear,
    torch.matmul: matmul,
    torch.mm: matmul,
    torch.bmm: matmul,
    torch.mv: matmul,
    torch.dot: matmul,
    operator.matmul: matmul,
    torch.addmm: addmm,
    torch.einsum: einsum,
}

METHODS: dict[str, Rule] = {"matmul": matmul, "mm": matmul, "bmm": matmul, "addmm": addmm}
