"""The one place where a model is called: how it gets its inputs, and in which number format.

A dict is passed by name, a tuple by position, where the signature of ``forward`` takes them so;
else the whole as one argument. The answer depends on the signature alone, so that every batch, job
and process has the same.

=====  ==========================================================================================
fp32   that of the parameters, with the settings of torch in the caller's process
tf32   the same; GPUs round the inputs of matrix products and convolutions to TF32
bf16   matrix products and convolutions in bfloat16, by `torch.autocast`
fp16   the same in float16: losses are scaled, so that small gradients do not become 0
=====  ==========================================================================================

Autocast computes in float32 what would lose accuracy. Parameters, gradients and optimizer state
keep their format. Outputs are converted back, so that every loss is computed in float32, in all
trainers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from asynckfold.data.transforms.trees import mapped, tensors_in
from asynckfold.errors import nearest

NAMES, POSITIONS, ONE = "by name", "by position", "as one argument"
"""How a model gets its inputs."""


class UnfitInputsError(TypeError):
    """``forward`` takes the inputs in no way; the arguments are (received, remedy)."""


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Return what a model gives for a batch: one tensor, a dict, a tuple, or an object."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return call_by(way_of(model, inputs), model, inputs)


def call_by(way: str, model: Callable[..., Any], inputs: Any) -> Any:
    """Return what a model gives for inputs passed in one of the three ways."""
    if way == NAMES:
        return model(**inputs)
    return model(*inputs) if way == POSITIONS else model(inputs)


def way_of(model: Callable[..., Any], inputs: Any) -> str:
    """Return how a model gets its inputs; raise `UnfitInputsError` if it takes them in no way."""
    forward = model.forward if isinstance(model, nn.Module) else model
    # Bound methods of equal models compare as different.
    function = getattr(forward, "__func__", forward)
    if isinstance(inputs, Mapping):
        names, count = tuple(inputs), 0
    elif isinstance(inputs, tuple) and not hasattr(inputs, "data"):
        names, count = (), len(inputs)
    else:
        return ONE
    try:
        known = _WAYS.setdefault(function, {})
    except TypeError:
        known = {}
    if (names, count) not in known:
        known[names, count] = _way(function, function is not forward, names, count)
    return known[names, count]


def needs_inputs(model: nn.Module, count: int) -> bool:
    """Whether ``forward`` takes just so many inputs by position, and needs each of them."""
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [item for item in parameters if item.default is item.empty]
    return len(needed) == count or any(item.kind is item.VAR_POSITIONAL for item in needed)


_WAYS: WeakKeyDictionary[Any, dict[Any, str]] = WeakKeyDictionary()
"""Answers by function, which must not live longer for it: its globals may hold a data set."""


def _way(function: Callable[..., Any], bound: bool, names: tuple[str, ...], count: int) -> str:
    try:
        parameters = list(inspect.signature(function).parameters.values())[bound:]
    except (TypeError, ValueError):
        return ONE
    signature, keywords = inspect.Signature(parameters), dict.fromkeys(names)
    if names and all(isinstance(name, str) for name in names) and _binds(signature, **keywords):
        return NAMES
    if not names and _binds(signature, *range(count)):
        return POSITIONS
    # A dict that shares a name with the signature is meant by name.
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = {item.name for item in parameters if item.kind in kinds}
    if _binds(signature, None) and not taken.intersection(names):
        return ONE
    if not names:
        received = f"forward{signature} for {count} inputs by position"
        raise UnfitInputsError(received, "Give forward one parameter for each.")
    received = f"forward{signature} for inputs {', '.join(map(str, names))}"
    hints = "".join(nearest(str(name), sorted(taken)) for name in names if name not in taken)
    raise UnfitInputsError(received, f"Name the inputs as forward does.{hints}")


def _binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def outputs_of(model: Callable[..., Any], inputs: Any, precision: str) -> Any:
    """Return a model's outputs, computed in a number format (`TrainerParams.precision`)."""
    dtype = AUTOCAST.get(precision)
    if dtype is None:
        return call_model(model, inputs)
    with torch.autocast(_device(inputs).type, dtype):
        outputs = call_model(model, inputs)
    return in_float32(outputs, dtype)


def in_float32(outputs: Any, dtype: torch.dtype) -> Any:
    """Return outputs, a tensor or a tree of tensors, with those of `dtype` in float32."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype is dtype else outputs
    return mapped(lambda item: item.float() if item.dtype is dtype else item, outputs)


def _device(inputs: Any) -> torch.device:
    return next((item.device for item in tensors_in(inputs)), torch.device("cpu"))


def scaler_of(
    precision: str, device: torch.device, optimizer: torch.optim.Optimizer
) -> GradScaler | None:
    """Return a scaler of losses for float16; None for other formats."""
    if precision != "fp16":
        return None
    if isinstance(optimizer, torch.optim.SGD):
        # Its fused kernel leaves the momentum uninitialised if it leaves out the first step.
        optimizer._step_supports_amp_scaling = False
    return GradScaler(device.type)


def step(optimizer: torch.optim.Optimizer, scaler: GradScaler | None) -> None:
    """Take a step; with a scaler, leave it out if a gradient overflowed, and adapt the scale."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
