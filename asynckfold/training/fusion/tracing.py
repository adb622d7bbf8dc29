"""A model as a graph of torch calls, with the shape of every value.

Built on torch.fx (Reed et al. 2022). Each call is also carried out on an example as it is recorded,
so that a forward may ask for ranks. What a graph does not hold, such as a changed grad mode or the
memory that views share, changes numbers: the comparison with plain steps finds it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from asynckfold.training.calls import POSITIONS, call_by, way_of
from asynckfold.training.fusion.decompositions import DECOMPOSED, multihead
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.model_state import describe


@dataclass(frozen=True)
class Trace:
    """One forward of one model.

    Every node of ``graph`` has ``meta["layer"]`` and ``meta["example"]``; ``constants`` are tensors
    that are neither parameters nor buffers.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]

    def text(self) -> list[tuple[Any, ...]]:
        """Return what is equal for replicas that compute the same."""
        return [
            (node.op, node.target, repr(node.args), repr(node.kwargs)) for node in self.graph.nodes
        ]


class _Proxy(fx.Proxy):  # type: ignore[no-any-unimported,misc,unused-ignore]
    """Knows its rank, and records in-place operators, which Python would turn into copies."""

    def dim(self) -> int:
        return int(self.node.meta["example"].dim())

    ndim = property(dim)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _recorded(function: Callable[..., Any]) -> Any:
    return lambda self, other: self.tracer.create_proxy(
        "call_function", function, (self, other), {}
    )


for _name in ("iadd", "isub", "imul", "itruediv"):
    setattr(_Proxy, f"__{_name}__", _recorded(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, root: nn.Module, arguments: Arguments) -> None:
        super().__init__()
        self.arguments = arguments
        self.layers: list[str] = []
        self.inputs = iter([item.clone() for item in arguments.example])
        self.known: dict[str, torch.Tensor] = {
            **dict(root.named_parameters(remove_duplicate=False)),
            **dict(root.named_buffers(remove_duplicate=False)),
        }

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # When the forward raises, the last entry names the layer.
        self.layers.append(describe(self.path_of_module(m), m))
        if type(m) is nn.MultiheadAttention:
            forward = partial(multihead, m)
        result = super().call_module(m, forward, args, kwargs)
        self.layers.pop()
        return result

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        # One proxy per given tensor; other arguments keep their defaults.
        names = [f"input_{i}" for i in range(len(self.arguments.example))]
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in names]

        def forward(root: nn.Module, *leaves: Any) -> Any:
            return self.arguments.call(partial(root_fn, root), leaves)

        return forward, [self.root, *proxies]

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **names: Any
    ) -> Any:
        if target in DECOMPOSED:
            return DECOMPOSED[target](*args, **kwargs)
        return super().create_proxy(kind, target, args, kwargs, *rest, **names)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["layer"] = self.layer
        with torch.no_grad():
            node.meta["example"] = self._example(node)
        return node

    def _example(self, node: fx.Node) -> Any:
        name: Any = node.target
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda other: other.meta["example"]
        )
        if node.op == "placeholder":
            return next(self.inputs)
        if node.op == "get_attr":
            return self.known[name] if name in self.known else operator.attrgetter(name)(self.root)
        if node.op == "output":
            return None
        return (
            getattr(args[0], name)(*args[1:], **kwargs)
            if node.op == "call_method"
            else name(*args, **kwargs)
        )

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    @property
    def layer(self) -> str:
        return self.layers[-1] if self.layers else "the model"


@contextmanager
def _slow_attention() -> Iterator[None]:
    """Disable the fast path of attention, which needs values that a trace does not have."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def trace(model: nn.Module, arguments: Arguments, *, training: bool) -> Trace:
    """Trace a copy of the model in one mode."""
    root = copied(model).train(training)
    tracer = _Tracer(root, arguments)
    # The user's code may raise anything on proxies; that becomes the reason.
    try:
        with _slow_attention():
            graph = tracer.trace(root)
    except Exception as error:
        raise NotFusible(f"{tracer.layer} cannot be traced: {first_sentence(error)}") from error
    constants = {
        node.target: node.meta["example"]
        for node in graph.nodes
        if node.op == "get_attr" and node.target not in tracer.known
    }
    for node in graph.nodes:
        node.meta["example"] = pytree.tree_map_only(
            torch.Tensor, partial(torch.empty_like, device="meta"), node.meta["example"]
        )
    return Trace(graph, constants)


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise NotFusible(f"the model cannot be copied: {first_sentence(error)}") from error


def first_sentence(error: BaseException) -> str:
    """Return the type of an exception, and the first sentence of its message."""
    text = " ".join(str(error).split()).split(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {text}"[:200]


def leaves_of(arguments: Sequence[Any]) -> Sequence[Any]:
    """Return the tensors of arguments that may be dicts, tuples and lists of tensors, in order."""
    if all(isinstance(item, torch.Tensor) for item in arguments):
        return arguments
    leaves: list[Any] = pytree.tree_leaves(tuple(arguments))
    return leaves


@dataclass(frozen=True)
class Arguments:
    """How the plain models take what a fused forward gets as tensors.

    ``example`` are the tensors for one batch of one replica; ``spec`` and ``way`` say how a plain
    forward gets them.
    """

    example: Sequence[torch.Tensor]
    spec: pytree.TreeSpec
    way: str

    @classmethod
    def of(cls, model: nn.Module, arguments: Sequence[Any]) -> Arguments:
        """Flatten the arguments; a single tree is passed as `calls.call_model` does."""
        inputs: Any = tuple(arguments)
        way = POSITIONS
        if len(inputs) == 1 and not isinstance(inputs[0], torch.Tensor):
            (inputs,) = inputs
            way = way_of(model, inputs)
        leaves, spec = pytree.tree_flatten(inputs)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise NotFusible(f"an input is no tensor but a {type(leaf).__name__}")
        return cls(leaves, spec, way)

    def call(self, forward: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """Call a plain forward with tensors, or with what stands for them."""
        return call_by(self.way, forward, pytree.tree_unflatten(list(leaves), self.spec))
