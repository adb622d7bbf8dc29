"""Sweeps of different shapes, planned without a machine: for tests of what a plan depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asynckfold import Fold, Plan, TrainerParams
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.plan import make_jobs
from asynckfold.planning.choice import choose, choose_devices
from asynckfold.planning.forecast import Forecast, forecast, predicted
from asynckfold.planning.fusion_groups import group
from asynckfold.planning.fusion_rule import Fuse
from asynckfold.planning.workload import Choice, Workload

SMALL, MEDIUM, LARGE, HUGE = 1_000_000, 100_000_000, 2_000_000_000, 30_000_000_000


@dataclass(frozen=True)
class Shape:
    """A sweep, and what the caller asks for."""

    flops: dict[str, int]
    cores: int
    folds: int = 5
    schedules: int = 1
    epochs: int = 3
    gpus: int = 0
    devices: tuple[str, ...] = ("cpu",)
    threads: int | None = None
    fuse: Fuse = "auto"
    params: tuple[tuple[str, Any], ...] = ()

    def work(self) -> Workload:
        """Return the sweep, undecided."""
        names = list(self.flops)
        folds = tuple(
            Fold(0, index, np.arange(3200), np.arange(100)) for index in range(self.folds)
        )
        jobs = make_jobs(names, [f"s{number}" for number in range(self.schedules)], folds, 0)
        params = TrainerParams(epochs=self.epochs, **dict(self.params))
        plan = Plan(jobs, params, 32, 1, 0, "cpu", ("accuracy",), "d", "f")
        recipe = {"architecture": {name: f"{name} {count}" for name, count in self.flops.items()}}
        steps, memory = dict.fromkeys(names, 0.001), dict.fromkeys(names, 100)
        refusals = {name: "" if count < LARGE else "large" for name, count in self.flops.items()}
        facts = Facts(recipe, steps, memory, flops=self.flops, fusible=refusals)
        return Workload(plan, folds, facts, self.cores, self.gpus)

    def planned(self, work: Workload | None = None, before: Choice | None = None) -> Forecast:
        """Decide all, and predict the sweep."""
        work = work or self.work()
        devices = choose_devices(work, self.devices, None)
        work = replace(work, plan=work.plan.with_devices(devices.kinds))
        choice = choose(work, self.threads, before, None)
        groups = group(work, choice, None, self.fuse, 1 << 40)
        return forecast(work, predicted(work, choice, groups), groups)


SWEEPS = {
    "one core": Shape({"a": SMALL, "b": HUGE}, 1),
    "two cores": Shape({"a": LARGE}, 2),
    "small models in groups": Shape({"a": SMALL, "b": MEDIUM}, 2, 6, 4),
    "small and large": Shape({"a": SMALL, "b": HUGE}, 4, 10, 2),
    "few large jobs": Shape({"a": HUGE}, 16, 3),
    "the last jobs": Shape({"a": HUGE}, 4, 5),
    "an odd number of cores": Shape({"a": MEDIUM, "b": LARGE, "c": HUGE}, 7, 5, 3),
    "many jobs": Shape({"a": MEDIUM, "b": LARGE}, 16, 10, 30),
    "more cores than jobs": Shape({"a": SMALL, "b": MEDIUM}, 49, 10, 2, fuse=True),
    "threads as asked": Shape({"a": SMALL, "b": HUGE}, 12, 10, 3, threads=6, fuse=True),
    "groups as asked": Shape({"a": SMALL}, 8, 10, 2, fuse=4),
    "processes": Shape(
        {"a": MEDIUM}, 4, params=(("trainer", "averaging"), ("processes", 2)), fuse=False
    ),
    "a GPU and cores": Shape({"a": SMALL, "b": HUGE}, 4, 5, 2, gpus=1, devices=("cpu", "cuda")),
    "two GPUs": Shape({"a": LARGE, "b": HUGE}, 6, gpus=2, devices=("cuda",)),
}
