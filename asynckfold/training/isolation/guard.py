"""Restore what user code changes in its process, so that no job depends on an earlier one.

Three kinds of state are compared before and after a job::

    settings    of torch, Python and the process: read, and written if they differ
    contexts    left open: autocast, inference mode, hooks for saved tensors, modes of torch
    patches     functions, classes and global hooks, see `patches`

What cannot be restored is reported. A worker then ends after its job; a run in the caller's own
process is no longer called reproducible. Every job seeds the random generators. Changes to user
modules and classes are not detected.
"""

from __future__ import annotations

import gc
import locale
import os
import resource
import signal
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

from asynckfold.errors import Problem
from asynckfold.training import torch_internals
from asynckfold.training.isolation import torch_settings
from asynckfold.training.isolation.denormals import flushed
from asynckfold.training.isolation.patches import Patches
from asynckfold.training.isolation.torch_settings import Setting

LIMITS = "resource limits"

IMPORTS = "imports"
"""Reported if a job changed something and imported a module: the import may have changed it, and
will not happen again in this process."""


def _attribute(owner: Any, name: str, label: str) -> Setting:
    return Setting(label, lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _set_default_device(device: torch.device) -> None:
    # None removes the mode, which slows down every call of torch.
    torch.set_default_device(None if device.type == "cpu" else device)


_TORCHS_OWN = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Variables that torch itself sets when it loads its compiler."""


class _Variables(dict[str, str]):
    """The environment; variables that torch itself sets make no difference."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, dict):
            return NotImplemented
        return all(self.get(name) == other.get(name) for name in {*self, *other} - {*_TORCHS_OWN})

    def __ne__(self, other: object) -> bool:
        return not self == other


def _set_environment(variables: dict[str, str]) -> None:
    kept = {name: os.environ[name] for name in _TORCHS_OWN if name in os.environ}
    os.environ.clear()
    os.environ.update(kept | variables)


# Contexts of torch


def _function_stack() -> list[Any]:
    """Modes of torch's Python functions, without that of `torch.set_default_device`."""
    default_device = torch_internals.device_mode()
    return [mode for mode in torch_internals.function_modes() if mode is not default_device]


def _set_function_stack(wanted: list[Any]) -> None:
    for mode in reversed(_function_stack()):
        # One entered from C cannot be left from Python.
        if mode not in wanted:
            with suppress(Exception):
                mode.__exit__(None, None, None)
    if _function_stack() != wanted:
        # Leave or enter contexts directly on the stack.
        for _ in _function_stack():
            torch_internals.pop_function_mode()
        for mode in wanted:
            torch_internals.push_function_mode(mode)


def _dispatch_modes() -> list[Any]:
    return list(torch_internals.dispatch_modes())


def _leave_dispatch_modes(wanted: list[Any]) -> None:
    while (there := _dispatch_modes()) and there[: len(wanted)] == wanted != there:
        there[-1].__exit__(None, None, None)


_MOST_HOOKS = 1000


def _set_saved_tensors_hooks(wanted: Any) -> None:
    for _ in range(_MOST_HOOKS):
        if torch_internals.saved_tensors_hooks() in (None, wanted):
            break
        torch_internals.pop_saved_tensors_hooks()
    if wanted is not None and torch_internals.saved_tensors_hooks() is None:
        torch_internals.push_saved_tensors_hooks(*wanted)


def _autocast(device: str) -> list[Setting]:
    enabled = (
        partial(torch.is_autocast_enabled, device),
        partial(torch.set_autocast_enabled, device),
    )
    dtype = partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
    return [
        Setting(f"autocast on {device}", *enabled),
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


def _leave_python_keys(_: Any) -> None:
    """Take back the keys of modes that are closed; torch cannot set the others.

    The end of an inference mode restores the keys of its beginning, when a mode may have been open.
    """
    if not _dispatch_modes():
        torch_internals.leave_python_keys()


# Python and the process


_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGALRM),
    *(signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGXFSZ),
)


def _set_handlers(wanted: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, wanted, strict=True):
        # A handler not set from Python reads as None, and cannot be set again.
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


_LIMITS = sorted({number for name, number in vars(resource).items() if name[:7] == "RLIMIT_"})


def limits() -> list[tuple[int, int]]:
    """Return the limits of this process's resources, soft and hard."""
    return [resource.getrlimit(number) for number in _LIMITS]


def _set_limits(wanted: list[tuple[int, int]]) -> None:
    for number, limit in zip(_LIMITS, wanted, strict=True):
        if resource.getrlimit(number) != limit:
            # Only a superuser can raise a hard limit again.
            with suppress(OSError, ValueError):
                resource.setrlimit(number, limit)


def _umask() -> int:
    # It can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


_SETTINGS: tuple[Setting, ...] = (
    # Modes first: they intercept the calls below.
    Setting("modes of torch functions", _function_stack, _set_function_stack),
    Setting("modes of the dispatcher", _dispatch_modes, _leave_dispatch_modes),
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
    Setting("denormal numbers", flushed, torch.set_flush_denormal),
    Setting("dispatch keys of torch", torch_internals.dispatch_keys, _leave_python_keys),
    Setting("numpy.seterr", np.geterr, lambda found: np.seterr(**found)),
    Setting("environment", lambda: _Variables(os.environ), _set_environment),
    Setting(
        "sys.path", lambda: list(sys.path), lambda found: sys.path.__setitem__(slice(None), found)
    ),
    _attribute(sys, "stdout", "sys.stdout"),
    _attribute(sys, "stderr", "sys.stderr"),
    Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Setting("garbage collector", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    Setting("its thresholds", gc.get_threshold, lambda found: gc.set_threshold(*found)),
    Setting(
        "locale",
        lambda: locale.setlocale(locale.LC_ALL),
        lambda found: locale.setlocale(locale.LC_ALL, found),
    ),
    Setting("umask", _umask, os.umask),
    Setting("signal handlers", lambda: [*map(signal.getsignal, _SIGNALS)], _set_handlers),
    Setting(
        "alarm",
        lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        lambda running: running or signal.setitimer(signal.ITIMER_REAL, 0),
    ),
    Setting(LIMITS, limits, _set_limits),
)
"""What is restored after a job, in this order."""

WITHOUT_NUMBERS = frozenset(
    {"sys.stdout", "sys.stderr", "umask", "signal handlers", "alarm", LIMITS, "garbage collector"}
)
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


def open_autocast() -> list[Problem]:
    """Refuse a call within ``torch.autocast``, which workers would not have."""
    if not any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        return []
    return [
        Problem(
            "a sweep must be called outside torch.autocast: precision= sets the precision of its "
            "jobs",
            "autocast is enabled around the call",
            "Pass precision='bf16', or use torch.autocast in the model's forward.",
        )
    ]


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
        found = [
            setting.name
            for setting, value in zip(_SETTINGS, before, strict=True)
            if setting.differs(value)
        ]
        return found + (places.changed() if places else [])

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
            found = [*look(), *(name for name in changed if name in _STICKY)]
            if patches and len(sys.modules) != modules and not WITHOUT_NUMBERS.issuperset(changed):
                found.append(IMPORTS)
            traces.changed, traces.left = changed, [*dict.fromkeys([*traces.left, *found])]
        if traces.left and (outer := _enclosing.get()) is not None:
            outer.left += traces.left
