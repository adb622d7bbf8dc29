"""Laws of the simulator: a schedule that a machine could carry out, and never an idle one."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asynckfold.errors import InputError
from asynckfold.jobs.placement import Request
from asynckfold.scheduling.retries import CLASS_OF, decide
from asynckfold.scheduling.simulate import (
    DONE,
    Failure,
    OtherProcess,
    Simulation,
    Span,
    VirtualMachine,
    simulate,
)
from tests.scheduling.random_sweep import draw_scenario
from tests.size import examples


@dataclass(frozen=True)
class Case:
    """Arguments of `simulate`."""

    requests: list[Request]
    machine: VirtualMachine
    seconds: dict[str, float]
    others: list[OtherProcess]
    failures: dict[str, list[Failure]]

    def run(self) -> Simulation:
        return simulate(
            self.requests,
            self.machine,
            self.seconds,
            others=self.others,
            failures=self.failures,
        )

    def ready(self, found: Simulation) -> dict[Span, tuple[float, Request]]:
        """From when each attempt was pending, and what it asked for."""
        by_id = {request.job_id: request for request in self.requests}
        since = dict.fromkeys(by_id, 0.0)
        history: dict[str, list[str]] = {job: [] for job in by_id}
        pending = {}
        for span in found.spans:
            pending[span] = since[span.job], by_id[span.job]
            if span.outcome != DONE and (retry := decide(history[span.job], span.outcome)):
                history[span.job].append(span.outcome)
                since[span.job] = span.end + retry.after_s
                by_id[span.job] = replace(by_id[span.job], alone=retry.alone)
        return pending


durations = st.integers(0, 9).map(float)


@st.composite
def cases(draw: st.DrawFn, undisturbed: bool = False) -> Case:
    machine = VirtualMachine(
        draw(st.integers(1, 5)),
        draw(st.integers(0, 2)),
        draw(st.sampled_from([sys.maxsize, 10])),
        draw(st.sampled_from([sys.maxsize, 6])),
    )
    requests = draw(
        st.lists(
            st.builds(
                Request,
                job_id=st.text("abc", min_size=1, max_size=3),
                seconds=durations,
                threads=st.integers(1, 6),
                memory=st.integers(0, 12),
                gpu=st.booleans() if machine.gpus else st.just(False),
                alone=st.sampled_from([False, False, False, True]),
                gpu_memory=st.integers(0, 7),
                jobs_per_gpu=st.integers(1, 3),
            ),
            max_size=10,
            unique_by=lambda request: request.job_id,
        )
    )
    names = st.sampled_from([request.job_id for request in requests] or ["none"])
    seconds = draw(st.dictionaries(names, durations))
    if undisturbed:
        return Case(requests, machine, seconds, [], {})
    failure = st.builds(Failure, durations, st.sampled_from(sorted(CLASS_OF)))
    other = st.builds(
        lambda core, start, stay: OtherProcess(core, start, start + stay),
        st.integers(0, machine.cores - 1),
        durations,
        durations,
    )
    return Case(
        requests,
        machine,
        seconds,
        draw(st.lists(other, max_size=4)),
        draw(st.dictionaries(names, st.lists(failure, max_size=3), max_size=3)),
    )


def at(spans: Sequence[Span], when: float) -> list[Span]:
    """What runs right after a moment."""
    return [span for span in spans if span.start <= when < span.end]


@given(cases())
def test_every_job_is_attempted_until_it_is_done_or_given_up(case: Case) -> None:
    found = case.run()
    for request in case.requests:
        spans = [span for span in found.spans if span.job == request.job_id]
        planned = case.failures.get(request.job_id, [])
        history = [span.outcome for span in spans]
        assert history[:-1] == [failure.outcome for failure in planned[: len(spans) - 1]]
        assert all(decide(history[:n], item) for n, item in enumerate(history[:-1]))
        assert history[-1] == DONE or decide(history[:-1], history[-1]) is None
        expected = case.seconds.get(request.job_id, request.seconds)
        if history[-1] == DONE:
            assert len(spans) == len(planned) + 1
            assert spans[-1].end - spans[-1].start == pytest.approx(expected)
        for earlier, later in itertools.pairwise(spans):
            assert earlier.end <= later.start
    assert {span.job for span in found.spans} == {item.job_id for item in case.requests}


@given(cases())
def test_nothing_is_reserved_twice_at_any_moment(case: Case) -> None:
    found = case.run()
    pending = case.ready(found)
    for start in {span.start for span in found.spans}:
        active = at(found.spans, start)
        asked = {span: pending[span][1] for span in active}
        cores = [core for span in active for core in span.cores]
        assert len(set(cores)) == len(cores)
        assert all(0 <= core < case.machine.cores for core in cores)
        if len(active) < 2:
            continue
        assert not any(request.alone for request in asked.values())
        assert sum(request.memory for request in asked.values()) <= case.machine.memory
        for gpu in {span.gpu for span in active} - {None}:
            there = [asked[span] for span in active if gpu == span.gpu]
            assert len(there) <= min(request.jobs_per_gpu for request in there)
            if len(there) > 1:
                assert sum(item.gpu_memory for item in there) <= case.machine.gpu_memory


def fits(case: Case, request: Request, active: dict[Span, Request], when: float) -> bool:
    """Whether a request could start beside what runs, told from first principles."""
    if any(item.alone for item in active.values()) or (request.alone and active):
        return False
    if not active:
        return True  # one job always runs
    taken = {item.core for item in case.others if item.start <= when < item.end}
    held = [core for span in active for core in span.cores]
    idle = set(range(case.machine.cores)) - taken
    if request.threads > min(len(idle - set(held)), len(idle) - len(held)):
        return False
    if request.memory + sum(item.memory for item in active.values()) > case.machine.memory:
        return False
    free = 0
    for gpu in range(case.machine.gpus):
        there = [request, *(item for span, item in active.items() if gpu == span.gpu)]
        free += len(there) <= min(item.jobs_per_gpu for item in there) and (
            sum(item.gpu_memory for item in there) <= case.machine.gpu_memory
        )
    return free >= request.gpu


@given(cases())
def test_nothing_waits_that_could_run(case: Case) -> None:
    found = case.run()
    pending = case.ready(found)
    moments = {0.0, *(span.end for span in found.spans)}
    moments |= {time for item in case.others for time in (item.start, item.end)}
    moments |= {since for since, _ in pending.values()}
    for when in moments:
        active = {span: pending[span][1] for span in at(found.spans, when)}
        for span, (since, request) in pending.items():
            if since <= when < span.start:
                assert not fits(case, request, active, when)


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_the_jobs_does_not_matter(case: Case, random: object) -> None:
    shuffled = list(case.requests)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert replace(case, requests=shuffled).run() == case.run()


@given(cases())
def test_no_schedule_stays_below_the_lower_bound(case: Case) -> None:
    found = case.run()
    assert found.makespan >= found.lower_bound - 1e-9
    assert found.ratio >= 1 - 1e-9
    assert 0 <= found.use <= 1 + 1e-9


@given(cases(), st.integers(1, 7))
def test_the_use_over_time_adds_up_to_the_use(case: Case, parts: int) -> None:
    found = case.run()
    assert sum(found.use_over(parts)) / parts == pytest.approx(found.use)


def guarantee(
    requests: Sequence[Request], machine: VirtualMachine, seconds: Mapping[str, float]
) -> float:
    """Return seconds that no simulation of these jobs exceeds, however wrong their estimates are.

    Without others and failures. With cores as the only limit, (2 - 1/m) times the larger of
    core-seconds / m and the longest job p: the bound of Feldmann, Sgall and Teng (1994) for rigid
    parallel jobs. With memory and GPUs too, twice the larger of p and the sum over these resources
    of work / capacity, after Garey and Graham (1975); a GPU job counts with a whole GPU. Jobs that
    must be alone follow one after another.

    Why: a job that runs at a time t' later than t + p was pending at t and did not fit, so that
    some resource was, at t and t' together, asked for beyond its capacity. A makespan C of 2 p or
    more consists of pairs of moments C / 2 apart; so the work exceeds half of what fits into C. A
    shorter one has such pairs p apart in its first and last C - p seconds, which leaves at most
    work / m + p (1 - 1/m).
    """
    alone = math.fsum(seconds[item.job_id] for item in requests if item.alone)
    others = [(item, seconds[item.job_id]) for item in requests if not item.alone]
    longest = max((length for _, length in others), default=0.0)
    cores = machine.cores
    work = math.fsum(min(item.threads, cores) * length for item, length in others) / cores
    if not any(item.gpu or item.memory for item, _ in others):
        return alone + (2 - 1 / cores) * max(work, longest)
    if machine.memory:
        capped = (min(item.memory, machine.memory) * length for item, length in others)
        work += math.fsum(capped) / machine.memory
    if machine.gpus:
        work += math.fsum(length for item, length in others if item.gpu) / machine.gpus
    return alone + 2 * max(work, longest)


@settings(max_examples=examples(300))
@given(cases(undisturbed=True))
def test_no_simulation_exceeds_its_guarantee(case: Case) -> None:
    taken = {item.job_id: item.seconds for item in case.requests} | case.seconds
    assert case.run().makespan <= guarantee(case.requests, case.machine, taken) + 1e-9


@pytest.mark.nightly
@given(cases(undisturbed=True))
def test_with_cores_alone_the_guarantee_is_near_the_lower_bound(case: Case) -> None:
    requests = [
        Request(item.job_id, item.seconds, min(item.threads, case.machine.cores))
        for item in case.requests
    ]
    found = simulate(requests, case.machine, case.seconds)
    assert found.makespan <= (2 - 1 / case.machine.cores) * found.lower_bound + 1e-9


@pytest.mark.parametrize("cores", [2, 3, 8])
def test_the_guarantee_is_met_exactly_by_the_worst_estimates(cores: int) -> None:
    """Graham 1966: short jobs fill all cores, and the long one, thought to be nothing, is last."""
    jobs = [Request(f"short-{number}", 1.0) for number in range(cores * (cores - 1))]
    found = simulate([*jobs, Request("long", 0.0)], VirtualMachine(cores), {"long": float(cores)})
    assert found.lower_bound == cores
    assert found.makespan == 2 * cores - 1 == (2 - 1 / cores) * found.lower_bound


def optimum(seconds: Sequence[int], cores: int) -> int:
    """The shortest makespan, by trying every assignment."""
    return min(
        max(
            sum(time for time, at in zip(seconds, where, strict=True) if at == core)
            for core in range(cores)
        )
        for where in itertools.product(range(cores), repeat=len(seconds))
    )


def on_equal_cores(seconds: Sequence[int], cores: int) -> Simulation:
    jobs = [Request(f"{number:04}", float(time)) for number, time in enumerate(seconds)]
    return simulate(jobs, VirtualMachine(cores))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 3))
@example([5, 5, 4, 4, 3, 3, 3], 3)
def test_the_makespan_is_within_grahams_bound(seconds: list[int], cores: int) -> None:
    bound = (4 / 3 - 1 / (3 * cores)) * optimum(seconds, cores)
    assert on_equal_cores(seconds, cores).makespan <= bound + 1e-9


def test_grahams_worst_case_is_met_exactly() -> None:
    """Longest first on 5, 5, 4, 4, 3, 3, 3 and three cores: 11 where 9 is possible."""
    assert on_equal_cores([5, 5, 4, 4, 3, 3, 3], 3).makespan == 11
    assert optimum([5, 5, 4, 4, 3, 3, 3], 3) == 9


@settings(max_examples=50)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(1, 32))
def test_many_jobs_end_within_the_last_job_of_the_lower_bound(
    seconds: list[int], cores: int
) -> None:
    """Graham 1969, proof of theorem 2: the cores are full until the job that ends last starts."""
    found = on_equal_cores(seconds, cores)
    last = max(found.spans, key=lambda span: span.end)
    rest = (1 - 1 / cores) * (last.end - last.start)
    assert found.makespan <= sum(seconds) / cores + rest + 1e-6


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


def test_a_failed_attempt_is_followed_by_another_after_a_pause() -> None:
    found = simulate(
        [Request("a", 3.0)], VirtualMachine(2), failures={"a": [Failure(1.0), Failure(2.0)]}
    )
    assert [(span.end, span.outcome) for span in found.spans] == [
        (1.0, "died"),
        (3.5, "died"),
        (8.5, "done"),
    ]
    assert found.lower_bound == 8.5  # with pauses of 0.5 and 2 seconds


def test_a_job_that_was_short_of_memory_is_tried_again_alone_after_all_others() -> None:
    jobs = [Request(name, 2.0) for name in "abcd"]
    found = simulate(jobs, VirtualMachine(2), failures={"a": [Failure(1.0, "oom")]})
    assert [(span.job, span.start) for span in found.spans] == [
        ("a", 0.0),
        ("b", 0.0),
        ("c", 1.0),
        ("d", 2.0),
        ("a", 4.0),
    ]
    assert found.bounds.cores == (1 + 6 + 2 * 2) / 2


def test_nothing_starts_beside_another_process_and_the_core_is_used_when_it_has_gone() -> None:
    jobs = [Request(name, 2.0) for name in "abcd"]
    found = simulate(jobs, VirtualMachine(2), others=[OtherProcess(1, 1.0, 5.0)])
    assert [(span.job, span.start, span.cores) for span in found.spans] == [
        ("a", 0.0, (0,)),
        ("b", 0.0, (1,)),
        ("c", 2.0, (0,)),
        ("d", 4.0, (0,)),
    ]


def test_the_bounds_count_a_shared_gpu_by_its_shares() -> None:
    jobs = [Request(name, 4.0, gpu=True, jobs_per_gpu=2) for name in "abcd"]
    found = simulate(jobs, VirtualMachine(4, gpus=1))
    assert found.bounds.gpus == found.makespan == 8.0
    assert (found.bounds.cores, found.bounds.longest) == (4.0, 4.0)


def test_what_cannot_run_is_refused_all_at_once() -> None:
    jobs = [Request("a", math.nan), Request("b", 1.0, gpu=True), Request("b", 1.0, threads=0)]
    with pytest.raises(InputError) as refused:
        simulate(
            jobs,
            VirtualMachine(0, memory=-1),
            others=[OtherProcess(0, 2.0, 1.0)],
            failures={"a": [Failure(1.0, "bored")]},
        )
    assert len(refused.value.problems) == 8
    assert "nan for 'a'" in str(refused.value)


def test_no_jobs_take_no_time() -> None:
    found = simulate([], VirtualMachine(1), others=[OtherProcess(0, 1.0, math.inf)])
    assert (found.makespan, found.lower_bound, found.ratio, found.use) == (0.0, 0.0, 1.0, 0.0)


def test_a_scenario_has_all_that_makes_a_sweep_hard() -> None:
    scenario = draw_scenario(2000, 32, 2, seed=3)
    assert {request.threads for request in scenario.requests} == {1, 2, 4, 8}
    assert {request.jobs_per_gpu for request in scenario.requests if request.gpu} == {1, 2, 4}
    assert all(scenario.seconds[item.job_id] != item.seconds for item in scenario.requests)
    assert scenario.others
    assert scenario.failures
    assert scenario == draw_scenario(2000, 32, 2, seed=3) != draw_scenario(2000, 32, 2, seed=4)


def test_the_sweep_is_the_same_on_any_number_of_nodes_and_others_are_on_all() -> None:
    one, four = draw_scenario(500, 8, 1, seed=3), draw_scenario(500, 8, 1, seed=3, nodes=4)
    assert (one.requests, one.seconds, one.failures) == (four.requests, four.seconds, four.failures)
    assert {item.node for item in one.others} == {0}
    assert {item.node for item in four.others} == {0, 1, 2, 3}
    assert {0, 7} <= {item.core for item in four.others} <= set(range(8))
