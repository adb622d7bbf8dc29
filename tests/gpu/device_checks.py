"""What is checked on a GPU in a process of its own: ``python -m tests.gpu.device_checks NAME``.

The process of the tests must not open the GPU: its workers could not be forked any more.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asynckfold import AsyncKFold, TrainerParams
from asynckfold.data.batches import Batches
from asynckfold.data.device_copies import Prefetcher
from asynckfold.data.transforms.trees import mapped, on_device
from asynckfold.jobs.messages import GpuShare, Task
from asynckfold.jobs.result import DONE
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import loop, setup, step_graph, torch_settings
from asynckfold.training.calls import call_model
from asynckfold.training.cuda_graph import MEMORY_SHARE, CudaRecorder, NotCapturable
from asynckfold.training.fusion.backward import backward, fuse_criterion, parts_of
from asynckfold.training.fusion.module import fuse
from asynckfold.training.job_log import JobLog
from asynckfold.training.training_run import Training
from tests import toy
from tests.training.fusion.test_group_graph import CASES, attempt, grouped
from tests.training.fusion.test_zoo import replicas
from tests.training.fusion.zoo import ZOO
from tests.training.test_gpu_step import Conv, images
from tests.training.tiny import CLASSES, FEATURES, Tiny, never, sgd

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class Perceptron(nn.Module):
    """Running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(64, CLASSES),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(inputs)
        return found


class Convolutions(Perceptron):
    """A convolution before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 1, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.first(inputs[:, None])[:, 0])


class Masked(Perceptron):
    """Waits for the device in its forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        found = super().forward(inputs)
        return found + inputs[inputs > 0].mean()


class Asking(Perceptron):
    """Waits for the device, in plain words."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (1.0 + inputs.mean().item())


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adam, fused": lambda model: torch.optim.Adam(model.parameters(), 0.01),
    "adam, foreach": lambda model: torch.optim.Adam(model.parameters(), 0.01, foreach=True),
    "adam, capturable": lambda model: torch.optim.Adam(model.parameters(), 0.01, capturable=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), 0.01),
}


def tiny_of(root: Path, model: Callable[[], nn.Module] = Perceptron, **changes: Any) -> Tiny:
    # Batches of 12, 12, 12 and 4.
    words: dict[str, Any] = {"params": TrainerParams(epochs=5), "batch_size": 12, **changes}
    return Tiny(root, {"net": model}, {"cosine": "cosine"}, **words)


def built(tiny: Tiny, log: JobLog, data: Batches | None = None) -> Training:
    data = data or tiny.batches
    return setup.build(tiny.bundle, Task(tiny.jobs[0]), data, DEVICE, log, Heartbeat())


class NoRecorder(CudaRecorder):
    """Refuses, so that each step is eager, with the learning rates of a job on a GPU."""

    def capture(self, work: Any, generators: Any = ()) -> Any:
        raise NotCapturable("it is not wanted")


def trained(tiny: Tiny, *, graph: bool, data: Batches | None = None) -> Any:
    """Return the numbers of a job."""
    torch.cuda.manual_seed(0)
    with JobLog(tiny.root, tiny.jobs[0]) as log:
        training = built(tiny, log, data)
        step_graph.prepare(training, None if graph else NoRecorder(DEVICE, 1.0))
        result = loop.train_to_end(training, lambda event: None, never)
    assert result is not None
    assert result.status == DONE, result
    assert result.outputs is not None
    epochs = [replace(item, seconds=0.0) for item in result.epochs]
    return result.weights, epochs, result.outputs.tobytes()


def graphs_have_the_bits_of_eager_steps(root: Path) -> None:
    """Prints what each job's log says of its graph; most of them are to have one."""
    torch.use_deterministic_algorithms(True)
    step_graph.LEAST_STEPS, step_graph.LEAST_BATCHES = 10, 4
    used = evaluated = 0
    common: dict[str, Any] = {"epochs": 5, "eval_batch_size": 8}
    cases = [
        (model, optimizer, TrainerParams(precision=precision, clip_grad_norm=clipped, **common))
        for model in (Perceptron, Convolutions)
        for optimizer in OPTIMIZERS
        for precision in ("fp32", "tf32", "bf16", "fp16")
        for clipped in (None, 0.5)
    ]
    for number, (model, optimizer, params) in enumerate(cases):
        before = torch_settings.current()
        if params.precision == "tf32":
            torch_settings.allow_tf32()
        words: dict[str, Any] = {"params": params, "opt_fn": OPTIMIZERS[optimizer]}
        plain = trained(tiny_of(root / f"plain-{number}", model, **words), graph=False)
        tiny = tiny_of(root / f"graph-{number}", model, **words)
        name = f"{model.__name__}, {optimizer}, {params.precision}, {params.clip_grad_norm}"
        assert trained(tiny, graph=True) == plain, name
        line, *others = [line for line in tiny.log().splitlines() if "CUDA graph" in line]
        print(f"{name}: {line}; {others}")
        used += line.startswith("CUDA graph")
        evaluated += others == ["CUDA graph of evaluations"]
        torch_settings.apply(before)
    assert used > len(cases) // 2, f"{used} of {len(cases)} jobs used a graph"
    assert evaluated > used // 2, f"{evaluated} of {used} of these evaluated by a graph"


