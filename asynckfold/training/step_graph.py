"""The step of a job, or of a group of fused ones, as a CUDA graph: one launch in place of many.

::

    full, equal batches ─ 3 eager steps ─ trial ─► graph ──► replay: rows in, rates in, losses out
                                            │        │ an optimizer's numbers changed, or a state
                                            │        ▼ was loaded: another trial
    a last, smaller batch ──────────────────┴─────► eager

A graph holds the gather of the batch where the data lie on the GPU, forward, backward, clipping and
the optimizer. It repeats all numbers of the host, so learning rates are on the device
(`GraphOptimizer`), and an optimizer whose other numbers change, or that has no such kernel, steps
outside of the graph. A trial puts back what it changes. With deterministic kernels, a replay has
the bits of the eager step: which jobs use a graph changes no number, and the plan does not record
it. Where a step has a graph, a forward of an evaluation may have one, too.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn, optim
from torch.amp.grad_scaler import GradScaler
from torch.utils import _pytree as pytree

from asynckfold.data.device_copies import packed
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import model_state, seeding
from asynckfold.training.calls import outputs_of
from asynckfold.training.calls import step as take_step
from asynckfold.training.cuda_graph import (
    WARM_UPS,
    Captured,
    CudaRecorder,
    NotCapturable,
    Trial,
    recorder_on,
)
from asynckfold.training.gpu_share import ShareMeter
from asynckfold.training.gradients import clip, fresh_gradient, needs_closure, training_step
from asynckfold.training.training_run import StepTaker, Training

LEAST_STEPS = 30
"""Steps that a job must have left: a trial takes the time of about 10, and a replay a fifth of that
of a step of a small model (H100, `planning/gpu_rule.py`)."""

LEAST_BATCHES = 200
"""Full batches that must be left to evaluate: a graph takes some 60 ms, a batch of a LeNet 0.8 ms
(H200, `reports/bench/gpu.md`), of which a replay is to save a third: not measured."""

PROFILED_SECONDS = 20.0
"""Seconds that a job must have left to be profiled: the start of a profiler takes about one."""

CAPTURABLE = (optim.SGD, optim.Adam, optim.AdamW)
"""Fused or capturable, they read the learning rate, and keep their count, on the device."""


class GraphOptimizer:
    """An optimizer whose step a CUDA graph may hold; it reads its learning rates on the device."""

    def __init__(self, optimizer: optim.Optimizer, scaler: GradScaler | None = None) -> None:
        self.optimizer, self._scaler = optimizer, scaler
        self._device: torch.device | None = None
        self._rates: list[Tensor] = []

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph may hold the step: a kernel reads the learning rates on the device.

        A graph of plain SGD would freeze them without a word, and others count on the host. A
        scaler of losses asks the device whether to take the step.
        """
        if type(self.optimizer) not in CAPTURABLE or self._scaler is not None:
            return False
        of = vars(self.optimizer).items()
        has_hooks = any(kept for name, kept in of if "_step_" in name and name.endswith("_hooks"))
        return not has_hooks and all(
            (group.get("fused") or group.get("capturable"))
            and not any(isinstance(value, Tensor) for value in group.values())
            for group in self.optimizer.param_groups
        )

    def read_rates_from(self, device: torch.device) -> None:
        """Step with learning rates on a device from now on, which LR schedules do not see.

        In all steps, captured or not, so that they have the same bits: CUDA kernels read float32.
        """
        self._device = device

    def copy_rates(self) -> None:
        """Copy the learning rates of the LR schedule to the device."""
        groups, device = self.optimizer.param_groups, self._device
        dtype = torch.float32 if device is not None and device.type == "cuda" else torch.float64
        while len(self._rates) < len(groups):
            self._rates.append(torch.zeros((), dtype=dtype, device=device))
        for rate, group in zip(self._rates, groups, strict=False):
            rate.fill_(group["lr"])

    def constants(self) -> list[dict[str, Any]]:
        """Return what a graph of the step freezes."""
        return [
            {key: value for key, value in group.items() if key not in ("params", "lr")}
            for group in self.optimizer.param_groups
        ]

    def state(self) -> list[Tensor]:
        """Return the tensors that a step changes besides the parameters."""
        entries = chain(*(item.values() for item in self.optimizer.state.values()))
        return [value for value in entries if isinstance(value, Tensor)]

    def step(self, *, capturing: bool = False) -> None:
        """Take one step with the gradients of the parameters."""
        if self._device is None:
            take_step(self.optimizer, self._scaler)
            return
        if not capturing:
            self.copy_rates()
        groups = self.optimizer.param_groups
        kept = [dict(group) for group in groups]
        for rate, group in zip(self._rates, groups, strict=False):
            group["lr"] = rate
            if capturing and "capturable" in group:
                group["capturable"] = True
        try:
            self.optimizer.step()
        finally:
            for group, values in zip(groups, kept, strict=True):
                group |= values


