"""Normalisations, over batches in CHANNELS and over layers in STACKED; losses, one a replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from asynckfold.training.fusion.layouts import Layout, Value
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule


def batch_norm(
    low: Lowering,
    input: Value,
    running_mean: Value | None,
    running_var: Value | None,
    weight: Value | None = None,
    bias: Value | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Emitted:
    """Emit a batch normalisation with the running statistics of each replica."""
    tensors = [
        None if value is None else low.stacked(value)
        for value in (running_mean, running_var, weight, bias)
    ]
    return low.on_channels(normalise_batch, input, *tensors, training, momentum, eps)


def normalise_batch(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *settings: Any,
) -> torch.Tensor:
    """Return ``F.batch_norm`` of (B, R·C, ...), whose statistics, weight and bias are (R, C)."""
    return F.batch_norm(x, _flat(mean), _flat(var), _flat(weight), _flat(bias), *settings)


def _flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    # A view, never a copy: running statistics are written through it.
    return None if tensor is None else tensor.view(-1)


def layer_norm(
    low: Lowering,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
) -> Emitted:
    """Emit one normalisation for all, then each replica's scale and shift."""
    node = low.emit(F.layer_norm, low.stacked(input), normalized_shape, None, None, eps)
    if weight is not None:
        node = low.emit(torch.mul, node, low.aligned(weight, input.rank))
    if bias is not None:
        node = low.emit(torch.add, node, low.aligned(bias, input.rank))
    return Layout.STACKED, node


def _elementwise_rule(function: Callable[..., Any]) -> Rule:
    """Return the rule of a loss that compares element with element."""

    def loss(
        low: Lowering, input: Value, target: Value, *, reduction: str = "mean", **settings: Any
    ) -> Any:
        rank = max(input.rank, target.rank)
        aligned = {
            name: low.aligned(item, rank) if isinstance(item, Value) else item
            for name, item in settings.items()
        }
        nodes = low.aligned(input, rank), low.aligned(target, rank)
        losses = low.emit(function, *nodes, reduction="none", **aligned)
        return Layout.STACKED, low.emit(_reduced, losses, reduction)

    return loss


def _reduced(losses: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none" or losses.dim() == 1:
        return losses
    return losses.flatten(1).mean(1) if reduction == "mean" else losses.flatten(1).sum(1)


def _classification_rule(name: str) -> Rule:
    """Return the rule of ``F.cross_entropy`` or ``F.nll_loss``."""

    def loss(
        low: Lowering,
        input: Value,
        target: Value,
        weight: Value | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        probabilities = target.example.dtype.is_floating_point
        if input.rank < 2 or probabilities or (weight is not None and label_smoothing):
            return NotImplemented
        nodes = low.stacked(target), weight and low.stacked(weight)
        settings: dict[str, Any] = {"ignore_index": ignore_index}
        if name == "cross_entropy":
            settings["label_smoothing"] = label_smoothing
        return low.on_stacked(_classified, input, *nodes, name, reduction, settings)

    return loss


def _classified(
    scores: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None,
    function: str,
    reduction: str,
    settings: dict[str, Any],
) -> torch.Tensor:
    """Return (R,) for scores (R, B, classes, ...): the replicas as one long batch, then apart."""
    losses: torch.Tensor = getattr(F, function)(
        scores.flatten(0, 1), targets.flatten(0, 1), reduction="none", **settings
    )
    losses = losses.view(targets.shape)
    if weight is None and reduction == "none":
        return losses
    counted = targets != settings["ignore_index"]
    shares = counted.to(losses.dtype)
    if weight is not None:
        known = targets.where(counted, 0).flatten(1)
        shares = weight.gather(1, known).view(shares.shape) * shares
        losses = losses * shares
    if reduction != "mean":
        return _reduced(losses, reduction)
    counts: torch.Tensor = shares.flatten(1).sum(1)
    return losses.flatten(1).sum(1) / counts


_LOSSES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)

RULES: dict[Any, Rule] = {
    F.batch_norm: batch_norm,
    F.layer_norm: layer_norm,
    **{function: _elementwise_rule(function) for function in _LOSSES},
    F.binary_cross_entropy: _elementwise_rule(F.binary_cross_entropy),
    F.binary_cross_entropy_with_logits: _elementwise_rule(F.binary_cross_entropy_with_logits),
    F.cross_entropy: _classification_rule("cross_entropy"),
    F.nll_loss: _classification_rule("nll_loss"),
}
