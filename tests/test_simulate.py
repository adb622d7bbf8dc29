"""Laws of the simulator: a schedule that a machine could carry out, and never an idle one."""

from __future__ import annotations

import math

import pytest

from asynckfold.errors import InputError
from asynckfold.placement import Request
from asynckfold.simulate import Failure, Neighbour, VirtualMachine, simulate


def test_jobs_take_the_seconds_they_take_not_those_expected() -> None:
    found = simulate(
        [Request("a", 1.0), Request("b", 9.0)], VirtualMachine(1), {"a": 5.0, "b": 2.0}
    )
    assert [(span.job, span.start, span.end) for span in found.spans] == [
        ("b", 0.0, 2.0),
        ("a", 2.0, 7.0),
    ]
    assert found.makespan == found.lower_bound == 7.0
    assert found.use == 1.0


def test_a_failed_attempt_is_followed_by_another() -> None:
    found = simulate(
        [Request("a", 3.0)], VirtualMachine(2), failures={"a": [Failure(1.0), Failure(2.0)]}
    )
    assert [(span.end, span.outcome) for span in found.spans] == [
        (1.0, "died"),
        (3.5, "died"),
        (8.5, "done"),
    ]
    assert found.lower_bound == 8.5  # with pauses of 0.5 and 2 seconds


def test_nothing_starts_beside_a_neighbour_and_the_core_is_used_when_it_has_gone() -> None:
    jobs = [Request(name, 2.0) for name in "abcd"]
    found = simulate(jobs, VirtualMachine(2), neighbours=[Neighbour(1, 1.0, 5.0)])
    assert [(span.job, span.start, span.cores) for span in found.spans] == [
        ("a", 0.0, (0,)),
        ("b", 0.0, (1,)),
        ("c", 2.0, (0,)),
        ("d", 4.0, (0,)),
    ]


def test_what_cannot_run_is_refused_all_at_once() -> None:
    jobs = [Request("a", math.nan), Request("b", 1.0, gpu=True), Request("b", 1.0)]
    with pytest.raises(InputError) as refused:
        simulate(jobs, VirtualMachine(0), neighbours=[Neighbour(0, 2.0, 1.0)])
    assert len(refused.value.problems) == 5
