"""From the graph of one model to the graph of R replicas.

Common functions have a rule, which emits their batched form; any other is called once for all
replicas, as by `torch.func.vmap`. In-place operations become ordinary ones, after which the name
stands for the new value; only writes into buffers stay writes. Where another view of the memory is
read later, that is wrong, and the comparison with plain steps finds it.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from asynckfold.training import torch_internals
from asynckfold.training.fusion import layouts
from asynckfold.training.fusion.layouts import Layout, NotFusible, Slot, Value
from asynckfold.training.fusion.tracing import Trace, first_sentence

Emitted = tuple[Layout, Any]
"""(layout of the result, its node)."""

Rule = Callable[..., Any]
"""(lowering, arguments of the plain call with `Value` for each traced value) → `Emitted`, or
NotImplemented where it does not cover them."""

Rules = Mapping[Any, Rule]
"""By function, or by the name of a tensor's method; ``name`` covers ``name_``."""

IN_PLACE_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.setitem: None,
}


@dataclass(eq=False)
class _Cell:
    """The present value of a name of the plain model."""

    value: Value


class Lowering:
    """The batched graph of `width` replicas in progress.

    ``slots`` are all parameters and buffers by name, ``aliases`` further names of tied ones;
    ``constants`` are the trace's, stacked where the replicas differ.
    """

    def __init__(
        self,
        traced: Trace,
        rules: Rules,
        width: int,
        slots: Mapping[str, Slot],
        aliases: Mapping[str, str],
        constants: Mapping[str, tuple[Layout, torch.Tensor]],
    ) -> None:
        self.traced, self.rules, self.width = traced, rules, width
        self.slots, self.aliases, self.constants = slots, aliases, constants
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.storage = {name: self.graph.placeholder(f"stack_{i}") for i, name in enumerate(slots)}
        self.generators = self.graph.placeholder("generators")
        self.cells: dict[fx.Node, _Cell] = {}
        self.attributes: dict[str, _Cell] = {}
        self.converted: dict[tuple[Value, Layout], Any] = {}

    # What rules call

    def emit(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a call of a function, or of a method by name.

        Arguments may be nodes, shared values or plain objects.
        """
        call = self.graph.call_method if isinstance(function, str) else self.graph.call_function
        return call(function, self._nodes(args), self._nodes(kwargs))

    def on_stacked(self, function: Any, input: Value, *args: Any, **kwargs: Any) -> Emitted:
        """Add a call whose input and result are (R, ...)."""
        return Layout.STACKED, self.emit(function, self.stacked(input), *args, **kwargs)

    def on_channels(self, function: Any, input: Value, *args: Any, **kwargs: Any) -> Emitted:
        """Add a call whose input and result are (B, R·C, ...)."""
        return Layout.CHANNELS, self.emit(function, self.channels(input), *args, **kwargs)

    def on_each(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Emitted:
        """Add one call for all replicas of a function that sees plain values, as by `vmap`."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        differs = [isinstance(v, Value) and v.layout is not Layout.SHARED for v in leaves]
        nodes = [
            self.stacked(item) if apart else item
            for item, apart in zip(leaves, differs, strict=True)
        ]
        return Layout.STACKED, self.emit(_vmapped(function, spec, differs, self.width), *nodes)

    def stacked(self, value: Value) -> Any:
        """Return the node of a value in the layout (R, ...)."""
        if value.layout is Layout.STACKED:
            return value.node
        convert = layouts.unfold if value.layout is Layout.CHANNELS else layouts.spread
        return self._convert(value, Layout.STACKED, convert, value.node, self.width)

    def aligned(self, value: Value, rank: int) -> Any:
        """Return a node that broadcasts against stacked values of this plain rank."""
        if value.layout is Layout.SHARED:
            return value.node
        node = self.stacked(value)
        return node if value.rank == rank else self.emit(layouts.align, node, rank)

    def channels(self, value: Value) -> Any:
        """Return the node of a value in the layout (B, R·C, ...)."""
        if value.layout is Layout.CHANNELS:
            return value.node
        if value.rank < 2:
            raise NotFusible(f"an input of {value.rank} dimensions has no channels")
        return self._convert(value, Layout.CHANNELS, layouts.fold, self.stacked(value))

    # The walk

    def run(self, improve: Callable[[fx.Graph], None]) -> fx.GraphModule:
        """Lower every node; return the module of the batched graph, after `improve`."""
        for node in self.traced.graph.nodes:
            try:
                self._lower(node)
            except Exception as error:
                text = f"{node.meta['layer']}: {node.target} has no batched form"
                raise NotFusible(f"{text}: {first_sentence(error)}") from error
        for node in reversed(self.graph.nodes):
            if node.op == "call_method" and node.target == "permute" and not node.users:
                self.graph.erase_node(node)  # the weight is used only in the stack's order
        improve(self.graph)
        return fx.GraphModule(self.root, self.graph)

    def _lower(self, node: fx.Node) -> None:
        if node.op == "output":
            self.graph.output(pytree.tree_map_only(Value, self.stacked, self._values(node.args[0])))
        elif node.op == "placeholder":
            here = self.graph.placeholder(str(node.target))
            self.cells[node] = _Cell(Value(here, Layout.STACKED, node.meta["example"]))
        elif node.op == "get_attr":
            self.cells[node] = self._attribute(str(node.target), node.meta["example"])
        else:
            self._call(node)

    def _attribute(self, name: str, example: torch.Tensor) -> _Cell:
        if name in self.constants:
            layout, tensor = self.constants[name]
            target = f"constant_{len(self.cells)}"
            self.root.register_buffer(target, tensor)
            return _Cell(Value(self.graph.get_attr(target), layout, example))
        name = self.aliases.get(name, name)
        if name not in self.attributes:
            order = self.slots[name].inverse
            node: Any = self.storage[name]
            if order != tuple(range(len(order))):
                node = self.emit("permute", node, 0, *(1 + dim for dim in order))
            self.attributes[name] = _Cell(Value(node, Layout.STACKED, example, name))
        return self.attributes[name]

    def _call(self, node: fx.Node) -> None:
        args, kwargs = self._values((node.args, node.kwargs))
        example = node.meta["example"]
        values = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Value)]
        if all(value.layout is Layout.SHARED for value in values):
            result = self.emit(node.target, *args, **kwargs)
            self.cells[node] = _Cell(Value(result, Layout.SHARED, example))
            return
        function, args, kwargs, in_place = _ordinary(node, args, kwargs)
        rule = self.rules.get(function)
        emitted: Any = rule(self, *args, **kwargs) if rule else NotImplemented
        if emitted is NotImplemented:
            emitted = self.on_each(_plain_call(node, function, in_place=in_place), *args, **kwargs)
        layout, result = emitted
        if in_place:
            self._overwrite(node, layout, result)
            return
        if not any(isinstance(item, torch.Tensor) for item in pytree.tree_leaves(example)):
            layout = Layout.SHARED  # sizes, ranks and types are equal in all replicas
        self.cells[node] = _Cell(Value(result, layout, example))

    def _overwrite(self, node: fx.Node, layout: Layout, result: Any) -> None:
        operand: Any = node.args[0]
        cell = self.cells[operand]
        old, new = cell.value, Value(result, layout, cell.value.example)
        if old.name:
            self.emit("copy_", self.storage[old.name], self.stacked(new))
            new = Value(old.node, old.layout, old.example, old.name)
        cell.value = new
        self.cells[node] = cell

    # Bookkeeping

    def _convert(self, value: Value, layout: Layout, function: Any, *args: Any) -> Any:
        if (value, layout) not in self.converted:
            self.converted[value, layout] = self.emit(function, *args)
        return self.converted[value, layout]

    def _values(self, tree: Any) -> Any:
        def value_of(item: Any) -> Any:
            return self.cells[item].value if isinstance(item, fx.Node) else item

        return fx.node.map_aggregate(tree, value_of)

    def _nodes(self, tree: Any) -> Any:
        def node_of(item: Any) -> Any:
            if not isinstance(item, Value):
                return item
            if item.layout is not Layout.SHARED:
                raise NotFusible("a value differs between replicas where it must not")
            return item.node

        return fx.node.map_aggregate(tree, node_of)


