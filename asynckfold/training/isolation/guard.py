"""Restore what user code changes in its process, so that no job depends on an earlier one.

Three kinds of state are compared before and after a job::

    settings    of torch, Python and the process: read, and written if they differ
    contexts    left open: autocast, inference mode, hooks for saved tensors, modes of torch
    patches     functions, classes and global hooks of torch, NumPy and Python

What cannot be restored is reported. A worker then ends after its job; a run in the caller's
process is no longer called reproducible. Every job seeds the random generators. Changes to user
modules and classes are not detected.
"""

from __future__ import annotations

import builtins
import copy
import gc
import inspect
import math
import operator
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.modules.module
import torch.nn.utils.parametrize
import torch.optim.lr_scheduler
import torch.optim.optimizer
from torch import nn

from asynckfold.training import torch_internals, torch_settings
from asynckfold.training.torch_settings import Setting, denormals_are_flushed

IMPORTS = "imports"
"""Reported if a job changed something and imported a module: the import may have changed it, and
will not happen again in this process."""

# Contexts of torch


def _function_modes() -> list[Any]:
    """Modes of torch's Python functions, without that of `torch.set_default_device`."""
    default_device = torch_internals.device_mode()
    return [mode for mode in torch_internals.function_modes() if mode is not default_device]


def _set_function_modes(wanted: list[Any]) -> None:
    for mode in reversed(_function_modes()):
        # One entered from C cannot be left from Python.
        if mode not in wanted:
            with suppress(Exception):
                mode.__exit__(None, None, None)
    if _function_modes() != wanted:
        # Leave or enter contexts directly on the stack.
        for _ in _function_modes():
            torch_internals.pop_function_mode()
        for mode in wanted:
            torch_internals.push_function_mode(mode)


def _leave_dispatch_modes(wanted: list[Any]) -> None:
    while (modes := torch_internals.dispatch_modes()) != wanted == modes[: len(wanted)]:
        modes[-1].__exit__(None, None, None)


def _set_saved_tensors_hooks(wanted: Any) -> None:
    while torch_internals.saved_tensors_hooks() not in (None, wanted):
        torch_internals.pop_saved_tensors_hooks()
    if wanted is not None and torch_internals.saved_tensors_hooks() is None:
        torch_internals.push_saved_tensors_hooks(*wanted)


def _autocast(device: str) -> list[Setting]:
    read, write = (
        partial(torch.is_autocast_enabled, device),
        partial(torch.set_autocast_enabled, device),
    )
    dtype = partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
    return [
        Setting(f"autocast on {device}", read, write),
        Setting(f"autocast format on {device}", *dtype),
    ]


def _autocast_depth() -> int:
    """Number of open contexts; the outermost one clears the cache when it ends."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _set_autocast_depth(depth: int) -> None:
    while (now := _autocast_depth()) != depth:
        (torch.autocast_increment_nesting if now < depth else torch.autocast_decrement_nesting)()
    torch.clear_autocast_cache()


_inference: list[Any] = []
"""Contexts that override an inference mode left open: torch has no other way to end it."""


def _set_inference_mode(enabled: bool) -> None:
    # If its owner is garbage, collecting it ends the mode.
    gc.collect()
    if torch.is_inference_mode_enabled() != enabled:
        _inference.append(torch_internals.enter_inference_mode(enabled))


def _set_default_device(device: torch.device) -> None:
    # None removes the mode, which slows down every call of torch.
    torch.set_default_device(None if device.type == "cpu" else device)
    torch_internals.forget_no_device_mode()


# Python and the process


_TORCHS_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that torch itself sets when it loads its compiler."""


def _environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name not in _TORCHS_VARIABLES}


def _set_environment(variables: dict[str, str]) -> None:
    kept = {name: os.environ[name] for name in _TORCHS_VARIABLES if name in os.environ}
    os.environ.clear()
    os.environ.update(kept | variables)


def _attribute(name: str) -> Setting:
    return Setting(f"sys.{name}", partial(getattr, sys, name), partial(setattr, sys, name))


