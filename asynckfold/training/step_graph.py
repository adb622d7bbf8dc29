"""The gradient of a step as a CUDA graph: one launch in place of one for each operation.

::

    first batch of a job ─ obstacles? ─ capture ─ same numbers? ─ graph
                               └───────────┴───────────┴───────── eager

A graph holds what a step computes from its batch to its gradients. Clipping and the optimizer, a
few kernels, stay outside: their learning rates and counts are numbers of the host, which a graph
would freeze. A trial puts back what it changes. With deterministic kernels, a replay has the bits
of the eager step: which jobs use a graph changes no number, and the plan does not record it. Other
kernels have other bits in each eager step, too: there, a replay is as close as two of these.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from asynckfold.data.device_copies import packed
from asynckfold.training import model_state, seeding, torch_internals
from asynckfold.training.calls import outputs_of
from asynckfold.training.gpu_share import ShareMeter
from asynckfold.training.gradients import fresh_gradient, needs_closure
from asynckfold.training.stopwatch import mark, seconds_between
from asynckfold.training.training_run import Gradient, Training

LEAST_STEPS = 30
"""Steps that a job must have left: a trial takes the time of about 10, and a replay a fifth of that
of a step of a small model (H100, `planning/gpu_rule.py`)."""

LEAST_SPREAD, MOST_SPREAD = 1e-4, 1e-3
"""Relative difference of a replay that is allowed in any case, and in none."""

MEMORY_SHARE = 0.02
"""Largest share of a GPU's memory for a graph, which keeps its activations: evaluations need as
much again, and no reservation counts it."""

WARM_UPS = 3
"""Steps before the capture, in which libraries choose kernels."""

PROFILED_SECONDS = 20.0
"""Seconds that a job must have left to be profiled: the start of a profiler takes about one."""


class NotCapturable(Exception):  # noqa: N818
    """Why the steps of a job stay eager."""


class CudaRecorder:
    """Captures CUDA graphs on a GPU; `generator` is the one that the GPU draws from.

    `is_exact` says whether two runs of one kernel have the same bits.
    """

    def __init__(self, device: torch.device, share: float = MEMORY_SHARE) -> None:
        self._device, self._index, self._share = device, device.index or 0, share
        torch.cuda.init()  # type: ignore[no-untyped-call]
        # Every graph knows this one.
        self.generator = torch.cuda.default_generators[self._index]
        self.is_exact = torch.are_deterministic_algorithms_enabled()

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do the work on the stream of the capture; raise if it waits for the GPU."""
        stream, current = _side_stream(self._device), torch.cuda.current_stream(self._device)
        mode = torch.cuda.get_sync_debug_mode()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), warnings.catch_warnings():
                work()
                warnings.simplefilter("ignore")  # the mode says that it does not see every wait
                torch.cuda.set_sync_debug_mode("error")
                for _ in range(WARM_UPS - 1):
                    work()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(stream)

    def capture(
        self, work: Callable[[], Tensor], generators: Sequence[torch.Generator] = ()
    ) -> tuple[Tensor, Callable[[], object]]:
        """Return the result of the work, its values undefined, and what fills it.

        That does the work again on what then lies where the work read. The memory is a pool apart.
        `generators` are those that the work draws from, besides that of the GPU.
        """
        torch.cuda.empty_cache()
        before, pool = torch.cuda.memory_reserved(self._device), torch.cuda.graph_pool_handle()
        graph, stream = _graph_with(generators), _side_stream(self._device)
        # The outer context restores the stream where the inner one cannot end.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)):
            try:
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    result = work()
            except Exception:
                self._end_capture(pool, generators)
                raise
        taken = torch.cuda.memory_reserved(self._device) - before
        if taken > self._share * torch.cuda.mem_get_info(self._device)[1]:
            raise NotCapturable(f"it would keep {taken >> 20} MiB of the GPU's memory")
        return result, graph.replay

    def replay_seconds(self, replay: Callable[[], object]) -> float:
        """Return the seconds that the GPU takes for a replay: jobs of others slow some down."""
        marks = []
        for _ in range(4):
            # All but the first wait for the GPU: their launches are not timed.
            replay()
            marks.append(mark(self._device))
        torch.cuda.synchronize(self._device)
        return min(map(seconds_between, marks, marks[1:]))

    def kernel_seconds(self, work: Callable[[], Tensor]) -> tuple[Tensor, float]:
        """Do the work; return its result, and the seconds of its kernels, 0 if unknown."""
        kinds = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        if torch.profiler.ProfilerActivity.CUDA not in kinds or torch_internals.is_profiled():
            return work(), 0.0
        words: dict[str, Any] = {"use_device": "cuda", "use_cpu": False, "use_kineto": True}
        # torch.profiler would import the compiler.
        with torch.autograd.profiler.profile(**words) as profiler:
            result = work()
        kernels = [item for item in profiler.key_averages() if item.device_type.name == "CUDA"]
        return result, sum(item.self_device_time_total for item in kernels) / 1e6

    def _end_capture(self, pool: Any, generators: Sequence[torch.Generator]) -> None:
        """End what a failed capture leaves begun in older versions of torch.

        Their allocator would keep the pool, and any memory that several streams used; their
        generators would refuse to draw until a capture succeeds.
        """
        torch_internals.release_capture(self._index, pool)
        with torch.cuda.graph(_graph_with(generators), stream=_side_stream(self._device)):
            torch.zeros(1, device=self._device)


