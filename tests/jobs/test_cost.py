"""What a model costs: seconds between the threads that were measured, and the way through JSON."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from asynckfold.jobs.cost import Cost, Work, at
from asynckfold.jobs.decoding import decoded, encoded, parsed

seconds = st.floats(1e-6, 1e4)
by_threads = st.dictionaries(st.integers(1, 64), seconds, max_size=6).flatmap(
    lambda found: seconds.map(lambda one: {**found, 1: one})
)


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    steps = draw(by_threads)
    evaluations = {count: draw(seconds) for count in steps}
    flops, memory, gpu_memory = (draw(st.integers(0, 2**50)) for _ in range(3))
    return Cost(steps, evaluations, flops, memory, gpu_memory)


@given(costs())
def test_a_cost_survives_json(cost: Cost) -> None:
    assert decoded(Cost, parsed(encoded(cost))) == cost


@given(by_threads, st.integers(1, 256))
def test_between_measured_threads_the_seconds_lie_between_theirs(
    known: dict[int, float], threads: int
) -> None:
    fewer = max(count for count in known if count <= threads)
    more = min((count for count in known if count >= threads), default=fewer)
    low, high = sorted([known[fewer], known[more]])
    assert low * (1 - 1e-9) <= at(known, threads) <= high * (1 + 1e-9)


@given(by_threads)
def test_measured_seconds_are_given_back(known: dict[int, float]) -> None:
    assert all(math.isclose(at(known, count), value) for count, value in known.items())


@given(st.floats(0, 1), st.integers(1, 64))
def test_amdahls_law_is_met_between_its_ends(share: float, threads: int) -> None:
    def law(count: int) -> float:
        return 1 - share + share / count

    assert math.isclose(at({1: law(1), 64: law(64)}, threads), law(threads))


def test_a_job_is_its_steps_and_its_evaluations() -> None:
    cost = Cost({1: 0.5, 2: 0.25}, {1: 2.0, 2: 1.5})
    assert cost.seconds(Work(10, 3), 1) == 11
    assert cost.seconds(Work(10, 3), 2) == 7


@given(costs(), st.floats(0.1, 10.0), st.integers(1, 64), st.integers(0, 1000))
def test_jobs_as_one_gain_in_their_steps_alone(
    cost: Cost, gain: float, threads: int, evaluations: int
) -> None:
    found = cost.fused(gain)
    steps = cost.seconds(Work(100, 0), threads) / gain
    assert math.isclose(found.seconds(Work(100, 0), threads), steps)
    assert found.seconds(Work(0, evaluations), threads) == cost.seconds(
        Work(0, evaluations), threads
    )
    assert cost.fused(1.0) == cost
    assert (found.flops, found.memory, found.gpu_memory) == (
        cost.flops,
        cost.memory,
        cost.gpu_memory,
    )


def test_scaling_brings_a_step_to_what_was_seen_and_keeps_proportions() -> None:
    cost = Cost({1: 0.5, 2: 0.25}, {1: 2.0, 2: 1.5}, 7, 8, 9)
    assert cost.scaled(1.0) == Cost({1: 1.0, 2: 0.5}, {1: 4.0, 2: 3.0}, 7, 8, 9)
    assert [cost.scaled(value) for value in (0.0, -1.0, math.inf, math.nan)] == [cost] * 4
