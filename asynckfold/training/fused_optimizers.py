"""Use the fused kernels of torch.optim unless the user chose otherwise.

They pass over each parameter once instead of once per operation. They round differently from the
default, but reproducibly; so the choice depends on model and optimizer alone, in all trainers, and
the plan records it among the optimizer's settings.

Update by default and fused, in µs, on one core of an AMD EPYC (torch 2.15); medians of 57,
interleaved. Fused was never slower:

==========================  ===========  ==============  ===========
model                       Adam         SGD, momentum   Adagrad
==========================  ===========  ==============  ===========
MLP 64-128-10               263    132   159    104      254    145
MLP 784-128-10              613    259   263    176      444    219
LeNet5                      1148   379   185    95       383    158
VGG11, quarter width        3935  1331   1034   660      2209   940
MobileNet                   29214 5690   8488   4102     13171 4718
==========================  ===========  ==============  ===========

SGD without momentum gains little (1.03 to 1.2 times).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from asynckfold.training.several_optimizers import SeveralOptimizers

OFFERED = frozenset({optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad})
"""Optimizers with a fused CPU kernel; all but the last have one for GPUs in torch 2.6."""


def with_fused_kernel(opt_fn: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    """Return the optimizer that `opt_fn` makes, with ``fused=True`` if the user left it open.

    That is: none of ``fused``, ``foreach`` and ``differentiable`` is set, the learning rate is a
    number, and all parameters are dense floating-point tensors on a CPU or a GPU. A tuple of
    optimizers becomes `SeveralOptimizers`.
    """
    optimizer = opt_fn(model)
    if isinstance(optimizer, (tuple, list)):
        return SeveralOptimizers([_with_kernel(part, model) for part in optimizer])
    return _with_kernel(optimizer, model)


def _with_kernel(optimizer: Any, model: nn.Module) -> Any:
    if _is_open(optimizer, model):
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["fused"] = True
        # As their constructors set it: the kernels scale gradients back without asking the host.
        optimizer._step_supports_amp_scaling = True
    return optimizer


def leave_open(optimizer: Optimizer) -> None:
    """Undo `with_fused_kernel` for Adagrad, which has no CUDA kernel in older versions of torch.

    Also if the user asked for the kernel: torch then chooses.
    """
    if type(optimizer) is optim.Adagrad:
        for group in optimizer.param_groups:
            group["fused"] = None if group["fused"] else group["fused"]


def follow_parameters(optimizer: Optimizer) -> None:
    """Give the optimizer's state of each parameter the memory layout of the parameter.

    Checkpoints lose the layout, and torch's fused kernels assume that it is the same.
    """
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _is_open(optimizer: Any, model: nn.Module) -> bool:
    return (
        isinstance(optimizer, Optimizer)
        and type(optimizer) in OFFERED
        and not any(getattr(module, "sparse", False) for module in model.modules())
        and all(
            group["fused"] is None
            and group["foreach"] is None
            and not group["differentiable"]
            and not isinstance(group["lr"], torch.Tensor)
            and all(
                item.layout is torch.strided
                and item.is_floating_point()
                and (item.is_cpu or (item.is_cuda and type(optimizer) is not optim.Adagrad))
                for item in group["params"]
            )
            for group in optimizer.param_groups
        )
    )
