"""Whose code it is: the user's own, or a library's, whose version is checked elsewhere.

The user's code is what was typed into a console or notebook, and every file outside the standard
library and ``site-packages`` that no distribution installed there (``pip install --target``). What
is installed with ``pip install -e`` may be edited at any time, so it is the user's own, too.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


def is_own(value: Any) -> bool:
    """Whether a function, class or module is the user's."""
    if isinstance(value, FunctionType):
        scope = value.__globals__
        return _is_own_place(str(scope.get("__name__") or ""), scope.get("__file__"))
    name = _module_name(value)
    module = sys.modules.get(name)
    if module is None:
        # Its module lives elsewhere only: it was sent by value.
        return not is_asynckfold(name) and name != "builtins"
    return _is_own_place(name, getattr(module, "__file__", None))


def _module_name(value: Any) -> str:
    return str(value.__name__ if isinstance(value, ModuleType) else value.__module__)


def _is_own_place(name: str, file: Any) -> bool:
    if name == "__main__":
        return True
    if is_asynckfold(name):
        return False
    if isinstance(file, str):
        return is_own_file(file)
    return name.partition(".")[0] not in sys.stdlib_module_names


def is_asynckfold(name: str) -> bool:
    """Whether a module belongs to this package."""
    return name == "asynckfold" or name.startswith("asynckfold.")


@functools.lru_cache(maxsize=65536)
def is_own_file(file: str) -> bool:
    """Whether a Python file is the user's."""
    if file.endswith((".so", ".pyd")) or re.search(r"[/\\](site|dist)-packages[/\\]", file):
        return False
    if any(file.startswith(folder) for folder in _library_folders()):
        return False
    folders = (os.path.abspath(folder) for folder in sys.path)  # noqa: PTH100
    return not any(
        file.startswith(folder + os.sep) and file in _installed(folder) for folder in folders
    )


@functools.lru_cache(maxsize=256)
def _installed(folder: str) -> frozenset[str]:
    """Return the files that distributions installed into a folder of the module search path."""
    return frozenset(
        str(Path(folder, row[0]))
        for record in Path(folder).glob("*.dist-info/RECORD")
        for row in csv.reader(record.read_text(encoding="utf-8").splitlines())
    )


def package_of(value: Any) -> str:
    """Return the top-level package of a function, class or module; ``""`` outside of packages."""
    scope = getattr(value, "__globals__", None) or {"__name__": _module_name(value)}
    name = str(scope.get("__name__")).partition(".")[0]
    return name if hasattr(sys.modules.get(name), "__path__") else ""


def files_digest(package: str) -> str:
    """Return the digest of all Python files of a package."""
    whole = hashlib.sha256()
    for home in sys.modules[package].__path__:
        for folder, inner, files in os.walk(home):
            code = sorted(name for name in files if name.endswith(".py"))
            # Folders without code may hold millions of samples.
            inner[:] = sorted(inner) if code else []
            for path in (Path(folder, name) for name in code):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                whole.update(f"{path.relative_to(home)} {content}\n".encode())
    return whole.hexdigest()[:16]


@contextmanager
def sent_by_value() -> Iterator[None]:
    """Pickle what is defined in the user's modules by value: another machine lacks them."""
    import cloudpickle

    known = {*cloudpickle.list_registry_pickle_by_value()}
    mine = [
        module
        for name, module in [*sys.modules.items()]
        if name not in known and _is_own_module(name, module)
    ]
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own_module(name: str, module: Any) -> bool:
    # issubclass of the type, since isinstance may run code of a proxy.
    if not issubclass(type(module), ModuleType):
        return False
    file = vars(module).get("__file__")
    # First what is known of thousands of modules. A package without a file is not one's own.
    if not isinstance(file, str) or not is_own_file(file):
        return False
    # Definitions of __main__ travel by value anyway.
    is_named = name != "__main__" and vars(module).get("__name__") == name
    return is_named and _is_own_place(name, file)


@functools.lru_cache(maxsize=1)
def _library_folders() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(os.path.join(path, "") for path in paths if path)  # noqa: PTH118