def graphs_hold_the_gather_and_its_draws(root: Path) -> None:
    """Of crops and flips, whose draws are copied in; a `OneCycleLR` steps outside."""
    torch.use_deterministic_algorithms(True)
    step_graph.LEAST_STEPS = 10
    for schedule, line in (("cosine", ""), ("onecycle", ", without Adam")):
        words: dict[str, Any] = {"opt_fn": OPTIMIZERS["adam, fused"], "batch_size": 12}
        words |= {"lr_schedules": {schedule: schedule}, "params": TrainerParams(epochs=5)}
        plain, tiny = (Tiny(root / f"{name} {schedule}", {"conv": Conv}, **words) for name in "ab")
        expected = trained(plain, graph=False, data=images())
        assert trained(tiny, graph=True, data=images()) == expected
        assert f"CUDA graph of the step{line}\n" in tiny.log()


def groups_have_the_bits_of_eager_steps(root: Path) -> None:
    """Weights and optimizer states, with each replica's dropout; prints what the logs say."""
    torch.use_deterministic_algorithms(True)
    step_graph.LEAST_STEPS = 10
    for name, (changes, line) in CASES.items():
        for model in (Perceptron, Convolutions):
            words = {"models": {"net": model}, **changes}
            recorders = CudaRecorder(DEVICE, 1.0), NoRecorder(DEVICE, 1.0)
            folders = [root / f"{name} {model.__name__} {number}" for number in range(2)]
            graph, plain = [grouped(folder, **words) for folder in folders]
            found, _ = attempt(graph, recorders[0], device=DEVICE)
            assert found == attempt(plain, recorders[1], device=DEVICE)[0], name
            said = [text for text in graph.log().splitlines() if "CUDA graph" in text]
            print(f"{name}, {model.__name__}: {said}")
            assert f"{said[-1]}\n" == line, name


def a_step_that_waits_stays_eager(root: Path) -> None:
    """It is refused before a capture, and trains on, dropout and all."""
    torch.use_deterministic_algorithms(True)
    step_graph.LEAST_STEPS = 10
    for model in (Masked, Asking):
        plain = trained(tiny_of(root / f"plain-{model.__name__}", model), graph=False)
        tiny = tiny_of(root / f"graph-{model.__name__}", model)
        assert trained(tiny, graph=True) == plain
        assert "no CUDA graph: " in tiny.log()
        print(next(line for line in tiny.log().splitlines() if "CUDA graph" in line))


