"""From the graph of one model to the graph of R replicas.

The rule of each function emits its batched form. In-place operations become ordinary ones, after
which the name stands for the new value; that is the same as long as no other view reads the old
memory, which is checked. Only writes into buffers stay writes.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from asynckfold.training.fusion import layouts
from asynckfold.training.fusion.layouts import Layout, NotFusible, Slot, Value
from asynckfold.training.fusion.tracing import Trace

Emitted = tuple[Layout, Any]
"""(layout of the result, its node)."""

Rule = Callable[..., Emitted]
"""(lowering, arguments of the plain call with `Value` for each traced value) → `Emitted`."""


@dataclass(frozen=True)
class Rules:
    """The rules of functions, methods of tensors (``name`` covers ``name_``), and leaf modules.

    Modules with a rule are not traced into; the rule gets their path and the module first.
    ``aliases`` are functions and methods whose result may be a view of their first argument,
    ``random`` those that draw random numbers and have no rule.
    """

    functions: dict[Callable[..., Any], Rule]
    methods: dict[str, Rule]
    leaves: dict[type[nn.Module], Rule]
    aliases: frozenset[str]
    random: frozenset[str]


IN_PLACE_OPERATORS: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.setitem: operator.setitem,
}


@dataclass(eq=False)
class _Cell:
    """The present value of a name of the plain model, and the names that share its memory."""

    value: Value
    family: list[fx.Node] = field(default_factory=list)


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
        slots: dict[str, Slot],
        aliases: dict[str, str],
        constants: dict[str, tuple[Layout, torch.Tensor]],
    ) -> None:
        self.traced, self.rules, self.width = traced, rules, width
        self.slots, self.aliases, self.constants = slots, aliases, constants
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.storage = {name: self.graph.placeholder(f"stack_{i}") for i, name in enumerate(slots)}
        self.generators = self.graph.placeholder("generators")
        self.position = {node: i for i, node in enumerate(traced.graph.nodes)}
        self.cells: dict[fx.Node, _Cell] = {}
        self.attributes: dict[str, _Cell] = {}
        self.converted: dict[tuple[Value, Layout], Any] = {}

    # What rules call

    def emit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add a call to the graph; arguments may be nodes, shared values or plain objects."""
        args, kwargs = self._nodes(args), self._nodes(kwargs)
        return self.graph.call_function(function, args, kwargs)

    def emit_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Add a call of a tensor's method to the graph."""
        return self.graph.call_method(name, self._nodes(args), self._nodes(kwargs))

    def on_stacked(
        self, function: Callable[..., Any], input: Value, *args: Any, **kwargs: Any
    ) -> Emitted:
        """Add a call whose input and result are (R, ...)."""
        return Layout.STACKED, self.emit(function, self.stacked(input), *args, **kwargs)

    def on_channels(
        self, function: Callable[..., Any], input: Value, *args: Any, **kwargs: Any
    ) -> Emitted:
        """Add a call whose input and result are (B, R·C, ...)."""
        return Layout.CHANNELS, self.emit(function, self.channels(input), *args, **kwargs)

    def stacked(self, value: Value) -> Any:
        """Return the node of a value in the layout (R, ...)."""
        if value.layout is Layout.STACKED:
            return value.node
        if value.layout is Layout.CHANNELS:
            return self._convert(value, Layout.STACKED, layouts.unfold, value.node, self.width)
        return self._convert(value, Layout.STACKED, layouts.spread, value.node, self.width)

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

    def parameter(self, name: str) -> Value:
        """Return a parameter or buffer by name, in plain order."""
        name = self.aliases.get(name, name)
        if name not in self.attributes:
            slot, node = self.slots[name], self.storage[name]
            if not slot.is_plain:
                node = self.emit_method("permute", node, 0, *(1 + dim for dim in slot.inverse))
            example = torch.empty((0,) * len(slot.order), device="meta")
            self.attributes[name] = _Cell(Value(node, Layout.STACKED, example, name))
        return self.attributes[name].value

    # The walk

    def run(self, improve: Callable[[fx.Graph], None]) -> fx.GraphModule:
        """Lower every node; return the module of the batched graph, after `improve`."""
        for node in self.traced.graph.nodes:
            try:
                self._lower(node)
            except NotFusible as error:
                layer = node.meta.get("layer", "the model")
                raise NotFusible(f"{layer}: {error}") from error
            except TypeError as error:
                # The signature of a rule limits what it covers.
                layer = node.meta.get("layer", "the model")
                raise NotFusible(
                    f"{layer}: {_name(node)} is called in a way that has no batched form: {error}"
                ) from error
        for node in reversed(self.graph.nodes):
            if node.op == "call_method" and node.target == "permute" and not node.users:
                self.graph.erase_node(node)  # the weight is used only in the stack's order
        improve(self.graph)
        return fx.GraphModule(self.root, self.graph)

    def _lower(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            value = Value(
                self.graph.placeholder(str(node.target)), Layout.STACKED, node.meta["example"]
            )
            self.cells[node] = _Cell(value, [node])
        elif node.op == "get_attr":
            self._attribute(node)
        elif node.op == "output":
            self.graph.output(pytree.tree_map_only(Value, self.stacked, self._values(node.args[0])))
        else:
            self._call(node)

    def _attribute(self, node: fx.Node) -> None:
        name = str(node.target)
        if name in self.constants:
            layout, tensor = self.constants[name]
            target = f"constant_{len(self.cells)}"
            self.root.register_buffer(target, tensor)
            value = Value(self.graph.get_attr(target), layout, node.meta["example"])
            self.cells[node] = _Cell(value, [node])
            return
        parameter = self.parameter(name)
        cell = self.attributes[parameter.name]
        cell.value = Value(parameter.node, parameter.layout, node.meta["example"], parameter.name)
        cell.family.append(node)
        self.cells[node] = cell

    def _call(self, node: fx.Node) -> None:
        target, args, kwargs, in_place = self._normalised(node)
        layout, result = self._apply(node, target, self._values(args), self._values(kwargs))
        value = Value(result, layout, node.meta["example"])
        if in_place:
            self._overwrite(node, args[0], value)
            return
        cell = _Cell(value, [node])
        self.cells[node] = cell
        first = args[0] if args else None
        if _name(node) in self.rules.aliases and isinstance(first, fx.Node):
            # One list for the whole family of views.
            cell.family = self.cells[first].family
            cell.family.append(node)

    def _normalised(self, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any], bool]:
        """Return (target without its underscore, args, kwargs, in place)."""
        target, args, kwargs = node.target, tuple(node.args), dict(node.kwargs)
        if node.op == "call_function" and target in IN_PLACE_OPERATORS:
            per_replica = isinstance(node.args[0], fx.Node) and self.cells[node.args[0]]
            if per_replica and per_replica.value.is_tensor:
                return IN_PLACE_OPERATORS[target], args, kwargs, True
        if node.op == "call_method" and str(target).endswith("_"):
            return str(target)[:-1], args, kwargs, True
        if node.op == "call_function" and (twin := _without_underscore(target)) is not None:
            return twin, args, kwargs, True
        if inspect.isfunction(target) and "inplace" in (names := _parameters(target)):
            args = args[: names.index("inplace")] if len(args) > names.index("inplace") else args
            bound = inspect.signature(target).bind(*node.args, **node.kwargs).arguments
            kwargs.pop("inplace", None)
            return target, args, kwargs, bool(bound.get("inplace", False))
        return target, args, kwargs, False

    def _apply(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Emitted:
        if node.op == "call_module":
            leaf = self.traced.leaves[str(target)]
            return self.rules.leaves[type(leaf)](self, str(target), leaf, *args, **kwargs)
        values = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Value)]
        if all(value.layout is Layout.SHARED for value in values):
            return self._as_it_is(node)
        table: Any = self.rules.methods if node.op == "call_method" else self.rules.functions
        rule = table.get(target)
        if rule is None:
            raise NotFusible(f"{_name(node)} has no batched form")
        emitted: Emitted = rule(self, *args, **kwargs)
        return emitted

    def _as_it_is(self, node: fx.Node) -> Emitted:
        """Compute what all replicas share once."""
        name = _name(node)
        if name in self.rules.random or name.rstrip("_") in self.rules.random:
            raise NotFusible(f"{name} draws random numbers that all replicas would share")
        args, kwargs = self._nodes(self._values((node.args, node.kwargs)))
        if node.op == "call_method":
            return Layout.SHARED, self.graph.call_method(str(node.target), args, kwargs)
        return Layout.SHARED, self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]

    def _overwrite(self, node: fx.Node, operand: fx.Node, value: Value) -> None:
        cell = self.cells[operand]
        if cell.value.layout is Layout.SHARED and value.layout is not Layout.SHARED:
            raise NotFusible(f"{_name(node)} writes a replica's value into what all share")
        here = self.position[node]
        for other in cell.family:
            if self.cells[other] is cell:
                continue
            if other.op == "get_attr":
                raise NotFusible(f"{_name(node)} writes into a part of {other.target}")
            if any(self.position[user] > here for user in other.users):
                raise NotFusible(f"{_name(node)} writes into memory that another view reads later")
        old = cell.value
        if old.name:
            if self.slots[old.name].is_parameter:
                raise NotFusible(f"parameter {old.name} is written in the forward")
            self.emit_method("copy_", self.storage[old.name], self.stacked(value))
            cell.value = Value(old.node, old.layout, old.example, old.name)
        else:
            cell.value = Value(value.node, value.layout, old.example)
        cell.family.append(node)
        self.cells[node] = cell

    # Bookkeeping

    def _convert(self, value: Value, layout: Layout, function: Any, *args: Any) -> Any:
        if (value, layout) not in self.converted:
            self.converted[value, layout] = self.emit(function, *args)
        return self.converted[value, layout]

    def _values(self, tree: Any) -> Any:
        def value_of(item: Any) -> Any:
            return self.cells[item].value if isinstance(item, fx.Node) else item

        values: Any = fx.node.map_aggregate(tree, value_of)
        return values

    def _nodes(self, tree: Any) -> Any:
        def node_of(value: Value) -> Any:
            if value.layout is not Layout.SHARED:
                raise NotFusible("a value differs between replicas where it must not")
            return value.node

        return fx.node.map_aggregate(
            tree, lambda item: node_of(item) if isinstance(item, Value) else item
        )


def _without_underscore(function: Any) -> Any:
    """Return ``F.relu`` for ``F.relu_``."""
    name = getattr(function, "__name__", "")
    if name.startswith("_") or not name.endswith("_"):
        return None
    return getattr(torch, name[:-1], None) or getattr(nn.functional, name[:-1], None)


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _name(node: fx.Node) -> str:
    if node.op == "call_function":
        return getattr(node.target, "__name__", str(node.target))
    return str(node.target)


def per_replica(values: Sequence[Any]) -> list[Value]:
    """Return those of some arguments that differ between replicas."""
    return [v for v in values if isinstance(v, Value) and v.layout is not Layout.SHARED]