def _graph_with(generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
    """Return an empty graph that may draw from generators besides the GPU's."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        if not hasattr(graph, "register_generator_state"):
            raise NotCapturable("it draws random numbers, and torch is too old to capture that")
        graph.register_generator_state(generator)
    return graph


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures: libraries keep memory for each stream that they see."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Captured:
    """A captured step: `replay` repeats it on the batch in `place`, and fills `loss`."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        place: Sequence[Tensor],
        loss: Tensor,
        replay: Callable[[], object],
    ) -> None:
        self._place, self._loss, self._replay = place, loss, replay
        self._gradients = [(item, item.grad) for item in parameters]

    def fits(self, *batch: Tensor) -> bool:
        """Whether a batch can be copied to where the captured one lay."""
        return len(batch) == len(self._place) and all(map(_alike, batch, self._place))

    def __call__(self, *batch: Tensor) -> Tensor:
        """Set the gradients of the parameters; return the loss, detached."""
        for here, item in zip(self._place, batch, strict=True):
            here.copy_(item)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._replay()
        return self._loss.clone()


class GradientGraph:
    """A captured gradient; batches of another shape are computed eagerly."""

    def __init__(self, model: nn.Module, captured: Captured) -> None:
        self._captured, self._frozen = captured, model_state.frozen(model)

    def __call__(self, training: Training, inputs: Tensor, targets: Tensor) -> Tensor:
        """Set the gradients of the parameters; return the loss, detached."""
        if training.batch == 0 and self._frozen != model_state.frozen(_whole(training)):
            training.log.write("no CUDA graph any more: something changed the model\n")
            training.gradient = fresh_gradient
        elif self._captured.fits(inputs, targets):
            return self._captured(inputs, targets)
        return fresh_gradient(training, inputs, targets)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _whole(training: Training) -> nn.ModuleDict:
    """Return model and criterion as one module."""
    parts = {"model": training.model, "criterion": training.criterion}
    return nn.ModuleDict({key: item for key, item in parts.items() if isinstance(item, nn.Module)})


def prepare(training: Training, recorder: CudaRecorder | None = None) -> None:
    """Let a job on a GPU try a graph at its first batch."""
    if recorder is None and training.device.type == "cuda":
        recorder = CudaRecorder(training.device)
    if recorder is not None and training.user_step is None and training.params.accumulate == 1:
        training.gradient = functools.partial(_first_gradient, recorder)


def _first_gradient(
    recorder: CudaRecorder, training: Training, inputs: Any, targets: Tensor
) -> Tensor:
    if training.data.collation is not None or not isinstance(inputs, Tensor):
        training.gradient = _eager(recorder, training)
        training.log.write("no CUDA graph: a batch has several inputs\n")
        return fresh_gradient(training, inputs, targets)
    low, high = training.bounds[0]
    if len(inputs) != high - low:
        return fresh_gradient(training, inputs, targets)
    training.gradient = _eager(recorder, training)
    training.heartbeat.begin_long_phase()
    # What the user's code raises, it raises again in the eager step.
    try:
        with seeding.preserved():
            training.gradient = _trial(recorder, training, inputs, targets)
        training.log.write("CUDA graph of forward and backward\n")
    except Exception as error:  # noqa: BLE001
        training.log.write(why_not(error))
    return training.gradient(training, inputs, targets)


def _eager(recorder: CudaRecorder, training: Training) -> Gradient:
    """Return the gradient without a graph, which measures what the GPU does where asked to."""
    if not training.task.measures_gpu:
        return fresh_gradient
    return ShareMeter(fresh_gradient, recorder.kernel_seconds, PROFILED_SECONDS)


def why_not(error: Exception) -> str:
    """Return the line of a log on a graph that was not made."""
    kind = "" if isinstance(error, NotCapturable) else f"{type(error).__name__}: "
    return f"no CUDA graph: {kind}{' '.join(str(error).split()):.200}\n"


def _trial(recorder: CudaRecorder, training: Training, *example: Tensor) -> Gradient:
    """Return a graph that has the numbers of the eager step."""
    model, generator = _whole(training), recorder.generator
    for obstacle in _obstacles(training, model, generator.device, *example):
        raise NotCapturable(obstacle)
    trial = Trial(recorder, model.parameters(), model.buffers())
    batch, frozen = [item.clone() for item in example], model_state.frozen(model)

    def eager(*batch: Tensor) -> Tensor:
        return fresh_gradient(training, *batch)

    try:
        recorder.warm_up(lambda: eager(*batch))
        training.optimizer.zero_grad()
        captured = recorder.capture(lambda: eager(*batch))
        graph = Captured(model.parameters(), batch, *captured)
        trial.compare(eager, graph, example)
        if model_state.frozen(model) != frozen:
            raise NotCapturable("a step replaces a tensor of the model")
        gradient = GradientGraph(model, graph)
        if not training.task.measures_gpu:
            return gradient
        seconds = recorder.replay_seconds(captured[1])
        return ShareMeter(gradient, lambda work: (work(), seconds))
    finally:
        trial.restore()
        training.optimizer.zero_grad()


