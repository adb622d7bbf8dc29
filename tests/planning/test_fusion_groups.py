"""Which jobs are trained as one: laws of the groups, and the reasons that are told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold import Fold, Plan, TrainerParams
from asynckfold.planning.fusion_groups import LEAST_JOBS, MOST_JOBS, grouped
from asynckfold.planning.fusion_rule import MOST_FLOPS, Fuse, why_not_paying
from tests.toy import make_jobs

ROWS = np.arange(1000)


def folds(count: int) -> list[Fold]:
    return [Fold(0, index, ROWS[:800], ROWS[800:]) for index in range(count)]


def plan_of(models: int = 1, schedules: int = 1, count: int = 5, epochs: int = 5) -> Plan:
    names = [f"m{number}" for number in range(models)]
    jobs = make_jobs(names, [f"s{number}" for number in range(schedules)], folds(count), 0)
    return Plan(jobs, TrainerParams(epochs=epochs), 32, 1, 0, "cpu", ("accuracy",), "d", "f")


FUSES = st.one_of(st.just("auto"), st.just(True), st.integers(2, 20))


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 12), st.integers(1, 70), FUSES, st.data()
)
def test_groups_divide_the_jobs_of_a_model_in_their_order(
    models: int, schedules: int, count: int, cores: int, fuse: Fuse, data: st.DataObject
) -> None:
    plan = plan_of(models, schedules, count)
    why_not = {
        f"m{number}": data.draw(st.sampled_from(["", "a reason"])) for number in range(models)
    }
    found = grouped(plan, fuse, why_not, cores)
    groups_on_one_core = grouped(plan, fuse, why_not, 1).groups
    assert list(found.why) == list(why_not)
    order = [job.id for job in plan.jobs]
    named = [name for group in found.groups for name in group]
    assert named == [name for name in order if name in set(named)]
    model_of = {job.id: job.model for job in plan.jobs}
    for group in found.groups:
        (model,) = {model_of[name] for name in group}
        assert not why_not[model]
        if fuse in ("auto", True):
            assert 2 <= len(group) <= MOST_JOBS
        else:
            assert 2 <= len(group) <= fuse
    if fuse not in ("auto", True):
        assert groups_on_one_core == found.groups


def test_a_candidate_whose_dry_run_failed_is_in_no_group() -> None:
    plan = plan_of(1, 2, 5)
    found = grouped(plan, True, {"m0": ""}, 2, failing={"m0/s1"})
    assert [name for group in found.groups for name in group] == [
        job.id for job in plan.jobs if job.lr_schedule == "s0"
    ]
    none = grouped(plan, True, {"m0": ""}, 2, failing={"m0/s0", "m0/s1"})
    assert (none.groups, none.why) == ((), {"m0": "not fused: its dry run failed"})


@pytest.mark.parametrize("fuse", ["auto", True, 10])
def test_a_group_that_does_not_fit_into_memory_is_split_and_says_so(fuse: Fuse) -> None:
    plan = plan_of(1, 2, 5)
    whole = grouped(plan, fuse, {"m0": ""}, 1, checks={"m0": "all is well"}, most={"m0": 10})
    assert whole.why == {"m0": "fused: 10 of 10 jobs; all is well"}
    split = grouped(plan, fuse, {"m0": ""}, 1, most={"m0": 4})
    assert sorted(map(len, split.groups)) == [3, 3, 4]
    told = "fused: 3 + 4 + 3 of 10 jobs, since no more than 4 at once fit into the memory"
    assert split.why == {"m0": told}
    assert split.widths == {"m0": 4}
    none = grouped(plan, fuse, {"m0": ""}, 1, most={"m0": 1})
    assert none.why == {"m0": "not fused: no two of its jobs fit into the memory at once"}


def test_every_core_gets_a_group() -> None:
    plan = plan_of(1, 4, 5)
    sizes = [len(group) for group in grouped(plan, "auto", {"m0": ""}, 4).groups]
    assert sizes == [5, 5, 5, 5]
    sizes = [len(group) for group in grouped(plan, "auto", {"m0": ""}, 8).groups]
    assert sorted(sizes) == [2, 2, 2, 2, 3, 3, 3, 3]
    few = grouped(plan, "auto", {"m0": ""}, 10)
    assert LEAST_JOBS > 2
    assert not few.groups
    assert few.why == {"m0": "not fused: 20 jobs are too few for 10 cores"}
    assert {len(group) for group in grouped(plan, True, {"m0": ""}, 10).groups} == {2}


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(1, 8), FUSES, FUSES)
def test_a_continued_run_keeps_its_groups_whatever_is_asked(
    one: int, two: int, cores: int, others: int, fuse: Fuse, other: Fuse
) -> None:
    plan, more = plan_of(1, one), plan_of(1, one + two)
    first = replace(plan, groups=grouped(plan, fuse, {"m0": ""}, cores).groups)
    again = grouped(plan, other, {"m0": ""}, others, first)
    assert again.groups == first.groups
    grown = replace(more, groups=grouped(more, other, {"m0": ""}, others, first).groups)
    assert set(first.groups) <= set(grown.groups)
    assert first.obstacle(grown) is None
    old = {job.id for job in plan.jobs}
    assert all(old.issuperset(group) or not old & set(group) for group in grown.groups)


def test_jobs_on_gpus_are_grouped_by_gpus() -> None:
    gpu = replace(plan_of(), device="cuda", threads_per_job=4)
    sizes = [len(group) for group in grouped(gpu, "auto", {"m0": ""}, 1).groups]
    assert sizes == [5]
    assert [len(group) for group in grouped(gpu, True, {"m0": ""}, 2).groups] == [2, 3]
    few = grouped(gpu, "auto", {"m0": ""}, 3)
    assert few.why == {"m0": "not fused: 5 jobs are too few for 3 GPUs"}


@pytest.mark.parametrize(
    ("fuse", "epochs", "flops", "part"),
    [
        (False, 1000, 1, "fuse is False"),
        (True, 1, 10**12, ""),
        (4, 1, 10**12, ""),
        ("auto", 1000, 10**6, ""),
        ("auto", 1000, int(MOST_FLOPS) + 10**6, "MFLOP"),
        ("auto", 1, 10**6, "is the least"),
    ],
)
def test_the_rule_says_why_not(fuse: Fuse, epochs: int, flops: int, part: str) -> None:
    reason = why_not_paying(fuse, plan_of(epochs=epochs), folds(5), "m0", flops)
    assert bool(reason) == bool(part)
    assert part in reason