def _vmapped(
    function: Callable[..., Any], spec: pytree.TreeSpec, differs: Sequence[bool], width: int
) -> Callable[..., Any]:
    """Return what calls a function on the leaves of its arguments, some of them (R, ...)."""

    def vmapped(*leaves: Any) -> Any:
        torch_internals.allow_loops(False)  # no faster than separate jobs
        level = torch_internals.enter_vmap(width, "error")

        def inner(item: torch.Tensor) -> Any:
            return torch_internals.batched(item, 0, level)

        def outer(item: torch.Tensor) -> Any:
            return torch_internals.unbatched(item, level, width, 0)

        try:
            plain = [
                pytree.tree_map_only(torch.Tensor, inner, item) if apart else item
                for item, apart in zip(leaves, differs, strict=True)
            ]
            args, kwargs = pytree.tree_unflatten(plain, spec)
            return pytree.tree_map_only(torch.Tensor, outer, function(*args, **kwargs))
        finally:
            torch_internals.leave_vmap()
            torch_internals.allow_loops(True)

    return vmapped


def _ordinary(
    node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, Sequence[Any], dict[str, Any], bool]:
    """Return a call without its in-place form: (function or method, args, kwargs, in place)."""
    target: Any = node.target
    name = target if node.op == "call_method" else getattr(target, "__name__", "")
    if target in IN_PLACE_OPERATORS and args[0].is_tensor:
        return IN_PLACE_OPERATORS[target], args, kwargs, True
    if node.op == "call_method" and name.endswith("_") and not name.endswith("__"):
        return name[:-1], args, kwargs, True
    if name.endswith("_") and (twin := getattr(torch, name[:-1], None)):
        return twin, args, kwargs, True
    if inspect.isfunction(target) and "inplace" in inspect.signature(target).parameters:
        bound = inspect.signature(target).bind(*args, **kwargs)
        in_place = bool(bound.arguments.pop("inplace", False))
        return target, bound.args, bound.kwargs, in_place
    return target, args, kwargs, False


def _plain_call(node: fx.Node, function: Any, *, in_place: bool) -> Callable[..., Any]:
    """Return the plain function of a node; one that works in place works on a copy."""
    target: Any = node.target
    if node.op == "call_method":
        target = getattr(torch.Tensor, target)
    if not in_place or target is function:
        return target  # type: ignore[no-any-return]

    def changed(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = x.clone()
        target(copy, *args, **kwargs)
        return copy

    return changed
