"""The components of one part of a run, such as a model or `opt_fn`.

``=0.1`` is a value itself, ``#5be1…`` a hash of its content, ``?Lock`` only its type.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib.util
import inspect
import itertools
import logging
import sys
import tempfile
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path, PurePath
from types import FunctionType, MethodType, ModuleType
from typing import Any

from asynckfold.jobs.digests import bytecode
from asynckfold.jobs.digests.changes import WEIGHTS
from asynckfold.jobs.digests.objects import (
    DEEPEST,
    attributes_of,
    changed_by_use,
    closure_of,
    functions_of,
    is_module,
    is_named,
    is_wrapper,
    module_settings,
    settings_of,
    unwrapped,
    used_parts,
)
from asynckfold.jobs.digests.ownership import (
    files_digest,
    is_asynckfold,
    is_own,
    is_own_file,
    package_of,
)

DEEPEST_NAMED = 4
"""Parts of parts of an object that have a name of their own."""

MOST_ITEMS = 64
"""Containers of a data set that hold more are samples, which its fingerprint covers."""

MOST_STEPS = 1000
"""Functions of a package that are followed for a part; of more, any change of its files counts.

Measured: of timm, 5,546 functions would be followed, in 60 s.
"""

MODULE_STEPS = 20
"""A module that a function imports is compiled, which takes as long as following functions."""

_PLAIN = (bool, int, float, complex, type(None))
_CONTAINERS = (int, float, str, bytes, dict, set, frozenset)
_NO_TORCH: Any = types.SimpleNamespace(Tensor=(), Generator=(), device=())
_CHOSEN_SEED = 2**64
"""A seed of the operating system's choice has 128 bits."""

_UNUSED = {
    *("__repr__", "__str__", "extra_repr", "__hash__", "__eq__", "__replace__"),
    *("__annotate__", "__annotate_func__"),
}
"""Methods of a class that no result depends on."""

Inside = tuple[tuple[str, str], list[tuple[str, Any]]]
"""Name and text of what kind of thing a value is, and its parts by the rest of their path; the name
is empty where parts have no components of their own."""


class LargePackageError(Exception):
    """A package is too large to be followed function by function."""

    def __init__(self, package: str) -> None:
        self.package = package


