"""How many threads: the same for the same sweep, and never slower than the serial way."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckfold.jobs.cost import Cost, Work
from asynckfold.jobs.placement import Request
from asynckfold.planning.flop_model import OVERTURN, POINTS, MeasuredModel, rule_cost, thread_counts
from asynckfold.planning.thread_search import (
    LAST_OF_FEW,
    TIE,
    Decision,
    LastJobs,
    Model,
    decide,
    predict,
    size_of,
)
from asynckfold.scheduling.simulate import VirtualMachine, simulate

MLP, LENET5, SMALL_VGG, VGG11 = 13_100_000, 72_500_000, 1_870_000_000, 29_200_000_000

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


def folds(count: int, operations: int, cores: int = 2, name: str = "M") -> Model:
    return Model(name, (Work(1000, 10),) * count, rule_cost(operations, cores))


def serial_seconds(models: list[Model], cores: int) -> float:
    return math.fsum(item.cost.seconds(work, cores) for item in models for work in item.jobs)


# The rule


@pytest.mark.parametrize("point", POINTS)
def test_the_rule_goes_through_what_was_measured(point: MeasuredModel) -> None:
    cost = rule_cost(int(point.flops), 2).step_seconds
    assert cost[1] == pytest.approx(point.seconds, 1e-6)
    assert cost[1] / cost[2] == pytest.approx(point.two_threads, 1e-6)


def test_many_small_products_gain_less_by_threads_than_few_large_ones() -> None:
    few, many = (rule_cost(2_310_000_000, 2, products=count).step_seconds for count in (27, 84))
    assert few[1] == many[1]
    assert few[2] < many[2] < many[1]


def test_a_model_of_many_small_products_gets_one_thread_a_job() -> None:
    # A MobileNet of half the width: operations alone say that two threads take no longer.
    jobs = (Work(26, 5),) * 5
    assert decide([Model("M", jobs, rule_cost(2_310_000_000, 2, 8.0))], 2).threads == {"M": 2}
    divided = rule_cost(2_310_000_000, 2, 8.0, products=84)
    assert decide([Model("M", jobs, divided)], 2).threads == {"M": 1}


@given(flops, flops, st.integers(1, 64))
def test_more_operations_never_cost_less_and_more_threads_never_more(
    left: int, right: int, cores: int
) -> None:
    small, large = (rule_cost(value, cores).step_seconds for value in sorted([left, right]))
    assert small[1] <= large[1] * (1 + 1e-9)
    for found in (small, large):
        counts = sorted(found)
        assert all(found[b] <= found[a] for a, b in pairwise(counts))
        # Nor do threads save core-seconds.
        assert all(count * found[count] >= found[1] * (1 - 1e-9) for count in counts)


@pytest.mark.parametrize(
    ("cores", "counts"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 3)), (8, (1, 2, 4, 8)), (16, (1, 2, 3, 4, 5, 8, 16))],
)
def test_threads_share_the_cores_equally(cores: int, counts: tuple[int, ...]) -> None:
    assert thread_counts(cores) == counts


# The decision


@given(sweeps(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_models_and_jobs_does_not_matter(
    sweep: tuple[list[Model], int], random: Random
) -> None:
    models, cores = sweep
    mixed = [
        Model(item.name, tuple(random.sample(item.jobs, len(item.jobs))), item.cost)
        for item in random.sample(models, len(models))
    ]
    assert decide(models, cores) == decide(mixed, cores)


@given(sweeps())
@settings(deadline=None)
def test_never_more_threads_than_cores_and_never_slower_than_the_serial_way(
    sweep: tuple[list[Model], int],
) -> None:
    models, cores = sweep
    found = decide(models, cores)
    assert found.threads.keys() == found.why.keys() == {item.name for item in models}
    assert all(1 <= count <= cores for count in found.threads.values())
    prediction = predict(models, found.threads, cores)
    assert prediction.makespan <= serial_seconds(models, cores) * (1 + 1e-9)
    assert prediction.makespan >= prediction.lower_bound * (1 - 1e-9)
    assert prediction.lower_bound >= prediction.longest * (1 - 1e-9)


@given(sweeps())
@settings(deadline=None)
def test_no_equal_number_of_threads_is_better_by_more_than_a_tie(
    sweep: tuple[list[Model], int],
) -> None:
    models, cores = sweep
    here = predict(models, decide(models, cores).threads, cores).makespan
    for count in thread_counts(cores):
        equal = {item.name: count for item in models}
        assert here <= TIE * predict(models, equal, cores).makespan * (1 + 1e-9)


@given(sweeps())
@settings(deadline=None)
def test_timings_that_agree_with_the_rule_change_nothing(sweep: tuple[list[Model], int]) -> None:
    models, cores = sweep
    measured = {item.name: item.cost for item in models}
    assert decide(models, cores, measured) == decide(models, cores)


@given(sweeps(), st.data())
@settings(deadline=None)
def test_timings_overturn_the_rule_by_the_margin_only(
    sweep: tuple[list[Model], int], data: st.DataObject
) -> None:
    models, cores = sweep
    timed = []
    for item in models:
        found = {
            count: value * data.draw(st.floats(0.5, 3))
            for count, value in item.cost.step_seconds.items()
        }
        timed.append(Model(item.name, item.jobs, Cost(found, item.cost.eval_seconds)))
    measured = {item.name: item.cost for item in timed}
    ruled, decided = decide(models, cores), decide(models, cores, measured)
    if decided.overturned:
        here, there = (predict(timed, way.threads, cores).makespan for way in (decided, ruled))
        assert there >= OVERTURN * here * (1 - 1e-9)
        assert all("measured here" in text for text in decided.why.values())
    else:
        assert decided == ruled


def simulated(models: list[Model], found: Decision, cores: int) -> float:
    """The makespan of a decision, its last jobs included."""
    requests = []
    for item in models:
        last = found.last if found.last and found.last.model == item.name else LastJobs("", 0, 0)
        for number, work in enumerate(sorted(item.jobs, key=size_of)):
            threads = last.threads if number < last.jobs else found.threads[item.name]
            seconds = item.cost.seconds(work, threads)
            requests.append(Request(f"{item.name}/{number:06}", seconds, threads))
    return simulate(requests, VirtualMachine(cores)).makespan


@given(sweeps(), st.booleans())
@settings(deadline=None)
def test_the_last_jobs_have_more_threads_only_where_it_is_clearly_shorter(
    sweep: tuple[list[Model], int], timed: bool
) -> None:
    models, cores = sweep
    measured = {item.name: item.cost for item in models} if timed else None
    whole = decide(models, cores, measured)
    found = decide([replace(item, last_apart=True) for item in models], cores, measured)
    if found.last is None:
        assert found == whole
        return
    mine = next(item for item in models if item.name == found.last.model)
    assert 0 < found.last.jobs < len(mine.jobs)
    assert found.last.jobs * found.last.threads <= cores
    assert found.last.threads > found.threads[mine.name]
    assert len(models) == 1 or found.threads == whole.threads
    here, there = simulated(models, found, cores), predict(models, whole.threads, cores).makespan
    assert TIE * here < there * (1 + 1e-9)
    assert f"{here:.3g} s against {there:.3g} s for the sweep" in found.why[mine.name]


def test_an_overturned_rule_says_by_how_much() -> None:
    bad_neighbours = Cost({1: 1.0, 2: 0.3}, {1: 0.1, 2: 0.1})
    models = [folds(40, SMALL_VGG)]
    assert decide(models, 2).threads == {"M": 1}
    found = decide(models, 2, {"M": bad_neighbours})
    assert found.overturned
    assert found.threads == {"M": 2}
    assert found.why["M"].endswith(
        "measured here: the rule's threads (M 1) take 1.66 times as long"
    )


# Examples: what a reader would expect


@pytest.mark.parametrize("operations", [0, 10**6, MLP, LENET5, SMALL_VGG, VGG11, 10**13])
def test_many_equal_jobs_take_one_thread_each(operations: int) -> None:
    assert decide([folds(200, operations)], 2).threads == {"M": 1}


@pytest.mark.parametrize("operations", [MLP, LENET5, SMALL_VGG, VGG11])
def test_a_single_job_takes_all_cores(operations: int) -> None:
    assert decide([folds(1, operations)], 2).threads == {"M": 2}


def test_a_single_job_that_threads_do_not_help_takes_one() -> None:
    assert decide([folds(1, 10**6)], 2).threads == {"M": 1}


def test_five_folds_on_two_cores() -> None:
    """Three rounds of two jobs against five jobs after another: only the largest nets differ."""
    assert decide([folds(5, LENET5)], 2).threads == {"M": 1}
    assert decide([folds(5, SMALL_VGG)], 2).threads == {"M": 1}
    assert decide([folds(5, VGG11)], 2).threads == {"M": 2}


@pytest.mark.parametrize(
    ("cores", "jobs", "threads", "last"),
    [
        (2, 5, 1, LastJobs("M", 1, 2)),
        (4, 5, 1, LastJobs("M", 1, 4)),
        (4, 6, 1, LastJobs("M", 2, 2)),
        (4, 7, 1, None),  # three jobs for four cores
        (8, 5, 2, LastJobs("M", 1, 8)),
        (8, 20, 1, LastJobs("M", 4, 2)),
        (2, 4, 1, None),
        (2, LAST_OF_FEW + 1, 1, None),
    ],
)
def test_the_last_jobs_take_the_cores_that_would_be_idle(
    cores: int, jobs: int, threads: int, last: LastJobs | None
) -> None:
    found = decide([replace(folds(jobs, VGG11, cores), last_apart=True)], cores)
    assert (found.threads, found.last) == ({"M": threads}, last)


def test_threads_that_bring_nothing_are_not_given_to_the_last_job() -> None:
    assert decide([replace(folds(5, 10**6), last_apart=True)], 2).last is None


def test_the_last_of_few_long_jobs_beside_many_short_ones_is_seen() -> None:
    long, short = folds(1, VGG11, 4, "long"), folds(40, LENET5, 4, "short")
    assert decide([long, short], 4).threads["long"] > 1
    assert decide([long, short], 4).threads["short"] == 1


def test_one_core_and_no_jobs() -> None:
    assert decide([folds(5, VGG11, 1)], 1).why == {"M": "1 thread: there is 1 core"}
    assert decide([folds(0, VGG11)], 2).why == {"M": "1 thread: there is no job"}
    assert decide([], 2).threads == {}


def test_the_sentences_name_the_numbers_that_were_compared() -> None:
    assert decide([folds(3, SMALL_VGG)], 2).why["M"] == (
        "2 threads × 1 job beat 1 thread × 2 jobs: 36.4 s against 40.2 s for the sweep, "
        "12 ms against 10 ms per step"
    )
    assert decide([folds(100, SMALL_VGG)], 2).why["M"] == (
        "1 thread × 2 jobs: the jobs of the sweep fill the cores, and threads cost core-seconds: "
        "10 ms per step against 12 ms with 2 threads × 1 job"
    )
