"""Jobs of several processes, trained in this process and by what it forks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from asynckfold.messages import News, Task
from asynckfold.plan import TrainerParams
from asynckfold.result import DONE, Result
from asynckfold.store import CheckpointRef
from asynckfold.training import several
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
) -> tuple[Result | None, list[News]]:
    """One attempt at the first job, and what it told; it leaves no process."""
    news: list[News] = []
    task = Task(tiny.jobs[0], number, tuple(refs))
    before = descendants()
    try:
        result = several.train(tiny.bundle, task, tiny.batches, (), news.append, stop)
    finally:
        assert descendants() <= before
    return result, news


def train(tiny: Tiny) -> Result:
    """The first job, which ends well."""
    result, _ = attempt(tiny)
    assert result is not None
    assert result.status == DONE
    return result


def train_with_stops(tiny: Tiny, stop: Callable[[], bool] = always) -> tuple[Result, int]:
    """The first job, stopped whenever `stop` says so, and how many attempts it took."""
    refs: list[CheckpointRef] = []
    for number in range(1, 100):
        result, news = attempt(tiny, number, refs, stop)
        if result is not None:
            return result, number
        refs = checkpoints(news)
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
