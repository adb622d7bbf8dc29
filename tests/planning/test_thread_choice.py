"""Whose threads a run takes, and when models are timed at all: with fake timings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold.errors import InputError
from asynckfold.jobs.cost import Timing
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import WORKER_BYTES, Request
from asynckfold.jobs.plan import Plan, make_jobs
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.planning.group_choice import group
from asynckfold.planning.thread_choice import chosen
from asynckfold.planning.workload import Choice, Workload, requests

SMALL, LARGE = 1_000_000, 2_000_000_000
FOLDS = tuple(Fold(0, index, np.arange(3200), np.arange(100)) for index in range(12))


def workload(epochs: int = 1, cores: int = 2, device: str = "cpu", **flops: int) -> Workload:
    flops = flops or {"M": LARGE}
    plan = Plan(
        make_jobs(list(flops), ["cosine"], FOLDS, 0),
        TrainerParams(epochs=epochs),
        32,
        1,
        0,
        device,
        ("accuracy",),
        "d",
        "f",
    )
    recipe = {"architecture": {name: f"{name} {count}" for name, count in flops.items()}}
    steps = dict.fromkeys(flops, 0.001)
    facts = Facts(recipe, steps, dict.fromkeys(flops, 100), flops=flops)
    return Workload(plan, FOLDS, facts, cores, {"cpu": "Z80"})


@dataclass
class Fake:
    """A machine on which a step takes these seconds, by threads."""

    seconds: dict[int, float] = field(default_factory=lambda: {1: 0.020, 2: 0.012})
    bad: str = ""
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    together: dict[int, float] = field(default_factory=dict)

    def __call__(
        self, model: str, threads: int, copies: int, together: int = 1
    ) -> Sequence[Timing]:
        self.asked.append((model, threads, copies))
        if model == self.bad or (together > 1 and together not in self.together):
            return [Timing(failure="Traceback\nBoom: on purpose")]
        seconds = self.seconds[threads] if together == 1 else self.together[together]
        return [Timing(seconds, seconds, 70 + threads, 0)] * copies


BAD_NEIGHBOURS = {1: 0.100, 2: 0.012}
"""Two jobs side by side take eight times as long as one with two threads."""


def choose(
    work: Workload,
    place: Path | None = None,
    probe: Any = None,
    asked: int | None = None,
    before: Choice | None = None,
    other: Plan | None = None,
) -> Choice:
    return chosen(work, asked, before, other, probe, place)


# Who decides


def test_a_number_that_was_asked_for_stands() -> None:
    probe = Fake()
    found = choose(workload(1000), None, probe, asked=2)
    assert found.threads == {"M": 2}
    assert found.why == {"M": "2 threads: as asked"}
    assert not probe.asked


def test_a_run_keeps_what_it_chose_before() -> None:
    probe = Fake(BAD_NEIGHBOURS)
    before = choose(workload())
    assert choose(workload(1000), None, probe, before=before) is before
    assert not probe.asked


def test_models_that_are_added_to_a_run_are_decided_and_the_others_stay() -> None:
    before = choose(workload(A=SMALL), asked=2)
    work = workload(A=SMALL, B=SMALL)
    found = choose(work, before=before)
    assert found.threads == {"A": 2, "B": 1}
    assert found.why["A"] == "2 threads: as asked"
    assert found.costs.keys() == {"A", "B"}
    small = workload(A=SMALL).plan.with_threads(before.threads)
    assert small.obstacle(work.plan.with_threads(found.threads)) is None
    told = small.obstacle(work.plan.with_threads({"A": 1, "B": 1}))
    assert told == "threads_per_job: 2 there, 1 here"


def test_another_runs_threads_are_taken_over() -> None:
    work = workload(A=SMALL, B=SMALL)
    other = work.plan.with_threads({"A": 1, "B": 2})
    found = choose(work, other=other)
    assert found.threads == {"A": 1, "B": 2}
    assert found.why["B"] == "2 threads: taken over from another run"


def test_another_run_must_know_the_models_and_fit_the_cores() -> None:
    other = workload(A=SMALL).plan.with_threads({"A": 8})
    with pytest.raises(InputError, match="8 threads for A on 2 cores") as told:
        choose(workload(A=SMALL, B=SMALL), other=other)
    assert "received B, and a run of A" in str(told.value)


def test_on_a_gpu_one_thread_is_enough() -> None:
    probe = Fake()
    assert choose(workload(10, device="cuda"), None, probe).threads == {"M": 1}
    assert not probe.asked


# When models are timed


def test_a_short_sweep_is_decided_by_the_rule_alone(tmp_path: Path) -> None:
    probe = Fake(BAD_NEIGHBOURS)
    found = choose(workload(), tmp_path, probe)
    assert found.threads == {"M": 1}
    assert not probe.asked
    # Also where another sweep has timed the model: else it would depend on what ran before.
    assert choose(workload(1000), tmp_path, probe).overturned
    assert choose(workload(), tmp_path, probe) == found


def test_one_core_needs_no_probe() -> None:
    probe = Fake()
    assert choose(workload(1000, cores=1), None, probe).threads == {"M": 1}
    assert not probe.asked


def test_probes_of_a_long_sweep_run_side_by_side_like_its_jobs() -> None:
    probe = Fake()
    found = choose(workload(1000), None, probe)
    assert probe.asked == [("M", 1, 2), ("M", 2, 1)]
    assert found.costs["M"].step_seconds == {1: 0.020, 2: 0.012}
    assert found.costs["M"].memory == 100  # the larger of what was measured and what must be


def test_powers_of_two_are_probed_between_one_thread_and_all() -> None:
    probe = Fake(dict.fromkeys(range(1, 13), 0.01))
    choose(workload(10_000, cores=12), None, probe)
    assert probe.asked == [("M", 1, 12), ("M", 2, 6), ("M", 4, 3), ("M", 8, 1), ("M", 12, 1)]


def test_a_probe_that_raises_leaves_its_model_to_the_rule_and_the_others_go_on() -> None:
    probe = Fake(BAD_NEIGHBOURS, bad="A")
    found = choose(workload(1000, A=LARGE, B=LARGE), None, probe)
    assert found.failures == {"A": "Traceback\nBoom: on purpose"}
    assert found.costs["B"].step_seconds == BAD_NEIGHBOURS
    assert found.costs["A"].step_seconds[1] == 0.001  # as the dry run saw
    assert found.threads.keys() == {"A", "B"}


# Trained as one


def fusible(epochs: int = 1000) -> Workload:
    work = workload(epochs)
    return replace(work, facts=replace(work.facts, fusible={"M": ""}, fused={"M": "alike"}))


def test_what_fusing_gains_is_probed_where_it_may_be_fused(tmp_path: Path) -> None:
    probe = Fake(together={5: 0.008})
    found = choose(fusible(), tmp_path, probe)
    assert probe.asked == [("M", 1, 2), ("M", 2, 1), ("M", 1, 2)]
    assert found.costs["M"].fused_gain == pytest.approx(2.5)
    asked = requests(found, fusible(), [[job.id for job in fusible().plan.jobs[:5]]])
    together, alone = (asked[job.id].seconds for job in fusible().plan.jobs[4:6])
    # 1,000 epochs × (100 steps + 1 evaluation), each of 0.02 s.
    assert alone == pytest.approx(1000 * 101 * 0.02)
    assert together == pytest.approx(1000 * (100 * 0.008 + 0.02))
    # A run that is not to be fused does not take what this one keeps for one that measured less.
    other = Fake()
    assert choose(workload(1000), tmp_path, other).costs["M"].fused_gain == 0.0
    assert choose(fusible(), tmp_path, other) == found


def test_a_group_that_raises_in_a_probe_is_left_to_the_rule() -> None:
    found = choose(fusible(), None, Fake())
    assert found.costs["M"].fused_gain == 0.0
    assert found.failures == {}


@pytest.mark.parametrize(
    ("seconds", "fused", "told"),
    [
        (0.008, True, "are 2.50 times faster than separate ones"),
        (0.020, True, "take as long as separate ones"),
        (0.025, True, "take 1.25 times as long as separate ones"),
        (0.027, False, "take 1.35 times as long as separate ones"),
    ],
)
def test_a_probe_overturns_fusing_by_a_large_margin_only(
    seconds: float, fused: bool, told: str
) -> None:
    work = fusible()
    found = choose(work, None, Fake(together={5: seconds}))
    groups = group(work, found, None, "auto", None)
    assert bool(groups.groups) == fused
    assert ("measured here: " in groups.why["M"], told in groups.why["M"]) == (True, True)
    # What is asked for is done.
    assert group(work, found, None, True, None).groups


# What is remembered


def test_an_overturned_rule_is_remembered_idle_or_busy(tmp_path: Path) -> None:
    first = choose(workload(1000), tmp_path, Fake(BAD_NEIGHBOURS))
    assert first.overturned
    assert first.threads == {"M": 2}
    busy = Fake({1: 0.010, 2: 0.400})
    assert choose(workload(1000), tmp_path, busy) == first
    assert not busy.asked
    # Without the cache, too, where nothing can be probed: by the rule.
    assert choose(workload(1000)).threads == {"M": 1}


def test_a_small_difference_does_not_overturn(tmp_path: Path) -> None:
    found = choose(workload(1000), tmp_path, Fake({1: 0.025, 2: 0.012}))
    assert not found.overturned
    assert found.threads == {"M": 1}


@pytest.mark.parametrize(
    "other",
    [
        workload(1000, cores=4),
        workload(1000, M=LARGE + 1),
        replace(workload(1000), machine={"cpu": "6502"}),
        replace(workload(1000), plan=replace(workload(1000).plan, batch_size=31)),
    ],
)
def test_what_seconds_depend_on_is_probed_anew(tmp_path: Path, other: Workload) -> None:
    choose(workload(1000), tmp_path, Fake())
    probe = Fake(dict.fromkeys((1, 2, 4), 0.01))
    choose(other, tmp_path, probe)
    assert probe.asked


def test_a_choice_survives_json() -> None:
    for found in (choose(workload()), choose(workload(1000), None, Fake(BAD_NEIGHBOURS))):
        assert Choice.from_dict(json.loads(json.dumps(found.to_dict()))) == found


# What follows


def test_equal_threads_are_equal_plans_however_they_were_chosen() -> None:
    work = workload(A=SMALL, B=SMALL)
    plans = [
        work.plan.with_threads(found.threads)
        for found in (choose(work), choose(work, asked=1), choose(work, other=work.plan))
    ]
    assert len({plan.fingerprint for plan in plans}) == 1
    assert work.plan.with_threads(choose(work, asked=2).threads).threads_per_job == 2


# The last jobs


def five(**changes: Any) -> Workload:
    """Five folds on two cores, the fourth with the fewest samples."""
    folds = [Fold(0, index, np.arange(3200), np.arange(100)) for index in range(5)]
    folds[3] = Fold(0, 3, np.arange(3100), np.arange(100))
    work = workload(**changes)
    plan = replace(work.plan, jobs=make_jobs(["M"], ["cosine"], folds, 0))
    return replace(work, plan=plan, folds=tuple(folds))


def test_the_smallest_job_is_the_last_and_has_the_threads_that_are_left() -> None:
    work = five()
    found = choose(work)
    assert found.threads == {"M": 1}
    assert found.last_threads == {"M/cosine/fold-3": 2}
    made = requests(found, work)
    assert [made[job.id].threads for job in work.plan.jobs] == [1, 1, 1, 2, 1]
    name = "M/cosine/fold-3"
    assert made[name].seconds == found.costs["M"].seconds(work.works()[name], 2)
    assert Choice.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_of_equal_jobs_the_last_of_the_plan_is_the_last() -> None:
    work = five()
    work = replace(work, folds=tuple(replace(fold, train=np.arange(3200)) for fold in work.folds))
    assert choose(work).last_threads == {"M/cosine/fold-4": 2}


def test_jobs_that_may_be_fused_have_equal_threads() -> None:
    work = five()
    work = replace(work, facts=replace(work.facts, fusible={"M": ""}, fused={"M": "alike"}))
    assert choose(work).last_threads == {}


def test_the_last_jobs_are_as_asked_as_before_or_as_another_run_had_them() -> None:
    work = five()
    found = choose(work)
    assert choose(work, asked=1).last_threads == {}
    assert choose(work, before=found) is found
    other = work.plan.with_threads(found.threads, found.last_threads)
    assert choose(work, other=other).last_threads == found.last_threads
    fewer = replace(work, plan=replace(work.plan, jobs=work.plan.jobs[:3]))
    assert choose(fewer, other=other).last_threads == {}
    one = replace(work, cores=1)
    with pytest.raises(InputError, match="2 threads for M on 1 cores"):
        choose(one, other=other)


def test_models_that_are_added_leave_the_last_jobs_as_they_are() -> None:
    before = choose(five())
    work = five()
    jobs = make_jobs(["M", "B"], ["cosine"], work.folds, 0)
    facts = replace(work.facts, flops={"M": LARGE, "B": SMALL})
    more = replace(work, plan=replace(work.plan, jobs=jobs), facts=facts)
    found = choose(more, before=before)
    assert found.last_threads == before.last_threads
    mine = five().plan.with_threads(before.threads, before.last_threads)
    theirs = more.plan.with_threads(found.threads, found.last_threads)
    assert mine.obstacle(theirs) is None
    told = mine.obstacle(more.plan.with_threads(found.threads))
    assert told == "last_threads.M/cosine/fold-3: 2 there, null here"


def test_a_plan_without_such_jobs_keeps_its_fingerprint() -> None:
    plan = five().plan
    assert "last_threads" not in plan.to_json()
    more = plan.with_threads({"M": 1}, {"M/cosine/fold-3": 2})
    assert more.fingerprint != plan.fingerprint
    assert Plan.from_json(more.to_json()) == more
    assert more.threads_text == "1; M/cosine/fold-3 2"
    assert more.most_threads_of("M") == 2
    assert plan.most_threads_of("M") == 1


def test_requests_have_the_models_threads_seconds_and_bytes() -> None:
    work = workload(1000, A=LARGE, B=SMALL)
    found = replace(choose(work), threads={"A": 2, "B": 1})
    made = requests(found, work)
    assert list(made) == [job.id for job in work.plan.jobs]
    first = work.plan.jobs[0].id
    seconds = found.costs["A"].seconds(work.works()[first], 2)
    assert made[first] == Request(first, seconds, threads=2, memory=WORKER_BYTES + 100)
    assert made["A/cosine/fold-0"].seconds > 0
    assert made["B/cosine/fold-0"].threads == 1


def test_the_prediction_is_of_the_costs_that_are_known() -> None:
    found = choose(workload(1000), None, Fake({1: 0.02, 2: 0.012}))
    # 12 jobs of 1,000 epochs × (100 steps + 1 evaluation), two at a time.
    assert found.prediction.makespan == pytest.approx(6 * 1000 * 101 * 0.02)
    assert found.prediction.lower_bound == pytest.approx(found.prediction.makespan)
    assert found.prediction.longest == pytest.approx(1000 * 101 * 0.02)
