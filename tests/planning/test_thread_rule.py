"""How many threads: the same for the same sweep, and never slower than the serial way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckfold.jobs.cost import Work
from asynckfold.jobs.placement import NodeSize, Request
from asynckfold.planning.flop_model import POINTS, MeasuredModel, rule_cost, thread_counts
from asynckfold.planning.forecast import simulate
from asynckfold.planning.thread_rule import TIE, LastJobs, Model, Threads, decide, size_of

SMALL_VGG = 1_870_000_000

works = st.builds(Work, st.integers(1, 10_000), st.integers(1, 100))
flops = st.integers(0, 10**12)


@st.composite
def sweeps(draw: st.DrawFn, most_cores: int = 8) -> tuple[list[Model], int]:
    cores = draw(st.integers(1, most_cores))
    models = [
        Model(name, tuple(draw(st.lists(works, max_size=6))), rule_cost(draw(flops), cores))
        for name in draw(st.lists(st.sampled_from("ABCD"), unique=True, min_size=1))
    ]
    return models, cores


def seconds(models: list[Model], threads: Threads, cores: int) -> float:
    """Simulate the sweep with these threads."""
    requests = []
    last = threads.last or LastJobs("", 0, 0)
    for item in models:
        for number, work in enumerate(sorted(item.jobs, key=size_of)):
            is_last = item.name == last.model and number < last.jobs
            count = last.threads if is_last else threads.counts[item.name]
            name = f"{item.name}/{number:06}"
            requests.append(Request(name, item.cost.seconds(work, count), count))
    return simulate(requests, [NodeSize(cores)]).makespan


def equal(models: list[Model], count: int) -> Threads:
    return Threads({item.name: count for item in models}, {})


@pytest.mark.parametrize("point", POINTS)
def test_the_cost_model_goes_through_what_was_measured(point: MeasuredModel) -> None:
    cost = rule_cost(int(point.flops), 2).step_seconds
    assert cost[1] == pytest.approx(point.seconds, 1e-6)
    assert cost[1] / cost[2] == pytest.approx(point.two_threads, 1e-6)


def test_a_model_of_many_small_products_gets_one_thread_a_job() -> None:
    # A MobileNet of half the width: operations alone say that two threads take no longer.
    jobs = (Work(26, 5),) * 5
    assert decide([Model("M", jobs, rule_cost(2_310_000_000, 2, 8.0))], 2).counts == {"M": 2}
    divided = rule_cost(2_310_000_000, 2, 8.0, products=84)
    assert decide([Model("M", jobs, divided)], 2).counts == {"M": 1}


@given(sweeps(), st.booleans())
@settings(deadline=None)
def test_never_slower_than_the_serial_way_nor_than_equal_threads(
    sweep: tuple[list[Model], int], apart: bool
) -> None:
    models, cores = sweep
    models = [replace(item, last_apart=apart) for item in models]
    threads = decide(models, cores)
    assert threads.counts.keys() == threads.why.keys() == {item.name for item in models}
    assert all(1 <= count <= cores for count in threads.counts.values())
    serial = math.fsum(item.cost.seconds(job, cores) for item in models for job in item.jobs)
    here = seconds(models, threads, cores)
    assert here <= serial * (1 + 1e-9)
    for count in thread_counts(cores):
        assert here <= TIE * seconds(models, equal(models, count), cores) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("jobs", "cores", "last"), [(5, 4, (1, 4)), (6, 4, (2, 2)), (7, 4, None), (5, 2, (1, 2))]
)
def test_the_jobs_that_are_left_over_share_the_cores(
    jobs: int, cores: int, last: tuple[int, int] | None
) -> None:
    work = (*[Work(1000, 10)] * (jobs - 1), Work(990, 10))
    models = [Model("M", work, rule_cost(SMALL_VGG, cores), last_apart=True)]
    threads = decide(models, cores)
    assert threads.last == (last and LastJobs("M", *last))
    if last:
        whole = decide([replace(models[0], last_apart=False)], cores)
        assert whole.last is None
        here, there = seconds(models, threads, cores), seconds(models, whole, cores)
        assert TIE * here < there
        assert f"{here:.3g} s predicted for the sweep, {there:.3g} s with" in threads.why["M"]