def a_failed_capture_leaves_a_sound_process(root: Path) -> None:
    """The generator draws on, memory that two streams used is used again, a capture succeeds."""
    recorder = CudaRecorder(DEVICE, MEMORY_SHARE)
    values = torch.ones(4, device=DEVICE)
    drawn = torch.cuda.get_rng_state()
    for _ in range(3):
        try:
            recorder.capture(lambda: values * values.sum().item())
        except Exception as error:  # noqa: BLE001
            print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            raise AssertionError("a capture that waits for the device succeeded")
    assert torch.cuda.current_stream(DEVICE) == torch.cuda.default_stream(DEVICE)
    assert torch.equal(torch.cuda.get_rng_state(), drawn)
    nn.functional.dropout(values)
    # Batches of 4 MiB each: kept, 200 of them would be 800 MiB.
    order = torch.arange(1 << 10)
    prefetcher = Prefetcher(torch.zeros(1 << 10, 1 << 10), DEVICE)
    for number in range(200):
        prefetcher.take((number, number + 1), order)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved(DEVICE) < 400 << 20
    found, replay = recorder.capture(lambda: nn.functional.dropout(values * 2) + values)
    torch.cuda.manual_seed(5)
    expected = nn.functional.dropout(values * 3 * 2) + values * 3
    torch.cuda.manual_seed(5)
    values.mul_(3)
    replay()
    assert torch.equal(found, expected)


def the_host_waits_once_an_epoch(root: Path) -> None:
    """As torch itself counts; once more for a schedule that reacts to a loss."""
    for schedule, waits in (("cosine", 1), ("reduce", 2)):
        words: dict[str, Any] = {"lr_schedules": {schedule: schedule}, "batch_size": 12}
        tiny = Tiny(root / schedule, {"net": Perceptron}, **words)
        with JobLog(tiny.root, tiny.jobs[0]) as log:
            training = built(tiny, log)
            for epoch in range(2):
                found = _waits(training)
                # The first epoch opens libraries.
                assert epoch == 0 or len(found) == waits, found


def _waits(training: Training) -> list[str]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        training.begin_epoch()
        while training.batch < training.batches:
            training.step()
            training.report_progress(lambda event: None)
        training.end_epoch(0.0, lambda event: None)
        torch.cuda.set_sync_debug_mode("default")
    texts = [f"{item.message} ({item.filename}:{item.lineno})" for item in warned]
    return [text for text in texts if "synchronizing CUDA operation" in text]


def a_job_leaves_no_memory_behind(root: Path) -> None:
    """Neither its graph nor what it kept, once the cache is empty."""
    step_graph.LEAST_STEPS = 10
    left = []
    for number in range(4):
        trained(tiny_of(root / str(number)), graph=True)
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_allocated(DEVICE))
    print(f"{[size >> 10 for size in left]} KiB left")
    # Of the first job the workspaces of libraries stay: on an H200 32 MiB each of cuBLAS and
    # cuBLASLt for each of two streams.
    assert max(left[1:]) <= left[0] < 200 << 20


def fused_models_are_plain(root: Path) -> None:
    """All of the zoo in float64, with plain models on a core: cuDNN has kernels that round."""
    wrong = {}
    for name, animal in ZOO.items():
        models = [model.double().eval() for model in replicas(animal)]
        (inputs, targets), *_ = [animal.batch(5, 0)]
        inputs = mapped(lambda item: item.double() if item.is_floating_point() else item, inputs)
        expected = [
            nn.functional.cross_entropy(call_model(copy.deepcopy(model), inputs), targets)
            for model in models
        ]
        inputs, targets = on_device((inputs, targets), DEVICE)
        fused = fuse([model.to(DEVICE) for model in models], [inputs])
        outputs = torch.zeros(5, animal.classes, device=DEVICE, dtype=torch.float64)
        criterion = fuse_criterion(nn.CrossEntropyLoss(), len(models), outputs, targets)
        losses = backward(fused, criterion, parts_of([(inputs, targets)] * len(models)))
        off = float((losses.cpu() - torch.stack(expected).detach()).abs().max())
        print(f"{name}: {off:.1e}")
        if not off < 1e-9:
            wrong[name] = off
    assert not wrong, wrong


