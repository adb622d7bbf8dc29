"""Ten kills at random; ``make chaos`` makes two hundred. And is the campaign itself sound?"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
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
from tests.size import NIGHTLY
from tests.toy import Tiny, adam, samples
from tests.watched.chain import Chain, HogwildChain, Hurt, Landed, Rest, compare
from tests.watched.kills import AT, MOMENTS, PHASES, TARGETS, Kill, of_children, planned
from tests.watched.sweep import EPOCHS

SEED, AT_ONCE = 0, 2
KILLS = 20 if NIGHTLY else 10
"""Of ten, each phase gets one."""


@pytest.fixture(scope="module")
def starters() -> Iterator[list[Nursery]]:
    """For both campaigns; that of the session also starts what is no run of theirs."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(nursery()) for _ in range(AT_ONCE)]
        leftovers.helpers.update(item.pid for item in made)
        yield made
        leftovers.helpers.difference_update(item.pid for item in made)


@pytest.mark.timeout(600)
def test_kills_at_random_are_no_event(tmp_path: Path, starters: list[Nursery]) -> None:
    outcome = Outcome(SEED, KILLS)
    Campaign(outcome, planned(SEED, KILLS), tmp_path, AT_ONCE, starters).run()
    print(chaos.table(outcome, "…"))
    assert outcome.failures == []
    assert outcome.invalid() == []
    assert len(outcome.landed) == KILLS


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_kills_are_no_event_for_jobs_of_several_processes(
    tmp_path: Path, starters: list[Nursery]
) -> None:
    outcome, kills = Outcome(SEED, 6, "hogwild"), of_children(planned(SEED, 6))
    Campaign(outcome, kills, tmp_path, AT_ONCE, starters, HogwildChain).run()
    assert outcome.failures == []
    assert outcome.missed == []
    assert len(outcome.landed) == len(kills)
    assert any(item.target == "worker's child" for item in outcome.landed)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_decides_all_kills(seed: int) -> None:
    kills = planned(seed, 200)
    assert kills == planned(seed, 200)
    assert kills != planned(seed + 1, 200)
    assert [kill.index for kill in kills] == list(range(200))
    assert all(kill.target in AT[kill.phase] for kill in kills)
    counts = Counter(kill.phase for kill in kills)
    assert all(counts[phase] == 20 for phase in MOMENTS)
    assert all(counts[phase] == 1 for phase in PHASES if phase not in MOMENTS)
    shares = sorted(kill.share for kill in kills if kill.phase is None)
    assert all(part <= share * len(shares) < part + 1 for part, share in enumerate(shares)), (
        "one in each part of a run"
    )
    assert {kill.target for kill in kills} == set(TARGETS)


def test_a_campaign_that_left_out_a_phase_says_that_it_proves_nothing() -> None:
    outcome = Outcome(0, 20, landed=[landed(phase) for phase in PHASES])
    assert outcome.invalid() == []
    assert "proves nothing" not in chaos.table(outcome, "…")
    outcome.landed.pop()
    assert outcome.invalid() == ["0 kills at resume"]
    assert "**This proves nothing: 0 kills at resume.**" in chaos.table(outcome, "…")
    large = Outcome(0, 200, landed=[landed(phase) for phase in PHASES for _ in range(19)])
    assert len(large.invalid()) == len(PHASES)


class TooLate:
    """Stands for a chain whose run is always over before the kill."""

    def strike(self, kill: Kill) -> bool:
        return False


def test_a_kill_that_never_lands_is_given_up_and_told(tmp_path: Path) -> None:
    campaign = Campaign(Outcome(0, 1), [Kill(0, "sweep", "report")], tmp_path, at_once=1)
    while (kill := campaign._next(1.0)) is not None:
        assert not campaign._lands(TooLate(), kill)  # type: ignore[arg-type]
    assert campaign.outcome.missed == ["kill 0: sweep at report 1 + 0.0 ms, tried 6 times"]
    assert campaign.outcome.invalid()[0] in chaos.table(campaign.outcome, "…")


def landed(phase: str) -> Landed:
    return Landed(Kill(0, "sweep", None), "sweep", phase, 1, 0.0)


def test_the_table_counts_and_is_honest() -> None:
    hits = [replace(landed("train"), detect_seconds=0.25), *[landed("commit")] * 2]
    told = chaos.table(Outcome(7, 3, landed=hits, chains=2, starts=5, redone=4), "make chaos")
    assert "| commit | 0 | 0 | 0 | 0 | 2 | 0 | 2 |" in told
    assert "| all | 0 | 0 | 0 | 0 | 3 | 0 | 3 |" in told
    assert "2 runs, 3 resumes" in told
    assert "0.25 s (of 1 that had a job)" in told
    assert "below 100.0%" in told
    assert chaos.bound(200).count("below 1.5%") == 1
    failed = chaos.table(Outcome(7, 3, landed=hits, failures=["x"]), "make chaos")
    assert "1 failures" in failed
    assert "rule of three" not in failed


GOLDEN: dict[str, Any] = {"weights": {"a": "1"}, "progress": {"a 1": ["x"], "a 2": ["y"]}}


def test_progress_may_be_lost_but_not_be_wrong_and_nothing_else_may_differ() -> None:
    compare({**GOLDEN, "progress": {"a 2": ["y"]}}, GOLDEN)
    with pytest.raises(Hurt, match="progress"):
        compare({**GOLDEN, "progress": {"a 2": ["x"]}}, GOLDEN)
    with pytest.raises(Hurt, match=r"1 values differ from the golden run:\n +weights: a is None"):
        compare({**GOLDEN, "weights": {}}, GOLDEN)


@pytest.fixture
def chain(tmp_path: Path) -> Any:
    made = Chain(tmp_path / "chain", 1.0)
    yield made
    made.close()


def lines(*steps: int) -> str:
    return "".join(
        f"epoch {(step - 1) // 10 + 1}/6 batch {(step - 1) % 10 + 1}/10 loss 1\n" for step in steps
    )


def test_work_done_again_is_counted_and_bounded(chain: Chain) -> None:
    chain._check_continuation("a", lines(*range(1, 15), *range(11, 20)))
    assert chain.redone == 4
    with pytest.raises(Hurt, match="from batch 60 to 1"):
        chain._check_continuation("a", lines(*range(1, 61), 1))
    with pytest.raises(Hurt, match="from batch 3 to 5"):
        chain._check_continuation("a", lines(1, 2, 3, 5))


def test_a_job_that_does_not_continue_where_it_could_is_told(chain: Chain) -> None:
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


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_a_job_of_several_processes_may_lose_one_that_it_needs_no_more(
    tmp_path: Path, starters: list[Nursery]
) -> None:
    with contextlib.closing(HogwildChain(tmp_path / "chain", 1.0, starters[0])) as chain:
        lead = held_at_its_last_checkpoint(chain)
        assert chain.strike(Kill(0, "worker's child", None))
        assert chain.landed[0].target == "worker's child"
        chain.finish()
        with RunStore.read(chain.root) as store:
            attempts = store.attempts()
    assert {(item.outcome, item.attempt) for item in attempts} == {("ok", 1)}
    assert {item.pid for item in attempts} == {lead}


def held_at_its_last_checkpoint(chain: Chain) -> int:
    """Start a run; return the worker of its first job, whose last epoch is behind it."""
    chain._running()
    while True:
        chain._keeper.aim("checkpoint", 1)
        assert chain._keeper.reached.wait(60)
        (log,) = chain.root.rglob("log.txt")
        if f"epoch {EPOCHS} train_loss" in log.read_text():
            return chain._keeper.held
        chain._keeper.release()


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
