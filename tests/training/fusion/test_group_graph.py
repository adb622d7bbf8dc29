"""The fused step as one CUDA graph has the bits of the eager one. What replays on cores stands in.

It repeats operations with the numbers that the host had, as a CUDA graph does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn, optim

from asynckfold import Result, TrainerParams
from asynckfold.jobs.messages import CheckpointRef, RunEvent, Task
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import loop, step_graph
from asynckfold.training.fusion import group as group_trainer
from tests.training.fusion.test_trainer import Grouped, raised, refs_of
from tests.training.test_step_graph import OUTPUT_TRIAL, Replayer
from tests.training.tiny import CPU, Mlp, never, samples

BATCH, EPOCH = TrainerParams(epochs=4, lr_step="batch"), TrainerParams(epochs=4)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "LEAST_STEPS", 5)


def grouped(root: Path, **changes: Any) -> Grouped:
    """Folds of 40 samples to train on, in batches of 12, 12, 12 and 4."""
    words: dict[str, Any] = {"params": BATCH, "batch_size": 12, "data": samples(60)}
    words["lr_schedules"] = {"constant": "constant", "cosine": "cosine"}
    return Grouped(root, **{"models": {"mlp": Mlp}, **words, **changes})


def attempt(
    tiny: Grouped,
    recorder: Any,
    stop: Callable[[], bool] = never,
    refs: dict[str, list[CheckpointRef]] | None = None,
    number: int = 1,
    device: torch.device = CPU,
) -> tuple[Any, list[RunEvent]]:
    """Results and optimizer states after one attempt at the group; None where it was stopped."""
    tasks = [Task(job, number, tuple((refs or {}).get(job.id, ()))) for job in tiny.jobs]
    events: list[RunEvent] = []
    with pytest.MonkeyPatch.context() as patch, ExitStack() as logs:
        patch.setattr(group_trainer, "recorder_on", lambda device, share: recorder)
        group = group_trainer.build(
            tiny.bundle, tasks, tiny.batches, device, Heartbeat(), logs, raised
        )
        group.restore(events.append)
        if not loop.run(group, tiny.bundle.plan.params, events.append, stop):
            return None, events
        group.end_all(loop.result_of)
    states = [
        optimizer.state_dict_of(replica)
        for optimizer in group.optimizers
        for replica in optimizer.replicas
    ]
    return (digests(group.results), flat(states)), events


def digests(results: dict[str, Result]) -> dict[str, str]:
    return {name: result.digest for name, result in results.items()}


def flat(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.shape, tree.cpu().numpy().tobytes()
    if isinstance(tree, dict):
        return {key: flat(value) for key, value in tree.items()}
    return [flat(item) for item in tree] if isinstance(tree, (list, tuple)) else tree


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.Adam(model.parameters(), 0.01)


def two_rates(model: nn.Module) -> optim.Optimizer:
    first, *others = model.parameters()
    return optim.AdamW([{"params": first, "lr": 0.02}, {"params": others}], 0.01, amsgrad=True)


def sgd(**settings: Any) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda model: optim.SGD(model.parameters(), 0.05, **settings)


HEAVY = {"momentum": 0.9, "dampening": 0.3}
CYCLE = {"lr_schedules": {"onecycle": "onecycle"}}
INSIDE, MIXED = "CUDA graph of the step\n", "CUDA graph of the step, without "

TRIAL, REPLAYS = 3, 9
"""Replays of a trial; of three steps in each epoch but the first, whose steps are eager."""

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "adam": ({"opt_fn": adam}, INSIDE),
    "adamw": (
        {
            "opt_fn": two_rates,
            "params": TrainerParams(epochs=4, precision="bf16", clip_grad_norm=0.1),
        },
        INSIDE,
    ),
    "sgd": ({"opt_fn": sgd()}, INSIDE),
    "sgd with momentum": ({"opt_fn": sgd(**HEAVY)}, INSIDE),
    "sgd of several kernels": ({"opt_fn": sgd(foreach=True, **HEAVY)}, f"{MIXED}SGD\n"),
    "rmsprop": (
        {"opt_fn": lambda model: optim.RMSprop(model.parameters(), 0.01)},
        f"{MIXED}RMSprop\n",
    ),
    "adagrad": (
        {"opt_fn": lambda model: optim.Adagrad(model.parameters(), 0.01)},
        f"{MIXED}Adagrad\n",
    ),
    # Momentum changes with each step, so the optimizer is outside at the first trial.
    "onecycle": ({"opt_fn": adam, **CYCLE}, f"{MIXED}Adam\n"),
    "onecycle and sgd": ({"opt_fn": sgd(**HEAVY), **CYCLE}, f"{MIXED}SGD\n"),
    # It changes after the first epoch, in which there is no graph yet.
    "onecycle by epoch": ({"opt_fn": adam, "params": EPOCH, **CYCLE}, f"{MIXED}Adam\n"),
    # Of 41 samples, the last batch has one more.
    "unequal folds": ({"data": samples(61), "opt_fn": adam}, INSIDE),
    "two kinds": (
        {"opt_fn": adam, "lr_schedules": {"cosine": "cosine", "onecycle": "onecycle"}},
        f"{MIXED}Adam\n",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_group_with_a_graph_has_the_same_bits(tmp_path: Path, name: str) -> None:
    """Dropout, running statistics, a last batch of another size; weights and optimizer states."""
    changes, line = CASES[name]
    plain, _ = attempt(grouped(tmp_path / "plain", **changes), None)
    recorder, tiny = Replayer(), grouped(tmp_path / "graph", **changes)
    found, _ = attempt(tiny, recorder)
    assert {line in tiny.log(job) for job in tiny.jobs} == {True}, tiny.log()
    assert found == plain
    assert recorder.replays == TRIAL + REPLAYS
    # Each replica draws its dropout.
    assert len(recorder.registered) == len(tiny.jobs)
    assert recorder.gathers


def test_evaluations_of_a_group_with_a_graph_have_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All held-out folds in one pass: of up to 21 samples, two full batches, and a smaller one."""
    monkeypatch.setattr(group_trainer, "TOGETHER", ("cpu",))
    monkeypatch.setattr(step_graph, "LEAST_BATCHES", 6)
    words = {"data": samples(61), "params": replace(EPOCH, eval_batch_size=8)}
    plain, _ = attempt(grouped(tmp_path / "plain", **words), None)
    recorder, tiny = Replayer(), grouped(tmp_path / "graph", **words)
    assert attempt(tiny, recorder)[0] == plain
    assert "CUDA graph of evaluations\n" in tiny.log()
    assert recorder.outputs == OUTPUT_TRIAL + 3 * 2


