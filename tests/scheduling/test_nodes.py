"""Laws of placement over several nodes, and its equality with one machine where there is one."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckfold.errors import InputError
from asynckfold.jobs.placement import Gpu, Load, Placement, Request
from asynckfold.scheduling.place import place
from asynckfold.scheduling.preemption import HeldCores, reassign_cores
from asynckfold.scheduling.reservations import Reservations
from asynckfold.scheduling.simulate import (
    Failure,
    OtherProcess,
    Simulation,
    VirtualMachine,
    simulate,
)
from asynckfold.scheduling.wait_reasons import blocked_everywhere, obstacle
from tests.scheduling.test_place import cores_of, has_device, loads, queues, some
from tests.size import examples

NAMES = ("x", "y", "z")


def cluster(nodes: Sequence[Load]) -> Load:
    """The load of some nodes, named in their order."""
    first, *peers = (replace(load, node=name) for load, name in zip(nodes, NAMES, strict=False))
    return replace(first, peers=tuple(peers))


clusters = st.lists(loads(), min_size=2, max_size=3).map(cluster)

Situation = tuple[list[Request], list[Placement], Load]


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """A queue, what an earlier decision started, and nodes that may have changed, left or come."""
    load = draw(clusters)
    before = draw(some)[: draw(st.integers(0, 5))]
    running = place([replace(item, job_id=f"old-{item.job_id}") for item in before], [], load)
    nodes = [
        replace(
            node,
            peers=(),
            idle=node.idle[draw(st.sampled_from([0, 0, 0, 1])) :],
            blocked=draw(st.sampled_from(["", "", "", "no memory"])),
        )
        for node in load.nodes
        if draw(st.integers(0, 5))
    ]
    if draw(st.booleans()) or not nodes:
        nodes.append(replace(draw(loads()), node="late"))
    return draw(some), running, replace(nodes[0], peers=tuple(nodes[1:]))


def is_forced(placed: Sequence[Placement], running: Sequence[Placement]) -> bool:
    """Whether the first job may have been started because none fitted.

    On the other nodes only jobs that run alone start beside it.
    """
    return not running and len({placement.node for placement in placed}) == len(placed)


def on(placements: Sequence[Placement], node: str) -> list[Placement]:
    return [placement for placement in placements if placement.node == node]


@settings(max_examples=examples(500))
@given(situations())
def test_each_job_is_on_one_node_as_a_whole_and_no_core_is_reserved_twice(
    situation: Situation,
) -> None:
    pending, running, load = situation
    placed = place(pending, running, load)
    by_id = {request.job_id: request for request in pending}
    assert len({placement.jobs for placement in placed}) == len(placed)
    assert {placement.node for placement in placed} <= {node.node for node in load.nodes}
    for node in load.nodes:
        cores = cores_of(on([*running, *placed], node.node))
        assert len(set(cores)) == len(cores)
        assert set(cores_of(on(placed, node.node))) <= set(node.cores)
        for placement in on(placed, node.node):
            request = by_id[placement.jobs[0]]
            assert len(placement.cores) == min(request.threads, len(node.cores))
            assert placement.gpu in ([gpu.index for gpu in node.gpus] if request.gpu else [None])


@settings(max_examples=examples(500))
@given(situations())
def test_the_rules_of_a_machine_hold_on_each_node(situation: Situation) -> None:
    pending, running, load = situation
    placed = place(pending, running, load)
    for node in load.nodes:
        new = on(placed, node.node)
        active = [*on(running, node.node), *new]
        assert not (node.blocked and new)
        if not new or (placed[0] in new and is_forced(placed, running)):
            continue  # one job runs in the cluster, whatever it needs
        assert not any(placement.alone for placement in active) or len(active) == 1
        assert sum(placement.memory for placement in active) <= node.free_memory
        assert len(cores_of(active)) <= len(node.idle)
        assert set(cores_of(new)) <= set(node.idle)
        for gpu in node.gpus:
            there = [item for item in active if gpu.index == item.gpu]
            assert len(there) <= min((item.jobs_per_gpu for item in there), default=1)
            if any(gpu.index == item.gpu for item in new):
                assert sum(item.gpu_memory for item in there) <= gpu.free + gpu.own


@settings(max_examples=examples(300))
@given(situations())
def test_what_is_left_fits_on_no_node(situation: Situation) -> None:
    pending, running, load = situation
    placed = place(pending, running, load)
    started = {job for placement in placed for job in placement.jobs}
    rest = [request for request in pending if request.job_id not in started]
    if active := [*running, *placed]:
        assert place(rest, active, load) == []
        for node in load.nodes:
            # Nor where only that node is looked at, with all that runs on it.
            if on(active, node.node):
                assert place(rest, on(active, node.node), replace(node, peers=())) == []


@given(queues, clusters)
def test_one_job_runs_in_the_cluster(pending: list[Request], load: Load) -> None:
    able = [item for item in pending if any(has_device(item, node) for node in load.nodes)]
    assert bool(place(pending, [], load)) == bool(able)


@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_the_queue_does_not_matter(situation: Situation, shuffle: object) -> None:
    pending, running, load = situation
    shuffled = list(pending)
    shuffle.shuffle(shuffled)  # type: ignore[attr-defined]
    assert place(shuffled, running, load) == place(pending, running, load)


@settings(max_examples=examples(500))
@given(some, some, loads(), st.lists(loads(), max_size=2), st.integers(0, 2))
def test_beside_blocked_nodes_a_node_is_used_like_one_machine(
    pending: list[Request],
    earlier: list[Request],
    load: Load,
    others: list[Load],
    position: int,
) -> None:
    running = place([replace(item, job_id=f"old-{item.job_id}") for item in earlier[:2]], [], load)
    blocked = [replace(item, blocked="full", node=f"other-{n}") for n, item in enumerate(others)]
    nodes = [*blocked[:position], replace(load, node="x"), *blocked[position:]]
    found = place(
        pending,
        [replace(item, node="x") for item in running],
        replace(nodes[0], peers=tuple(nodes[1:])),
    )
    assert [replace(item, node="") for item in found] == place(pending, running, load)


@settings(max_examples=examples(300))
@given(queues, clusters)
def test_a_job_goes_to_the_node_with_the_most_free_cores(
    pending: list[Request], load: Load
) -> None:
    """What the heaps of the nodes find is what a look at every node finds."""
    pending = [replace(item, gpu=False, alone=False, memory=0) for item in pending]
    free = {seen.node: len(seen.idle) for seen in load.nodes}
    placed = place(pending, [], load)
    for placement in placed if max(free.values()) else ():
        if placement.threads > max(free.values()):
            # Forced, or too large for every node.
            assert on(placed, placement.node) == [placement]
            continue
        most = max(free.values())
        assert placement.node == next(name for name, cores in free.items() if cores == most)
        free[placement.node] -= placement.threads


@settings(max_examples=examples(300))
@given(queues, clusters)
def test_no_gpu_is_shared_while_one_on_any_node_is_empty(
    pending: list[Request], load: Load
) -> None:
    pending = [replace(item, gpu=True, alone=False, memory=0) for item in pending]
    placed, jobs = place(pending, [], load), Counter[tuple[str, int]]()
    idle = Counter({seen.node: len(seen.idle) for seen in load.nodes})
    if len(placed) < 2:
        return  # one may have been forced where it does not fit
    for placement in placed:
        assert placement.gpu is not None
        empty = [
            gpu
            for seen in load.nodes
            if idle[seen.node] >= placement.threads
            for gpu in seen.gpus
            if not jobs[seen.node, gpu.index] and gpu.free + gpu.own >= placement.gpu_memory
        ]
        assert not (empty and jobs[placement.node, placement.gpu])
        jobs[placement.node, placement.gpu] += 1
        idle[placement.node] -= placement.threads


def node(name: str, cores: int, **changes: object) -> Load:
    numbers = tuple(range(cores))
    return replace(Load(numbers, numbers, 100, node=name), **changes)  # type: ignore[arg-type]


def test_the_longest_job_of_the_cluster_comes_first_and_jobs_go_where_most_cores_are_free() -> None:
    load = replace(node("x", 1), peers=(node("y", 3), node("z", 2)))
    pending = [Request(name, seconds) for name, seconds in zip("abcdefg", range(7), strict=True)]
    placed = place(pending, [], load)
    assert [(item.jobs[0], item.node, item.cores) for item in placed] == [
        ("g", "y", (0,)),
        ("f", "y", (1,)),
        ("e", "z", (0,)),
        ("d", "x", (0,)),
        ("c", "y", (2,)),
        ("b", "z", (1,)),
    ]


def test_a_job_of_several_cores_is_never_spread_over_nodes() -> None:
    load = replace(node("x", 2), peers=(node("y", 2),))
    running = [Placement(("old",), (0,), node="x"), Placement(("older",), (1,), node="y")]
    assert place([Request("a", 1.0, threads=2)], running, load) == []
    (found,) = place([Request("a", 1.0, threads=2)], running[:1], load)
    assert (found.node, found.cores) == ("y", (0, 1))


def test_gpu_jobs_go_to_the_emptiest_gpu_of_the_cluster() -> None:
    gpus = (Gpu(0, 9, 9, 0.5), Gpu(1, 9, 9))
    load = replace(node("x", 4, gpus=gpus), peers=(node("y", 4, gpus=(Gpu(0, 9, 9),)),))
    pending = [Request(name, 1.0, gpu=True, jobs_per_gpu=2) for name in "abcd"]
    placed = place(pending, [], load)
    assert [(item.node, item.gpu) for item in placed] == [("y", 0), ("x", 1), ("x", 0), ("y", 0)]


def test_a_job_that_must_run_alone_gets_a_node_that_nothing_else_needs() -> None:
    load = replace(node("x", 2), peers=(node("y", 2),))
    alone = Request("alone", 9.0, alone=True)
    running = [Placement(("old",), (0,), node="x")]
    (first,) = place([alone, Request("a", 1.0)], running, load)
    assert (first.jobs, first.node) == (("a",), "y")
    (found,) = place([alone, replace(alone, job_id="then")], running, load)
    assert (found.jobs, found.node) == (("alone",), "y")
    assert place([Request("b", 1.0, threads=2)], [*running, found], load) == []
    assert place([Request("b", 1.0)], [found], load)[0].node == "x"


def test_jobs_that_must_run_alone_start_on_all_empty_nodes_each_once() -> None:
    load = replace(node("x", 1), peers=(node("y", 2), node("z", 2)))
    pending = [Request(name, 1.0, alone=True) for name in "abcd"]
    placed = place(pending, [], load)
    assert sorted((item.node, item.jobs[0]) for item in placed) == [
        ("x", "a"),
        ("y", "b"),
        ("z", "c"),
    ]
    # A job that fits nowhere is forced on one node; on the others one that is alone may start.
    large = Request("large", 9.0, memory=101)
    assert [item.jobs for item in place([large, *pending[:1]], [], load)] == [("large",), ("a",)]


def test_a_node_that_vanished_frees_nothing_and_a_late_one_gets_work_at_once() -> None:
    load = replace(node("x", 1), peers=(node("y", 1),))
    pending = [Request(name, 1.0) for name in "abcd"]
    running = Reservations(place(pending, [], load))
    left = pending[2:]
    assert place(left, running, load.peers[0]) == []
    assert place(left, running, load) == []  # back again, and its job still runs
    (found,) = place(left, running, replace(load, peers=(*load.peers, node("late", 1))))
    assert (found.jobs, found.node) == (("c",), "late")
    running.remove(next(item for item in running if item.node == "x"))
    assert place(left, running, load.peers[0]) == []
    assert [item.node for item in place(left, running, load)] == ["x"]


# Moving jobs


@st.composite
def crowds(draw: st.DrawFn) -> tuple[dict[str, HeldCores], Load]:
    """Jobs on some nodes, of which one is not seen now, and the cores that are idle."""
    running = {}
    for name in NAMES:
        cores = draw(st.permutations(range(4)))
        for number in range(draw(st.integers(0, 2))):
            held = tuple(cores[2 * number : 2 * number + draw(st.integers(1, 2))])
            running[f"{name}{number}"] = HeldCores(held, draw(st.booleans()), name)
    idle = st.sets(st.integers(0, 3)).map(tuple)
    nodes = [Load((0, 1, 2, 3), draw(idle), 1, node=name) for name in NAMES[:2]]
    return running, replace(nodes[0], peers=tuple(nodes[1:]))


@settings(max_examples=examples(500))
@given(crowds())
def test_jobs_move_on_their_node_only_and_one_goes_on_in_the_cluster(
    crowd: tuple[dict[str, HeldCores], Load],
) -> None:
    running, load = crowd
    changes = reassign_cores(running, load)
    after = {
        name: replace(held, cores=changes[name] or held.cores, paused=not changes[name])
        if name in changes
        else held
        for name, held in running.items()
    }
    assert not any(name.startswith("z") for name in changes)
    active = [held for name, held in after.items() if not held.paused and held.node != "z"]
    assert active or not any(held.node != "z" for held in running.values())
    for seen in load.nodes:
        cores = [core for held in active if held.node == seen.node for core in held.cores]
        assert len(set(cores)) == len(cores)
        assert set(cores) <= set(seen.idle) or len(active) == 1
    assert reassign_cores(after, load) == {}


def test_each_node_decides_for_itself_as_one_machine_does() -> None:
    running = {"a": HeldCores((0,), node="x"), "b": HeldCores((0,), node="y")}
    load = replace(node("x", 2, idle=(1,)), peers=(node("y", 2, idle=(0, 1)),))
    assert reassign_cores(running, load) == {"a": (1,)}
    nowhere = replace(load, idle=())
    assert reassign_cores(running, nowhere) == {"a": ()}
    assert reassign_cores({"a": running["a"]}, nowhere) == {}


# Why jobs wait


def test_wait_reasons_name_the_nodes_that_are_large_enough() -> None:
    load = replace(node("x", 2), peers=(node("y", 2, idle=(0,)), node("z", 1)))
    running = Reservations([Placement(("a",), (0, 1), threads=2, node="x")])
    found = obstacle(Request("b", 1.0, threads=2), running, load)
    assert found.text == "2 cores: 2 of 2 busy with own jobs (x); other processes on core 1 (y)"
    gpu = obstacle(Request("b", 1.0, gpu=True), running, replace(load, gpus=(Gpu(0, 1, 1),)))
    assert gpu.text == "cores: 2 of 2 busy with own jobs (x)"
    nothing = obstacle(Request("b", 1.0, gpu=True), Reservations(), load)
    assert (nothing.kind, nothing.text) == ("gpu", "a GPU: none is available (x, y, z)")
    alone = obstacle(Request("b", 1.0, alone=True), running, replace(load, peers=load.peers[:0]))
    assert alone.text == "the machine to itself: 1 other job runs"
    many = replace(load, peers=tuple(node(f"n{number}", 0) for number in range(9)))
    told = obstacle(Request("b", 1.0), running, many).text
    assert told == "cores: 2 of 2 busy with own jobs (x)"


def test_nothing_can_start_only_where_every_node_is_blocked() -> None:
    load = replace(node("x", 1, blocked="full"), peers=(node("y", 1), node("z", 1, blocked="full")))
    assert blocked_everywhere(load) == ""
    assert place([Request("a", 1.0)], [], load)[0].node == "y"
    both = replace(load, peers=load.peers[1:])
    assert blocked_everywhere(both) == "full (x, z)"
    assert place([Request("a", 1.0)], [], both) == []
    assert obstacle(Request("a", 1.0), Reservations(), both).text == "memory: full (x, z)"


@given(some, situations())
def test_what_a_cluster_waits_for_is_named(pending: list[Request], situation: Situation) -> None:
    _, running, load = situation
    placed = place(pending, running, load)
    started = {job for item in placed for job in item.jobs}
    held = Reservations([*running, *placed])
    for request in pending:
        if held and request.job_id not in started:
            found = obstacle(request, held, load)
            assert found.kind in ("cores", "neighbours", "memory", "gpu", "alone", "turn")
            if load.peers:
                assert any(f"({seen.node}" in found.text for seen in load.nodes)


# The simulator


@st.composite
def sweeps(draw: st.DrawFn) -> tuple[list[Request], VirtualMachine, dict[str, float]]:
    machine = VirtualMachine(
        draw(st.integers(1, 4)),
        draw(st.integers(0, 2)),
        draw(st.sampled_from([sys.maxsize, 12])),
        nodes=draw(st.integers(1, 4)),
        data_seconds=draw(st.sampled_from([0.0, 0.0, 1.0, 5.0])),
    )
    pending = draw(
        st.lists(
            st.builds(
                Request,
                job_id=st.text("abc", min_size=1, max_size=3),
                seconds=st.integers(0, 9).map(float),
                threads=st.integers(1, machine.cores),
                memory=st.integers(0, 12),
                gpu=st.booleans() if machine.gpus else st.just(False),
                alone=st.sampled_from([False, False, False, True]),
            ),
            max_size=14,
            unique_by=lambda request: request.job_id,
        )
    )
    names = st.sampled_from([item.job_id for item in pending] or ["none"])
    return pending, machine, draw(st.dictionaries(names, st.integers(0, 9).map(float)))


@settings(max_examples=examples(300))
@given(sweeps())
def test_the_simulated_nodes_could_carry_it_out(
    sweep: tuple[list[Request], VirtualMachine, dict[str, float]],
) -> None:
    pending, machine, seconds = sweep
    found = simulate(pending, machine, seconds)
    by_id = {item.job_id: item for item in pending}
    ready = dict(zip(machine.names, machine.ready, strict=True))
    assert sorted(span.job for span in found.spans) == sorted(by_id)
    for span in found.spans:
        takes = seconds.get(span.job, by_id[span.job].seconds)
        assert span.end == max(span.start, ready[span.node]) + takes
    for start, name in itertools.product({span.start for span in found.spans}, machine.names):
        active = [s for s in found.spans if s.node == name and s.start <= start < s.end]
        cores = [core for span in active for core in span.cores]
        assert len(set(cores)) == len(cores)
        assert set(cores) <= set(range(machine.cores))
        gpus = [span.gpu for span in active if span.gpu is not None]
        assert len(set(gpus)) == len(gpus)
        assert len(active) < 2 or sum(by_id[s.job].memory for s in active) <= machine.memory
        assert len(active) < 2 or not any(by_id[span.job].alone for span in active)
    assert found.makespan >= found.lower_bound - 1e-9
    assert 0 <= found.use <= 1 + 1e-9


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(st.integers(1, 99), st.integers(1, 3)), min_size=1, max_size=60),
    st.integers(3, 6),
    st.integers(1, 5),
    st.sampled_from([0.0, 7.0]),
)
def test_the_makespan_is_within_the_bound_of_list_scheduling(
    jobs: list[tuple[int, int]], cores: int, nodes: int, data_seconds: float
) -> None:
    """While the job that ends last waits, each node has fewer free cores than it needs.

    So each node is busy on at least cores - threads + 1 cores until that job starts, all seconds
    that it waits for data included (Garey and Graham 1975, for nodes).
    """
    pending = [Request(f"{n:03}", float(s), threads) for n, (s, threads) in enumerate(jobs)]
    machine = VirtualMachine(cores, nodes=nodes, data_seconds=data_seconds)
    found = simulate(pending, machine)
    last = max(found.spans, key=lambda span: span.end)
    others = math.fsum(
        (min(span.end, last.start) - span.start) * len(span.cores)
        for span in found.spans
        if span.start < last.start
    )
    busy = nodes * (cores - len(last.cores) + 1)
    assert last.start <= others / busy + 1e-9
    work = math.fsum(item.seconds * item.threads for item in pending)
    travel = sum(machine.ready) * cores
    assert last.start <= (work + travel) / busy + 1e-9


def test_data_that_must_travel_delay_the_first_jobs_of_each_node() -> None:
    jobs = [Request(name, 4.0) for name in "abc"]
    found = simulate(jobs, VirtualMachine(1, nodes=3, data_seconds=2.0))
    assert [(span.job, span.node, span.start, span.end) for span in found.spans] == [
        ("a", "node-0", 0.0, 4.0),
        ("b", "node-1", 0.0, 6.0),
        ("c", "node-2", 0.0, 8.0),
    ]
    assert found.bounds.cores == (12 + 2 + 4) / 3
    assert found.bounds.longest == 4.0
    on_gpus = [replace(item, gpu=True) for item in jobs]
    found = simulate(on_gpus, VirtualMachine(1, 1, nodes=3, data_seconds=2.0))
    assert found.bounds.gpus == (12 + 2 + 4) / 3


def test_other_processes_are_on_a_node() -> None:
    jobs = [Request(name, 2.0) for name in "ab"]
    machine = VirtualMachine(1, 1, nodes=2)
    found = simulate(jobs, machine, others=[OtherProcess(0, 0.0, 1.0, node=1)])
    assert [(span.node, span.start) for span in found.spans] == [("node-0", 0.0), ("node-1", 1.0)]
    on_gpus = [replace(item, gpu=True) for item in jobs]
    found = simulate(on_gpus, machine, others=[OtherProcess(None, 0.0, 1.0, gpu=0, node=1)])
    assert found.bounds.gpus == 2.5
    with pytest.raises(InputError, match=r"a process must be on a node.*Pass node=0 to 1"):
        simulate(jobs, machine, others=[OtherProcess(0, 0.0, 1.0, node=2)])
    with pytest.raises(InputError) as refused:
        simulate(jobs, VirtualMachine(1, nodes=0, data_seconds=math.nan))
    assert {"nodes", "data_seconds"} <= {str(item).split()[0] for item in refused.value.problems}


# One machine, as before there were nodes

BEFORE = {
    0: "9f4ab2b7f166",
    1: "5aeb73238587",
    2: "076ee45859fa",
    3: "a9b61ce83ec7",
    4: "a49889877842",
    5: "21028d544d74",
    6: "cb1c3c4dcb27",
    7: "5e36a9d8d5a4",
    8: "5793b39ef648",
    9: "0eba116d1888",
    10: "8f2e0158dfe4",
    11: "72abdf26aed1",
    12: "c2841cb06479",
    13: "781cd23f36b3",
    14: "87bd0145a69e",
    15: "8a5c5d009af5",
    16: "708c36fa4341",
    17: "814488f575e7",
    18: "261d6fceef5c",
    19: "898c144bdb4a",
    20: "5f19f695f774",
    21: "18bb209e8a72",
    22: "b62530ca5f19",
    23: "f891b6afd53b",
}
"""Digests of sweeps simulated by the version that knew of one machine only."""


def drawn(seed: int) -> Simulation:
    """A random sweep; whole numbers, which are the same on every platform."""
    own = random.Random(seed)
    cores, gpus = 1 + own.randrange(8), own.randrange(3)
    machine = VirtualMachine(
        cores, gpus, [sys.maxsize, 20][own.randrange(2)], [sys.maxsize, 6][own.randrange(2)]
    )
    jobs = [
        Request(
            f"job-{number}",
            float(own.randrange(30)),
            1 + own.randrange(4),
            own.randrange(12),
            gpu=bool(gpus) and own.randrange(3) == 0,
            alone=own.randrange(9) == 0,
            gpu_memory=own.randrange(5),
            jobs_per_gpu=1 + own.randrange(3),
        )
        for number in range(60)
    ]
    seconds = {job.job_id: float(own.randrange(30)) for job in jobs[::2]}
    others = [
        OtherProcess(own.randrange(cores), float(start), float(start + own.randrange(60)))
        for start in (own.randrange(200) for _ in range(6))
    ]
    outcomes = ["died", "oom", "gpu_oom", "hang"]
    failures = {
        job.job_id: [Failure(float(own.randrange(9)), outcomes[own.randrange(4)])]
        for job in jobs[::7]
    }
    return simulate(jobs, machine, seconds, others=others, failures=failures)


def digest(found: Simulation) -> str:
    rows = [
        (span.job, span.start, span.end, span.cores, span.gpu, span.outcome) for span in found.spans
    ]
    bounds = found.bounds
    text = repr((rows, bounds.cores, bounds.gpus, bounds.longest, found.use))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@pytest.mark.parametrize("seed", BEFORE)
def test_one_machine_is_used_as_before(seed: int) -> None:
    assert digest(drawn(seed)) == BEFORE[seed]


def test_the_sweeps_of_before_have_all_that_matters() -> None:
    found = [drawn(seed) for seed in BEFORE]
    outcomes = Counter(span.outcome for item in found for span in item.spans)
    assert outcomes["done"] > 50 * len(found)
    assert outcomes["oom"] > len(found)
    assert any(span.gpu for item in found for span in item.spans)
