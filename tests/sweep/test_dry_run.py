"""The dry run of all candidates: side by side on idle cores, alone where a process dies of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.engines.engine import Answer
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import Facts, Task
from asynckfold.jobs.placement import Command, Load, Placement
from asynckfold.sweep.tasks import ATTEMPTS, DryRun, ask
from asynckfold.system.signals import Interruption


@dataclass(eq=False)
class Engines:
    """An engine whose workers answer at once, or die of some models."""

    runs_in_submit = False

    idle: tuple[int, ...]
    deadly: dict[str, str] = field(default_factory=dict)
    mended: bool = False
    together: list[list[Placement]] = field(default_factory=list)

    @property
    def asked(self) -> list[Placement]:
        return [placement for placements in self.together for placement in placements]

    @contextmanager
    def __call__(self, bundle: Any) -> Iterator[Engines]:
        yield self

    def load(self, running: Sequence[Placement]) -> Load:
        self.together.append([])
        return Load(tuple(range(8)), self.idle, 1 << 30)

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        self.together[-1].append(placement)
        ((name, _),) = (job.split("/") for job in placement.jobs)
        future: Future[Answer] = Future()
        if name in self.deadly:
            outcome = self.deadly.pop(name) if self.mended else self.deadly[name]
            future.set_exception(WorkerDiedError(1, "SIGKILL", outcome))
            return future
        facts = Facts({"architecture": {name: "x"}}, {}, {})
        future.set_result(Answer([facts], 1, 0))
        return future


def found(engines: Engines, names: Sequence[str], most: int = 8) -> Facts:
    jobs = [
        SimpleNamespace(id=f"{name}/{n}", model=name, candidate=name)
        for name in names
        for n in range(3)
    ]
    bundle = SimpleNamespace(
        recipe=SimpleNamespace(models=dict.fromkeys(names)), plan=SimpleNamespace(jobs=jobs)
    )
    everywhere = Placement((), tuple(range(8)), 1, command=Command.DRY_RUN)
    run = DryRun(engines, everywhere, most, None, Interruption())  # type: ignore[arg-type]
    return run(bundle)


@given(st.integers(1, 9), st.integers(0, 8), st.integers(1, 8))
def test_each_model_is_checked_once_and_as_many_at_once_as_cores_are_idle(
    models: int, idle: int, most: int
) -> None:
    names = [f"m{number}" for number in range(models)]
    engines = Engines(tuple(range(idle)))
    facts = found(engines, names, most)
    assert [placement.jobs for placement in engines.asked] == [(f"{name}/0",) for name in names]
    assert list(facts.recipe["architecture"]) == names
    assert max(map(len, engines.together)) == max(1, min(models, idle, most))
    # Each but the first has an idle core for itself.
    for _, *others in filter(None, engines.together):
        cores = [placement.cores for placement in others]
        assert len({*cores}) == len(cores)
        assert all(len(alone) == 1 and alone[0] < idle for alone in cores)


def test_one_whose_process_dies_is_checked_again_alone_and_only_its_own_jobs_fail() -> None:
    engines = Engines((0, 1), {"bad": "died"})
    facts = found(engines, ["a", "bad", "b"])
    asked = [placement.jobs[0] for placement in engines.asked]
    assert asked == ["a/0", "bad/0", "b/0", *["bad/0"] * ATTEMPTS]
    assert list(facts.failures) == ["bad"]
    assert facts.recipe["architecture"] == {"a": "x", "bad": None, "b": "x"}


@pytest.mark.parametrize(("outcome", "times"), [("hang", 1), ("oom", 2)])
def test_what_another_attempt_would_not_mend_is_not_tried_often(outcome: str, times: int) -> None:
    engines = Engines((0, 1), {"bad": outcome})
    assert list(found(engines, ["a", "bad"]).failures) == ["bad"]
    assert [placement.jobs[0] for placement in engines.asked].count("bad/0") == times


def test_a_dry_run_and_a_single_task_are_on_an_open_node_and_its_cores() -> None:
    engines = Engines((0, 2))
    peer = Load((0, 1, 2), (0, 2), 1, node="y")
    engines.load = lambda running: (  # type: ignore[method-assign]
        engines.together.append([]) or Load((0,), (0,), 1, blocked="full", node="x", peers=(peer,))
    )
    found(engines, "abc")
    assert [(item.node, item.cores) for item in engines.asked] == [
        ("y", (0, 1, 2)),
        ("y", (0,)),
        ("y", (0, 1, 2)),
    ]
    task = Placement(("a/0",), tuple(range(8)), 1, trainer="baseline")
    ask(engines, task, None, Interruption())  # type: ignore[arg-type]
    assert engines.asked[-1] == replace(task, node="y", cores=(0, 1, 2))