class Step(Protocol):
    """A step up to its gradients, and outputs; `dim`: of the samples in what makes a batch."""

    dim: int
    heartbeat: Heartbeat

    def log(self, text: str) -> None:
        """Write to the log of each job."""

    def gradients(self, batch: Any) -> Tensor:
        """Set the gradients of a batch, clipped; return the losses, detached."""

    def obstacles(self, batch: Any) -> Iterator[str]:
        """Yield why no graph is tried."""

    def outputs(self, inputs: Any) -> Any:
        """Return the outputs of the model, in the mode that it is in."""

    def side_effects(self, inputs: Any) -> Iterator[str]:
        """Yield why no graph of `outputs` is tried."""

    def held(self) -> tuple[list[Tensor], list[Tensor], list[torch.Generator]]:
        """Return parameters, buffers, and generators besides the GPU's."""

    def frozen(self) -> list[Any]:
        """Return what a graph freezes of the model."""


class StepGraph:
    """Takes steps, by a graph where there is one; the log says that there is, or why not.

    If `is_timed`, `replay_seconds` are those of the GPU for a replay, 0 without a graph.
    """

    def __init__(
        self,
        step: Step,
        optimizers: Sequence[GraphOptimizer],
        device: torch.device,
        recorder: CudaRecorder,
        *,
        is_timed: bool = False,
    ) -> None:
        self._step, self._optimizers, self._is_timed = step, optimizers, is_timed
        self.replay_seconds = 0.0
        self._recorder: CudaRecorder | None = recorder
        self._inside = [item for item in optimizers if item.is_capturable]
        for optimizer in self._inside:
            optimizer.read_rates_from(device)
        self._graph: Captured | None = None
        self._eager_steps, self._known, self._frozen = 0, self._numbers(), list[Any]()
        self._outputs = OutputGraph(step, recorder)

    @property
    def is_decided(self) -> bool:
        """Whether there is a graph, or will be none."""
        return self._graph is not None or self._recorder is None

    def __call__(
        self,
        leaves: Sequence[Tensor],
        make: Callable[..., Any],
        left: int,
        *,
        begins: bool,
        is_full: bool,
    ) -> tuple[Tensor, Collection[GraphOptimizer]]:
        """Set the gradients of the batch that `make` makes of leaves.

        `left` counts the steps up to the end of the training, this one included; an epoch `begins`
        with it.

        Returns
        -------
        losses : Tensor
            Detached.
        stepped : collection of GraphOptimizer
            Those that took their step.
        """
        graph = self._graph_for(leaves, make, left, begins) if is_full else None
        if graph is None or not graph.fits(leaves):
            return self._step.gradients(make(*leaves)), ()
        for optimizer in self._inside:
            optimizer.copy_rates()
        return graph(*leaves), self._inside

    def evaluation_forward(self, left: int) -> Callable[[Any], Any]:
        """Return the forward of an evaluation, inputs → outputs.

        `left` counts the full batches to evaluate up to the end of the training.
        """
        return self._step.outputs if self._graph is None else self._outputs.begin(left)

    def _graph_for(
        self, leaves: Sequence[Tensor], make: Callable[..., Any], left: int, begins: bool
    ) -> Captured | None:
        """Return a graph for a full batch if there is or can be one."""
        if self._recorder is None:
            return None
        self._follow_changes()
        if self._graph is not None:
            if begins and self._frozen != self._addresses():
                self._graph = self._recorder = None
                self._step.log("no CUDA graph any more: something changed the model\n")
        elif left < LEAST_STEPS:
            text = f"{left} steps are left, and a trial pays from {LEAST_STEPS}"
            self._refuse(NotCapturable(text))
        elif self._eager_steps == WARM_UPS:
            self._try(self._recorder, leaves, make)
        else:
            self._eager_steps += 1
        return self._graph

    def _numbers(self) -> list[tuple[Any, Any]]:
        return [(item.constants(), item.optimizer.state) for item in self._optimizers]

    def _addresses(self) -> list[Any]:
        states = [value.data_ptr() for item in self._inside for value in item.state()]
        return [*self._step.frozen(), states]

    def _follow_changes(self) -> None:
        """Drop the graph where an optimizer's numbers changed, or its state was loaded."""
        before, self._known = self._known, self._numbers()
        for optimizer, (was, state), (numbers, now) in zip(
            self._optimizers, before, self._known, strict=True
        ):
            if state is not now:
                self._graph, self._eager_steps = None, 0
            elif optimizer in self._inside and was != numbers:
                self._graph = None
                self._inside = [item for item in self._inside if item is not optimizer]

    def _refuse(self, reason: Exception) -> None:
        self._recorder = None
        self._step.log(why_not(reason))

    def _try(
        self, recorder: CudaRecorder, leaves: Sequence[Tensor], make: Callable[..., Any]
    ) -> None:
        self._step.heartbeat.begin_long_phase()
        # Whatever the trial raises, the step stays eager; the user's code raises it there again.
        try:
            with seeding.preserved():
                self._graph = self._trial(recorder, leaves, make)
        except Exception as error:  # noqa: BLE001
            self._refuse(error)
            return
        outside = [item.optimizer for item in self._optimizers if item not in self._inside]
        names = ", ".join(dict.fromkeys(type(item).__name__ for item in outside))
        self._step.log(f"CUDA graph of the step{f', without {names}' if names else ''}\n")

    def _trial(
        self, recorder: CudaRecorder, example: Sequence[Tensor], make: Callable[..., Any]
    ) -> Captured:
        """Return a graph that has the numbers of the eager step; put back what that changes."""
        for obstacle in self._step.obstacles(make(*example)):
            raise NotCapturable(obstacle)
        # Callbacks may have added hooks.
        self._inside = [item for item in self._inside if item.is_capturable]
        parameters, buffers, generators = self._step.held()
        stepped = [*parameters, *(value for item in self._inside for value in item.state())]
        trial = Trial(recorder, parameters, buffers, stepped, generators)
        self._frozen = self._addresses()

        def eager(*leaves: Tensor, capturing: bool = False) -> Tensor:
            losses = self._step.gradients(make(*leaves))
            for optimizer in self._inside:
                optimizer.step(capturing=capturing)
            return losses

        try:
            capturing = functools.partial(eager, capturing=True)
            graph = trial.captured(eager, capturing, example, self._step.dim)
            trial.restore()
            graph(*example)
            after = packed(stepped)
            trial.restore()
            for optimizer in self._inside:
                optimizer.step()
            # From equal gradients: these kernels are deterministic.
            if not torch.equal(after, packed(stepped)):
                raise NotCapturable("its optimizer steps have other bits than eager ones")
            if self._addresses() != self._frozen:
                raise NotCapturable("a step replaces a tensor of the model")
            if self._is_timed:
                self.replay_seconds = recorder.replay_seconds(graph.replay)
            return graph
        finally:
            trial.restore()
            for parameter in parameters:
                parameter.grad = None


