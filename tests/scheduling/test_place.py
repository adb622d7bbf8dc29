"""Laws of `place`, over any queue, any load and anything that runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckfold.jobs.placement import Gpu, Load, Placement, Request
from asynckfold.scheduling.backlog import Backlog
from asynckfold.scheduling.place import place
from asynckfold.scheduling.reservations import Reservations, may_hold
from tests.size import examples


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
    jobs_per_gpu=st.integers(1, 3),
)
queues = st.lists(requests, max_size=12, unique_by=lambda request: request.job_id)
some = st.lists(requests, min_size=1, max_size=12, unique_by=lambda request: request.job_id)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Request], list[Placement], Load]:
    """A queue, what an earlier decision started, and a load that may have changed since.

    Few jobs were there before: an earlier decision on many leaves room for nothing.
    """
    load = draw(loads())
    alone = draw(st.sampled_from([{}, {}, {}, {"alone": True}]))
    before = draw(some)[: draw(st.integers(0, 3))]
    earlier = [replace(item, job_id=f"old-{item.job_id}", **alone) for item in before]
    running = place(earlier, [], load)
    if draw(st.sampled_from([False, False, True])):
        load = replace(load, idle=load.idle[draw(st.integers(0, len(load.idle))) :])
    return draw(some), running, load


def cores_of(placements: Sequence[Placement]) -> list[int]:
    return [core for placement in placements for core in placement.cores]


def has_device(request: Request, load: Load) -> bool:
    """Whether a job could start where nothing runs."""
    return not request.gpu or any(may_hold(gpu, request) for gpu in load.gpus)


def by_gpu(placements: Sequence[Placement]) -> dict[int, list[Placement]]:
    found: dict[int, list[Placement]] = {}
    for placement in placements:
        if placement.gpu is not None:
            found.setdefault(placement.gpu, []).append(placement)
    return found


@settings(max_examples=examples(500))
@given(situations())
def test_no_core_is_reserved_twice(
    situation: tuple[list[Request], list[Placement], Load],
) -> None:
    pending, running, load = situation
    cores = cores_of([*running, *place(pending, running, load)])
    assert len(set(cores)) == len(cores)
    assert set(cores) <= set(load.cores)


@given(situations())
def test_no_slot_and_no_byte_of_a_gpu_is_reserved_twice(
    situation: tuple[list[Request], list[Placement], Load],
) -> None:
    pending, running, load = situation
    placed = place(pending, running, load)
    active = by_gpu([*running, *placed])
    room = {gpu.index: gpu.free + gpu.own for gpu in load.gpus}
    assert set(active) <= set(room)
    for jobs in active.values():
        assert len(jobs) <= min(placement.jobs_per_gpu for placement in jobs)
    if len([*running, *placed]) > 1:
        for index in by_gpu(placed):
            assert sum(placement.gpu_memory for placement in active[index]) <= room[index]


@given(situations())
def test_a_placement_gives_what_was_requested(
    situation: tuple[list[Request], list[Placement], Load],
) -> None:
    pending, running, load = situation
    by_id = {request.job_id: request for request in pending}
    placed = place(pending, running, load)
    names = [job for placement in placed for job in placement.jobs]
    assert len(set(names)) == len(names)
    for placement in placed:
        (job,) = placement.jobs
        request = by_id[job]
        assert placement.threads == request.threads
        assert placement.memory == request.memory
        assert placement.gpu_memory == request.gpu_memory
        assert placement.jobs_per_gpu == request.jobs_per_gpu
        assert (placement.gpu is not None) is request.gpu
        assert placement.alone == request.alone
        assert len(placement.cores) == min(request.threads, len(load.cores))


@settings(max_examples=examples(500))
@given(situations())
def test_what_must_be_alone_never_shares_the_machine(
    situation: tuple[list[Request], list[Placement], Load],
) -> None:
    pending, running, load = situation
    active = [*running, *place(pending, running, load)]
    assert len(active) == 1 or not any(placement.alone for placement in active)


@given(queues, loads())
def test_what_must_be_alone_waits_for_all_others_that_can_start(
    pending: list[Request], load: Load
) -> None:
    able = [request for request in pending if has_device(request, load)]
    placed = place(pending, [], load)
    if any(placement.alone for placement in placed):
        assert all(request.alone for request in able)


@settings(max_examples=60, deadline=None)
@given(queues, loads())
def test_every_job_gets_its_turn(pending: list[Request], load: Load) -> None:
    left, running, busy = list(pending), list[Placement](), True
    while busy:
        placed = place(left, running, load)
        started = {job for placement in placed for job in placement.jobs}
        left = [request for request in left if request.job_id not in started]
        busy = bool(placed or running)
        running = [*running, *placed][1:]  # the first of them ends
    assert not any(has_device(request, load) for request in left)


@settings(max_examples=examples(500))
@given(situations())
def test_only_a_single_job_may_exceed_the_free_memory_and_the_idle_cores(
    situation: tuple[list[Request], list[Placement], Load],
) -> None:
    pending, running, load = situation
    placed = place(pending, running, load)
    active = [*running, *placed]
    if placed and len(active) > 1:
        assert sum(placement.memory for placement in active) <= load.free_memory
        assert len(cores_of(active)) <= len(load.idle)
        assert set(cores_of(placed)) <= set(load.idle)


@given(queues, loads())
def test_something_starts_where_nothing_runs(pending: list[Request], load: Load) -> None:
    able = [request for request in pending if has_device(request, load)]
    assert bool(place(pending, [], load)) == bool(able)


@given(situations())
def test_what_is_left_does_not_fit(
    situation: tuple[list[Request], list[Placement], Load],
) -> None:
    pending, running, load = situation
    placed = place(pending, running, load)
    started = {job for placement in placed for job in placement.jobs}
    active = [*running, *placed]
    rest = [request for request in pending if request.job_id not in started]
    if active:
        assert place(rest, active, load) == []


@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_the_queue_does_not_matter(
    situation: tuple[list[Request], list[Placement], Load], random: object
) -> None:
    pending, running, load = situation
    shuffled = list(pending)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert place(shuffled, running, load) == place(pending, running, load)


@given(situations(), queues, st.data())
def test_what_is_kept_between_calls_changes_no_decision(
    situation: tuple[list[Request], list[Placement], Load],
    others: list[Request],
    data: st.DataObject,
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


def test_a_job_is_pending_once() -> None:
    backlog = Backlog([Request("a", 1.0)])
    with pytest.raises(ValueError, match="'a' twice"):
        backlog.add(Request("a", 2.0))
    backlog.remove("a")
    with pytest.raises(KeyError):
        backlog.remove("a")


@given(st.integers(1, 8), st.integers(0, 20))
def test_equal_jobs_fill_the_idle_cores(cores: int, jobs: int) -> None:
    load = Load(tuple(range(cores)), tuple(range(cores)), 0)
    pending = [Request(f"job-{number:02}", 1.0) for number in range(jobs)]
    assert len(place(pending, [], load)) == min(cores, jobs)


def test_a_cpu_job_starts_behind_a_gpu_job_that_has_no_gpu() -> None:
    pending = [Request("long", 9.0, gpu=True), Request("short", 1.0)]
    (placement,) = place(pending, [], Load((0,), (), 0))
    assert placement.jobs == ("short",)


def test_a_job_that_fits_goes_before_a_longer_one_that_does_not() -> None:
    pending = [Request("large", 9.0, memory=100), Request("small", 1.0, memory=1)]
    (first,) = place(pending, [], Load((0, 1), (0, 1), 10))
    assert first.jobs == ("small",)
    (alone,) = place(pending[:1], [], Load((0, 1), (0, 1), 10))
    assert alone.jobs == ("large",)


def test_the_gpu_with_the_most_free_memory_is_taken_first() -> None:
    load = Load((0, 1, 2), (0, 1, 2), 0, (Gpu(0, 5, 9), Gpu(1, 8, 9)))
    pending = [Request(name, 1.0, gpu=True) for name in "abc"]
    assert [placement.gpu for placement in place(pending, [], load)] == [1, 0]


def gpu_job(name: str, gpu_memory: int, jobs_per_gpu: int) -> Request:
    return Request(name, 1.0, gpu=True, gpu_memory=gpu_memory, jobs_per_gpu=jobs_per_gpu)


def test_jobs_that_may_share_a_gpu_fill_its_slots_and_its_memory() -> None:
    cores = tuple(range(9))
    load = Load(cores, cores, 0, (Gpu(0, 8, 9), Gpu(1, 5, 9)))
    placed = place([gpu_job(name, 2, 3) for name in "abcdefg"], [], load)
    assert [placement.gpu for placement in placed] == [0, 1, 0, 1, 0]


def test_a_job_that_needs_the_whole_gpu_shares_it_with_no_other() -> None:
    load = Load((0, 1), (0, 1), 0, (Gpu(0, 9, 9),))
    (first,) = place([gpu_job("a", 0, 1), gpu_job("b", 0, 2)], [], load)
    assert first.jobs == ("a",)
    assert place([gpu_job("b", 0, 2)], [first], load) == []
    (second,) = place([gpu_job("b", 0, 2)], [], load)
    assert place([gpu_job("a", 0, 1)], [second], load) == []
    assert place([gpu_job("c", 0, 2)], [second], load)[0].gpu == 0


def test_what_own_jobs_hold_on_a_gpu_is_not_subtracted_twice() -> None:
    """The driver says that 3 of 9 bytes are free; 6 are those of the job that was promised 6."""
    running = [Placement(("old",), (0,), gpu=0, gpu_memory=6, jobs_per_gpu=2)]
    told, untold = Gpu(0, 3, 9, own=6), Gpu(0, 3, 9)
    pending = [gpu_job("new", 3, 2)]
    assert len(place(pending, running, Load((0, 1), (0, 1), 0, (told,)))) == 1
    assert place(pending, running, Load((0, 1), (0, 1), 0, (untold,))) == []


def test_a_job_without_cores_of_its_own_counts_by_its_threads() -> None:
    unpinned = Placement(("old",), (), threads=2)
    assert place([Request("new", 1.0)], [unpinned], Load((0, 1), (0, 1), 0)) == []


def test_own_jobs_on_a_core_that_others_use_too_leave_less_room() -> None:
    running = [Placement(("old",), (0,))]
    assert place([Request("new", 1.0)], running, Load((0, 1), (1,), 0)) == []


@pytest.mark.parametrize("idle", [(), (0,), (1, 0)])
def test_equal_loads_give_equal_placements(idle: tuple[int, ...]) -> None:
    pending = [Request(name, 1.0) for name in "edcba"]
    load = Load((0, 1), idle, 0)
    assert place(pending, [], load) == place(pending, [], load)
    assert place(pending, [], load)[0].jobs == ("a",)