_SETTINGS: tuple[Setting, ...] = (
    # Modes first: they intercept the calls below.
    Setting("modes of torch functions", _function_modes, _set_function_modes),
    Setting("modes of the dispatcher", torch_internals.dispatch_modes, _leave_dispatch_modes),
    Setting("inference mode", torch.is_inference_mode_enabled, _set_inference_mode),
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("default device", torch_internals.default_device, _set_default_device),
    Setting("threads", torch.get_num_threads, torch.set_num_threads),
    Setting("gradients", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("anomaly mode", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    *_autocast("cpu"),
    *_autocast("cuda"),
    Setting("autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    Setting("autocast contexts", _autocast_depth, _set_autocast_depth),
    Setting(
        "hooks for saved tensors", torch_internals.saved_tensors_hooks, _set_saved_tensors_hooks
    ),
    Setting(
        "deterministic algorithms",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    *torch_settings.SETTINGS,
    Setting("denormal numbers", denormals_are_flushed, torch.set_flush_denormal),
    Setting("numpy.seterr", np.geterr, lambda values: np.seterr(**values)),
    Setting("environment", _environment, _set_environment),
    Setting(
        "sys.path", lambda: [*sys.path], lambda paths: sys.path.__setitem__(slice(None), paths)
    ),
    _attribute("stdout"),
    _attribute("stderr"),
    Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
)
"""What is restored after a job, in this order."""

WITHOUT_NUMBERS = frozenset({"sys.stdout", "sys.stderr"})
"""Settings that change no number."""

_STICKY = frozenset({"inference mode"})
"""Settings that may change again once restored: their context ends when its owner is garbage."""

_CLEAN: dict[str, Any] = {
    "modes of torch functions": [],
    "inference mode": False,
    "default device": torch.device("cpu"),
    "gradients": True,
    "autocast on cpu": False,
    "autocast on cuda": False,
    "hooks for saved tensors": None,
}
"""How a job begins, whatever contexts the caller has open: a worker has none."""


def leave_contexts() -> None:
    """Leave the caller's contexts, such as ``torch.no_grad``, until `isolated` ends."""
    for setting in _SETTINGS:
        if setting.name in _CLEAN:
            setting.put(_CLEAN[setting.name])


# Functions and classes that user code may replace

_NAMESPACES = (
    *(builtins, math, random, copy, np, np.random),
    *(torch, torch.Tensor, torch.autograd, torch.linalg, torch.fft, torch.special),
    *(torch.__future__, nn, nn.functional, nn.init, nn.modules.module, nn.utils.parametrize),
)

_OWNERS: tuple[Any, ...] = (
    *_NAMESPACES,
    *dict.fromkeys(
        item
        for module in (nn.modules, torch.optim, torch.optim.lr_scheduler)
        for item in vars(module).values()
        if inspect.isclass(item) and item.__module__.startswith("torch.")
    ),
)
"""Modules and classes whose names are watched."""

_HOOKS: tuple[dict[Any, Any], ...] = tuple(
    hooks
    for module in (nn.modules.module, inspect.getmodule(torch.optim.Optimizer))
    for name, hooks in vars(module).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
)
"""Hooks for all modules, and for all optimizers."""

_GONE = object()


class Patches:
    """A snapshot of these names; taking and comparing it takes 0.4 ms (2-core Linux)."""

    def __init__(self) -> None:
        self._before: list[dict[str, Any]] = [dict(vars(owner)) for owner in _OWNERS]
        self._hooks = [dict(hooks) for hooks in _HOOKS]

    def changed(self) -> list[str]:
        """Name what was replaced or removed since; additions are harmless."""
        hooked = any(map(operator.ne, _HOOKS, self._hooks))
        places = [f"{_label(owner)}.{name}" for owner, name, _ in self._replaced()]
        return [*places, *["global hooks"] * hooked]

    def undo(self) -> None:
        """Restore everything that can be."""
        for owner, name, value in list(self._replaced()):
            with suppress(Exception):
                setattr(owner, name, value)
        for hooks, before in zip(_HOOKS, self._hooks, strict=True):
            if hooks != before:
                hooks.clear()
                hooks.update(before)

    def _replaced(self) -> Iterator[tuple[Any, str, Any]]:
        for owner, before in zip(_OWNERS, self._before, strict=True):
            now = vars(owner)
            # A fast comparison: names keep their order, and new ones follow.
            if len(now) >= len(before) and all(map(operator.is_, now.values(), before.values())):
                continue
            for name, value in before.items():
                if (new := now.get(name, _GONE)) is not value and not _is_wrapped(new, value):
                    yield owner, name, value


def _is_wrapped(new: Any, value: Any) -> bool:
    """Whether torch itself wrapped the value.

    It wraps the ``step`` of an optimizer class at its first use, and ``torch.manual_seed`` and
    ``nn.Module.__init__`` when its compiler is imported or starts.
    """
    # Whatever a decorator copied, a function's globals are those of its module.
    module = str(new.__globals__.get("__name__", "")) if inspect.isfunction(new) else ""
    wraps = module.startswith("torch.") and getattr(new, "__wrapped__", None) is value
    return wraps or module.startswith("torch._dynamo.")


def _label(owner: Any) -> str:
    if inspect.isclass(owner):
        return f"{owner.__module__}.{owner.__qualname__}"
    return str(owner.__name__)


# The guard


@dataclass
class Traces:
    """Changes of the process: `look` returns those so far, by name.

    At the end, `changed` are all changes, and `left` those that could not be restored.
    """

    look: Callable[[], list[str]]
    changed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


_enclosing: ContextVar[Traces | None] = ContextVar("_enclosing", default=None)


@contextmanager
def isolated(*, patches: bool = False) -> Iterator[Traces]:
    """Restore settings, contexts, working folder and warning filters afterwards.

    With `patches`, also restore what user code replaced, and detect imports. Yields the `Traces`;
    what is ``left`` at the end is added to those of the enclosing context.
    """
    before = [setting.value() for setting in _SETTINGS]
    places, modules = Patches() if patches else None, len(sys.modules)
    # By descriptor: the folder may be renamed meanwhile.
    folder = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))

    def look() -> list[str]:
        names = [
            setting.name
            for setting, value in zip(_SETTINGS, before, strict=True)
            if setting.differs(value)
        ]
        return names + (places.changed() if places else [])

    traces = Traces(look)
    token = _enclosing.set(traces)
    try:
        with warnings.catch_warnings():
            yield traces
    finally:
        _enclosing.reset(token)
        os.fchdir(folder)
        os.close(folder)
        if changed := look():
            if places:
                places.undo()
            for setting, value in zip(_SETTINGS, before, strict=True):
                # A setting that torch refuses to set is left.
                with suppress(Exception):
                    setting.put(value)
            left = [*look(), *(name for name in changed if name in _STICKY)]
            if patches and len(sys.modules) != modules and not WITHOUT_NUMBERS.issuperset(changed):
                left.append(IMPORTS)
            traces.changed, traces.left = changed, [*dict.fromkeys([*traces.left, *left])]
        if traces.left and (outer := _enclosing.get()) is not None:
            outer.left += traces.left
