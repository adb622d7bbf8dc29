"""Kills at random, of which ``make chaos`` makes two hundred. Is the campaign itself sound?"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, Plan, RunStore
from tests import chaos, leftovers
from tests.chaos import Campaign, Outcome
from tests.durability.work import work
from tests.nursery import Nursery, nursery
from tests.toy import Tiny, adam, samples
from tests.watched.chain import Chain, Hurt, Landed, Rest, compare
from tests.watched.kills import PHASES, Kill, planned

SEED = 0
KILLS = 20


@pytest.fixture
def starters(close_workers: Callable[[], None], warm: Nursery) -> Iterator[list[Nursery]]:
    """Two, of which nothing else is left: what has the mark of one belongs to its chain."""
    close_workers()
    with nursery() as other:
        leftovers.helpers.add(other.pid)
        yield [warm, other]
        leftovers.helpers.discard(other.pid)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_kills_at_random_are_no_event(tmp_path: Path, starters: list[Nursery]) -> None:
    outcome = Outcome(SEED, KILLS)
    Campaign(outcome, planned(SEED, KILLS), tmp_path, starters).run()
    print(chaos.table(outcome, "…"))
    assert outcome.failures == []
    assert outcome.invalid() == []
    assert len(outcome.landed) == KILLS


def test_a_campaign_that_left_out_a_phase_says_that_it_proves_nothing() -> None:
    outcome = Outcome(0, 20, landed=[landed(phase) for phase in PHASES])
    assert outcome.invalid() == []
    assert "proves nothing" not in chaos.table(outcome, "…")
    outcome.landed.pop()
    assert outcome.invalid() == ["0 kills at resume"]
    assert "**This proves nothing: 0 kills at resume.**" in chaos.table(outcome, "…")
    large = Outcome(0, 200, landed=[landed(phase) for phase in PHASES for _ in range(19)])
    assert len(large.invalid()) == len(PHASES)


def landed(phase: str) -> Landed:
    return Landed(Kill(0, "sweep", None), "sweep", phase, 1, 0.0)


GOLDEN: dict[str, Any] = {"weights": {"a": "1"}, "progress": {"a 1": ["x"], "a 2": ["y"]}}


def test_progress_may_be_lost_but_not_be_wrong_and_nothing_else_may_differ() -> None:
    compare({**GOLDEN, "progress": {"a 2": ["y"]}}, GOLDEN)
    with pytest.raises(Hurt, match="progress"):
        compare({**GOLDEN, "progress": {"a 2": ["x"]}}, GOLDEN)
    with pytest.raises(Hurt, match=r"1 values differ from the golden run:\n +weights: a is None"):
        compare({**GOLDEN, "weights": {}}, GOLDEN)


@pytest.fixture
def chain(tmp_path: Path, warm: Nursery) -> Chain:
    return Chain(tmp_path / "chain", 1.0, warm)


def lines(*steps: int) -> str:
    return "".join(
        f"epoch {(step - 1) // 10 + 1}/6 batch {(step - 1) % 10 + 1}/10 loss 1\n" for step in steps
    )


def test_work_done_again_or_not_continued_where_it_could_be_is_told(chain: Chain) -> None:
    chain._check_continuation("a", lines(*range(1, 15), *range(11, 20)))
    assert chain.redone == 4
    with pytest.raises(Hurt, match="from batch 60 to 1"):
        chain._check_continuation("a", lines(*range(1, 61), 1))
    with pytest.raises(Hurt, match="from batch 3 to 5"):
        chain._check_continuation("a", lines(1, 2, 3, 5))
    first = lines(*range(1, 26))
    chain._rest = Rest(logs={"a": len(first)}, batches={"a": 20})
    chain._check_continuation("a", first + lines(21, 22))
    with pytest.raises(Hurt, match="newest checkpoint has 20"):
        chain._check_continuation("a", first + lines(11, 12))


def test_a_result_that_is_lost_or_made_twice_is_told(chain: Chain) -> None:
    work(chain.root, 1)
    chain._look()
    assert len(chain._rest.finished) == 2
    with RunStore.read(chain.root) as store:
        name = store.plan.jobs[0].id
    chain._rest.attempts[name] = 0
    with pytest.raises(Hurt, match="was tried again"):
        chain._look()
    chain._rest.finished[name] = "another"
    with pytest.raises(Hurt, match="is lost"):
        chain._look()


# What the campaign found


class Fragile(Tiny):
    """Its process is killed the first two times that it trains."""

    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        before = self.notes.read_text() if self.notes.exists() else ""
        if len(before) < 2:
            self.notes.write_text(f"{before}x")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs)


@pytest.mark.nightly
def test_the_plan_does_not_depend_on_who_was_killed_in_a_dry_run(tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    def plan(name: str) -> Plan:
        kfold = AsyncKFold(
            2, samples(), tmp_path / name, nn.CrossEntropyLoss(), 20, baseline=None, verbose=0
        )
        return kfold({"fragile": lambda: Fragile(notes)}, ["step"], adam, {"epochs": 1}).plan

    disturbed = plan("disturbed")
    assert notes.read_text() == "xx"
    assert plan("undisturbed").first_difference(disturbed) is None
