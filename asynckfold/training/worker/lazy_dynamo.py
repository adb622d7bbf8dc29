"""Import torch's compiler on demand.

It takes as long to import as torch itself, and every optimizer imports it only to learn that it has
nothing to do there.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
        # torch.distributed asks it to clear its caches, which are empty yet.
        rules: Any = _OnDemand(f"{_NAME}.trace_rules", file)
        rules.clear_lru_cache = lambda: None
        self.trace_rules = rules

    def disable(self, fn: Any = None, *args: Any, **options: Any) -> Any:
        """Return a function of torch unchanged: nothing is compiled yet."""
        if not getattr(fn, "__module__", "").startswith("torch."):
            return self.__getattr__("disable")(fn, *args, **options)
        self.disabled.append(fn)
        return fn

    def graph_break(self, *args: Any, **options: Any) -> None:
        """Do nothing, as where nothing is compiled."""

    def leave(self) -> None:
        """Make room for the compiler."""
        del sys.modules[_NAME], sys.modules[_UTILS]
        vars(torch).pop("_dynamo")
        # torch caches the answers above; it must ask the compiler again.
        for fn in self.disabled:
            vars(fn).pop(_KEPT, None)


def import_on_demand() -> None:
    """Let this process import torch's compiler on first use, unless it is imported already.

    Saves a second of the start of a process that compiles nothing (torch 2.15). Any use imports it,
    also ``torch.compile`` and ``import torch._dynamo.config``, except the two functions that
    optimizers call and the one that torchvision imports but does not call.
    """
    spec = None if _NAME in sys.modules else importlib.util.find_spec(_NAME)
    if spec is not None and spec.origin is not None:
        sys.modules[_NAME] = vars(torch)["_dynamo"] = _Compiler(spec.origin)
        utils: Any = _OnDemand(_UTILS, str(Path(spec.origin).with_name("utils.py")))
        ask = partial(utils.__getattr__, "is_compile_supported")
        utils.is_compile_supported = lambda *args, **options: ask()(*args, **options)
        sys.modules[_UTILS] = utils


@contextmanager
def imported_on_demand() -> Iterator[None]:
    """Let a block import torch's compiler on first use; leave no stand-in behind."""
    import_on_demand()
    try:
        yield
    finally:
        if isinstance(whole := sys.modules.get(_NAME), _Compiler):
            whole.leave()
