"""CUDA graphs of a job's steps: same bits or none. What replays on cores stands in for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asynckfold import Result, TrainerParams
from asynckfold.jobs.messages import CheckpointRef, GpuShare, RunEvent, Task
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import gpu_share, loop, setup, step_graph
from asynckfold.training.job_log import JobLog
from tests.training.test_gpu_step import Conv, images
from tests.training.tiny import CPU, Mlp, Tiny, checkpoints, never, sgd


class Net(Mlp):
    """A perceptron with a number that a graph freezes."""

    scale = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs * self.scale)


class Tape(TorchDispatchMode):
    """The operations of some work, to be repeated on the same memory with the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, list[Tensor]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's own answer imports its compiler, which takes seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {item.untyped_storage().data_ptr() for item in tensors_in((args, kwargs))}
        new = [item for item in tensors_in(out) if item.untyped_storage().data_ptr() not in given]
        self.steps.append((func, args, kwargs or {}, new))
        return out

    def forget_values(self) -> None:
        """A capture computes nothing."""
        for *_, new in self.steps:
            for item in new:
                item.fill_(99)

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, new in self.steps:
                out = func(*args, **kwargs)
                fresh = tensors_in(out)[: len(new)] if new else []
                for here, value in zip(new, fresh, strict=True):
                    here.copy_(value)


def tensors_in(tree: Any) -> list[Tensor]:
    return [item for item in tree_leaves(tree) if isinstance(item, Tensor)]


@dataclass
class Replayer:
    """Captures on cores."""

    fault: str = ""
    replays: int = 0
    generator: torch.Generator = field(default_factory=lambda: torch.default_generator)
    is_exact: bool = True
    registered: list[torch.Generator] = field(default_factory=list)
    busy: float = 0.0
    outputs: int = 0
    gathers: bool = False

    def warm_up(self, work: Callable[[], object]) -> None:
        for _ in range(2):
            work()
        if self.fault == "waits":
            raise RuntimeError("called a synchronizing CUDA operation")

    def capture(
        self, work: Callable[[], Tensor], generators: Sequence[torch.Generator] = ()
    ) -> tuple[Tensor, Callable[[], object]]:
        of_step = torch.is_grad_enabled()
        self.registered = list(generators) if of_step else self.registered
        with Tape() as tape:
            loss = work()
        if of_step:
            self.gathers = torch.ops.aten.index_select.default in [step[0] for step in tape.steps]
        if self.fault == "capture" or (self.fault == "evaluation" and not of_step):
            raise RuntimeError("operation not permitted when stream is capturing")
        with torch.no_grad():
            tape.forget_values()
        outputs = [item for *_, new in tape.steps for item in new if item.is_floating_point()]

        def replay() -> None:
            self.replays += of_step
            self.outputs += not of_step
            tape.replay()
            with torch.no_grad():
                if self.fault == "bits":
                    outputs[-1].copy_(torch.nextafter(outputs[-1], torch.tensor(9.0)))
                if self.fault == "wrong":
                    outputs[-1].add_(0.1)
            if self.fault == "draws":
                torch.rand(1)

        return loss, replay

    def replay_seconds(self, replay: Callable[[], object]) -> float:
        return self.busy

    def kernel_seconds(self, work: Callable[[], Tensor]) -> tuple[Tensor, float]:
        return work(), self.busy


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "LEAST_STEPS", 5)


def built(tiny: Tiny, log: JobLog, refs: tuple[CheckpointRef, ...] = (), attempt: int = 1) -> Any:
    task = Task(tiny.jobs[0], attempt, refs)
    return setup.build(tiny.bundle, task, tiny.batches, CPU, log, Heartbeat())


def trained(tiny: Tiny, recorder: Replayer | None) -> Result:
    """A job from its start to its end."""
    with JobLog(tiny.root, tiny.jobs[0]) as log:
        training = built(tiny, log)
        step_graph.prepare(training, recorder)
        result = loop.train_to_end(training, lambda event: None, never)
    assert result is not None
    return result


def numbers(result: Result | None) -> Any:
    assert result is not None
    epochs = [replace(item, seconds=0.0) for item in result.epochs]
    assert result.outputs is not None
    return result.weights, epochs, result.outputs.tobytes()


def tiny_at(root: Path, **changes: Any) -> Tiny:
    # Batches of 12, 12, 12 and 4.
    words = {"models": {"net": Net}, "params": TrainerParams(epochs=3), "batch_size": 12}
    sample_weight = changes.pop("sample_weight", None)
    tiny = Tiny(root, **{**words, **changes})
    tiny.batches.sample_weight = sample_weight
    return tiny


