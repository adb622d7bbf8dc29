"""Normalisations: over batches, groups and instances in CHANNELS; over layers in STACKED.

Loss functions are here, too: one loss for each replica, (R,).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from asynckfold.training import torch_internals
from asynckfold.training.fusion.layouts import Layout, NotFusible, Value
from asynckfold.training.fusion.lowering import Emitted, Lowering, Rule
from asynckfold.training.fusion.rules.shapes import shifted


def batch_norm_leaf(
    low: Lowering, path: str, module: nn.modules.batchnorm._BatchNorm, input: Value
) -> Emitted:
    """Emit a batch normalisation with the running statistics of each replica."""
    names = ("running_mean", "running_var", "num_batches_tracked", "weight", "bias")
    use_batch = module.training or (module.running_mean is None and module.running_var is None)
    update = module.training and module.track_running_stats
    settings = (use_batch, update, module.momentum, module.eps)
    tensors = _stored(low, path, module, names)
    return low.on_channels(normalise_batch, input, *tensors, *settings)


def _stored(low: Lowering, path: str, module: nn.Module, names: Sequence[str]) -> list[Any]:
    """Return the nodes of a layer's tensors, in the order of the stack; None for missing ones."""
    return [
        low.storage[low.aliases.get(f"{path}.{name}", f"{path}.{name}")]
        if getattr(module, name) is not None
        else None
        for name in names
    ]


def normalise_batch(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    count: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    use_batch: bool,
    update: bool,
    momentum: float | None,
    eps: float,
) -> torch.Tensor:
    """Normalise (B, R·C, ...); mean, var, weight and bias are (R, C), count is (R,)."""
    if update and count is not None:
        count.add_(1)
    affine = (_flat(weight), _flat(bias))
    if use_batch and not update:
        return F.batch_norm(x, None, None, *affine, training=True, eps=eps)
    if update and momentum is None and mean is not None and var is not None and count is not None:
        # Momentum 1 leaves the statistics of this batch; then each replica's cumulative average.
        # What was there before is multiplied by 0, which keeps a NaN: so it must be numbers.
        now = (torch.zeros_like(mean).flatten(), torch.zeros_like(var).flatten())
        normalised = F.batch_norm(x, *now, *affine, training=True, momentum=1.0, eps=eps)
        for average, batch in zip((mean, var), now, strict=True):
            share = (1 / count.to(average.dtype)).unsqueeze(1)
            average.copy_(share * batch.view_as(average) + (1 - share) * average)
        return normalised
    return F.batch_norm(
        x,
        _flat(mean),
        _flat(var),
        *affine,
        training=use_batch,
        momentum=0.0 if momentum is None else momentum,
        eps=eps,
    )


def _flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    # A view, never a copy: running statistics are written through it.
    return None if tensor is None else tensor.view(-1)


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
    """Emit the functional form."""
    tensors = [
        None if value is None else low.stacked(value)
        for value in (running_mean, running_var, None, weight, bias)
    ]
    update = training and running_mean is not None
    return low.on_channels(normalise_batch, input, *tensors, training, update, momentum, eps)


def instance_norm_leaf(
    low: Lowering, path: str, module: nn.modules.instancenorm._InstanceNorm, input: Value
) -> Emitted:
    """Emit an instance normalisation."""
    if module.running_mean is not None:
        raise NotFusible("running statistics of instances have no batched form")
    tensors = _stored(low, path, module, ("weight", "bias"))
    return low.on_channels(_instance_norm, input, *tensors, module.eps)


def _instance_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return F.instance_norm(x, weight=_flat(weight), bias=_flat(bias), eps=eps)


def group_norm(
    low: Lowering,
    input: Value,
    num_groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
) -> Emitted:
    """Emit R times as many groups."""
    tensors = [None if value is None else low.stacked(value) for value in (weight, bias)]
    return low.on_channels(_group_norm, input, num_groups * low.width, *tensors, eps)