def late_cycle(optimizer: optim.Optimizer) -> Any:
    """Changes the momentum in the middle of the training, and the rate all the time."""

    def rate(step: int) -> float:
        if step == 7:
            optimizer.param_groups[0]["momentum"] = 0.5
        return float(0.9**step)

    return optim.lr_scheduler.LambdaLR(optimizer, rate)


def test_an_optimizer_whose_numbers_change_leaves_the_graph(tmp_path: Path) -> None:
    words: dict[str, Any] = {"opt_fn": sgd(**HEAVY), "lr_schedules": {"late": late_cycle}}
    plain, _ = attempt(grouped(tmp_path / "plain", **words), None)
    recorder, tiny = Replayer(), grouped(tmp_path / "graph", **words)
    assert attempt(tiny, recorder)[0] == plain
    first, second = (tiny.log().index(line) for line in (INSIDE, f"{MIXED}SGD\n"))
    assert first < second
    assert recorder.replays == 2 * TRIAL + REPLAYS


@pytest.mark.parametrize("opt_fn", [adam, sgd(**HEAVY)])
def test_a_group_continues_with_and_without_a_graph(tmp_path: Path, opt_fn: Any) -> None:
    """Left after every sixth step; a state that is loaded is captured anew."""
    plain, _ = attempt(grouped(tmp_path / "plain", opt_fn=opt_fn), None)
    tiny, recorder = grouped(tmp_path / "graph", opt_fn=opt_fn), Replayer()
    refs: dict[str, list[CheckpointRef]] = {}
    found, number = None, 0
    while found is None:
        number += 1
        calls = iter(range(100))
        stop = lambda calls=calls: next(calls) == 5  # noqa: E731
        found, events = attempt(tiny, recorder if number % 2 else None, stop, refs, number)
        refs = {**refs, **refs_of(events)}
    assert found == plain
    assert number > 2
    assert recorder.replays > TRIAL


def by_hand(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Branches on a value, so that losses cannot be computed together."""
    loss = nn.functional.cross_entropy(outputs, targets)
    return loss * 2 if float(loss) > 1e6 else loss


REFUSED: dict[str, tuple[Replayer, dict[str, Any], str]] = {
    "bits": (Replayer("bits"), {}, "its replay has other bits than an eager run"),
    "capture": (Replayer("capture"), {}, "RuntimeError: operation not permitted when stream"),
    "waits": (Replayer("waits"), {}, "RuntimeError: called a synchronizing CUDA operation"),
    "wrong": (Replayer("wrong", is_exact=False), {}, "its replay differs from an eager run by"),
    "criterion": (Replayer(), {"criterion": by_hand}, "the losses of its jobs are computed one by"),
    "own data": (Replayer(), {"preprocess": StandardScaler()}, "its jobs have data of their own"),
    "short": (
        Replayer(),
        {"params": TrainerParams(epochs=2, lr_step="batch")},
        "4 steps are left, and a trial pays from 5",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_says_why_once_and_leaves_no_trace(
    tmp_path: Path, name: str
) -> None:
    recorder, changes, reason = REFUSED[name]
    words = {"opt_fn": adam, **changes}
    plain, _ = attempt(grouped(tmp_path / "plain", **words), None)
    tiny = grouped(tmp_path / "graph", **words)
    assert attempt(tiny, recorder)[0] == plain
    for job in tiny.jobs:
        assert tiny.log(job).count("no CUDA graph: ") == 1
        assert f"no CUDA graph: {reason}" in tiny.log(job)