def heavy(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def clamped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)

    @torch.no_grad()
    def clamp(*args: Any) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)

    optimizer.register_step_post_hook(clamp)
    return optimizer


BATCH, ONECYCLE = TrainerParams(epochs=3, lr_step="batch"), {"o": "onecycle"}
CLIPPED = TrainerParams(epochs=3, precision="bf16", clip_grad_norm=0.5)
HALF = TrainerParams(epochs=3, precision="fp16", clip_grad_norm=0.5)
INSIDE, MIXED = "CUDA graph of the step\n", "CUDA graph of the step, without "
EVALUATED = "CUDA graph of evaluations\n"

JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "sgd": ({"opt_fn": heavy, "params": BATCH}, INSIDE),
    "adamw": ({"opt_fn": adamw, "params": CLIPPED}, INSIDE),
    "rmsprop": (
        {"opt_fn": lambda model: torch.optim.RMSprop(model.parameters(), 0.01, foreach=True)},
        f"{MIXED}RMSprop\n",
    ),
    # Its momentum changes, too.
    "onecycle": ({"opt_fn": heavy, "params": BATCH, "lr_schedules": ONECYCLE}, f"{MIXED}SGD\n"),
    # A replay would not call its hook.
    "clamped": ({"opt_fn": clamped}, f"{MIXED}AdamW\n"),
    # Its scaler asks whether to take a step.
    "fp16": ({"opt_fn": adamw, "params": HALF}, f"{MIXED}AdamW\n"),
    "weights": ({"sample_weight": torch.arange(60, dtype=torch.float64) % 4}, INSIDE),
    "sums": ({"criterion": nn.CrossEntropyLoss(torch.arange(3.0), reduction="sum")}, INSIDE),
}

TRIAL, OUTPUT_TRIAL = 3, 2
"""Replays of a trial, of the step and of an evaluation."""


@pytest.mark.parametrize("name", JOBS)
def test_a_job_with_a_graph_has_the_same_bits(tmp_path: Path, name: str) -> None:
    """Dropout, running statistics, LR schedules, clipping, a last batch of another size."""
    changes, line = JOBS[name]
    words = {"lr_schedules": {"c": "cosine"}, **changes}
    plain = trained(tiny_at(tmp_path / "plain", **words), None)
    recorder, tiny = Replayer(), tiny_at(tmp_path / "graph", **words)
    assert numbers(trained(tiny, recorder)) == numbers(plain)
    # Three of four batches in each epoch but the first, whose steps are eager.
    assert recorder.replays == TRIAL + 6
    assert recorder.gathers
    assert line in tiny.log()


def test_batches_that_the_host_makes_are_copied_in(tmp_path: Path) -> None:
    """Crops and flips of the CPU."""
    words = {"models": {"conv": Conv}}
    (eager, graph), recorder = (tiny_at(tmp_path / name, **words) for name in "ab"), Replayer()
    eager.batches, graph.batches = images(), images()
    assert numbers(trained(graph, recorder)) == numbers(trained(eager, None))
    assert recorder.replays == TRIAL + 6
    assert not recorder.gathers


def test_a_graph_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    plain = trained(tiny_at(tmp_path / "plain"), None)
    for recorder, reason in (
        (Replayer(fault="bits"), "its replay has other bits than an eager run"),
        (Replayer(fault="draws"), "its replay has other bits than an eager run"),
        (Replayer(fault="capture"), "RuntimeError: operation not permitted when stream"),
        (Replayer(fault="waits"), "RuntimeError: called a synchronizing CUDA operation"),
    ):
        tiny = tiny_at(tmp_path / f"{recorder.fault} graph")
        assert numbers(trained(tiny, recorder)) == numbers(plain)
        assert f"no CUDA graph: {reason}" in tiny.log()
        assert "CUDA graph of" not in tiny.log()