class PartDigests:
    """The components of one part.

    The user's functions and classes wait in a queue, so a long chain of calls is no deep recursion.
    """

    def __init__(self, whole: Container[str], *, is_used: bool, is_data: bool) -> None:
        self.is_used, self.is_data = is_used, is_data
        self._whole, self._counts = whole, Counter[str]()
        self.components: dict[str, str] = {}
        self.skipped: dict[str, None] = {}
        self.modules: set[str] = set()
        self._labels: dict[int, str] = {}
        self._taken: set[str] = set()
        self._waiting: deque[Callable[[], None]] = deque()
        self._main: Any = None
        self._is_model = False  # given as an instance
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
            self._is_model, module = True, value.module
            weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            texts = {name: _tensor(item) for name, item in weights.items()}
            self._put(WEIGHTS, f"#{sha(repr(texts))}")
            self._expand("", module)
        elif isinstance(value, (list, tuple)) and not self.is_data:
            self._record("", _steps_of(value))
        else:
            self._expand("", value)
        while self._waiting:
            self._waiting.popleft()()

    # Values

    def _expand(self, path: str, value: Any, depth: int = 0) -> None:
        """Record a value by its components, so that a changed one can be named."""
        self._kept.append(value)
        inside = self._inside(path, value, depth)
        if isinstance(inside, str) or not inside[0][0] or depth > DEEPEST_NAMED:
            self._put(path or "it", self._hash(path, value, inside, depth))
            return
        self._within.add(id(value))
        self._record(path, inside, depth + 1)
        self._within.discard(id(value))

    def _record(self, path: str, inside: Inside, depth: int = 1) -> None:
        (name, text), items = inside
        self._put(_joined(path, f": {name}"), text)
        for rest, item in items:
            self._expand(_joined(path, rest), item, depth)

    def _text(self, value: Any, path: str, depth: int = 0) -> str:
        """Return a value as a short text, equal for equal values in any process."""
        return self._hash(path, value, self._inside(path, value, depth), depth)

    def _hash(self, path: str, value: Any, inside: str | Inside, depth: int) -> str:
        if isinstance(inside, str):
            return inside
        self._within.add(id(value))
        (_, head), items = inside
        texts = [(rest, self._text(item, _joined(path, rest), depth + 1)) for rest, item in items]
        self._within.discard(id(value))
        if isinstance(value, (set, frozenset)):
            texts.sort()
        return f"#{sha(f'{head} {texts}')}"

    def _inside(self, path: str, value: Any, depth: int) -> str | Inside:
        """Return a value as text, or what it consists of."""
        if type(value) in _PLAIN:
            return f"={value!r}"
        if type(value) is str:
            return "#" + sha(f"str:{_without_place(value, self.is_data)}")
        if id(value) in self._within:
            return "=itself"
        if issubclass(type(value), (FunctionType, ModuleType, type)):
            return self._reference(path, value)
        if depth > DEEPEST:
            return self._skip(path, value)
        try:
            return self._known(path, value) or self._container(path, value, depth)
        except LargePackageError:
            raise
        except Exception:  # noqa: BLE001 - properties and the like are the user's code
            return self._skip(path, value)

    def _known(self, path: str, value: Any) -> str:
        """Return the text of a value of torch, NumPy, pandas and the like; ``""`` for others."""
        import numpy as np

        kind, torch = type(value), sys.modules.get("torch", _NO_TORCH)
        is_pandas = kind.__module__.startswith("pandas.") and hasattr(value, "__array__")
        is_tensor = isinstance(value, torch.Tensor)
        if is_pandas or is_tensor or isinstance(value, np.ndarray):
            size = value.numel() if is_tensor else value.size
            if self.is_data and (is_pandas or size > MOST_ITEMS):
                return f"={kind.__name__}"
            return _tensor(value) if is_tensor else self._array(path, np.asarray(value))
        if isinstance(value, (bytes, bytearray, memoryview)):
            return f"#{sha('bytes', bytes(value))}"
        if isinstance(value, PurePath):
            return "#" + sha(f"path:{_without_place(str(value), self.is_data)}")
        if isinstance(value, np.generic):
            return f"={kind.__name__}({value.item()!r})"
        if isinstance(value, torch.Generator):
            return f"=seed {value.initial_seed()}"
        if isinstance(value, np.random.Generator):
            # By its seed: its state changes as it is used.
            seeds = getattr(value.bit_generator, "seed_seq", None)
            if isinstance(seed := getattr(seeds, "entropy", None), int) and seed < _CHOSEN_SEED:
                return f"=seed {seed} {getattr(seeds, 'spawn_key', ())}"
        if isinstance(value, (np.random.Generator, np.random.RandomState)):
            return self._skip(path, value)
        if kind.__module__ == "random":
            return self._skip(path, value)
        if isinstance(value, (torch.device, logging.Logger, logging.LoggerAdapter)):
            return f"={kind.__name__}"
        return ""

    def _array(self, path: str, array: Any) -> str:
        if array.dtype.hasobject:
            return f"#{sha(f'{array.shape} {self._text(array.ravel().tolist(), path)}')}"
        return "#" + sha(f"{array.dtype} {array.shape}", array.tobytes())

    def _container(self, path: str, value: Any, depth: int) -> str | Inside:
        """Return what a collection, a function with arguments or another object consists of."""
        kind = type(value)
        is_collection = isinstance(value, (list, tuple, deque, dict, set, frozenset))
        if is_collection and self.is_data and len(value) > MOST_ITEMS:
            return f"={kind.__name__}"
        if isinstance(value, (list, tuple, deque)):
            if len(value) <= 8 and kind in (list, tuple) and {*map(type, value)} <= {*_PLAIN}:
                return f"={value!r}"
            items = [(f"[{place}]", item) for place, item in enumerate(value)]
            return ("", self._text(kind, path)), items
        if kind in (set, frozenset):
            return ("", "set"), [("", item) for item in value]
        if kind in (dict, OrderedDict, types.MappingProxyType):
            return self._mapping(path, value, depth)
        if isinstance(value, enum.Enum):
            return ("", self._text(kind, path)), [(".name", value.name), (".value", value.value)]
        if isinstance(value, functools.partial):
            items = [(f": argument {n}", item) for n, item in enumerate(value.args, 1)]
            items += [(f": {key}", value.keywords[key]) for key in sorted(value.keywords)]
            return ("its arguments", f"={len(value.args)}"), [("", value.func), *items]
        if isinstance(value, MethodType):
            name, instance = value.__func__.__name__, value.__self__
            if self._partly(_joined(path, ": self"), instance, name):
                return ("its method", f"={name}()"), []
            return ("its method", self._text(value.__func__, path)), [(": self", instance)]
        if kind.__module__.startswith("torchvision.transforms") and kind.__name__ == "Compose":
            return _steps_of(value.transforms)
        return self._object(path, value)

    def _mapping(self, path: str, value: Any, depth: int) -> Inside:
        by_text = {
            repr(key) if type(key) in (*_PLAIN, str) else self._text(key, path, depth + 1): item
            for key, item in value.items()
        }
        texts = list(by_text) if type(value) is OrderedDict else sorted(by_text)
        is_named = 0 < len(texts) <= MOST_ITEMS and {*map(type, value)} == {str}
        head = ("its keys" if is_named else "", "#" + sha(f"dict {texts}"))
        return head, [(f"[{text:.40}]", by_text[text]) for text in texts]

    def _object(self, path: str, value: Any) -> str | Inside:
        if is_module(value):
            return self._module(path, value)
        kind = self._text(type(value), path)
        if is_wrapper(value):
            return ("its class", kind), [("", value.__wrapped__)]
        settings = None if isinstance(value, _CONTAINERS) else settings_of(value)
        if settings is None:
            reduced = value.__reduce_ex__(4)
            if isinstance(reduced, str):
                return f"={type(value).__module__}.{reduced}"
            held = [*reduced[1:3], *(list(item) for item in reduced[3:5] if item is not None)]
            return ("", kind), [("", item) for item in held]
        is_used = self.is_used and is_own(type(value))
        changed = changed_by_use(type(value)) if is_used else frozenset()
        for name in sorted(changed & settings.keys()):
            self._skip(_joined(path, f".{name}"), settings[name])
        items = [(f".{name}", settings[name]) for name in sorted(settings.keys() - changed)]
        return ("its class", kind), items

    def _module(self, path: str, module: Any) -> Inside:
        """Return the settings, tensors and inner modules of a torch module."""
        parts = dict(module_settings(module, is_used=self.is_used))
        # Those of a model given as an instance have a component for all of them.
        parts |= {} if self._is_model else {**module._parameters, **module._buffers}
        items = [(f".{name}", item) for name, item in {**parts, **module._modules}.items()]
        return ("its class", self._text(type(module), path)), items

    def _skip(self, path: str, value: Any) -> str:
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

    def _reference(self, path: str, value: Any) -> str:
        """Return the name of a function, class or module; queue the user's."""
        if id(value) not in self._labels:
            if isinstance(value, FunctionType):
                if is_own(value) or not is_named(value):
                    self._queue(value, value.__name__)
            elif is_own(value) and not self._is_whole(package_of(value)):
                is_class = isinstance(value, type)
                label = self._label(value, value.__name__ if is_class else f"the module {path}")
                take = self._class if is_class else self._all_of
                self._waiting.append(functools.partial(take, label if is_class else path, value))
        module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
        named = f"{module}.{name or value.__name__}".strip(".")
        return f"={self._labels.get(id(value), named)}"

    # Functions and what they look up

    def _queue(self, function: Any, name: str) -> None:
        """Queue a function, and the user's under the decorators of libraries."""
        shown = "the lambda" if name == "<lambda>" else f"{name}()"
        for layer in (unwrapped(function), function):
            if id(layer) in self._labels or not isinstance(layer, FunctionType):
                continue
            if not is_own(layer):
                label = self._label(layer, f"the decorator of {shown}")
                self._waiting.append(functools.partial(self._decorator, label, layer))
            elif not self._is_whole(package_of(layer)):
                take = functools.partial(self._function, self._label(layer, shown), layer)
                self._waiting.append(take)

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
            for chain in used.chains(name) or [()]:
                self._variable(word, name, value, chain, used)
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
            self._text(vars(function)["__wrapped__"], label)

    def _held(self, word: str, value: Any) -> None:
        """Record what a library's decorator holds: settings and the user's code, not its state."""
        if isinstance(value, MethodType):
            self._put(f"{word}: its method", self._text(value.__func__, word))
            self._held(word, value.__self__)
        elif _is_telling(value) or isinstance(value, (FunctionType, list, tuple, dict)):
            self._expand(word, value, 2)
        else:
            self._put(f"{word}: its class", self._text(type(value), word))
            # A context manager that is made anew for each call keeps its arguments.
            is_new = isinstance(value, contextlib._GeneratorContextManager)
            changed = () if is_new else changed_by_use(type(value))
            for name, item in sorted(attributes_of(value).items()):
                if name not in changed and not name.startswith("__") and _is_telling(item):
                    self._expand(f"{word}.{name}", item, 2)

    def _defaults(self, of: str, function: FunctionType) -> None:
        for name, item in inspect.signature(function, follow_wrapped=False).parameters.items():
            if item.default is not item.empty:
                self._expand(f"{of}the default of {name}", item.default, 2)

    def _globals(self, function: FunctionType, used: bytecode.Use) -> None:
        """Record the globals that a function reads, and the modules that it imports."""
        scope = function.__globals__
        for name, chain in used.reads:
            if name in scope and (not isinstance(scope[name], ModuleType) or is_own(scope[name])):
                path, value, rest = _followed(name, scope[name], chain)
                self._variable(f"the global {path}", name, value, rest, used)
        package = str(scope.get("__package__") or "")
        for name in used.imports:
            self._imported(name, package)

    def _variable(
        self, word: str, name: str, value: Any, chain: tuple[str, ...], used: bytecode.Use
    ) -> None:
        """Record a variable, or only the settings that are read of it."""
        if isinstance(value, (type, FunctionType, ModuleType)):
            text = self._text(value, word.removeprefix("the global "))
            if text not in (f"={name}", f"={name}()"):
                self._put(word, text)
            return
        if name in used.changes:
            self._skip(word, value)
            return
        settings: dict[str, Any] = {}
        if type(value) is dict:
            settings = {f"[{key!r}]": item for key, item in value.items()}
        elif not (is_module(value) or isinstance(value, (functools.partial, MethodType))):
            settings = {f".{key}": item for key, item in getattr(value, "__dict__", {}).items()}
        step = chain[0] if chain else ""
        if step in settings:
            self._expand(f"{word}{step}", settings[step], 2)
        elif not step or not self._partly(word, value, step[1:]):
            self._expand(word, value, 1)

    def _partly(self, word: str, value: Any, method: str) -> bool:
        """Record what a method uses of an object; return whether that is known."""
        used = None if is_module(value) else used_parts(value, method)
        if used is None:
            return False
        kind = type(value)
        methods, attributes = used
        for name, functions in sorted(methods.items()):
            for function in functions:
                self._method(f"{kind.__name__}.{name}", function)
        for name in sorted(attributes - (changed_by_use(kind) if self.is_used else set())):
            if name in vars(value):
                self._expand(f"{word}.{name}", vars(value)[name], 2)
            else:
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
                self._reference(f"{path}.{name}", value)

    def _imported(self, name: str, package: str) -> None:
        """Record a user's module that a function imports when it is called, by its file."""
        try:
            full = importlib.util.resolve_name(name, package or None)
            spec = importlib.util.find_spec(full)
            file = Path(spec.origin if spec and spec.origin else "")
            if file.suffix != ".py" or str(file) in self._imports or is_asynckfold(full):
                return
            self._imports.add(str(file))
            package = full.partition(".")[0]
            if not is_own_file(str(file)) or self._is_whole(package):
                return
            if package in sys.modules and spec and spec.parent:
                self._count(package, MODULE_STEPS)
            code = _compiled(str(file), file.stat().st_mtime_ns)
        except LargePackageError:
            raise
        except Exception:  # noqa: BLE001 - a package is imported to find its modules
            return
        self._put(f"the module {full}", f"code:{bytecode.digest(code)}")
        is_package = spec is not None and spec.submodule_search_locations
        for further in bytecode.use(code).imports:
            self._imported(further, full if is_package else full.rpartition(".")[0])

    # Classes

    def _class(self, label: str, kind: type) -> None:
        """Record a user's class with its methods and bases."""
        of = "" if kind is self._main else f"{label}."
        bases = [self._text(base, label) for base in (*kind.__bases__, type(kind))]
        self._put(f"the bases of {label}", "#" + sha(repr(bases)))
        is_enum = issubclass(kind, enum.Enum)
        if issubclass(kind, enum.Enum):
            members = {name: item.value for name, item in kind.__members__.items()}
            self._put(f"the members of {label}", self._text(members, label))
        for name, value in sorted(vars(kind).items()):
            functions = functions_of(value)
            # Such as the notes that copyreg makes when an object is pickled.
            is_note = name.startswith("__") and name.endswith("__") and not functions
            is_slot = isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))
            if name in _UNUSED or is_slot or is_note or (is_enum and not functions):
                continue
            for function in functions:
                self._method(f"{of}{name}", function)
            if not functions:
                self._expand(f"{of}{name}", value, 2)

    def _method(self, name: str, function: Any) -> None:
        self._queue(function, name)
        if not isinstance(function, FunctionType) or id(function) not in self._labels:
            self._put(name, self._text(function, name))

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


