"""A job that no node can hold starts on one of the largest, as soon as nothing runs there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asynckfold.jobs.placement import Gpu, Load, NodeSize, Placement, Request
from asynckfold.scheduling.place import place
from asynckfold.scheduling.simulate import Simulation, VirtualMachine, simulate


def node(name: str, cores: int, memory: int = 100, **changes: object) -> Load:
    own = tuple(range(cores))
    return replace(Load(own, own, memory, node=name), **changes)  # type: ignore[arg-type]


def cluster(*nodes: Load) -> Load:
    return replace(nodes[0], peers=tuple(nodes[1:]))


def started(
    pending: list[Request], running: list[Placement], *nodes: Load
) -> list[tuple[str, str]]:
    return [(item.node, item.jobs[0]) for item in place(pending, running, cluster(*nodes))]


ON_X = Placement(("old",), (0,), node="x")
ON_Y = Placement(("old",), (0,), node="y")


@pytest.mark.parametrize(
    "large", [Request("large", 1.0, threads=3), Request("large", 1.0, memory=200)]
)
@pytest.mark.parametrize("alone", [False, True])
def test_it_starts_where_nothing_runs_while_others_run_elsewhere(
    large: Request, alone: bool
) -> None:
    large = replace(large, alone=alone)
    nodes = node("x", 2), node("y", 2)
    assert started([large], [ON_X], *nodes) == [("y", "large")]
    assert started([large], [ON_X, ON_Y], *nodes) == []
    # Others come first, as on one machine: it takes a node that they leave.
    small = Request("small", 0.1)
    assert started([large, small], [ON_X], *nodes) == [("y", "small")]
    assert started([large, replace(large, job_id="more")], [], *nodes) == [
        ("x", "large"),
        ("y", "more"),
    ]


def test_it_waits_for_a_largest_node_and_for_cores_that_others_use() -> None:
    large = Request("large", 1.0, threads=4)
    assert started([large], [ON_X], node("x", 2), node("y", 1)) == []
    assert started([large], [ON_Y], node("x", 2), node("y", 1)) == [("x", "large")]
    assert started([large], [ON_Y], node("x", 2, idle=(0,)), node("y", 1)) == []
    heavy = Request("heavy", 1.0, memory=200)
    assert started([heavy], [ON_X], node("x", 2, 100), node("y", 2, 50)) == []
    assert started([heavy], [ON_X], node("x", 2, 100), node("y", 2, 95)) == [("y", "heavy")]
    # A lost or blocked node is no reason to wait.
    assert started([large], [ON_Y], node("x", 2), node("y", 1), node("z", 8, blocked="lost")) == [
        ("x", "large")
    ]


def test_what_fits_on_some_node_waits_for_it() -> None:
    wide = Request("wide", 1.0, threads=2)
    assert started([wide], [ON_X], node("x", 2), node("y", 1)) == []
    assert started([replace(wide, memory=90)], [ON_X], node("x", 2, 95), node("y", 2, 80)) == []


def test_a_gpu_job_needs_its_gpu() -> None:
    large = Request("large", 1.0, threads=3, gpu=True)
    gpu = (Gpu(0, 9, 9),)
    assert started([large], [ON_X], node("x", 2, gpus=gpu), node("y", 2)) == []
    assert started([large], [ON_X], node("x", 2), node("y", 1, gpus=gpu)) == [("y", "large")]


def swept(threads: int, nodes: int) -> Simulation:
    jobs = [Request("long", 10.0), Request("large", 5.0, threads), Request("short", 1.0)]
    return simulate(jobs, VirtualMachine(2, nodes=nodes))


def test_the_simulated_sweep_does_not_wait_for_the_last_job_of_the_cluster() -> None:
    found = {span.job: (span.start, span.end) for span in swept(4, 2).spans}
    assert found["large"] == (1.0, 6.0)
    # On one machine it starts when nothing else runs, as before.
    found = {span.job: (span.start, span.end) for span in swept(4, 1).spans}
    assert found["large"] == (10.0, 15.0)


def test_nodes_of_different_sizes_are_simulated_and_bounded() -> None:
    machine = VirtualMachine.of([NodeSize(1), NodeSize(3)])
    found = simulate([Request(f"{number}", 1.0) for number in range(8)], machine)
    assert (found.makespan, found.bounds.cores, found.use) == (2.0, 2.0, 1.0)
    assert machine.names == ("node-0", "node-1")
    assert [len(load.cores) for load in machine.load().nodes] == [1, 3]
    on_gpus = VirtualMachine.of([NodeSize(1), NodeSize(4, gpus=2)])
    found = simulate([Request(f"{number}", 3.0, gpu=True) for number in range(4)], on_gpus)
    assert (found.makespan, found.bounds.gpus) == (6.0, 6.0)
    assert {span.node for span in found.spans} == {"node-1"}
    assert VirtualMachine.of([NodeSize(2, 1)] * 3) == VirtualMachine(2, 1, nodes=3)
    assert VirtualMachine.of([NodeSize(2, 1)]) == VirtualMachine(2, 1)
