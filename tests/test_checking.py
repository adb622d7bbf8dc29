"""The dry run of all candidates: shares side by side, each model alone where one kills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.checking import ATTEMPTS, Checker, joined
from asynckfold.engines.engine import Answer
from asynckfold.errors import InputError, WorkerDiedError
from asynckfold.interruption import Interruption
from asynckfold.messages import Facts, Task
from asynckfold.placement import Load, Placement

RULE = ("a rule", "what was received", "a remedy")


@dataclass(eq=False)
class Engines:
    """Engines whose workers die of some models, and answer at once of others."""

    idle: tuple[int, ...]
    deadly: dict[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    asked: list[list[Placement]] = field(default_factory=list)

    @contextmanager
    def __call__(self, bundle: Any) -> Iterator[Engines]:
        self.asked.append([])
        yield self

    def load(self, running: Sequence[Placement]) -> Load:
        return Load(tuple(range(8)), self.idle, 1 << 30)

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        self.asked[-1].append(placement)
        future: Future[Answer] = Future()
        names = [job.partition("/")[0] for job in placement.jobs]
        for name in names:
            if name in self.deadly:
                future.set_exception(WorkerDiedError(1, "SIGKILL", self.deadly[name]))
                return future
        problems = (RULE,) if any(name in self.refused for name in names) else ()
        facts = Facts({"architecture": dict.fromkeys(names, "x")}, {}, {}, problems)
        future.set_result(Answer([facts], 1, 0))
        return future


def found(engines: Engines, names: Sequence[str], most: int = 8) -> Facts:
    jobs = [SimpleNamespace(id=f"{name}/{n}", model=name) for name in names for n in range(3)]
    bundle = SimpleNamespace(
        recipe=SimpleNamespace(models=dict.fromkeys(names)), plan=SimpleNamespace(jobs=jobs)
    )
    everywhere = Placement((), tuple(range(8)), 1, trainer="preflight")
    return Checker(engines, everywhere, most, None, Interruption())(bundle)  # type: ignore[arg-type]


@given(st.integers(1, 9), st.integers(0, 8), st.integers(1, 8))
def test_each_model_is_checked_once_and_each_share_has_an_idle_core(
    models: int, idle: int, most: int
) -> None:
    names = [f"m{number}" for number in range(models)]
    engines = Engines(tuple(range(idle)))
    facts = found(engines, names, most)
    (placements,) = engines.asked
    assert [job for placement in placements for job in placement.jobs] == [f"{n}/0" for n in names]
    assert list(facts.recipe["architecture"]) == names
    assert len(placements) == max(1, min(models, idle, most))
    sizes = [len(placement.jobs) for placement in placements]
    assert max(sizes) - min(sizes) <= 1
    if len(placements) > 1:
        cores = [placement.cores for placement in placements]
        assert len(set(cores)) == len(cores)
        assert all(len(own) == 1 and own[0] < idle for own in cores)


def test_where_one_kills_each_is_checked_alone_and_only_its_own_jobs_fail() -> None:
    engines = Engines((0, 1), {"bad": "died"})
    facts = found(engines, ["a", "bad", "b"])
    first, *others = ([placement.jobs for placement in asked] for asked in engines.asked)
    assert len(first) == 2
    assert others == [[("a/0",)], *[[("bad/0",)]] * ATTEMPTS, [("b/0",)]]
    assert list(facts.failures) == ["bad"]
    assert facts.recipe["architecture"] == {"a": "x", "bad": None, "b": "x"}


def test_one_that_hangs_is_not_tried_again() -> None:
    engines = Engines((0, 1), {"bad": "hang"})
    found(engines, ["a", "bad"])
    assert [asked[0].jobs for asked in engines.asked[1:]] == [("a/0",), ("bad/0",)]


def test_what_is_refused_in_several_shares_is_told_once() -> None:
    with pytest.raises(InputError) as caught:
        found(Engines((0, 1, 2), refused=("a", "b")), ["a", "b"])
    assert len(caught.value.problems) == 1


def test_facts_of_all_fields_are_joined() -> None:
    one, two = (
        Facts(
            {"settings": {name: "Adam"}, "criterion": "same"},
            **{
                kind: {name: kind}
                for kind in Facts.__dataclass_fields__
                if kind not in ("recipe", "problems")
            },  # type: ignore[arg-type]
        )
        for name in "ab"
    )
    whole = joined([one, two])
    assert whole.recipe == {"settings": {"a": "Adam", "b": "Adam"}, "criterion": "same"}
    for kind in Facts.__dataclass_fields__:
        if kind not in ("recipe", "problems"):
            assert getattr(whole, kind) == {"a": kind, "b": kind}
