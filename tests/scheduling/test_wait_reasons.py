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
        (
            Request("c", 1.0, memory=80 << 20),
            LOAD,
            "memory",
            "memory: needs 80 MiB, 70 MiB free",
        ),
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


REQUESTS = st.builds(
    Request,
    st.just("c"),
    st.just(1.0),
    threads=st.integers(1, 5),
    memory=st.integers(0, 120).map(lambda mib: mib << 20),
    gpu=st.booleans(),
    alone=st.booleans(),
)
LOADS = st.builds(
    Load,
    st.just((0, 1, 2, 3)),
    st.sets(st.integers(0, 3)).map(lambda cores: tuple(sorted(cores))),
    st.integers(0, 120).map(lambda mib: mib << 20),
    st.sampled_from([(), (Gpu(0, 1, 1),)]),
)
ENOUGH = 1 << 40
LIFTED = {
    "cores": lambda request, load: (replace(request, threads=0), load),
    "neighbours": lambda request, load: (request, replace(load, idle=load.cores)),
    "memory": lambda request, load: (request, replace(load, free_memory=ENOUGH)),
    "gpu": lambda request, load: (replace(request, gpu=False), load),
    "turn": lambda request, load: (replace(request, alone=False), load),
}


@given(REQUESTS, LOADS)
def test_what_is_named_is_in_the_way(request: Request, load: Load) -> None:
    """With it lifted the request starts, or something else is named."""
    if not place([request], BUSY, load):
        named = obstacle(request, BUSY, load).kind
        lifted, after = LIFTED[named](request, load)
        assert place([lifted], BUSY, after) or obstacle(lifted, BUSY, after).kind != named


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


def test_of_several_nodes_the_largest_tells_what_lacks() -> None:
    load = replace(node("x", 1), peers=(node("y", 2, idle=(0,)),))
    assert obstacle(Request("b", 1.0, threads=2), Reservations(), load) == Obstacle(
        "neighbours", "other processes on core 1 (y)"
    )
    gpu = obstacle(Request("b", 1.0, gpu=True), Reservations(), load)
    assert gpu.text == "a GPU: none is available (y)"


def test_nothing_can_start_only_where_every_node_is_blocked() -> None:
    load = replace(node("x", 1, blocked="full"), peers=(node("y", 1), node("z", 1, blocked="full")))
    assert blocked_everywhere(load) == ""
    assert place([Request("a", 1.0)], [], load)[0].node == "y"
    both = replace(load, peers=load.peers[1:])
    assert blocked_everywhere(both) == "full"
    assert place([Request("a", 1.0)], [], both) == []
    assert obstacle(Request("a", 1.0), Reservations(), both).text == "memory: full (x)"
