"""Laws of placement over several nodes, and its equality with one machine where there is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from asynckfold.jobs.placement import Gpu, Load, Placement, Request
from asynckfold.scheduling.place import place
from asynckfold.scheduling.preemption import HeldCores, reassign_cores
from asynckfold.scheduling.reservations import Reservations
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
    placed = place(pending, [], load)
    running = Reservations(placed)
    left = pending[2:]
    assert place(left, running, load.peers[0]) == []
    assert place(left, running, load) == []  # back again, and its job still runs
    (found,) = place(left, running, replace(load, peers=(*load.peers, node("late", 1))))
    assert (found.jobs, found.node) == (("c",), "late")
    running.remove(next(item for item in placed if item.node == "x"))
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