class OutputGraph:
    """Forwards of evaluations, by a graph for batches of one form; the log says why not."""

    def __init__(self, step: Step, recorder: CudaRecorder | None) -> None:
        self._step, self._recorder, self._frozen = step, recorder, list[Any]()
        self._graph: Captured | None = None

    def begin(self, left: int) -> Callable[[Any], Any]:
        """Return the forward of an evaluation, see `StepGraph.evaluation_forward`."""
        if self._recorder is None or (self._graph is None and left < LEAST_BATCHES):
            self._recorder = None
            return self._step.outputs
        before, self._frozen = self._frozen, self._step.frozen()
        if self._graph is not None and before != self._frozen:
            self._refuse(NotCapturable("something changed the model"))
        return self

    def __call__(self, inputs: Any) -> Any:
        """Return the outputs of a batch."""
        leaves, make = taken_apart(inputs)
        if self._graph is None and self._recorder is not None:
            self._try(self._recorder, leaves, make)
        if self._graph is None or not self._graph.fits(leaves):
            return self._step.outputs(inputs)
        return self._graph(*leaves)

    def _refuse(self, reason: Exception) -> None:
        self._graph = self._recorder = None
        self._step.log(why_not(reason, " of evaluations"))

    def _try(
        self, recorder: CudaRecorder, example: Sequence[Tensor], make: Callable[..., Any]
    ) -> None:
        def eager(*leaves: Tensor) -> Tensor:
            outputs = self._step.outputs(make(*leaves))
            if not isinstance(outputs, Tensor):
                raise NotCapturable("its outputs are several tensors")
            return outputs

        self._step.heartbeat.begin_long_phase()
        try:
            with seeding.preserved():
                for effect in self._step.side_effects(make(*example)):
                    raise NotCapturable(effect)
                _, buffers, generators = self._step.held()
                trial = Trial(recorder, (), buffers, (), generators)
                try:
                    self._graph = trial.captured(eager, eager, example, self._step.dim)
                finally:
                    trial.restore()
            self._step.log("CUDA graph of evaluations\n")
        except Exception as error:  # noqa: BLE001
            self._refuse(error)