class Trial:
    """Steps that begin at one state: of tensors that a step changes, and of generators.

    `extra` are such tensors besides the buffers, `generators` those besides the GPU's.
    """

    def __init__(
        self,
        recorder: CudaRecorder,
        parameters: Iterable[Tensor],
        buffers: Iterable[Tensor],
        extra: Iterable[Tensor] = (),
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        self._is_exact, self._parameters, self._buffers = (
            recorder.is_exact,
            [*parameters],
            [*buffers],
        )
        self._generators = [(item, item.get_state()) for item in (*generators, recorder.generator)]
        self._values = [(item, item.detach().clone()) for item in (*self._buffers, *extra)]

    def restore(self) -> None:
        """Return to the state of the beginning."""
        for generator, drawn in self._generators:
            generator.set_state(drawn)
        with torch.no_grad():
            for item, value in self._values:
                item.copy_(value)

    def drawing(self) -> list[torch.Generator]:
        """Return the generators, but for the GPU's, that were drawn from since."""
        pairs = self._generators[:-1]
        return [item for item, drawn in pairs if not torch.equal(item.get_state(), drawn)]

    def _numbers(self, step: Callable[..., Tensor], batch: list[Tensor]) -> tuple[Any, Any]:
        self.restore()
        loss, gradients = step(*batch), [item.grad for item in self._parameters]
        states = [item.get_state().numpy().tobytes() for item, _ in self._generators]
        there = [item for item in gradients if item is not None]
        groups = [there, *([item] for item in (loss, *self._buffers))]
        form = [item is None for item in gradients], states
        return form, [[item.detach().clone() for item in group] for group in groups]

    def compare(
        self,
        eager: Callable[..., Tensor],
        replayed: Callable[..., Tensor],
        example: Sequence[Tensor],
        dim: int = 0,
    ) -> None:
        """Raise `NotCapturable` where a replay has other numbers than an eager step.

        Both set gradients and return the loss of batches, whose samples are along a dimension.
        """
        # Other values than the captured ones first.
        for shift in (1, 0):
            batch = [torch.empty_like(item).copy_(item.roll(shift, dim)) for item in example]
            form, expected = self._numbers(eager, batch)
            other, found = self._numbers(replayed, batch)
            same = form == other
            if same and torch.equal(*(packed([*chain(*items)]) for items in (expected, found))):
                continue
            if self._is_exact or not same:
                raise NotCapturable("its replay has other bits than the eager step")
            again = self._numbers(eager, batch)[1]
            off, spread = (max(map(_difference, expected, items)) for items in (found, again))
            # Not <: they may be NaN.
            if not off <= min(MOST_SPREAD, max(LEAST_SPREAD, 4 * spread)):
                text = f"its replay differs from the eager step by {off:.1e}"
                raise NotCapturable(f"{text}, and two eager steps by {spread:.1e}")


def _difference(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference between tensors, relative to their norms.

    Those that are 0 but for rounding, as the gradient of a bias in front of BatchNorm, count
    relative to the norm of all.
    """
    if not some:
        return 0.0
    norms = torch.stack([item.double().norm() for item in some])
    pairs = zip(some, others, strict=True)
    differences = torch.stack([(one.double() - other.double()).norm() for one, other in pairs])
    return float((differences / norms.clamp(min=float(0.01 * norms.norm() + 1e-300))).max())


def _obstacles(
    training: Training, model: nn.ModuleDict, device: torch.device, *example: Tensor
) -> Iterator[str]:
    """Yield why no graph is tried; at last run a copy of the model."""
    params, optimizer = training.params, training.optimizer
    if training.steps_left < LEAST_STEPS:
        yield f"{training.steps_left} steps are left, and a trial pays from {LEAST_STEPS}"
    if params.compile:
        yield "torch.compile makes the kernels"
    # Those of others may keep gradients from step to step, which a graph overwrites.
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    if not is_known or needs_closure(optimizer):
        yield f"the optimizer is {type(optimizer).__name__}"
    stepped = {id(item) for group in optimizer.param_groups for item in group["params"]}
    if any(item.requires_grad and id(item) not in stepped for item in model.parameters()):
        yield "the gradient of a parameter that the optimizer does not have adds up"
    yield from model_state.hooks(model)
    yield from model_state.kept(model, training.criterion, device)
    twin, host = copy.deepcopy(model), torch.get_rng_state()
    criterion = dict(twin.items()).get("criterion", training.criterion)
    run = functools.partial(outputs_of, twin["model"], example[0], params.precision)
    yield from model_state.side_effects_of(twin, lambda: criterion(run(), example[1]))
    if device.type != "cpu" and not torch.equal(host, torch.get_rng_state()):
        yield "its forward draws random numbers on the CPU"
