"""Laws of `place`, over any queue, any nodes, and anything that runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from asynckfold.jobs.placement import FULL_SHARE, Gpu, Load, Placement, Request
from asynckfold.scheduling.backlog import Backlog
from asynckfold.scheduling.place import place
from asynckfold.scheduling.reservations import Reservations, may_hold
from tests.size import examples

NAMES = ("x", "y", "z")


@st.composite
def loads(draw: st.DrawFn) -> Load:
    cores = tuple(range(draw(st.integers(1, 8))))
    # Numbers are drawn small more often than large: machines are idle more often than busy.
    idle = draw(st.permutations(cores))[draw(st.integers(0, len(cores))) :]
    gpus = tuple(
        Gpu(index, draw(st.integers(0, 9)), 10, own=draw(st.integers(0, 1)))
        for index in range(draw(st.integers(0, 2)))
    )
    return Load(cores, tuple(idle), 100 - draw(st.integers(0, 100)), gpus)


requests = st.builds(
    Request,
    job_id=st.text("abc", min_size=1, max_size=4),
    seconds=st.sampled_from([0.0, 1.0, 1.5, 2.0, 60.0]),
    threads=st.integers(1, 3),
    memory=st.integers(0, 60),
    gpu=st.booleans(),
    alone=st.sampled_from([False] * 7 + [True]),
    gpu_memory=st.integers(0, 9),
    gpu_share=st.sampled_from([0.1, 0.3, 0.45, 0.8, 0.9, 1.0]),
)
queues = st.lists(requests, max_size=12, unique_by=lambda request: request.job_id)
some = st.lists(requests, min_size=1, max_size=12, unique_by=lambda request: request.job_id)


def cluster(nodes: Sequence[Load]) -> Load:
    """The load of some nodes, named in their order."""
    first, *peers = (replace(load, node=name) for load, name in zip(nodes, NAMES, strict=False))
    return replace(first, peers=tuple(peers))


clusters = st.lists(loads(), min_size=1, max_size=3).map(cluster)

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


def cores_of(placements: Sequence[Placement]) -> list[int]:
    return [core for placement in placements for core in placement.cores]


def has_device(request: Request, load: Load) -> bool:
    """Whether a job could start where nothing runs."""
    return not request.gpu or any(may_hold(gpu, request) for gpu in load.gpus)


@settings(max_examples=examples(500))
@given(situations())
def test_each_job_gets_what_it_requests_on_one_node_and_no_core_is_reserved_twice(
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
            (job,) = placement.jobs
            request = by_id[job]
            assert len(placement.cores) == min(request.threads, len(node.cores))
            assert placement.gpu in ([gpu.index for gpu in node.gpus] if request.gpu else [None])
            for name in ("threads", "memory", "gpu_memory", "gpu_share", "alone"):
                assert getattr(placement, name) == getattr(request, name)


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
            shares = [item.gpu_share for item in there]
            assert math.fsum(shares[:-1]) < FULL_SHARE
            assert len(shares) < 2 or max(shares) < FULL_SHARE
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


@settings(max_examples=examples(300))
@given(queues, clusters)
def test_a_job_goes_to_the_node_with_the_most_free_cores(
    pending: list[Request], load: Load
) -> None:
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


@settings(max_examples=60)
@given(queues, clusters)
def test_every_job_gets_its_turn(pending: list[Request], load: Load) -> None:
    left, running, busy = list(pending), list[Placement](), True
    while busy:
        placed = place(left, running, load)
        started = {job for placement in placed for job in placement.jobs}
        left = [request for request in left if request.job_id not in started]
        busy = bool(placed or running)
        running = [*running, *placed][1:]  # the first of them ends
    assert not any(has_device(request, node) for request in left for node in load.nodes)


@given(situations(), queues, st.data())
def test_what_is_kept_between_calls_changes_no_decision(
    situation: Situation, others: list[Request], data: st.DataObject
) -> None:
    """Whatever was added and removed before, a backlog and reservations are what is in them now."""
    pending, running, load = situation
    passing = [replace(item, job_id=f"passing-{item.job_id}") for item in others]
    backlog, reservations = Backlog(passing), Reservations(place(passing, [], load))
    coming = data.draw(st.permutations([*pending, *pending]), "added, removed and added again")
    for request in coming:
        if request.job_id in backlog:
            assert backlog.remove(request.job_id) == request
        else:
            backlog.add(request)
    for request in passing:
        backlog.remove(request.job_id)
    for request in pending:
        backlog.add(request)
    for placement in running:
        reservations.add(placement)
    for placement in place(passing, [], load):
        reservations.remove(placement)
    assert sorted(item.job_id for item in backlog) == sorted(item.job_id for item in pending)
    assert (len(backlog), len(reservations)) == (len(pending), len(running))
    assert place(backlog, reservations, load) == place(pending, running, load)
    assert place(backlog, reservations, load) == place(pending, running, load)


def test_what_own_jobs_hold_on_a_gpu_is_not_subtracted_twice() -> None:
    """The driver says that 3 of 9 bytes are free; 6 are those of the job that was promised 6."""
    running = [Placement(("old",), (0,), gpu=0, gpu_memory=6, gpu_share=0.4)]
    told, untold = Gpu(0, 3, 9, own=6), Gpu(0, 3, 9)
    pending = [Request("new", 1.0, gpu=True, gpu_memory=3, gpu_share=0.4)]
    assert len(place(pending, running, Load((0, 1), (0, 1), 0, (told,)))) == 1
    assert place(pending, running, Load((0, 1), (0, 1), 0, (untold,))) == []


def test_a_job_without_cores_of_its_own_counts_by_its_threads() -> None:
    unpinned = Placement(("old",), (), threads=2)
    assert place([Request("new", 1.0)], [unpinned], Load((0, 1), (0, 1), 0)) == []


def node(name: str, cores: int, **changes: object) -> Load:
    numbers = tuple(range(cores))
    return replace(Load(numbers, numbers, 100, node=name), **changes)  # type: ignore[arg-type]


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
