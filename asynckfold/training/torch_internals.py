"""Private names of torch: used nowhere else but ``torch.utils._pytree``, which has not changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch

_C: Any = torch._C


# Modes of Python functions and of the dispatcher, outermost first
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
push_function_mode = _C._push_on_torch_function_stack
pop_function_mode = _C._pop_torch_function_stack
dispatch_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack

# Hooks for saved tensors
push_saved_tensors_hooks = _C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks = _C._autograd._pop_saved_tensors_default_hooks

# Settings of `fp32_precision`, since torch 2.9
has_fp32_precision = hasattr(_C, "_get_fp32_precision_getter")

# What `torch.func.vmap` calls; vmap takes longer than a function of small tensors
enter_vmap = _C._functorch._vmap_increment_nesting
leave_vmap = _C._functorch._vmap_decrement_nesting
batched = _C._functorch._add_batch_dim
unbatched = _C._functorch._remove_batch_dim
allow_loops = _C._functorch._set_vmap_fallback_enabled

# Whether a profiler is in use: there may be one at a time
is_profiled: Callable[[], bool] = _C._autograd._profiler_enabled

# Functions that models call: `weight_norm` of the older kind, and a check that never waits
weight_norm = torch._weight_norm
assert_async = torch._assert_async


class OperationWatch(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base of the contexts that see each operation of torch."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's answer imports its compiler, which takes seconds.
        return False


def device_mode() -> Any:
    """Return the mode of `torch.set_default_device`, or None."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


def forget_no_device_mode() -> None:
    """Let torch < 2.9 answer for its default device after `torch.set_default_device(None)`."""
    context: Any = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    if device_mode() is None and hasattr(context, "device_context"):
        del context.device_context


def default_device() -> torch.device:
    """Return the device of new tensors."""
    try:
        return torch.get_default_device()
    except AttributeError:  # torch < 2.9, once `set_default_device(None)` has been called
        return torch.device("cpu")


def saved_tensors_hooks() -> Any:
    """Return the innermost pair of hooks for saved tensors, or None."""
    return _C._autograd._top_saved_tensors_default_hooks(True)


def enter_inference_mode(enabled: bool) -> Any:
    """Begin or override an inference mode, for as long as the returned object lives."""
    guard = _C._InferenceMode(enabled)
    guard.__enter__()
    return guard


def fp32_precision(backend: str, operation: str) -> str:
    """Return what a backend may round the float32 inputs of an operation to."""
    return str(_C._get_fp32_precision_getter(backend, operation))


def set_fp32_precision(backend: str, operation: str, value: str) -> None:
    """Set what a backend may round the float32 inputs of an operation to."""
    _C._set_fp32_precision_setter(backend, operation, value)


def release_capture(device_index: int, pool: Any) -> None:
    """End what a failed capture of a CUDA graph leaves begun in the allocator of older versions."""
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"):
        # It raises where the allocator has ended.
        with contextlib.suppress(RuntimeError, AttributeError):
            getattr(_C, name)(device_index, pool)
            _C._cuda_releasePool(device_index, pool)