def taken_apart(batch: Any) -> tuple[list[Tensor], Callable[..., Any]]:
    """Return the tensors of a tree, and what makes such a tree of others."""
    leaves, form = pytree.tree_flatten(batch)
    return leaves, lambda *others: pytree.tree_unflatten(others, form)


def why_not(error: Exception, of: str = "") -> str:
    """Return the line of a log on a graph that was not made."""
    kind = "" if isinstance(error, NotCapturable) else f"{type(error).__name__}: "
    return f"no CUDA graph{of}: {kind}{' '.join(str(error).split()):.200}\n"


def prepare(training: Training, recorder: CudaRecorder | None = None) -> None:
    """Let a job on a GPU try a graph."""
    recorder = recorder or recorder_on(training.device)
    if recorder is None or training.user_step is not None or training.params.accumulate > 1:
        return
    is_timed = training.task.measures_gpu
    for obstacle in _first_obstacles(training):
        training.log.write(why_not(NotCapturable(obstacle)))
        if is_timed:
            training.graph = ShareMeter(
                lambda job: training_step(job, *job.samples_of(job.batch)),
                recorder.kernel_seconds,
                PROFILED_SECONDS,
            )
        return
    optimizer = GraphOptimizer(training.optimizer, training.scaler)
    step = JobStep(training, recorder.generator.device)
    graph = StepGraph(step, [optimizer], training.device, recorder, is_timed=is_timed)
    take = functools.partial(_step_by, graph, optimizer)
    training.evaluation_forward = graph.evaluation_forward
    training.graph = functools.partial(_untimed, graph, take, recorder) if is_timed else take


def _untimed(
    graph: StepGraph, take: StepTaker, recorder: CudaRecorder, training: Training
) -> Tensor:
    """Take a step; time those that follow once it is decided whether a graph takes them."""
    loss = take(training)
    if seconds := graph.replay_seconds:
        training.graph = ShareMeter(take, lambda work: (work(), seconds))
    elif graph.is_decided:
        training.graph = ShareMeter(take, recorder.kernel_seconds, PROFILED_SECONDS)
    return loss


