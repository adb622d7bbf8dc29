"""The components of one part of a run, such as a model or `opt_fn`."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib.util
import inspect
import itertools
import sys
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from asynckfold.jobs.digests import bytecode
from asynckfold.jobs.digests.changes import WEIGHTS
from asynckfold.jobs.digests.ownership import (
    files_digest,
    is_asynckfold,
    is_own,
    is_own_file,
    package_of,
)
from asynckfold.jobs.digests.states import (
    PLAIN,
    attributes_of,
    changed_by_use,
    closure_of,
    functions_of,
    is_module,
    is_named,
    is_wrapper,
    module_settings,
    reached,
    settings_of,
    steps_of,
    unwrapped,
)
from asynckfold.jobs.digests.values import MOST_ITEMS, Tensors, Values, sha

DEEPEST_NAMED = 4
"""Parts of parts of an object that have a name of their own."""

MOST_STEPS = 1000
"""Functions of a package that are followed for a part; of more, any change of its files counts.

Measured: of timm, 5,546 functions would be followed, in 60 s.
"""

MODULE_STEPS = 20
"""A module that a function imports is compiled, which takes as long as following functions."""

_UNUSED = {
    *("__repr__", "__str__", "extra_repr", "__hash__", "__eq__", "__replace__"),
    *("__annotate__", "__annotate_func__"),
}
"""Methods of a class that no result depends on."""


class LargePackageError(Exception):
    """A package is too large to be followed function by function."""

    def __init__(self, package: str) -> None:
        self.package = package


class PartDigests:
    """The components of one part.

    The user's functions and classes wait in a queue, so a long chain of calls is no deep recursion.
    """

    def __init__(
        self, tensors: Tensors, whole: Container[str], *, is_used: bool, is_data: bool
    ) -> None:
        self.is_used, self.is_data = is_used, is_data
        self._whole, self._counts = whole, Counter[str]()
        self.components: dict[str, str] = {}
        self.skipped: dict[str, None] = {}
        self.modules: set[str] = set()
        self._values = Values(self, tensors)
        self._tensors = tensors
        self._labels: dict[int, str] = {}
        self._taken: set[str] = set()
        self._waiting: deque[Callable[[], None]] = deque()
        self._main: Any = None
        self._within: set[int] = set()
        self._imports: set[str] = set()
        self._kept: list[Any] = []  # alive, so that ids are not reused

    def take(self, value: Any) -> None:
        """Take the part apart.

        Raises
        ------
        LargePackageError
            Too much of a package that is not in `whole` would have to be followed.
        """
        self._main = _main_of(value)
        if type(value).__name__ == "InitialState" and is_asynckfold(type(value).__module__):
            self.module("", value.module, whole=True)
        elif isinstance(value, (list, tuple)) and not self.is_data:
            self._steps("", value)
        else:
            self._expand("", value)
        while self._waiting:
            self._waiting.popleft()()

    # What values refer to

    def refer(self, value: Any, path: str) -> str | None:
        """Return the text for a user's function, class or module, and queue it."""
        if id(value) in self._labels:
            return f"={self._labels[id(value)]}"
        if isinstance(value, FunctionType):
            if is_own(value) or not is_named(value):
                self._queue(value, value.__name__)
        elif (
            isinstance(value, (type, ModuleType))
            and is_own(value)
            and not self._is_whole(package_of(value))
        ):
            if isinstance(value, ModuleType):
                label = self._label(value, f"the module {path}")
                self._waiting.append(functools.partial(self._all_of, path, value))
            else:
                label = self._label(value, value.__name__)
                self._waiting.append(functools.partial(self._class, label, value))
        return f"={self._labels[id(value)]}" if id(value) in self._labels else None

    def module(self, path: str, module: Any, *, whole: bool = False) -> None:
        """Record a torch module: settings by name; its own tensors too, unless it is a model."""
        colon, weights = f"{path}: " if path else "", []
        for name, inner in module.named_modules():
            for key, tensor in {**inner._parameters, **inner._buffers}.items():
                text = "=None" if tensor is None else self._tensors.text(tensor)
                if not (name or whole):
                    self._put(f"{colon}{key}", text)
                elif tensor is not None:
                    weights.append(f"{name}.{key} {text}")
            kind = self._values.text(type(inner), name or path)
            settings = module_settings(inner, is_used=self.is_used)
            if name:
                at = f"{colon}{name}"
                texts = [(key, self._values.text(value, f"{at}.{key}")) for key, value in settings]
                self._put(f"{at} ({type(inner).__name__})", "#" + sha(f"{kind} {texts}"))
                continue
            self._put(f"{colon}its class", kind)
            for key, value in settings:
                self._expand(f"{colon}{key}", value, 2)
        if weights:
            self._put(f"{colon}{WEIGHTS}", "#" + sha("\n".join(weights)))

    def skip(self, path: str, value: Any) -> str:
        """Record what is compared by type only."""
        kind = type(value).__name__
        self.skipped[f"{path} ({kind})" if path else kind] = None
        return f"?{kind}"

    # Names

    def _label(self, value: Any, wanted: str) -> str:
        """Give an object a unique name."""
        name = next(name for name in _numbered(wanted) if name not in self._taken)
        self._taken.add(name)
        self._labels[id(value)] = name
        self._kept.append(value)
        return name

    def _put(self, name: str, text: str) -> None:
        """Record a component; number it where the name is taken."""
        key = next(key for key in _numbered(name) if self.components.get(key, text) == text)
        self.components[key] = text

    # Values by their components

    def _expand(self, path: str, value: Any, depth: int = 0) -> None:
        """Record a value by its components, so that a changed one can be named."""
        self._kept.append(value)
        known = id(value) in self._labels or id(value) in self._within
        inside = None
        if not known and depth <= DEEPEST_NAMED:
            try:
                inside = self._inside(path, value)
            except Exception:  # noqa: BLE001 - properties and the like are the user's code
                self._put(path or "it", self.skip(path, value))
                return
        if inside is None:
            self._put(path or "it", self._values.text(value, path))
            return
        self._within.add(id(value))
        try:
            for name, item in inside:
                self._expand(name, item, depth + 1)
        finally:
            self._within.discard(id(value))

    def _inside(self, path: str, value: Any) -> list[tuple[str, Any]] | None:
        """Return the named components of a value; None where it has none."""
        colon = f"{path}: " if path else ""
        if isinstance(value, functools.partial):
            self._put(f"{colon}its arguments", f"={len(value.args)}")
            inner = [(path, value.func)]
            inner += [(f"{colon}argument {n}", item) for n, item in enumerate(value.args, 1)]
            return inner + [
                (f"{colon}{key}", value.keywords[key]) for key in sorted(value.keywords)
            ]
        if isinstance(value, MethodType):
            name = value.__func__.__name__
            if self._partly(f"{colon}self", value.__self__, [name]):
                self._put(f"{colon}its method", f"={name}()")
                return []
            self._put(f"{colon}its method", self._values.text(value.__func__, path))
            return [(f"{colon}self", value.__self__)]
        if is_wrapper(value) and not isinstance(value, FunctionType):
            self._put(f"{colon}its class", self._values.text(type(value), path))
            return [(path, value.__wrapped__)]
        steps = steps_of(value)
        if steps is not None:
            self._steps(path, steps)
            return []
        if is_module(value):
            self.module(path, value)
            return []
        if type(value) in (dict, OrderedDict):
            return self._items(path, value)
        if (text := self._values.known(value, path)) is not None:
            self._put(path or "it", text)
            return []
        attributes = settings_of(value, is_used=self.is_used)
        if attributes is None:
            return None
        settings, changed = attributes
        self._put(f"{colon}its class", self._values.text(type(value), path))
        dot = f"{path}." if path else ""
        for name in changed:
            self.skip(f"{dot}{name}", getattr(value, name))
        return [(f"{dot}{name}", item) for name, item in settings]

    def _items(self, path: str, value: Mapping[Any, Any]) -> list[tuple[str, Any]] | None:
        if not 0 < len(value) <= MOST_ITEMS or not all(type(key) is str for key in value):
            return None
        keys = list(value) if type(value) is OrderedDict else sorted(value)
        self._put(f"{path}: its keys" if path else "its keys", "#" + sha(repr(keys)))
        return [(f"{path}[{key!r}]", value[key]) for key in keys]

    def _steps(self, path: str, steps: Sequence[Any]) -> None:
        colon = f"{path}: " if path else ""
        names = [short_name(step) for step in steps]
        self._put(f"{colon}its steps", f"={', '.join(names)}")
        for place, (name, step) in enumerate(zip(names, steps, strict=True), 1):
            self._expand(f"{colon}step {place} ({name})", step)

    # Functions and what they look up

    def _queue(self, function: Any, name: str) -> None:
        """Queue a function, and the user's under the decorators of libraries."""
        shown = "the lambda" if name == "<lambda>" else f"{name}()"
        for layer in (unwrapped(function), function):
            if id(layer) in self._labels or not isinstance(layer, FunctionType):
                continue
            if is_own(layer):
                if not self._is_whole(package_of(layer)):
                    take = functools.partial(self._function, self._label(layer, shown), layer)
                    self._waiting.append(take)
            else:
                label = self._label(layer, f"the decorator of {shown}")
                self._waiting.append(functools.partial(self._decorator, label, layer))

    def _function(self, label: str, function: FunctionType) -> None:
        """Record a user's function."""
        self._count(package_of(function), 1)
        code = function.__code__
        kind = "asserted" if bytecode.is_rewritten(code) else "code"
        self._put(label, f"{kind}:{bytecode.digest(code)}")
        if function.__module__ != "__main__" and function.__module__ in sys.modules:
            self.modules.add(function.__module__)
        of = "" if function is self._main else f"{label}: "
        self._defaults(of, function)
        used = bytecode.use(code)
        for name, value in closure_of(function):
            # As a dataclass calls the defaults of its fields.
            field = name.removeprefix("_dflt_")
            word = f"{of}the {'default of' if field != name else 'closure variable'} {field}"
            self._variable(word, name, value, used.chains(name), used)
        for name, value in sorted(vars(function).items()):
            if not name.startswith("__"):
                self._expand(f"{of}its attribute {name}", value, 2)
        self._globals(function, used)

    def _decorator(self, label: str, function: FunctionType) -> None:
        """Record a function that a library made: by name, and what it holds."""
        code = function.__code__
        self._put(label, f"={function.__globals__.get('__name__')}.{code.co_name}")
        self._defaults(f"{label}: ", function)
        changes = bytecode.use(code).changes
        for name, value in closure_of(function):
            if name not in changes:
                self._held(f"{label}: {name}", value)
        if is_wrapper(function):
            self._values.text(vars(function)["__wrapped__"], label)

    def _held(self, word: str, value: Any) -> None:
        """Record what a library's decorator holds: settings and the user's code, not its state."""
        if isinstance(value, MethodType):
            self._put(f"{word}: its method", self._values.text(value.__func__, word))
            self._held(word, value.__self__)
        elif _is_telling(value) or isinstance(value, (FunctionType, list, tuple, dict)):
            self._expand(word, value, 2)
        else:
            self._put(f"{word}: its class", self._values.text(type(value), word))
            # A context manager that is made anew for each call keeps its arguments.
            is_new = isinstance(value, contextlib._GeneratorContextManager)
            changed = () if is_new else changed_by_use(type(value))
            for name, item in sorted(attributes_of(value).items()):
                if name in changed or name.startswith("__"):
                    continue
                if _is_telling(item) or self._values.known(item, word) is not None:
                    self._expand(f"{word}.{name}", item, 2)

    def _defaults(self, of: str, function: FunctionType) -> None:
        code, given = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
        defaults = {**dict(zip(names, given, strict=True)), **(function.__kwdefaults__ or {})}
        for name in sorted(defaults):
            self._expand(f"{of}the default of {name}", defaults[name], 2)

    def _globals(self, function: FunctionType, used: bytecode.Use) -> None:
        """Record the globals that a function reads, and the modules that it imports."""
        scope = function.__globals__
        for name in dict.fromkeys(name for name, _ in used.reads if name in scope):
            value, chains = scope[name], used.chains(name)
            if not isinstance(value, ModuleType):
                self._variable(f"the global {name}", name, value, chains, used)
            elif is_own(value):
                for chain in chains:
                    path, inner, rest = _followed(name, value, chain)
                    self._variable(f"the global {path}", name, inner, [rest], used)
        package = str(scope.get("__package__") or "")
        for name in used.imports:
            self._imported(name, package)

    def _variable(
        self,
        word: str,
        name: str,
        value: Any,
        chains: Sequence[tuple[str, ...]],
        used: bytecode.Use,
    ) -> None:
        """Record a variable, or only the settings that are read of it."""
        if isinstance(value, (type, FunctionType, ModuleType)):
            text = self._values.text(value, word.removeprefix("the global "))
            if text not in (f"={name}", f"={name}()"):
                self._put(word, text)
            return
        if name in used.changes:
            self.skip(word, value)
            return
        settings = _lookups(value)
        taken = {chain[0] if chain else "" for chain in chains}
        if taken and taken <= settings.keys():
            for step in sorted(taken):
                self._expand(f"{word}{step}", settings[step], 2)
        elif "" in taken or not self._partly(word, value, [step[1:] for step in sorted(taken)]):
            self._expand(word, value, 1)

    def _partly(self, word: str, value: Any, names: Sequence[str]) -> bool:
        """Record what some methods use of an object; return whether that is known."""
        kind = type(value)
        if not names or is_module(value) or not is_own(kind) or not hasattr(value, "__dict__"):
            return False
        uses = reached(kind, names)
        if uses is None:
            return False
        methods, attributes = uses
        if not attributes <= {*vars(value), *dir(kind)}:
            return False
        for name in sorted(methods):
            self._method(f"{kind.__name__}.{name}", methods[name])
        changed = changed_by_use(kind) if self.is_used else ()
        for name in sorted(attributes):
            if name in vars(value) and name not in changed:
                self._expand(f"{word}.{name}", vars(value)[name], 2)
            elif name not in changed:
                self._expand(f"{kind.__name__}.{name}", inspect.getattr_static(kind, name), 2)
        return True

    def _all_of(self, path: str, module: ModuleType) -> None:
        """Record all that a user's module defines."""
        for name, value in sorted(vars(module).items()):
            if name.startswith("__") or isinstance(value, ModuleType):
                continue
            if not isinstance(value, (type, FunctionType)):
                self._expand(f"{path}.{name}", value, 2)
            elif is_own(value):
                self.refer(value, f"{path}.{name}")

    def _imported(self, name: str, package: str) -> None:
        """Record a user's module that a function imports when it is called, by its file."""
        try:
            full = importlib.util.resolve_name(name, package or None)
            spec = importlib.util.find_spec(full)
        except Exception:  # noqa: BLE001 - a package is imported to find its modules
            return
        origin = spec.origin if spec else None
        if spec is None or origin is None or origin in self._imports or is_asynckfold(full):
            return
        self._imports.add(origin)
        package = full.partition(".")[0]
        if not origin.endswith(".py") or not is_own_file(origin) or self._is_whole(package):
            return
        if package in sys.modules and spec.parent:
            self._count(package, MODULE_STEPS)
        try:
            code = _compiled(origin, Path(origin).stat().st_mtime_ns)
        except (OSError, SyntaxError, ValueError):
            return
        self._put(f"the module {full}", f"code:{bytecode.digest(code)}")
        inside = full if spec.submodule_search_locations else full.rpartition(".")[0]
        for further in bytecode.use(code).imports:
            self._imported(further, inside)

    # Classes

    def _class(self, label: str, kind: type) -> None:
        """Record a user's class with its methods and bases."""
        of = "" if kind is self._main else f"{label}."
        bases = [self._values.text(base, label) for base in (*kind.__bases__, type(kind))]
        self._put(f"the bases of {label}", "#" + sha(repr(bases)))
        is_enum = issubclass(kind, enum.Enum)
        if issubclass(kind, enum.Enum):
            members = [
                (name, self._values.text(item.value, f"{label}.{name}"))
                for name, item in kind.__members__.items()
            ]
            self._put(f"the members of {label}", "#" + sha(repr(members)))
        for name, value in sorted(vars(kind).items()):
            if name in _UNUSED or (is_enum and not functions_of(value)):
                continue
            if isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                continue
            functions = functions_of(value)
            if name.startswith("__") and name.endswith("__") and not functions:
                continue  # such as the notes that copyreg makes when an object is pickled
            for function in functions:
                self._method(f"{of}{name}", function)
            if not functions:
                self._expand(f"{of}{name}", value, 2)

    def _method(self, name: str, function: Any) -> None:
        self._queue(function, name)
        if not isinstance(function, FunctionType) or id(function) not in self._labels:
            self._put(name, self._values.text(function, name))

    # Packages that are too large to be followed

    def _count(self, package: str, steps: int) -> None:
        self._counts[package] += steps
        if package and self._counts[package] > MOST_STEPS:
            raise LargePackageError(package)

    def _is_whole(self, package: str) -> bool:
        """Whether a package counts as a whole; record it then."""
        if package not in self._whole:
            return False
        self._put(f"the package {package}", f"#{files_digest(package)}")
        return True


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name} ({number})" for number in itertools.count(2))


