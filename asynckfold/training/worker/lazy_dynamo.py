"""Import torch's compiler on demand.

It takes as long to import as torch itself, and every optimizer imports it only to learn that it has
nothing to do there.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_NAME, _KEPT = "torch._dynamo", "__dynamo_disable"
_UTILS = f"{_NAME}.utils"


class _OnDemand(ModuleType):
    """Stands in for a module of torch's compiler until it is used."""

    def __init__(self, name: str, file: str) -> None:
        super().__init__(name)
        # Code that searches all modules by their files must not trigger the import.
        self.__spec__, self.__file__ = ModuleSpec(name, None, origin=file), file

    def __getattr__(self, name: str) -> Any:
        """Import the compiler in its place."""
        if name == "__path__" and self.__name__ == _UTILS:
            # `from torch._dynamo.utils import x` asks whether it is a package.
            raise AttributeError(name)
        if isinstance(whole := sys.modules.get(_NAME), _Compiler):
            whole.leave()
        return getattr(importlib.import_module(self.__name__), name)


class _Compiler(_OnDemand):
    """Stands in for ``torch._dynamo``, with the two functions that optimizers use."""

    def __init__(self, file: str) -> None:
        super().__init__(_NAME, file)
        self.disabled: list[Callable[..., Any]] = []

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """Return a function of torch unchanged: nothing is compiled yet."""
        if not getattr(fn, "__module__", "").startswith("torch."):
            return self.__getattr__("disable")(fn, *args, **options)
        self.disabled.append(fn)
        return fn

    def graph_break(self, *args: Any, **options: Any) -> None:
        """Do nothing, as where nothing is compiled."""

    @property
    def trace_rules(self) -> Any:
        """What torch.distributed asks to clear its caches, which are empty yet."""
        return _TraceRules(self)

    def leave(self) -> None:
        """Make room for the compiler."""
        del sys.modules[_NAME], sys.modules[_UTILS]
        vars(torch).pop("_dynamo")
        # torch caches the answers above; it must ask the compiler again.
        for fn in self.disabled:
            vars(fn).pop(_KEPT, None)


class _Utils(_OnDemand):
    """Stands in for ``torch._dynamo.utils``, from which torchvision imports one function."""

    def is_compile_supported(self, *args: Any, **options: Any) -> Any:
        """Ask the compiler."""
        return self.__getattr__("is_compile_supported")(*args, **options)


class _TraceRules:
    """Stands in for ``torch._dynamo.trace_rules``."""

    def __init__(self, compiler: _Compiler) -> None:
        self._compiler = compiler

    def clear_lru_cache(self) -> None:
        """Do nothing: nothing is compiled yet."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler.__getattr__("trace_rules"), name)


def import_on_demand() -> None:
    """Let this process import torch's compiler on first use, unless it is imported already.

    Saves a second of the start of a process that compiles nothing (torch 2.15). Any use imports it,
    also ``torch.compile`` and ``import torch._dynamo.config``, except the two functions that
    optimizers call and the one that torchvision imports but does not call.
    """
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is not None and spec.origin is not None:
        sys.modules[_NAME] = vars(torch)["_dynamo"] = _Compiler(spec.origin)
        sys.modules[_UTILS] = _Utils(_UTILS, str(Path(spec.origin).with_name("utils.py")))
