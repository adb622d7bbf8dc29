"""A model as a graph of torch calls, with the shape of every value.

Built on torch.fx (Reed et al. 2022). Cases that symbolic tracing would silently get wrong are
caught here: in-place operators, which a proxy would turn into copies; a changed grad or autocast
mode, which a graph does not hold; fast paths of attention, which depend on values.
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

from asynckfold.training import seeding
from asynckfold.training.calls import POSITIONS, call_by, way_of
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.model_state import describe


@dataclass(frozen=True)
class Trace:
    """One forward of one model.

    Every node of ``graph`` has ``meta["layer"]``, and after `with_examples` ``meta["example"]``;
    ``leaves`` are the modules that were not traced into, by path; ``constants`` are tensors that
    are neither parameters nor buffers.
    """

    graph: fx.Graph
    leaves: dict[str, nn.Module]
    constants: dict[str, torch.Tensor]

    def text(self) -> list[tuple[Any, ...]]:
        """Return what is equal for replicas that compute the same."""
        return [
            (node.op, node.target, repr(node.args), repr(node.kwargs)) for node in self.graph.nodes
        ]


class _Proxy(fx.Proxy):  # type: ignore[no-any-unimported,misc,unused-ignore]
    """Records in-place operators, which Python would turn into copies."""

    def _in_place(self, function: Callable[..., Any], other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: Any) -> Any:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._in_place(operator.itruediv, other)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, leaf_types: frozenset[type], arguments: Arguments) -> None:
        super().__init__()
        self.leaf_types = leaf_types
        self.arguments = arguments
        self.layers: list[str] = []
        self.mode = _mode()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in self.leaf_types

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # When the forward raises, the last entry names the layer.
        self.layers.append(describe(self.path_of_module(m), m))
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

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _mode() != self.mode:
            raise NotFusible(f"{self.layer} changes the grad or autocast mode in its forward")
        node = super().create_node(*args, **kwargs)
        node.meta["layer"] = self.layer
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    @property
    def layer(self) -> str:
        return self.layers[-1] if self.layers else "the model"


def _mode() -> tuple[bool, ...]:
    devices = ("cpu", "cuda")
    return (torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in devices))


@contextmanager
def _slow_attention() -> Iterator[None]:
    """Disable the fast path of attention, which needs values that a trace does not have."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def trace(
    model: nn.Module, arguments: Arguments, *, training: bool, leaf_types: frozenset[type]
) -> Trace:
    """Trace a copy of the model in one mode, without tracing into modules of `leaf_types`."""
    root = copied(model).train(training)
    known = dict(root.named_parameters()) | dict(root.named_buffers())
    drawn = _generator_states(arguments.example)
    tracer = _Tracer(leaf_types, arguments)
    # The user's code may raise anything on proxies; that becomes the reason.
    try:
        with _slow_attention(), torch.enable_grad():
            graph = tracer.trace(root)
    except NotFusible:
        raise
    except Exception as error:
        raise NotFusible(f"{tracer.layer} cannot be traced: {first_sentence(error)}") from error
    if not all(map(torch.equal, _generator_states(arguments.example), drawn)):
        raise NotFusible("the forward draws random numbers that no input leads to")
    after = dict(root.named_parameters()) | dict(root.named_buffers())
    for name, tensor in known.items():
        if after.get(name) is not tensor:
            raise NotFusible(f"the forward replaces {name}")
    constants, leaves = {}, {}
    for node in graph.nodes:
        if node.op == "get_attr" and node.target not in known:
            constants[node.target] = operator.attrgetter(node.target)(root)
        elif node.op == "call_module":
            leaves[node.target] = root.get_submodule(node.target)
    return Trace(graph, leaves, constants)


def _generator_states(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    devices = {item.device: None for item in inputs}
    return [seeding.state_on(device) for device in (torch.device("cpu"), *devices)]


def with_examples(
    traced: Trace, model: nn.Module, inputs: Sequence[torch.Tensor], *, training: bool
) -> Trace:
    """Store at each node the shape and dtype of what a copy of the model computes there."""
    root = copied(model).train(training)
    for name, constant in traced.constants.items():
        owner, _, last = name.rpartition(".")
        setattr(root.get_submodule(owner), last, constant)
    with torch.no_grad(), _slow_attention():
        try:
            _Examples(root, graph=traced.graph).run(*inputs)
        except Exception as error:
            raise NotFusible(f"the model's trace fails: {first_sentence(error)}") from error
    return traced


class _Examples(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["example"] = pytree.tree_map_only(
            torch.Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), result
        )
        return result


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