def _main_of(value: Any) -> Any:
    """Return a part's main function or class: its methods need no prefix."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, FunctionType) or is_wrapper(value):
        return unwrapped(value)
    if isinstance(value, type):
        return value
    if isinstance(value, MethodType):
        return type(value.__self__)
    return type(getattr(value, "module", value))


@functools.lru_cache(maxsize=1024)
def _compiled(file: str, changed_ns: int) -> types.CodeType:
    return compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)


def _is_telling(value: Any) -> bool:
    """Whether a value is a plain setting or holds the user's code."""
    if isinstance(value, (list, tuple, dict)):
        return all(map(_is_telling, value.values() if isinstance(value, dict) else value))
    if isinstance(value, FunctionType) or is_wrapper(value):
        return value is not unwrapped(value) or is_own(value)
    plain = (*PLAIN, str, bytes, type, functools.partial)
    return isinstance(value, plain) or is_module(value) or is_own(type(value))


def _lookups(value: Any) -> dict[str, Any]:
    """Return the settings of a value by the expression that reads them."""
    if type(value) is dict:
        return {f"[{name!r}]": item for name, item in value.items()}
    if is_module(value) or isinstance(value, (functools.partial, MethodType)):
        return {}
    return {f".{name}": item for name, item in getattr(value, "__dict__", {}).items()}


def _followed(path: str, value: Any, chain: tuple[str, ...]) -> tuple[str, Any, tuple[str, ...]]:
    """Follow attributes of modules; return path, value, and the rest of the chain."""
    rest = list(chain)
    while rest and isinstance(value, ModuleType) and hasattr(value, rest[0][1:]):
        path, value = path + rest[0], getattr(value, rest.pop(0)[1:])
    return path, value, tuple(rest)


def short_name(value: Any) -> str:
    """Return the name of a function or class, or of the class of an object."""
    name = getattr(value, "__name__", None) or type(value).__name__
    return "lambda" if name == "<lambda>" else str(name)
