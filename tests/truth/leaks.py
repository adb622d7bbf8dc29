"""What one model may leave changed in its process; most of it alters the numbers of others."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

kept: list[Any] = []
"""Contexts that a model keeps beyond its life."""


def enter(context: Any) -> None:
    kept.append(context)
    context.__enter__()


class DoublesFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is F.relu else found


class DoublesKernels(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is torch.ops.aten.relu.default else found


def doubled(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return outputs * 2 if isinstance(module, nn.Linear) else None


def doubled_inputs(module: nn.Module, inputs: Any) -> Any:
    return tuple(item * 2 for item in inputs) if isinstance(module, nn.Linear) else None


def doubled_gradients(module: nn.Module, before: Any, after: Any) -> Any:
    return tuple(item * 2 if item is not None else None for item in before)


def no_step(optimizer: Any, *rest: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0


def zeros(tensor: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return tensor.zero_()


def patch_step() -> None:
    torch.optim.SGD.step = lambda self, closure=None: None  # type: ignore


def patch_reset() -> None:
    nn.Linear.reset_parameters = lambda self: nn.init.constant_(self.weight, 0.1)  # type: ignore


def import_that_patches() -> None:
    """As a module does whose import replaces a function; a second import does nothing."""
    if "odd_library" not in sys.modules:
        sys.modules["odd_library"] = types.ModuleType("odd_library")
        F.relu = torch.sigmoid


LEAKS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: enter(torch.autocast("cpu", torch.bfloat16)),
    "autocast by hand": lambda: torch.set_autocast_enabled("cpu", True),
    "no_grad": lambda: enter(torch.no_grad()),
    "inference mode": lambda: enter(torch.inference_mode()),
    "forward hook": lambda: modules.register_module_forward_hook(doubled),
    "forward hook, always": lambda: modules.register_module_forward_hook(doubled, always_call=True),
    "forward pre-hook": lambda: modules.register_module_forward_pre_hook(doubled_inputs),
    "backward hook": lambda: modules.register_module_full_backward_hook(doubled_gradients),
    "optimizer hook": lambda: torch.optim.optimizer.register_optimizer_step_pre_hook(no_step),
    "saved tensors": lambda: enter(
        torch.autograd.graph.saved_tensors_hooks(lambda kept: kept * 2, lambda found: found)
    ),
    "function mode": lambda: enter(DoublesFunctions()),
    "dispatch mode": lambda: enter(DoublesKernels()),
    "device context": lambda: enter(torch.device("meta")),
    "float64": lambda: torch.set_default_dtype(torch.float64),
    "tensor type": lambda: torch.set_default_tensor_type(torch.DoubleTensor),
    "function": lambda: setattr(F, "relu", torch.sigmoid),
    "function removed": lambda: delattr(F, "relu"),
    "initialisation": lambda: setattr(nn.init, "kaiming_uniform_", zeros),
    "class": patch_reset,
    "optimizer class": patch_step,
    "generator": lambda: setattr(np.random, "normal", lambda *rest: 7.0),
    "import": import_that_patches,
    "tf32": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "recursion": lambda: sys.setrecursionlimit(90),
}
"""By name: what a model does when it is made."""
