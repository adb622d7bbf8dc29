"""The further processes of a job: what they raise, and how they end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from asynckfold.errors import WorkerDiedError
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


SENTENCE = "process 2 of the job ended (SIGKILL), and with it the attempt"
