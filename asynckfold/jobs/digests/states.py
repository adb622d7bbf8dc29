"""An object's settings, without state that only its work left there."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any

from asynckfold.jobs.digests import bytecode
from asynckfold.jobs.digests.ownership import is_own

DEEPEST = 25
PLAIN = (bool, int, float, complex, type(None))

_CONTAINERS = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_NAMED = (type, ModuleType, PurePath, enum.Enum, FunctionType, types.BuiltinFunctionType)

_ENTRIES = {
    *("__call__", "__getitem__", "__getitems__", "__iter__", "__len__", "forward"),
    *("__enter__", "__exit__"),
}
"""Methods that work: what they assign to the object is its state, and no setting."""

Settings = list[tuple[str, Any]]


def settings_of(value: Any, *, is_used: bool = False) -> tuple[Settings, list[str]] | None:
    """Return an object's settings by name, and names that its own work changes.

    None where it has no attributes. `is_used`: it works in this process, which may have changed its
    state. For torch modules see `module_settings`.

    >>> settings_of(types.SimpleNamespace(sigma=0.5))
    ([('sigma', 0.5)], [])
    """
    kind = type(value)
    if isinstance(value, (*PLAIN, *_CONTAINERS, *_NAMED)):
        return None
    if hasattr(value, "_score_func") and hasattr(value, "_sign"):
        # scikit-learn's scorers have no public attributes.
        names = ("_score_func", "_sign", "_kwargs", "_response_method")
        return [(name.strip("_"), getattr(value, name, None)) for name in names], []
    is_users, state = is_own(kind), _state(value)
    is_of_sklearn = any(base.__module__.partition(".")[0] == "sklearn" for base in kind.__mro__)
    if callable(getattr(value, "get_params", None)) and is_of_sklearn:
        # What was fitted counts like an argument; `preprocess` is digested unfitted.
        attributes = {**value.get_params(deep=False), **vars(value)}
    elif isinstance(state, dict):
        attributes = {str(name): item for name, item in state.items()}
    else:
        attributes = attributes_of(value)
        if not is_users:
            # Other private attributes of libraries may be caches.
            attributes = {
                name: item
                for name, item in attributes.items()
                if name[:1] != "_" or hasattr(type(item), "__array__")
            }
            if not attributes or state is not None:
                return None
    changed = changed_by_use(kind) if is_users and is_used else frozenset()
    pairs = sorted(attributes.items(), key=lambda pair: pair[0])
    return (
        [(name, item) for name, item in pairs if name not in changed],
        [name for name, _ in pairs if name in changed],
    )


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes, those in slots included."""
    attributes = {str(name): item for name, item in dict(getattr(value, "__dict__", {})).items()}
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


def _state(value: Any) -> Any:
    """Return what an object's __getstate__ gives, if its class defines one."""
    method = getattr(type(value), "__getstate__", None)
    if not isinstance(method, FunctionType):
        return None
    try:
        return method(value)
    except Exception:  # noqa: BLE001 - the user's code; sending the object tells what is wrong
        return None


def changed_by_use(kind: type) -> frozenset[str]:
    """Return the attributes that an object's working methods assign, cached properties included."""
    changed = {
        name
        for base in kind.__mro__
        for name, item in vars(base).items()
        if isinstance(item, functools.cached_property)
    }
    seen: set[str] = set()
    wanted = sorted(_ENTRIES | changed)
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        for method in functions_of(inspect.getattr_static(kind, name, None)):
            core = unwrapped(method)
            if isinstance(core, FunctionType):
                used = bytecode.use(core.__code__)
                changed |= used.attributes
                wanted += used.methods
    return frozenset(changed)


def reached(kind: type, names: Iterable[str]) -> tuple[dict[str, Any], set[str]] | None:
    """Return the methods and attributes that calls of some methods use; None if unknown."""
    methods: dict[str, Any] = {}
    attributes: set[str] = set()
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        if name in methods or name in attributes:
            continue
        functions = functions_of(inspect.getattr_static(kind, name, None))
        if len(functions) != 1:
            attributes.add(name)
            continue
        (methods[name],) = functions
        core = unwrapped(functions[0])
        if not isinstance(core, FunctionType) or not is_own(core):
            return None
        used = bytecode.use(core.__code__)
        if used.passes:
            return None
        wanted += sorted(used.methods)
    return methods, attributes


def module_settings(module: Any, *, is_used: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield a torch module's attributes other than tensors and submodules."""
    usual = _bare_module()
    library = not is_own(type(module))
    changed = changed_by_use(type(module)) if is_used and not library else frozenset()
    for name in sorted(vars(module)):
        value = vars(module)[name]
        if name in usual:
            if name.endswith("_hooks") and value:
                yield name.strip("_"), list(value.values())
        elif name not in changed and not (library and name.startswith("_")):
            yield name, value


@functools.lru_cache(maxsize=1)
def _bare_module() -> frozenset[str]:
    return frozenset(vars(sys.modules["torch"].nn.Module()))


def is_module(value: Any) -> bool:
    """Whether a value is a module of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def steps_of(value: Any) -> list[Any] | None:
    """Return the steps of torchvision's Compose."""
    kind = type(value)
    if kind.__module__.startswith("torchvision.transforms") and kind.__name__ == "Compose":
        return list(value.transforms)
    return None


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
