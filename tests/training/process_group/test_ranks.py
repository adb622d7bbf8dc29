"""The further processes of a job: what they raise, and how they end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from asynckfold.errors import WorkerDiedError
from asynckfold.training.process_group import ranks
from asynckfold.training.process_group.ranks import ProcessGroup
from tests.leftovers import descendants, gone


def work(rank: int, order: str) -> str:
    if order == "fail":
        raise KeyError(f"rank {rank}")
    if order == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{order} {rank}"


@contextmanager
def group(count: int = 1) -> Iterator[ProcessGroup]:
    with closing(ProcessGroup(count, work)) as found:
        yield found


def test_an_error_ends_its_rank_and_is_raised_by_the_next_order() -> None:
    before = descendants()
    with group() as found:
        (rank,) = descendants() - before
        found.order("fail")
        assert gone({rank})
        with pytest.raises(KeyError, match="rank 1"):
            found.order("more")


@pytest.mark.parametrize("orders", [["die"], ["die", "more"]])
def test_a_death_is_raised_with_its_signal(orders: list[str]) -> None:
    def give(found: ProcessGroup) -> None:
        for order in orders:
            found.order(order)
            time.sleep(0.2)
        found.gather()

    with group(2) as found, pytest.raises(WorkerDiedError, match=r"\d of the job ended \(SIGK"):
        give(found)


@pytest.mark.parametrize("noticed", [False, True])
def test_a_watched_group_ends_its_worker_unless_it_notices_by_itself(
    monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    told: list[str] = []
    monkeypatch.setattr(ranks, "end_worker", told.append)
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 60.0 if noticed else 0.05)
    with group() as found:
        found.watch()
        found.order("work")
        found.gather()
        assert found.answers == {1: "work 1"}
        found.order("die")
        if noticed:
            with pytest.raises(WorkerDiedError):
                found.gather()
        else:
            deadline = time.monotonic() + 30
            while not told and time.monotonic() < deadline:
                time.sleep(0.01)
    assert told == ([] if noticed else [f"{SENTENCE}; rank 0 still waited for it"])


SENTENCE = "process 2 of the job ended (SIGKILL), and with it the attempt"
