"""torch.compile, where it was asked for: a model whole, or an error before the sweep.

And nothing of it where it was not: torch's compiler takes as long to import as torch itself, and
every optimizer imports it, only to tell it that it has nothing to do there.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
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


class _OnDemand(ModuleType):
    """Stands for ``torch._dynamo`` until somebody wants more of it than optimizers do."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_NAME)
        # Whoever looks for a file among all modules wants nothing of this one.
        self.__spec__, self.__file__ = spec, spec.origin
        self.told: list[Callable[..., Any]] = []

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """Return a function of torch as it is: nothing is compiled so far."""
        if not getattr(fn, "__module__", "").startswith("torch."):
            return self.__getattr__("disable")(fn, *args, **options)
        self.told.append(fn)
        return fn

    def graph_break(self, *args: Any, **options: Any) -> None:
        """Do what it does where nothing is compiled."""

    def __getattr__(self, name: str) -> Any:
        """Import the compiler, and be gone."""
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
            vars(torch).pop("_dynamo")
            # What torch remembers of the answers above it must ask again.
            for fn in self.told:
                vars(fn).pop(_KEPT, None)
        return getattr(importlib.import_module(_NAME), name)


def import_on_demand() -> None:
    """Let this process import torch's compiler when it is wanted, unless it has it already.

    In a process that compiles nothing, a second of a start is saved so (torch 2.15). Whatever is
    read from the module but the two functions that optimizers call imports it, as do
    ``torch.compile`` and ``import torch._dynamo.config``.
    """
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is not None:
        sys.modules[_NAME] = vars(torch)["_dynamo"] = _OnDemand(spec)