def sha(text: str, data: bytes = b"") -> str:
    """Return the shortened SHA-256 of a text and bytes."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass") + data).hexdigest()[:16]


def short_name(value: Any) -> str:
    """Return the name of a function or class, or of the class of an object."""
    name = getattr(value, "__name__", None) or type(value).__name__
    return "lambda" if name == "<lambda>" else str(name)


def _joined(path: str, rest: str) -> str:
    return path + rest if path else rest.lstrip(".: ")


def _steps_of(steps: Sequence[Any]) -> Inside:
    names = [short_name(step) for step in steps]
    shown = (f": step {place} ({name})" for place, name in enumerate(names, 1))
    return ("its steps", f"={', '.join(names)}"), list(zip(shown, steps, strict=True))


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
    plain = (*_PLAIN, str, bytes, type, functools.partial)
    return isinstance(value, plain) or is_module(value) or is_own(type(value))


def _followed(path: str, value: Any, chain: tuple[str, ...]) -> tuple[str, Any, tuple[str, ...]]:
    """Follow attributes of modules; return path, value, and the rest of the chain."""
    rest = list(chain)
    while rest and isinstance(value, ModuleType) and hasattr(value, rest[0][1:]):
        path, value = path + rest[0], getattr(value, rest.pop(0)[1:])
    return path, value, tuple(rest)


def _tensor(tensor: Any) -> str:
    torch = sys.modules["torch"]
    if hasattr(tensor, "materialize"):
        return "=not yet initialized"  # of a lazy module
    held = tensor.detach().cpu()
    held = held.to_dense() if held.layout is not torch.strided else held
    data = held.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return "#" + sha(f"{held.dtype} {tuple(held.shape)} {tensor.requires_grad}", data)


def _without_place(text: str, everywhere: bool) -> str:
    """Reduce an absolute path to its last part: files may move.

    >>> _without_place("/data/weights.pt", False), _without_place("a/b.pt", False)
    ('weights.pt', 'a/b.pt')
    >>> _without_place("../data", True)
    'data'
    """
    path = PurePath(text)
    is_path = path.is_absolute() or (everywhere and len(path.parts) > 1)
    if len(text) > 4096 or "\n" in text or not is_path:
        return text
    return "" if str(path.parent) == tempfile.gettempdir() else path.name
