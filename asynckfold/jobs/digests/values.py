"""A value as a short text, equal for equal values in any process.

``=0.1`` is the value itself, ``#5be1…`` a hash of its content, ``?Lock`` only its type.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import sys
import tempfile
import types
from collections import OrderedDict, deque
from collections.abc import Mapping
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from asynckfold.jobs.digests.states import (
    DEEPEST,
    PLAIN,
    is_module,
    is_wrapper,
    settings_of,
)

if TYPE_CHECKING:
    from asynckfold.jobs.digests.parts import PartDigests

MOST_ITEMS = 64
"""Containers of a data set that hold more are samples, which its fingerprint covers."""

SHOWN = 8
"""Items of a list of numbers that are shown as they are."""

_CHOSEN_SEED = 2**64
"""A seed of the operating system's choice has 128 bits."""


class Tensors:
    """Tensors by content, each hashed once."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._kept: list[Any] = []

    def text(self, tensor: Any) -> str:
        """Return the text of a tensor."""
        key = id(tensor)
        if key not in self._known:
            self._known[key] = _tensor(tensor)
            self._kept.append(tensor)  # alive, so that its id is not reused
        return self._known[key]


class Values:
    """The texts of one part's values."""

    def __init__(self, named: PartDigests, tensors: Tensors) -> None:
        self.named = named
        self.tensors = tensors
        self._within: set[int] = set()

    def text(self, value: Any, path: str, depth: int = 0) -> str:
        """Return the text of a value at `path`."""
        if type(value) in PLAIN:
            return f"={value!r}"
        if type(value) is str:
            return "#" + sha("str:" + _without_place(value, self.named.is_data))
        if depth > DEEPEST:
            return self.named.skip(path, value)
        if id(value) in self._within:
            return "=itself"
        name = self.named.refer(value, path)
        if name is not None:
            return name
        self._within.add(id(value))
        try:
            return self._text(value, path, depth + 1)
        except Exception:  # noqa: BLE001 - properties and the like are the user's code
            return self.named.skip(path, value)
        finally:
            self._within.discard(id(value))

    def _text(self, value: Any, path: str, depth: int) -> str:
        kind = type(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return "#" + hashlib.sha256(bytes(value)).hexdigest()[:16]
        if isinstance(value, PurePath):
            return "#" + sha("path:" + _without_place(str(value), self.named.is_data))
        if isinstance(value, enum.Enum):
            content = self.text(value.value, path, depth)
            return "#" + sha(f"{self.text(kind, path, depth)} {value.name} {content}")
        if isinstance(value, (list, tuple, deque)):
            return self._sequence(value, path, depth)
        if isinstance(value, (set, frozenset)):
            return self._set(value, path, depth)
        if kind in (dict, OrderedDict, types.MappingProxyType):
            return self._mapping(value, path, depth)
        if isinstance(value, (FunctionType, ModuleType, type)):
            return f"={full_name(value)}"
        known = self.known(value, path, depth)
        return self._object(value, path, depth) if known is None else known

    def _is_samples(self, count: int) -> bool:
        return self.named.is_data and count > MOST_ITEMS

    def _sequence(self, value: Any, path: str, depth: int) -> str:
        kind = type(value)
        if self._is_samples(len(value)):
            return f"={kind.__name__}"
        plain = all(type(item) in PLAIN for item in value)
        if plain and len(value) <= SHOWN and kind in (list, tuple):
            return f"={value!r}"
        texts = [self.text(item, f"{path}[{place}]", depth) for place, item in enumerate(value)]
        return "#" + sha(f"{self.text(kind, path, depth)} {texts}")

    def _set(self, value: Any, path: str, depth: int) -> str:
        if self._is_samples(len(value)):
            return "=set"
        return "#" + sha(f"set {sorted(self.text(item, path, depth) for item in value)}")

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> str:
        if self._is_samples(len(value)):
            return "=dict"
        pairs = [
            f"{self.text(key, path, depth)} {self.text(item, _at(path, key), depth)}"
            for key, item in value.items()
        ]
        ordered = type(value) is OrderedDict
        return "#" + sha(f"dict {pairs if ordered else sorted(pairs)}")

    def known(self, value: Any, path: str, depth: int = 0) -> str | None:
        """Return the text of a value of torch, NumPy, pandas and the like; None for others."""
        kind = type(value)
        if is_module(value):
            return None
        if isinstance(value, (logging.Logger, logging.LoggerAdapter)):
            return "=logger"
        if kind.__module__ == "random":
            return self.named.skip(path, value)
        if kind.__module__.startswith("pandas.") and hasattr(value, "__array__"):
            array = sys.modules["numpy"].asarray(value)
            return f"={kind.__name__}" if self.named.is_data else self.text(array, path, depth)
        for package, function in (("torch", self._torch), ("numpy", self._numpy)):
            library = sys.modules.get(package)
            text = function(library, value, path, depth) if library is not None else None
            if text is not None:
                return text
        return None

    def _torch(self, torch: Any, value: Any, path: str, depth: int) -> str | None:
        if isinstance(value, torch.Tensor):
            return "=Tensor" if self._is_samples(value.numel()) else self.tensors.text(value)
        if isinstance(value, torch.Generator):
            return f"=seed {value.initial_seed()}"
        if isinstance(value, torch.dtype):
            return f"={value!r}"
        return "=device" if isinstance(value, torch.device) else None

    def _numpy(self, numpy: Any, value: Any, path: str, depth: int) -> str | None:
        if isinstance(value, numpy.ndarray):
            if self._is_samples(value.size):
                return "=ndarray"
            if value.dtype.hasobject:
                return "#" + sha(f"{value.shape} {self.text(value.ravel().tolist(), path, depth)}")
            data = numpy.ascontiguousarray(value).reshape(-1)
            return "#" + sha(f"{value.dtype} {value.shape}", data.view("u1") if data.size else b"")
        if isinstance(value, numpy.generic):
            usual = type(value) in (numpy.float64, numpy.int64, numpy.bool_)
            return f"={value.item()!r}" if usual else f"={type(value).__name__}({value.item()!r})"
        if isinstance(value, numpy.dtype):
            return f"={value!r}"
        if isinstance(value, numpy.random.Generator):
            # By its seed: its state changes as it is used.
            seeds = getattr(value.bit_generator, "seed_seq", None)
            entropy = getattr(seeds, "entropy", None)
            if isinstance(entropy, int) and entropy < _CHOSEN_SEED:
                return f"=seed {entropy} {getattr(seeds, 'spawn_key', ())}"
            return self.named.skip(path, value)
        if isinstance(value, numpy.random.RandomState):
            return self.named.skip(path, value)
        return None

    def _object(self, value: Any, path: str, depth: int) -> str:
        """Return an object by class and settings."""
        if is_module(value):
            self.named.module(path, value)
            return f"={type(value).__name__}"
        kind = self.text(type(value), path, depth)
        if is_wrapper(value):
            return "#" + sha(f"{kind} {self.text(value.__wrapped__, path, depth)}")
        attributes = settings_of(value, is_used=self.named.is_used)
        if attributes is None:
            return self._pickled(value, kind, path, depth)
        settings, changed = attributes
        for name in changed:
            self.named.skip(f"{path}.{name}", getattr(value, name))
        texts = [(name, self.text(item, f"{path}.{name}", depth)) for name, item in settings]
        return "#" + sha(f"{kind} {texts}")

    def _pickled(self, value: Any, kind: str, path: str, depth: int) -> str:
        """Return an object without attributes by its pickled form."""
        parts = value.__reduce_ex__(4)
        if isinstance(parts, str):
            return f"={full_name(value)}"
        content = [self.text(item, path, depth) for item in parts[1:3]]
        items = [list(item) for item in parts[3:5] if item is not None]
        return "#" + sha(f"{kind} {content} {[self.text(item, path, depth) for item in items]}")


def sha(text: str, data: Any = b"") -> str:
    """Return the shortened SHA-256 of a text and bytes."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    digest.update(data)
    return digest.hexdigest()[:16]


def full_name(value: Any) -> str:
    """Return a qualified name with its module."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    module = getattr(value, "__module__", None) or ""
    return f"{module}.{name or type(value).__name__}".strip(".")


def _at(path: str, key: Any) -> str:
    return f"{path}[{key!r:.40}]" if type(key) in (*PLAIN, str) else f"{path}[…]"


def _tensor(tensor: Any) -> str:
    torch: Any = sys.modules["torch"]
    try:
        held = tensor.detach()
        head = f"{held.dtype} {tuple(held.shape)} {tensor.requires_grad}"
    except (RuntimeError, ValueError, AttributeError):
        return "=not yet initialized"  # of a lazy module
    try:
        plain = held.cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
    except (RuntimeError, TypeError, NotImplementedError):
        # Sparse and quantized ones.
        return "#" + sha(f"{head} {held.to_dense().tolist() if held.is_sparse else held}")
    return "#" + sha(head, data)


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