def _group_norm(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return F.group_norm(x, groups, _flat(weight), _flat(bias), eps)


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
    return Layout.STACKED, _scaled(low, node, input.rank, weight, bias)


def rms_norm(
    low: Lowering,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    eps: float | None = None,
) -> Emitted:
    """Emit one normalisation for all, then each replica's scale."""
    node = low.emit(F.rms_norm, low.stacked(input), normalized_shape, None, eps)
    return Layout.STACKED, _scaled(low, node, input.rank, weight, None)


def _scaled(low: Lowering, node: Any, rank: int, weight: Value | None, bias: Value | None) -> Any:
    if weight is not None:
        node = low.emit(torch.mul, node, low.aligned(weight, rank))
    return node if bias is None else low.emit(torch.add, node, low.aligned(bias, rank))


def weight_norm(low: Lowering, v: Value, g: Value, dim: int = 0) -> Emitted:
    """Emit ``g * v / |v|``, the norm over all dimensions but one (Salimans & Kingma 2016)."""
    dims = [1 + other for other in range(v.rank) if dim < 0 or other != dim]
    return low.on_stacked(_weight_norm, v, low.stacked(g), dims)


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(v, 2, dims, keepdim=True)
    share: torch.Tensor = g.reshape(norm.shape) / norm
    return v * share


FUNCTIONS: dict[Any, Rule] = {
    torch_internals.weight_norm: weight_norm,
    F.batch_norm: batch_norm,
    F.group_norm: group_norm,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.normalize: shifted(F.normalize, 2, default=1),
}

LEAVES: dict[type[nn.Module], Rule] = {
    nn.BatchNorm1d: batch_norm_leaf,
    nn.BatchNorm2d: batch_norm_leaf,
    nn.BatchNorm3d: batch_norm_leaf,
    nn.InstanceNorm1d: instance_norm_leaf,
    nn.InstanceNorm2d: instance_norm_leaf,
    nn.InstanceNorm3d: instance_norm_leaf,
}


def _refuse_deprecated(*settings: Any) -> None:
    if settings != (None, None):
        raise NotFusible("size_average and reduce, which torch deprecates")


def _elementwise_rule(function: Callable[..., Any]) -> Rule:
    """Return the rule of a loss that compares element with element."""

    def loss(
        low: Lowering,
        input: Value,
        target: Value,
        *,
        size_average: None = None,
        reduce: None = None,
        reduction: str = "mean",
        **settings: Any,
    ) -> Emitted:
        _refuse_deprecated(size_average, reduce)
        rank = max(input.rank, target.rank)
        aligned = {
            name: low.aligned(item, rank) if isinstance(item, Value) else item
            for name, item in settings.items()
            if item is not None
        }
        nodes = low.aligned(input, rank), low.aligned(target, rank)
        losses = low.emit(function, *nodes, reduction="none", **aligned)
        return Layout.STACKED, low.emit(_reduced, losses, reduction)

    return loss


def _reduced(losses: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none" or losses.dim() == 1:
        return losses
    flat = losses.flatten(1)
    if reduction == "mean":
        return flat.mean(1)
    return flat.sum(1) / (losses.shape[1] if reduction == "batchmean" else 1)


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
    ) -> Emitted:
        _refuse_deprecated(size_average, reduce)
        if input.rank < 2:
            raise NotFusible(f"{name} without a batch dimension")
        probabilities = name == "cross_entropy" and target.example.dtype.is_floating_point
        if weight is not None and (probabilities or label_smoothing):
            raise NotFusible("class weights with label smoothing or with probabilities")
        nodes = low.stacked(input), low.stacked(target), weight and low.stacked(weight)
        settings: dict[str, Any] = {"ignore_index": ignore_index}
        if name == "cross_entropy":
            settings["label_smoothing"] = label_smoothing
        return Layout.STACKED, low.emit(
            _classified, name, *nodes, reduction, probabilities, settings
        )

    return loss


def _classified(
    function: str,
    scores: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: str,
    probabilities: bool,
    settings: dict[str, Any],
) -> torch.Tensor:
    """Return (R,) for scores (R, B, classes, ...): the replicas as one long batch, then apart."""
    width = scores.shape[0]
    joined = targets.flatten(0, 1)
    losses: torch.Tensor = getattr(F, function)(
        scores.flatten(0, 1), joined, reduction="none", **settings
    )
    losses = losses.view(width, -1, *losses.shape[1:])
    if probabilities:
        return _reduced(losses, reduction)
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


FUNCTIONS |= {
    **{
        getattr(F, name): _elementwise_rule(getattr(F, name))
        for name in (
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "kl_div",
            "poisson_nll_loss",
        )
    },
    F.cross_entropy: _classification_rule("cross_entropy"),
    F.nll_loss: _classification_rule("nll_loss"),
}
