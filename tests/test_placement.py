"""Laws of `place`, over any queue, any load and anything that runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckfold.placement import Gpu, Load, Placement, Request, place


@st.composite
def loads(draw: st.DrawFn) -> Load:
    cores = tuple(range(draw(st.integers(1, 8))))
    idle = draw(st.permutations(cores))[: draw(st.integers(0, len(cores)))]
    gpus = tuple(
        Gpu(index, draw(st.integers(0, 9)), 10) for index in range(draw(st.integers(0, 2)))
    )
    return Load(cores, tuple(idle), draw(st.integers(0, 100)), gpus)


requests = st.builds(
    Request,
    job_id=st.text("abc", min_size=1, max_size=4),
    seconds=st.sampled_from([0.0, 1.0, 1.5, 2.0, 60.0]),
    threads=st.integers(1, 3),
    memory=st.integers(0, 60),
    gpu=st.booleans(),
    alone=st.sampled_from([False, False, False, True]),
)
queues = st.lists(requests, max_size=12, unique_by=lambda request: request.job_id)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Request], list[Placement], Load]:
    """A queue, what an earlier decision started, and a load that may have changed since."""
    load = draw(loads())
    alone = {"alone": True} if draw(st.booleans()) else {}
    earlier = [replace(item, job_id=f"old-{item.job_id}", **alone) for item in draw(queues)]
    running = place(earlier, [], load) if draw(st.booleans()) else []
    if draw(st.booleans()):
        load = replace(load, idle=load.idle[: draw(st.integers(0, len(load.idle)))])
    return draw(queues), running, load


def cores_of(placements: Sequence[Placement]) -> list[int]:
    return [core for placement in placements for core in placement.cores]


@given(situations())
def test_no_core_and_no_gpu_is_booked_twice(
    situation: tuple[list[Request], list[Placement], Load],
) -> None:
    pending, running, load = situation
    active = [*running, *place(pending, running, load)]
    cores = cores_of(active)
    gpus = [placement.gpu for placement in active if placement.gpu is not None]
    assert len(set(cores)) == len(cores)
    assert len(set(gpus)) == len(gpus)
    assert set(cores) <= set(load.cores)
    assert set(gpus) <= {gpu.index for gpu in load.gpus}


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
        assert (placement.gpu is not None) == request.gpu
        assert placement.alone == request.alone
        assert len(placement.cores) == min(request.threads, len(load.cores))


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
    able = [request for request in pending if load.gpus or not request.gpu]
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
    assert all(request.gpu and not load.gpus for request in left)


@given(situations())
def test_memory_is_kept_where_something_runs_beside(
    situation: tuple[list[Request], list[Placement], Load],
) -> None:
    pending, running, load = situation
    placed = place(pending, running, load)
    active = [*running, *placed]
    if placed and len(active) > 1:
        assert sum(placement.memory for placement in active) <= load.free_memory


@given(situations())
def test_more_cores_than_idle_ones_only_for_a_single_job(
    situation: tuple[list[Request], list[Placement], Load],
) -> None:
    pending, running, load = situation
    placed = place(pending, running, load)
    active = [*running, *placed]
    if placed and len(active) > 1:
        assert len(cores_of(active)) <= len(load.idle)
        assert set(cores_of(placed)) <= set(load.idle)


@given(queues, loads())
def test_something_starts_where_nothing_runs(pending: list[Request], load: Load) -> None:
    able = [request for request in pending if load.gpus or not request.gpu]
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


def test_a_job_without_cores_of_its_own_counts_by_its_threads() -> None:
    unpinned = Placement(("old",), (), threads=2)
    assert place([Request("new", 1.0)], [unpinned], Load((0, 1), (0, 1), 0)) == []


def test_own_jobs_on_a_core_that_others_use_too_leave_less_room() -> None:
    running = [Placement(("old",), (0,))]
    assert place([Request("new", 1.0)], running, Load((0, 1), (1,), 0)) == []


def makespan(seconds: Sequence[int], cores: int) -> float:
    """Drive `place` over virtual time until all jobs ended."""
    load = Load(tuple(range(cores)), tuple(range(cores)), 0)
    pending = [Request(str(number), float(time)) for number, time in enumerate(seconds)]
    now, running = 0.0, list[tuple[float, Placement]]()
    while pending or running:
        started = place(pending, [placement for _, placement in running], load)
        names = {job for placement in started for job in placement.jobs}
        running += [(now + float(seconds[int(item.jobs[0])]), item) for item in started]
        pending = [request for request in pending if request.job_id not in names]
        now = min(end for end, _ in running)
        running = [pair for pair in running if pair[0] > now]
    return now


def optimum(seconds: Sequence[int], cores: int) -> int:
    """The shortest makespan, by trying every assignment."""
    return min(
        max(
            sum(time for time, at in zip(seconds, where, strict=True) if at == core)
            for core in range(cores)
        )
        for where in itertools.product(range(cores), repeat=len(seconds))
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 3))
def test_the_makespan_is_within_grahams_bound(seconds: list[int], cores: int) -> None:
    bound = (4 / 3 - 1 / (3 * cores)) * optimum(seconds, cores)
    assert makespan(seconds, cores) <= bound + 1e-9


def test_grahams_worst_case_is_met_exactly() -> None:
    """Longest first on 5, 5, 4, 4, 3, 3, 3 and three cores: 11 where 9 is possible."""
    assert makespan([5, 5, 4, 4, 3, 3, 3], 3) == 11
    assert optimum([5, 5, 4, 4, 3, 3, 3], 3) == 9


@pytest.mark.parametrize("idle", [(), (0,), (1, 0)])
def test_equal_loads_give_equal_placements(idle: tuple[int, ...]) -> None:
    pending = [Request(name, 1.0) for name in "edcba"]
    load = Load((0, 1), idle, 0)
    assert place(pending, [], load) == place(pending, [], load)
    assert place(pending, [], load)[0].jobs == ("a",)