def test_where_kernels_have_other_bits_at_every_run_a_graph_is_as_close_as_two_steps(
    tmp_path: Path,
) -> None:
    separate = {"opt_fn": lambda model: torch.optim.SGD(model.parameters(), 0.1, foreach=True)}
    close, wrong = (tiny_at(tmp_path / name, **separate) for name in ("close", "wrong"))
    plain = trained(tiny_at(tmp_path / "plain", **separate), None)
    result = trained(close, Replayer("bits", is_exact=False))
    assert f"{MIXED}SGD\n" in close.log()
    assert [item.train_loss for item in result.epochs] == pytest.approx(
        [item.train_loss for item in plain.epochs]
    )
    assert numbers(trained(wrong, Replayer("wrong", is_exact=False))) == numbers(plain)
    assert "its replay differs from an eager run by " in wrong.log()
    # A graph that draws other numbers is never close enough.
    draws = tiny_at(tmp_path / "draws", **separate)
    assert numbers(trained(draws, Replayer("draws", is_exact=False))) == numbers(plain)
    assert "no CUDA graph" in draws.log()


class Counting(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        self.scale *= 0.99
        return super().forward(inputs)


class Late(Net):
    """Changes itself in a function that it calls, in one mode."""

    def __init__(self, *, training: bool = True) -> None:
        super().__init__()
        self.changing = training

    def forward(self, inputs: Tensor) -> Tensor:
        cool(self)
        return super().forward(inputs)


def cool(net: Late) -> None:
    net.scale *= 0.99 if net.training is net.changing else 1.0


class Remembering(Net):
    """Keeps a mean in a buffer, which a function that it calls replaces, or sets in place."""

    def __init__(self, *, replaces: bool = True) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        remember(self, inputs)
        return super().forward(inputs) * (1 + self.mean)


def remember(net: Any, inputs: Tensor) -> None:
    mean = 0.9 * net.mean + 0.1 * inputs[:, 1:].mean()
    net.mean = mean if net.replaces else net.mean.copy_(mean)


class Looking(Net):
    """Depends on a value of its batch, which a graph freezes."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (1 + float(inputs[0, 1]))


class Holding(Net):
    def __init__(self) -> None:
        super().__init__()
        self.meter = itertools.count()

    def forward(self, inputs: Tensor) -> Tensor:
        next(self.meter)
        return super().forward(inputs)


class Unknown(torch.optim.SGD):
    """Could do anything."""


calls: list[int] = []


def noting(outputs: Tensor, targets: Tensor) -> Tensor:
    calls.append(1)
    return nn.functional.cross_entropy(outputs, targets)


OBSTACLES: dict[str, tuple[dict[str, Any], str]] = {
    "attribute": ({"models": {"n": Counting}}, "forward changes scale"),
    "late": ({"models": {"n": Late}}, "layer model (Late) changes its attribute scale"),
    "buffer": ({"models": {"n": Remembering}}, "its forward replaces model.mean"),
    "object": ({"models": {"n": Holding}}, "Holding has meter, a count"),
    "value": ({"models": {"n": Looking}}, "its replay has other bits"),
    "criterion": ({"criterion": noting}, "noting changes calls"),
    "optimizer": (
        {"opt_fn": lambda model: Unknown(model.parameters(), 0.1)},
        "the optimizer is Unknown",
    ),
    "left out": (
        {"opt_fn": lambda model: sgd(model.layers[-1])},
        "the gradient of a parameter that the optimizer does not have",
    ),
    "short": ({"params": TrainerParams(epochs=1)}, "4 steps are left, and a trial pays from 5"),
}


def test_what_a_graph_cannot_repeat_stays_eager(tmp_path: Path) -> None:
    for name, (changes, reason) in OBSTACLES.items():
        tiny = tiny_at(tmp_path / f"{name} graph", **changes)
        result = trained(tiny, Replayer())
        assert f"no CUDA graph: {reason}" in tiny.log()
        if name in ("late", "value", "buffer"):  # noticed by a trial
            plain = trained(tiny_at(tmp_path / f"{name} plain", **changes), None)
            assert numbers(result) == numbers(plain)


def swapping(model: nn.Module) -> torch.optim.Optimizer:
    """Evaluates by other tensors each time, as an average of weights."""
    optimizer, kept = heavy(model), [*map(attrgetter("data"), model.parameters())]

    def put(tensors: Iterable[Tensor]) -> None:
        for parameter, tensor in zip(model.parameters(), tensors, strict=True):
            parameter.data = tensor

    vars(optimizer).update(train=lambda: put(kept), eval=lambda: put(item / 2 for item in kept))
    return optimizer


EVALUATIONS: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "fp32": ({"opt_fn": heavy}, "", EVALUATED, 4),
    "bf16": ({"opt_fn": adamw, "precision": "bf16"}, "", EVALUATED, 4),
    "state": ({"models": {"n": partial(Remembering, replaces=False)}}, "", EVALUATED, 4),
    "capture": ({}, "evaluation", "of evaluations: RuntimeError: operation not permitted", 0),
    "effect": ({"models": {"n": partial(Late, training=False)}}, "", "of evaluations: layer", 0),
    "swapped": ({"opt_fn": swapping}, "", "of evaluations: something changed the model", 2),
    "few": ({"eval_batch_size": 12}, "", INSIDE, 0),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluations_with_a_graph_have_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After the first epoch: of 20 samples, two full batches, and one that is smaller."""
    changes, fault, line, replays = EVALUATIONS[name]
    params = {"epochs": 3, "eval_batch_size": 8, **changes}
    words = {key: params.pop(key) for key in ("opt_fn", "models") if key in params}
    words["params"] = TrainerParams(**params)
    monkeypatch.setattr(step_graph, "LEAST_BATCHES", 4)
    plain = trained(tiny_at(tmp_path / "plain", **words), None)
    recorder, tiny = Replayer(fault), tiny_at(tmp_path / "graph", **words)
    assert numbers(trained(tiny, recorder)) == numbers(plain)
    assert line in tiny.log()
    assert recorder.outputs == (replays and replays + OUTPUT_TRIAL)


def test_a_model_that_is_changed_between_epochs_leaves_its_graph(tmp_path: Path) -> None:
    made: list[Net] = []

    def make() -> Net:
        made.append(Net())
        return made[-1]

    def decay(epoch: int) -> float:
        if epoch == 2:
            made[-1].scale = 0.5
        return 0.9**epoch

    schedule = {"own": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, decay)}
    params = TrainerParams(epochs=3)
    words = {"models": {"net": make}, "lr_schedules": schedule, "params": params}
    plain = trained(tiny_at(tmp_path / "plain", **words), None)
    recorder, tiny = Replayer(), tiny_at(tmp_path / "graph", **words)
    assert numbers(trained(tiny, recorder)) == numbers(plain)
    assert recorder.replays == TRIAL + 3
    assert "no CUDA graph any more" in tiny.log()


