"""Why jobs wait, and how long: what is charged to whom."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.jobs.placement import Gpu, Load, Placement, Request, fused
from asynckfold.scheduling.backlog import Backlog
from asynckfold.scheduling.place import place
from asynckfold.scheduling.reservations import Reservations
from asynckfold.scheduling.wait_reasons import Obstacle, Waits, blocked_everywhere, obstacle
from tests.scheduling.test_place import node

LOAD = Load(cores=(0, 1, 2, 3), idle=(0, 1, 2, 3), free_memory=100 << 20)
BUSY = Reservations(
    [Placement(("a",), (0,), memory=30 << 20), Placement(("b",), (1, 2), threads=2)]
)


@pytest.mark.parametrize(
    ("request_", "load", "kind", "text"),
    [
        (Request("c", 1.0, 2), LOAD, "cores", "2 cores: 3 of 4 busy with own jobs"),
        (
            Request("c", 1.0),
            replace(LOAD, idle=(0, 1, 2)),
            "neighbours",
            "other processes on core 3",
        ),
        (Request("c", 1.0, alone=True), LOAD, "turn", "the machine to itself: 2 other jobs run"),
        (Request("c", 1.0, memory=80 << 20), LOAD, "memory", "memory: needs 80 MiB, 70 MiB free"),
        (Request("c", 1.0, gpu=True), LOAD, "gpu", "a GPU: none is available"),
        (
            Request("c", 1.0, gpu=True, gpu_memory=2 << 30),
            replace(LOAD, gpus=(Gpu(0, 1 << 30, 4 << 30),)),
            "gpu",
            "a GPU with 2.0 GiB free: none of 1 has room for another job",
        ),
    ],
)
def test_what_lacks_is_named_with_its_numbers(
    request_: Request, load: Load, kind: str, text: str
) -> None:
    assert obstacle(request_, BUSY, load) == Obstacle(kind, text)


def test_nothing_starts_beside_a_job_that_is_alone() -> None:
    running = Reservations([Placement(("a",), (0,), alone=True)])
    assert obstacle(Request("c", 1.0), running, LOAD).kind == "alone"


def test_fusion_groups_wait_as_a_whole_and_count_by_their_jobs() -> None:
    backlog, waits = Backlog(), Waits()
    pairs = ("c", "d"), ("e", "f", "g")
    for names in pairs:
        asked = fused([Request(name, 1.0, threads=2) for name in names], names)
        backlog.add(asked)
        waits.arrive(asked, now=0.0)
    single = Request("h", 1.0, threads=2)
    backlog.add(single)
    waits.arrive(single, now=0.0)
    ((reason, jobs),) = waits.look(backlog, BUSY, LOAD, now=0.0).items()
    assert (reason.kind, jobs) == ("cores", 6)
    backlog.remove("e")
    assert [item.seconds for item in waits.start("e", now=2.0)] == [2.0]
    assert waits.look(backlog, BUSY, LOAD, now=2.0) == {reason: 3}
    assert [item.seconds for item in waits.start("c", now=3.0)] == [3.0]
    assert [item.seconds for item in waits.start("h", now=4.0)] == [4.0]


@given(st.lists(st.tuples(st.floats(0.1, 9.0), st.sampled_from([0, 3])), min_size=1, max_size=9))
def test_all_that_a_job_waited_is_charged_once(steps: list[tuple[float, int]]) -> None:
    """Jobs come at any time; each is charged from then on, whoever else waits."""
    backlog, waits, now = Backlog(), Waits(), 0.0
    came = {}
    for number, (seconds, idle) in enumerate(steps):
        came[str(number)] = now
        request = Request(str(number), 1.0, threads=2)
        backlog.add(request)
        waits.arrive(request, now)
        waits.look(backlog, BUSY, replace(LOAD, idle=LOAD.cores[:idle]), now)
        now += seconds
    for name, since in came.items():
        found = waits.start(name, now)
        assert {wait.kind for wait in found} <= {"cores", "neighbours"}
        assert math.fsum(wait.seconds for wait in found) == pytest.approx(now - since)


def test_nothing_can_start_only_where_every_node_is_blocked() -> None:
    load = replace(node("x", 1, blocked="full"), peers=(node("y", 1), node("z", 1, blocked="full")))
    assert blocked_everywhere(load) == ""
    assert place([Request("a", 1.0)], [], load)[0].node == "y"
    both = replace(load, peers=load.peers[1:])
    assert blocked_everywhere(both) == "full"
    assert place([Request("a", 1.0)], [], both) == []
    assert obstacle(Request("a", 1.0), Reservations(), both).text == "memory: full (x)"
