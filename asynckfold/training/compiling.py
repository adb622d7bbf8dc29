"""torch.compile, where it was asked for: a model whole, or an error before the sweep.

And nothing of it where it was not: torch's compiler takes as long to import as torch itself, and
every optimizer imports it, only to tell it that it has nothing to do there.
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
from torch import nn

COMPILER = {"compile_threads": 1, "fx_graph_cache": False}
"""A job has its cores for itself, and none for further processes that compile. What was compiled
for another number of threads may lie in the cache of graphs, whose key older versions of torch make
without it; translated kernels are taken over all the same, by their text."""


def compile_whole(model: nn.Module) -> None:
    """Let a model compile itself, anew for each shape, at the first batch that has it.

    In one piece, so that whatever cannot be compiled raises in place of running uncompiled, with
    other bits. Without shapes that vary, and without what jobs before have compiled: the code for
    a batch depends on its shape alone, also where a job goes on in another process.

    Parameters
    ----------
    model : nn.Module
        Its tensors, names and class stay as they are.
    """
    torch.compiler.reset()
    model.compile(fullgraph=True, dynamic=False, options=COMPILER)


_NAME, _KEPT = "torch._dynamo", "__dynamo_disable"
_UTILS = f"{_NAME}.utils"


class _OnDemand(ModuleType):
    """Stands for a module of torch's compiler until somebody wants it."""

    def __init__(self, name: str, file: str) -> None:
        super().__init__(name)
        # Whoever looks for a file among all modules wants nothing of this one.
        self.__spec__, self.__file__ = ModuleSpec(name, None, origin=file), file

    def __getattr__(self, name: str) -> Any:
        """Import the compiler, and be gone."""
        if name == "__path__" and self.__name__ == _UTILS:
            # An import of names from it asks whether it is a package.
            raise AttributeError(name)
        if isinstance(whole := sys.modules.get(_NAME), _Compiler):
            whole.leave()
        return getattr(importlib.import_module(self.__name__), name)


class _Compiler(_OnDemand):
    """Stands for ``torch._dynamo``, of which optimizers want no more than this."""

    def __init__(self, file: str) -> None:
        super().__init__(_NAME, file)
        self.told: list[Callable[..., Any]] = []

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """Return a function of torch as it is: nothing is compiled so far."""
        if not getattr(fn, "__module__", "").startswith("torch."):
            return self.__getattr__("disable")(fn, *args, **options)
        self.told.append(fn)
        return fn

    def graph_break(self, *args: Any, **options: Any) -> None:
        """Do what it does where nothing is compiled."""

    def leave(self) -> None:
        """Make room for the compiler itself."""
        del sys.modules[_NAME], sys.modules[_UTILS]
        vars(torch).pop("_dynamo")
        # What torch remembers of the answers above it must ask again.
        for fn in self.told:
            vars(fn).pop(_KEPT, None)


class _Utils(_OnDemand):
    """Stands for ``torch._dynamo.utils``, of which torchvision imports one function."""

    def is_compile_supported(self, *args: Any, **options: Any) -> Any:
        """Ask the compiler."""
        return self.__getattr__("is_compile_supported")(*args, **options)


def import_on_demand() -> None:
    """Let this process import torch's compiler when it is wanted, unless it has it already.

    In a process that compiles nothing, a second of a start is saved so (torch 2.15). Whatever is
    read from it but the two functions that optimizers call, and the one that torchvision imports
    and does not call, imports it, as do ``torch.compile`` and ``import torch._dynamo.config``.
    """
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is not None and spec.origin is not None:
        sys.modules[_NAME] = vars(torch)["_dynamo"] = _Compiler(spec.origin)
        sys.modules[_UTILS] = _Utils(_UTILS, str(Path(spec.origin).with_name("utils.py")))
