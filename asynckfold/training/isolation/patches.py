"""Functions and classes of torch, NumPy and Python that user code may replace, and global hooks.

A model that replaces ``F.relu``, or registers a hook for all modules, changes every model that is
trained in its process afterwards.
"""

from __future__ import annotations

import builtins
import copy
import inspect
import math
import operator
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.nn.modules.module
import torch.nn.utils.parametrize
import torch.optim.lr_scheduler
import torch.optim.optimizer
from torch import nn

_SPACES = (
    *(builtins, math, random, copy, np, np.random),
    *(torch, torch.Tensor, torch.autograd, torch.linalg, torch.fft, torch.special),
    *(torch.__future__, nn, nn.functional, nn.init, nn.modules.module, nn.utils.parametrize),
)
"""Modules and classes to watch, with the classes of `_CLASSES_OF`."""

_CLASSES_OF = (nn.modules, torch.optim, torch.optim.lr_scheduler)

_OWNERS: tuple[Any, ...] = (
    *_SPACES,
    *dict.fromkeys(
        found
        for space in _CLASSES_OF
        for found in vars(space).values()
        if inspect.isclass(found) and found.__module__.startswith("torch.")
    ),
)

_HOOKS: tuple[dict[Any, Any], ...] = tuple(
    found
    for space in (nn.modules.module, inspect.getmodule(torch.optim.Optimizer))
    for name, found in vars(space).items()
    if name.startswith("_global_") and isinstance(found, dict)
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
                if (found := now.get(name, _GONE)) is not value and not _is_wrapped(found, value):
                    yield owner, name, value


def foreign() -> list[str]:
    """Name the functions of torch that other modules replaced, and these modules.

    A worker has the replacements only if it imports the modules.
    """
    return [
        f"{_label(owner)}.{name} (by {module})"
        for owner in _OWNERS
        if _label(owner).startswith("torch")
        for name, value in vars(owner).items()
        if (module := _module_of(value)).partition(".")[0] not in _HOME
    ]


_HOME = frozenset({"torch", "typing_extensions", "numpy", "", *sys.stdlib_module_names}) - {
    "__main__"
}
"""Modules whose functions torch itself uses as its own."""


def _module_of(value: Any) -> str:
    """Module in which a Python function is defined, whatever a decorator copied."""
    plain = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    return str(plain.__globals__.get("__name__", "")) if inspect.isfunction(plain) else ""


def _is_wrapped(found: Any, value: Any) -> bool:
    """Whether torch itself wrapped the value.

    It wraps the ``step`` of an optimizer class at its first use, and ``torch.manual_seed`` and
    ``nn.Module.__init__`` when its compiler is imported or starts.
    """
    module = _module_of(found)
    wraps = module.startswith("torch.") and getattr(found, "__wrapped__", None) is value
    return wraps or module.startswith("torch._dynamo.")


def _label(owner: Any) -> str:
    if inspect.isclass(owner):
        return f"{owner.__module__}.{owner.__qualname__}"
    return str(owner.__name__)
