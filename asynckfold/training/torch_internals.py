"""Private names of torch, and what stands in where a version lacks them: used nowhere else.

A state that a version does not let us read counts as unchanged. ``torch.utils._pytree`` is not
here: it has kept its names and meaning since torch 2.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch

_C: Any = torch._C
_autograd: Any = getattr(_C, "_autograd", None)


def _nothing(*_: Any) -> None:
    """Stand in for a function that this version lacks."""


# Modes of Python functions and of the dispatcher, outermost first
function_modes: Callable[[], list[Any]] = getattr(
    torch.overrides, "_get_current_function_mode_stack", list
)
push_function_mode = getattr(_C, "_push_on_torch_function_stack", _nothing)
pop_function_mode = getattr(_C, "_pop_torch_function_stack", _nothing)
dispatch_modes: Callable[[], list[Any]] = getattr(
    _python_dispatch, "_get_current_dispatch_mode_stack", list
)

# Hooks for saved tensors
push_saved_tensors_hooks = getattr(_autograd, "_push_saved_tensors_default_hooks", _nothing)
pop_saved_tensors_hooks = getattr(_autograd, "_pop_saved_tensors_default_hooks", _nothing)
_top_saved_tensors_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", _nothing)


def _assert_now(condition: torch.Tensor, message: str) -> None:
    if not condition:
        raise IndexError(message)


# Settings of `fp32_precision`
has_fp32_precision = hasattr(_C, "_get_fp32_precision_getter")

# Functions that models call: `weight_norm` of the older kind, and a check that never waits
weight_norm = getattr(torch, "_weight_norm", _nothing)
assert_async = getattr(torch, "_assert_async", _assert_now)


class OperationWatch(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base of the contexts that see each operation of torch."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's own answer imports its compiler, which takes seconds.
        return False


def device_mode() -> Any:
    """Return the mode of `torch.set_default_device`, or None."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


def default_device() -> torch.device:
    """Return what `torch.get_default_device` does; torch 2.7 raises there after a reset."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


def saved_tensors_hooks() -> Any:
    """Return the innermost pair of hooks for saved tensors, or None."""
    return _top_saved_tensors_hooks(True)


def enter_inference_mode(enabled: bool) -> Any:
    """Begin or override an inference mode, for as long as the returned object lives."""
    guard = _C._InferenceMode(enabled)
    guard.__enter__()
    return guard


def dispatch_keys() -> tuple[int, int]:
    """Return the keys by which torch selects this thread's kernels: included, excluded."""
    try:
        included, excluded = _C._dispatch_tls_local_include_set, _C._dispatch_tls_local_exclude_set
    except AttributeError:
        return 0, 0
    return included().raw_repr(), excluded().raw_repr()


def leave_python_keys() -> None:
    """Drop the keys of the dispatcher's modes; torch asserts that a mode is open where they are."""
    with contextlib.suppress(AttributeError):
        for key in (_C.DispatchKey.Python, _C.DispatchKey.PythonTLSSnapshot):
            _C._dispatch_tls_set_dispatch_key_included(key, False)


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
