"""Jobs of several processes, trained in this process and by what it forks."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from asynckfold import Result, TrainerParams
from asynckfold.jobs.messages import CheckpointRef, RunEvent, Task
from asynckfold.jobs.result import DONE
from asynckfold.training.dry_run import preflight
from asynckfold.training.multiprocess import base as several
from asynckfold.training.process_group.gpu_handoff import HiddenGpu
from tests.leftovers import descendants
from tests.training.tiny import Plain, Tiny, always, checkpoints, never, sgd

OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "sgd": lambda model: optim.SGD(model.parameters(), 0.05),
    "momentum": sgd,
    "adam": lambda model: optim.Adam(model.parameters(), 0.01),
    "rprop": lambda model: optim.Rprop(model.parameters(), 0.001),
}


def params(trainer: str, processes: int = 2, **given: Any) -> TrainerParams:
    """Three epochs; of averaging, short rounds."""
    rounds = {"steps_per_round": 2} if trainer == "averaging" else {}
    return TrainerParams(
        **{"epochs": 3, "trainer": trainer, "processes": processes, **rounds, **given}
    )


def attempt(
    tiny: Tiny,
    number: int = 1,
    refs: Sequence[CheckpointRef] = (),
    stop: Callable[[], bool] = never,
    gpu: HiddenGpu | None = None,
) -> tuple[Result | None, list[RunEvent]]:
    """One attempt at the first job, and what it told; it leaves no process."""
    events: list[RunEvent] = []
    task = Task(tiny.jobs[0], number, tuple(refs))
    before = descendants()
    try:
        result = several.train(tiny.bundle, task, tiny.batches, (), events.append, stop, gpu=gpu)
    finally:
        assert descendants() <= before
    return result, events


def train(tiny: Tiny, gpu: HiddenGpu | None = None) -> Result:
    """The first job, which ends well."""
    result, _ = attempt(tiny, gpu=gpu)
    assert result is not None
    assert result.status == DONE
    return result


def train_with_stops(
    tiny: Tiny, stop: Callable[[], bool] = always, gpus: Iterable[HiddenGpu | None] = repeat(None)
) -> tuple[Result, int]:
    """The first job, stopped whenever `stop` says so, and how many attempts it took."""
    refs: list[CheckpointRef] = []
    for number, gpu in zip(range(1, 100), gpus, strict=False):
        result, events = attempt(tiny, number, refs, stop, gpu)
        if result is not None:
            return result, number
        refs = checkpoints(events)
    raise AssertionError("the training makes no progress")


def noting(
    path: Path, make: Callable[[], nn.Module] = Plain, *, training: bool = True
) -> Callable[[], nn.Module]:
    """A factory of models that write down, from any process, which samples they are trained on.

    Or evaluated on, where `training` is false.
    """

    def build() -> nn.Module:
        model = make()

        def note(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            if module.training is training:
                numbers = [int(value) for value in inputs[0][:, 0]]
                with path.open("a") as file:
                    file.write(json.dumps([os.getpid(), numbers]) + "\n")

        model.register_forward_pre_hook(note)
        return model

    return build


def noted(path: Path) -> list[tuple[int, list[int]]]:
    """(process, samples) of each batch that was noted."""
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def each_sample(tiny: Tiny, times: int = 3) -> Counter[int]:
    """What a job has trained on when it saw each sample of its fold so many times."""
    return Counter({int(number): times for number in tiny.bundle.folds[0].train})


def samples_in(path: Path) -> Counter[int]:
    """How often each sample was trained on, by any process."""
    return Counter(number for _, numbers in noted(path) for number in numbers)


class Counting(optim.SGD):
    """Keeps how often it stepped, which is no tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for item in group["params"]:
                self.state[item]["seen"] = self.state[item].get("seen", 0) + 1
        return super().step(closure)


def counting(model: nn.Module) -> optim.Optimizer:
    return Counting(model.parameters(), 0.1)


def problems(tiny: Tiny) -> list[tuple[str, str, str]]:
    """What is wrong with a sweep before anything starts."""
    return list(preflight.check(tiny.bundle, tiny.batches).problems)


class Fragile(Plain):
    """Does something in one of the further processes."""

    lead = os.getpid()

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.lead:
            self.act()
        return super().forward(inputs)
