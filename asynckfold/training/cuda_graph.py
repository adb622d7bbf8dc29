"""CUDA graphs: how work is captured, and whether a replay has the numbers of the work.

With deterministic kernels, it has its bits. Other kernels have other bits each time, too: there, a
replay is as close as two runs of the work.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from asynckfold.data.device_copies import packed
from asynckfold.training import torch_internals
from asynckfold.training.stopwatch import mark, seconds_between

LEAST_SPREAD, MOST_SPREAD = 1e-4, 1e-3
"""Relative difference of a replay that is allowed in any case, and in none."""

MEMORY_SHARE = 0.02
"""Largest share of a GPU's memory for a graph, which keeps its activations: evaluations need as
much again, and no reservation counts it."""

WARM_UPS = 3
"""Eager steps before a trial, which make the state of the optimizers, and steps before the capture,
in which libraries choose kernels."""


class NotCapturable(Exception):  # noqa: N818
    """Why the steps of a job stay eager."""


class CudaRecorder:
    """Captures CUDA graphs on a GPU; `generator` is the one that the GPU draws from.

    `is_exact` says whether two runs of one kernel have the same bits.
    """

    def __init__(self, device: torch.device, share: float) -> None:
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


def recorder_on(device: torch.device, share: float = MEMORY_SHARE) -> CudaRecorder | None:
    """Return what captures graphs on a device, if it is a GPU."""
    return CudaRecorder(device, share) if device.type == "cuda" else None


def _graph_with(generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
    """Return an empty graph that may draw from generators besides the GPU's."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    return graph


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures: libraries keep memory for each stream that they see."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Captured:
    """A captured step, or forward: `replay` repeats it on `place`, and fills `loss`, or outputs."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        example: Sequence[Tensor],
        place: Sequence[Tensor],
        loss: Tensor,
        replay: Callable[[], object],
    ) -> None:
        self._place, self._loss, self.replay = place, loss, replay
        self._forms = [_form(item) for item in example]
        self._gradients = [(item, item.grad) for item in parameters]

    def fits(self, leaves: Sequence[Tensor]) -> bool:
        """Whether tensors are like those that were captured."""
        return [_form(item) for item in leaves] == self._forms

    def __call__(self, *leaves: Tensor) -> Tensor:
        """Take the step; return the losses, detached."""
        for here, item in zip(self._place, leaves, strict=True):
            here.copy_(item)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self.replay()
        return self._loss.clone()


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


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
        self._recorder, self._parameters, self._buffers = recorder, [*parameters], [*buffers]
        self._generators = [(item, item.get_state()) for item in (*generators, recorder.generator)]
        self._values = [(item, item.detach().clone()) for item in (*self._buffers, *extra)]

    def restore(self) -> None:
        """Return to the state of the beginning."""
        for generator, drawn in self._generators:
            generator.set_state(drawn)
        with torch.no_grad():
            for item, value in self._values:
                item.copy_(value)

    def captured(
        self,
        eager: Callable[..., Tensor],
        capturing: Callable[..., Tensor],
        example: Sequence[Tensor],
        dim: int,
    ) -> Captured:
        """Return a graph of what `capturing` does, which has the numbers of what `eager` does.

        Both take tensors like the example, set gradients and return losses, or return outputs.
        The samples of an example are along `dim`.
        """
        place = [item.clone() for item in example]
        self._recorder.warm_up(lambda: eager(*place))
        # The graph knows that of the GPU.
        pairs = self._generators[:-1]
        drawing = [item for item, drawn in pairs if not torch.equal(item.get_state(), drawn)]
        self.restore()
        result, replay = self._recorder.capture(lambda: capturing(*place), drawing)
        graph = Captured(self._parameters, example, place, result, replay)
        self._compare(eager, graph, example, dim)
        return graph

    def _numbers(self, step: Callable[..., Tensor], batch: list[Tensor]) -> tuple[Any, Any]:
        self.restore()
        loss, gradients = step(*batch), [item.grad for item in self._parameters]
        states = [item.get_state().numpy().tobytes() for item, _ in self._generators]
        there = [item for item in gradients if item is not None]
        groups = [there, *([item] for item in (loss, *self._buffers))]
        form = [item is None for item in gradients], states
        return form, [[item.detach().clone() for item in group] for group in groups]

    def _compare(
        self, eager: Callable[..., Tensor], graph: Captured, example: Sequence[Tensor], dim: int
    ) -> None:
        """Raise `NotCapturable` where a replay has other numbers than the eager work."""
        # Other values than the captured ones first.
        for shift in (1, 0):
            batch = [torch.empty_like(item).copy_(item.roll(shift, dim)) for item in example]
            form, expected = self._numbers(eager, batch)
            other, found = self._numbers(graph, batch)
            same = form == other
            if same and torch.equal(*(packed([*chain(*items)]) for items in (expected, found))):
                continue
            if self._recorder.is_exact or not same:
                raise NotCapturable("its replay has other bits than an eager run")
            again = self._numbers(eager, batch)[1]
            off, spread = (max(map(_difference, expected, items)) for items in (found, again))
            # Not <: they may be NaN.
            if not off <= min(MOST_SPREAD, max(LEAST_SPREAD, 4 * spread)):
                text = f"its replay differs from an eager run by {off:.1e}"
                raise NotCapturable(f"{text}, and two eager runs by {spread:.1e}")


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
