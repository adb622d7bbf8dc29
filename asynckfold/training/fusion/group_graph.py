"""The step of a fusion group as one CUDA graph: forward, backward, clipping, optimizers.

::

    full, equal batches ─ 3 eager steps ─ trial ─► graph ──► replay: batch in, rates in, losses out
                                            │        │ an optimizer's numbers changed, or a state
                                            │        ▼ was loaded: another trial
    a last, smaller batch ──────────────────┴─────► eager

A step of small models is launches; a replay is one. It repeats all numbers of the host, so learning
rates are on the device (`StackedOptimizer.read_rates_from`), and an optimizer whose other numbers
change, or that has no such kernel, steps outside of the graph. Captured or not, a step of a group
on a GPU has the same numbers; the bits are compared where kernels are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from asynckfold.data.device_copies import packed
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import seeding
from asynckfold.training.fusion.backward import GroupCriterion, ReplicaBatches
from asynckfold.training.fusion.module import FusedModule
from asynckfold.training.fusion.optimizers import StackedOptimizer
from asynckfold.training.step_graph import (
    LEAST_STEPS,
    WARM_UPS,
    Captured,
    CudaRecorder,
    NotCapturable,
    Trial,
    why_not,
)


def recorder_on(device: torch.device) -> CudaRecorder | None:
    """Return what captures graphs on a device; activations of a group may take what there is."""
    return CudaRecorder(device, share=1.0) if device.type == "cuda" else None


class GroupGraph:
    """Takes the steps of a group, by a graph where it has one.

    `gradients` sets those of a batch and returns the losses (R,); `size` is that of a full batch;
    `log` writes to the logs of all jobs.
    """

    def __init__(
        self,
        fused: FusedModule,
        criterion: GroupCriterion,
        optimizers: Sequence[StackedOptimizer],
        gradients: Callable[[Sequence[ReplicaBatches]], Tensor],
        size: int,
        heartbeat: Heartbeat,
        log: Callable[[str], None],
    ) -> None:
        self._fused, self._criterion, self._optimizers = fused, criterion, optimizers
        self._gradients, self._size = gradients, size
        self._heartbeat, self._log = heartbeat, log
        device = next(iter(fused.stack.tensors.values())).device
        self._recorder = recorder_on(device)
        self._inside = [item for item in optimizers if item.is_capturable]
        if self._recorder is not None:
            for optimizer in self._inside:
                optimizer.read_rates_from(device)
        self._graph: Captured | None = None
        self._eager_steps, self._known = 0, self._frozen()

    def step(
        self, parts: Sequence[ReplicaBatches], left: int
    ) -> tuple[Tensor, Collection[StackedOptimizer]]:
        """Set the gradients; return the losses (R,), and the optimizers that took their step.

        `left` counts the steps up to the end of the training, this one included.
        """
        graph = self._graph_for(parts, left)
        if graph is None:
            return self._gradients(parts), ()
        leaves = pytree.tree_leaves((parts[0].inputs, parts[0].targets))
        if not graph.fits(*leaves):
            return self._gradients(parts), ()
        for optimizer in self._inside:
            optimizer.copy_rates()
        return graph(*leaves), self._inside

    def _graph_for(self, parts: Sequence[ReplicaBatches], left: int) -> Captured | None:
        """Return a graph for the batches of a step if they are full, and there is or can be one."""
        if self._recorder is None:
            return None
        taking_part = sum(len(part.replicas) for part in parts)
        sizes = {part.targets.shape[1] for part in parts}
        if taking_part < self._fused.width or sizes != {self._size}:
            return None
        if len(parts) > 1:
            self._refuse(NotCapturable("its jobs have data of their own"))
            return None
        self._follow_changes()
        if self._graph is None and self._eager_steps == WARM_UPS:
            self._try(self._recorder, parts[0], left)
        elif self._graph is None:
            self._eager_steps += 1
        return self._graph

    def _frozen(self) -> list[tuple[Any, Any]]:
        return [(item.constants(), item.optimizer.state) for item in self._optimizers]

    def _follow_changes(self) -> None:
        """Drop the graph where an optimizer's numbers changed, or its state was loaded."""
        before, self._known = self._known, self._frozen()
        for optimizer, (was, state), (numbers, now) in zip(
            self._optimizers, before, self._known, strict=True
        ):
            if state is not now:
                self._graph, self._eager_steps = None, 0
            elif was != numbers and optimizer in self._inside:
                self._graph = None
                self._inside = [item for item in self._inside if item is not optimizer]

    def _refuse(self, reason: Exception) -> None:
        self._recorder = None
        self._log(why_not(reason))

    def _try(self, recorder: CudaRecorder, batch: ReplicaBatches, left: int) -> None:
        self._heartbeat.begin_long_phase()
        # Whatever the trial raises, the step stays eager.
        try:
            with seeding.preserved():
                self._graph = self._trial(recorder, batch, left)
        except Exception as error:  # noqa: BLE001
            self._refuse(error)
            return
        outside = [item.optimizer for item in self._optimizers if item not in self._inside]
        names = ", ".join(dict.fromkeys(type(item).__name__ for item in outside))
        self._log(f"CUDA graph of the fused step{f', without {names}' if names else ''}\n")

    def _trial(self, recorder: CudaRecorder, example: ReplicaBatches, left: int) -> Captured:
        """Return a graph that has the numbers of the eager step; put back what that changes."""
        if left < LEAST_STEPS:
            raise NotCapturable(f"{left} steps are left, and a trial pays from {LEAST_STEPS}")
        criterion = self._criterion.fused
        if criterion is None:
            raise NotCapturable("the losses of its jobs are computed one by one")
        generators = [*self._fused.generators, *criterion.generators]
        parameters = list(self._fused.parameters().values())
        stacks = [*self._fused.stack.tensors.values(), *criterion.stack.tensors.values()]
        buffers = [item for item in stacks if not isinstance(item, nn.Parameter)]
        states = [item.optimizer.state.values() for item in self._inside]
        values = [value for entries in chain(*states) for value in entries.values()]
        stepped = [*parameters, *(value for value in values if isinstance(value, Tensor))]
        trial = Trial(recorder, parameters, buffers, stepped, generators)
        leaves, form = pytree.tree_flatten((example.inputs, example.targets))

        def eager(*leaves: Tensor, capturing: bool = False) -> Tensor:
            batch = pytree.tree_unflatten([*leaves], form)
            losses = self._gradients([ReplicaBatches(example.replicas, *batch)])
            for optimizer in self._inside:
                optimizer.step(capturing=capturing)
            return losses

        try:
            place = [item.clone() for item in leaves]
            recorder.warm_up(lambda: eager(*place))
            drawing = trial.drawing()
            trial.restore()
            for optimizer in self._inside:
                optimizer.copy_rates()
            captured = recorder.capture(lambda: eager(*place, capturing=True), drawing)
            graph = Captured(parameters, place, *captured)
            trial.compare(eager, graph, leaves, dim=1)
            trial.restore()
            graph(*leaves)
            after = packed(stepped)
            trial.restore()
            for optimizer in self._inside:
                optimizer.step()
            # From equal gradients: these kernels are deterministic.
            if not torch.equal(after, packed(stepped)):
                raise NotCapturable("its optimizer steps have other bits than eager ones")
            return graph
        finally:
            trial.restore()
            self._fused.zero_grad()