def _first_obstacles(training: Training) -> Iterator[str]:
    if training.params.compile:
        yield "torch.compile makes the kernels"
    # Those of others may keep gradients from step to step, which a graph overwrites.
    is_known = type(training.optimizer).__module__.startswith("torch.optim.")
    if not is_known or needs_closure(training.optimizer):
        yield f"the optimizer is {type(training.optimizer).__name__}"
    if training.data.collation is not None:
        yield "collate_fn makes its batches on the host"


def _step_by(graph: StepGraph, optimizer: GraphOptimizer, training: Training) -> Tensor:
    """Take one step of a job; return the loss, detached."""
    (low, high), (_, full) = training.bounds[training.batch], training.bounds[0]
    made_of = training.ordered.on_device
    if made_of is not None:
        leaves, make = [item[low:high] for item in made_of], training.data.train_on_device
    else:
        leaves, make = taken_apart(training.samples_of(training.batch))
    begins, is_full = training.batch == 0, high - low == full
    loss, stepped = graph(leaves, make, training.steps_left, begins=begins, is_full=is_full)
    if not stepped:
        if training.scaler is not None:
            clip(training)
        optimizer.step()
    return loss


class JobStep:
    """The step of a job; `device` is that of its generator."""

    dim = 0

    def __init__(self, training: Training, device: torch.device) -> None:
        # A circle would keep the memory of a job until it is collected.
        self._training: Training = weakref.proxy(training)
        self._device, self.log, self.heartbeat = device, training.log.write, training.heartbeat

    def gradients(self, batch: Any) -> Tensor:
        """Set the gradients, clipped unless they are scaled; return the loss."""
        loss = fresh_gradient(self._training, *batch)
        if self._training.scaler is None:
            clip(self._training)
        return loss

    def _whole(self) -> nn.ModuleDict:
        """Return model and criterion as one module."""
        parts = {"model": self._training.model, "criterion": self._training.criterion}
        modules = {key: item for key, item in parts.items() if isinstance(item, nn.Module)}
        return nn.ModuleDict(modules)

    def held(self) -> tuple[list[Tensor], list[Tensor], list[torch.Generator]]:
        """Return parameters and buffers; all draw from the GPU's generator."""
        whole = self._whole()
        return [*whole.parameters()], [*whole.buffers()], []

    def frozen(self) -> list[Any]:
        """Return addresses, modes and attributes."""
        return model_state.frozen(self._whole())

    def obstacles(self, batch: Any) -> Iterator[str]:
        """Yield why no graph is tried."""
        training, model, (inputs, targets) = self._training, self._whole(), batch
        stepped = {
            id(item) for group in training.optimizer.param_groups for item in group["params"]
        }
        if any(item.requires_grad and id(item) not in stepped for item in model.parameters()):
            yield "the gradient of a parameter that the optimizer does not have adds up"
        yield from model_state.hooks(model)
        yield from model_state.kept(model, training.criterion, self._device)
        yield from self.side_effects(inputs, targets)

    def outputs(self, inputs: Any) -> Any:
        """Return the outputs of the model, in the mode that it is in."""
        return outputs_of(self._training.model, inputs, self._training.params.precision)

    def side_effects(self, inputs: Any, targets: Any = None) -> Iterator[str]:
        """Run a copy of the model, and of the criterion if there are targets; yield what it did."""
        twin, host = copy.deepcopy(self._whole()), torch.get_rng_state()
        criterion = dict(twin.items()).get("criterion", self._training.criterion)

        def forward() -> None:
            outputs = outputs_of(twin["model"], inputs, self._training.params.precision)
            if targets is not None:
                criterion(outputs, targets)

        yield from model_state.side_effects_of(twin, forward)
        if self._device.type != "cpu" and not torch.equal(host, torch.get_rng_state()):
            yield "its forward draws random numbers on the CPU"