def each_replica_draws_masks_of_its_own(root: Path) -> None:
    """From its generator, so that another seed changes that replica only."""
    drawn = 0
    for name in ("mlp", "lenet5", "residual", "transformer"):
        animal = ZOO[name]
        models = [model.to(DEVICE) for model in replicas(animal)]
        inputs, targets = (item.to(DEVICE) for item in animal.batch(5, 0))
        batches = [(inputs, targets)] * len(models)
        losses = []
        for seeds in ((0, 1, 2), (0, 1, 2), (0, 9, 2)):
            fused = fuse(copy.deepcopy(models), [batches[0][0]])
            for generator, seed in zip(fused.generators, seeds, strict=True):
                assert generator.device == DEVICE
                generator.manual_seed(seed)
            outputs = torch.zeros(5, animal.classes, device=DEVICE)
            criterion = fuse_criterion(nn.CrossEntropyLoss(), 3, outputs, batches[0][1])
            losses.append(backward(fused, criterion, parts_of(batches)))
        torch.testing.assert_close(losses[0], losses[1])
        torch.testing.assert_close(losses[0][::2], losses[2][::2])
        if any(isinstance(part, nn.Dropout) and part.p for part in models[0].modules()):
            assert not torch.equal(losses[0][1], losses[2][1]), name
            drawn += 1
    assert drawn


def a_small_sweep_trains_in_the_process_of_the_caller(root: Path) -> None:
    """With the bits of workers, where kernels are deterministic.

    It leaves its memory, and the generator as it was.
    """
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(5)
    prints = []
    for engine in ("auto", "process"):
        settings: dict[str, Any] = {"devices": [0], "verbose": 0, "engine": engine}
        kfold = AsyncKFold(3, toy.samples(), root / engine, nn.CrossEntropyLoss(), 10, **settings)
        results = kfold([toy.Tiny], ["cosine", "step"], toy.adam, {"epochs": 20})
        assert set(results.to_frame("fold")["device"]) == {"cuda:0"}
        is_here = {item.pid for item in results.results.values()} == {os.getpid()}
        assert is_here == (engine == "auto")
        prints.append(results.fingerprint)
    assert prints[0] == prints[1]
    drawn = torch.rand(3, device=DEVICE)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3, device=DEVICE))
    print(f"{torch.cuda.memory_allocated() >> 20} MiB left")
    assert torch.cuda.memory_allocated() < 200 << 20


def shares_are_measured(root: Path) -> None:
    """By replays and by kernels: less of a host that pauses after each step."""
    step_graph.LEAST_STEPS, step_graph.PROFILED_SECONDS = 10, 0.0
    for kind in (CudaRecorder, NoRecorder):
        events: list[Any] = []
        for seconds in (0.02, 0.0):
            tiny = tiny_of(root / f"{kind.__name__} {seconds}")
            with JobLog(tiny.root, tiny.jobs[0]) as log:
                training = built(tiny, log)
                training.task = replace(training.task, measures_gpu=True)
                step_graph.prepare(training, kind(DEVICE, 1.0))
                loop.train_to_end(training, events.append, partial(time.sleep, seconds))
        paused, busy = (item.share for item in events if isinstance(item, GpuShare))
        assert 0 < 4 * paused < busy <= 1, (kind, paused, busy)


CHECKS = (
    fused_models_are_plain,
    each_replica_draws_masks_of_its_own,
    a_small_sweep_trains_in_the_process_of_the_caller,
    shares_are_measured,
    graphs_have_the_bits_of_eager_steps,
    graphs_hold_the_gather_and_its_draws,
    groups_have_the_bits_of_eager_steps,
    a_step_that_waits_stays_eager,
    a_failed_capture_leaves_a_sound_process,
    the_host_waits_once_an_epoch,
    a_job_leaves_no_memory_behind,
)

if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with tempfile.TemporaryDirectory() as folder:
        {check.__name__: check for check in CHECKS}[sys.argv[1]](Path(folder))