def test_a_job_continues_with_and_without_a_graph(tmp_path: Path) -> None:
    """Left after every sixth step, in every second attempt with a graph."""
    words = {"opt_fn": heavy, "params": TrainerParams(epochs=4)}
    plain = trained(tiny_at(tmp_path / "plain", **words), None)
    tiny, recorder = tiny_at(tmp_path / "graph", **words), Replayer()
    refs: list[CheckpointRef] = []
    result, attempt = None, 0
    while result is None:
        attempt += 1
        events: list[RunEvent] = []
        calls = iter(range(100))
        stop = lambda calls=calls: next(calls) == 5  # noqa: E731
        with JobLog(tiny.root, tiny.jobs[0]) as log:
            training = built(tiny, log, tuple(refs), attempt)
            step_graph.prepare(training, recorder if attempt % 2 else None)
            result = loop.train_to_end(training, events.append, stop)
        refs = checkpoints(events)
    assert numbers(result) == numbers(plain)
    assert attempt > 2
    assert recorder.replays > TRIAL


SHARES: list[tuple[float, str, float, list[float]]] = [
    (0.001, "", 1e9, [0.25]),
    (0.1, "", 1e9, [1.0]),
    (0.003, "capture", 0.0, [0.75]),  # without a graph, by its kernels
    (0.0, "capture", 0.0, []),  # none of which were seen
    (0.003, "capture", 1e9, []),  # a profiler does not pay
]


def test_a_job_tells_once_how_busy_its_steps_keep_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps of 4 ms, one of which takes a minute; it changes no bit."""
    plain = numbers(trained(tiny_at(tmp_path / "plain", params=TrainerParams(4)), None))
    for number, (busy, fault, least, expected) in enumerate(SHARES):
        times = itertools.accumulate(60.0 if call == 5 else 0.004 for call in itertools.count())
        monkeypatch.setattr(gpu_share, "time", SimpleNamespace(perf_counter=times.__next__))
        monkeypatch.setattr(step_graph, "PROFILED_SECONDS", least)
        events, tiny = list[RunEvent](), tiny_at(tmp_path / str(number), params=TrainerParams(4))
        with JobLog(tiny.root, tiny.jobs[0]) as log:
            training = built(tiny, log)
            training.task = replace(training.task, measures_gpu=True)
            step_graph.prepare(training, Replayer(fault, busy=busy))
            assert numbers(loop.train_to_end(training, events.append, never)) == plain
        shares = [item.share for item in events if isinstance(item, GpuShare)]
        assert shares == pytest.approx(expected)
