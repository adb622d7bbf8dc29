"""What an object is made of: its settings, without state that only its work left there."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from asynckfold.jobs.digests import bytecode
from asynckfold.jobs.digests.ownership import is_own

DEEPEST = 25

_ENTRIES = {
    *("__call__", "__getitem__", "__getitems__", "__iter__", "__len__", "forward"),
    *("__enter__", "__exit__"),
}
"""Methods that work: what they assign to the object is its state, and no setting."""


def settings_of(value: Any) -> dict[str, Any] | None:
    """Return an object's settings by name, None where it has none. For torch see `module_settings`.

    >>> from types import SimpleNamespace
    >>> settings_of(SimpleNamespace(sigma=0.5))
    {'sigma': 0.5}
    """
    kind = type(value)
    attributes = attributes_of(value)
    # Of a fitted estimator, what was fitted counts; `preprocess` is digested unfitted.
    if any(base.__module__.partition(".")[0] == "sklearn" for base in kind.__mro__):
        return attributes or None
    method = getattr(kind, "__getstate__", None)
    state = method(value) if isinstance(method, FunctionType) else None
    if isinstance(state, dict):
        return state
    if is_own(kind):
        return attributes
    # Other private attributes of libraries may be caches.
    public = {
        name: item
        for name, item in attributes.items()
        if name[:1] != "_" or hasattr(type(item), "__array__")
    }
    return public if state is None and public else None


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes, those in slots included."""
    attributes = {str(name): item for name, item in dict(getattr(value, "__dict__", {})).items()}
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


def reached(kind: type, entries: Iterable[str]) -> tuple[dict[str, list[Any]], set[str]]:
    """Return the methods that calls of some methods may use, and all names in their code."""
    methods: dict[str, list[Any]] = {}
    names: set[str] = set()
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names.add(name)
        if functions := functions_of(inspect.getattr_static(kind, name, None)):
            methods[name] = functions
            waiting += (name for code in _codes(functions) for name in bytecode.use(code).names)
    return methods, names


def _codes(functions: Iterable[Any]) -> Iterator[Any]:
    cores = map(unwrapped, functions)
    return (core.__code__ for core in cores if isinstance(core, FunctionType))


def changed_by_use(kind: type) -> frozenset[str]:
    """Return the attributes that an object's working methods assign, cached properties included."""
    cached = {
        name
        for base in kind.__mro__
        for name, item in vars(base).items()
        if isinstance(item, functools.cached_property)
    }
    methods, _ = reached(kind, {*_ENTRIES, *cached})
    codes = (code for functions in methods.values() for code in _codes(functions))
    return frozenset(cached.union(*(bytecode.use(code).attributes for code in codes)))


def used_parts(value: Any, method: str) -> tuple[dict[str, list[Any]], set[str]] | None:
    """Return methods and attributes that calls of a method use; None: perhaps all."""
    kind = type(value)
    if not is_own(kind) or hasattr(kind, "__getattr__") or not hasattr(value, "__dict__"):
        return None
    methods, names = reached(kind, [method])
    functions = [unwrapped(item) for items in methods.values() for item in items]
    for item in functions:
        is_known = isinstance(item, FunctionType) and is_own(item)
        if not is_known or bytecode.use(item.__code__).passes:
            return None
    return methods, names & {*vars(value), *dir(kind)} - methods.keys()


def module_settings(module: Any, *, is_used: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield a torch module's attributes other than tensors and submodules."""
    usual = vars(sys.modules["torch"].nn.Module())
    library = not is_own(type(module))
    changed = changed_by_use(type(module)) if is_used and not library else frozenset()
    for name in sorted(vars(module)):
        value = vars(module)[name]
        if name in usual:
            if name.endswith("_hooks") and value:
                yield name.strip("_"), list(value.values())
        elif name not in changed and not (library and name.startswith("_")):
            yield name, value


def is_module(value: Any) -> bool:
    """Whether a value is a module of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def closure_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield closure variables that have a value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        if name != "__class__" and not name.startswith(("_type_", "__dataclass_")):
            yield name, value


def functions_of(value: Any) -> list[Any]:
    """Return the functions that an attribute of a class stands for."""
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [item for item in (value.fget, value.fset, value.fdel) if item is not None]
    if isinstance(value, functools.cached_property):
        return [value.func]
    return [value] if is_wrapper(value) else []


def is_wrapper(value: Any) -> bool:
    """Whether a library's decorator made a value around a function, such as `functools.cache`."""
    if isinstance(value, (type, functools.partial)) or is_own(type(value)):
        return False
    return callable(_under(value))


def unwrapped(value: Any) -> Any:
    """Return the user's function under the decorators of libraries; else the value."""
    core = value
    for _ in range(DEEPEST):
        if isinstance(core, FunctionType) and is_own(core):
            return core
        core = _under(core)
    return value


def _under(value: Any) -> Any:
    return getattr(value, "__dict__", {}).get("__wrapped__")


def is_named(function: FunctionType) -> bool:
    """Whether a library's module holds a function under its name."""
    holder: Any = sys.modules.get(str(function.__module__))
    if holder is None or is_own(holder):
        return False
    for name in function.__qualname__.split("."):
        holder = inspect.getattr_static(holder, name, None)
    holder = getattr(holder, "__func__", holder)
    return holder is function or inspect.unwrap(holder) is function
