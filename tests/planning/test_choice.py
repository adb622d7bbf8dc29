"""Devices and threads: as requested, kept, taken over from another run, or by the rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asynckfold import Fold, InputError, Plan, TrainerParams
from asynckfold.jobs.decoding import decoded, encoded, parsed
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import WORKER_BYTES, Request
from asynckfold.planning.choice import KINDS, choose, choose_devices
from asynckfold.planning.forecast import forecast
from asynckfold.planning.fusion_groups import group
from asynckfold.planning.workload import Choice, Workload, requests
from tests.toy import make_jobs

SMALL, LARGE, HUGE = 1_000_000, 2_000_000_000, 30_000_000_000
FOLDS = tuple(Fold(0, index, np.arange(3200), np.arange(100)) for index in range(12))


def workload(epochs: int = 1, cores: int = 2, device: str = "cpu", **flops: int) -> Workload:
    """Twelve jobs of each model."""
    flops = flops or {"M": LARGE}
    jobs = make_jobs(list(flops), ["cosine"], FOLDS, 0)
    plan = Plan(jobs, TrainerParams(epochs=epochs), 32, 1, 0, device, ("accuracy",), "d", "f")
    steps = dict.fromkeys(flops, 0.001)
    facts = Facts({}, steps, dict.fromkeys(flops, 100), flops=flops)
    return Workload(plan, FOLDS, facts, cores)


def choice_of(
    work: Workload,
    requested: int | None = None,
    before: Choice | None = None,
    other: Plan | None = None,
) -> Choice:
    return choose(work, requested, before, other)


# Threads


def test_a_requested_number_stands() -> None:
    choice = choice_of(workload(1000), requested=2)
    assert choice.threads == {"M": 2}
    assert choice.why == {"M": "2 threads: as asked"}


def test_another_runs_threads_are_taken_over() -> None:
    work = workload(A=SMALL, B=SMALL)
    other = work.plan.with_threads({"A": 1, "B": 2})
    choice = choice_of(work, other=other)
    assert choice.threads == {"A": 1, "B": 2}
    assert choice.why["B"] == "2 threads: taken over from another run"


def test_another_run_must_know_the_models_and_fit_the_cores() -> None:
    other = workload(A=SMALL).plan.with_threads({"A": 8})
    with pytest.raises(InputError, match=r"(?s)A on 2 cores.*B on 2 cores.*: \{'A': 8\}"):
        choice_of(workload(A=SMALL, B=SMALL), other=other)


def test_requests_have_the_models_threads_seconds_and_bytes() -> None:
    work = workload(1000, A=LARGE, B=SMALL)
    choice = replace(choice_of(work), threads={"A": 2, "B": 1})
    made = requests(choice, work)
    assert list(made) == [job.id for job in work.plan.jobs]
    first = work.plan.jobs[0].id
    seconds = choice.costs["A"].seconds(work.works()[first], 2)
    assert made[first] == Request(first, seconds, threads=2, memory=WORKER_BYTES + 100)
    assert made["A/cosine/fold-0"].seconds > 0
    assert made["B/cosine/fold-0"].threads == 1
    # Scaled to the step that the dry run saw.
    assert choice.costs["A"].step_seconds[1] == pytest.approx(0.001)


# The last jobs


def five() -> Workload:
    """Five folds on two cores, the fourth with the fewest samples."""
    folds = [Fold(0, index, np.arange(3200), np.arange(100)) for index in range(5)]
    folds[3] = Fold(0, 3, np.arange(3100), np.arange(100))
    work = workload()
    plan = replace(work.plan, jobs=make_jobs(["M"], ["cosine"], folds, 0))
    return replace(work, plan=plan, folds=tuple(folds))


def test_the_smallest_job_is_the_last_and_has_the_threads_that_are_left() -> None:
    work = five()
    choice = choice_of(work)
    assert choice.threads == {"M": 1}
    assert choice.last_threads == {"M/cosine/fold-3": 2}
    made = requests(choice, work)
    assert [made[job.id].threads for job in work.plan.jobs] == [1, 1, 1, 2, 1]
    name = "M/cosine/fold-3"
    assert made[name].seconds == choice.costs["M"].seconds(work.works()[name], 2)
    assert decoded(Choice, parsed(encoded(choice))) == choice
    alike = replace(work, folds=tuple(replace(fold, train=np.arange(3200)) for fold in work.folds))
    assert choice_of(alike).last_threads == {"M/cosine/fold-4": 2}
    facts = replace(work.facts, fusible={"M": ""}, fused={"M": "alike"})
    assert choice_of(replace(work, facts=facts)).last_threads == {}


def test_the_last_jobs_are_as_requested_as_before_or_as_another_run_had_them() -> None:
    work = five()
    choice = choice_of(work)
    assert choice_of(work, requested=1).last_threads == {}
    other = work.plan.with_threads(choice.threads, choice.last_threads)
    assert choice_of(work, other=other).last_threads == choice.last_threads
    fewer = replace(work, plan=replace(work.plan, jobs=work.plan.jobs[:3]))
    assert choice_of(fewer, other=other).last_threads == {}
    with pytest.raises(InputError, match="M on 1 cores"):
        choice_of(replace(work, cores=1), other=other)


def test_models_that_are_added_leave_the_last_jobs_as_they_are() -> None:
    work, before = five(), choice_of(five())
    jobs = make_jobs(["M", "B"], ["cosine"], work.folds, 0)
    facts = replace(work.facts, flops={"M": LARGE, "B": SMALL})
    more = replace(work, plan=replace(work.plan, jobs=jobs), facts=facts)
    choice = choice_of(more, before=before)
    assert choice.last_threads == before.last_threads
    mine = work.plan.with_threads(before.threads, before.last_threads)
    theirs = more.plan.with_threads(choice.threads, choice.last_threads)
    assert mine.obstacle(theirs) is None
    obstacle = mine.obstacle(more.plan.with_threads(choice.threads))
    assert obstacle == "last_threads.M/cosine/fold-3: 2 there, null here"


# Devices


def both(epochs: int = 100, cores: int = 4, gpus: int = 1, **flops: int) -> Workload:
    return replace(workload(epochs, cores, **flops), gpus=gpus)


def with_devices(work: Workload, before: Plan | None = None) -> Workload:
    return replace(work, plan=work.plan.with_devices(choose_devices(work, KINDS, before).kinds))


def test_large_models_have_the_gpu_and_small_ones_fill_the_cores() -> None:
    devices = choose_devices(both(tiny=SMALL, vgg=HUGE), KINDS, None)
    assert devices.kinds == {"tiny/cosine": "cpu", "vgg/cosine": "cuda"}
    assert devices.why.startswith("candidates: 1 on cores, 1 on GPUs, by the rule: ")
    assert "with all on cores" in devices.why
    # Opening a GPU takes longer than a short sweep.
    short = choose_devices(both(1, tiny=SMALL), KINDS, None)
    assert short.kinds == {"tiny/cosine": "cpu"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_requested_kind_is_that_of_all_candidates(kind: str) -> None:
    work = both(tiny=SMALL, vgg=HUGE)
    devices = choose_devices(work, (kind,), None)
    assert (set(devices.kinds.values()), devices.why) == ({kind}, "")
    assert work.plan.with_devices(devices.kinds) == replace(work.plan, device=kind)


def test_a_run_keeps_its_kinds_and_new_candidates_follow_them() -> None:
    before = with_devices(both(tiny=SMALL, vgg=HUGE)).plan
    more = both(tiny=HUGE, vgg=SMALL, new=HUGE)  # what would be decided otherwise now
    kinds = choose_devices(more, KINDS, before).kinds
    assert (kinds["tiny/cosine"], kinds["vgg/cosine"]) == ("cpu", "cuda")
    assert before.obstacle(more.plan.with_devices(kinds)) is None
    other = more.plan.with_devices({**kinds, "tiny/cosine": "cuda"})
    assert "device" in str(before.obstacle(other))
    for device in KINDS:
        begun = replace(both(tiny=SMALL).plan, device=device)
        kinds = choose_devices(more, KINDS, begun).kinds
        assert set(kinds.values()) == {device}
        assert begun.obstacle(more.plan.with_devices(kinds)) is None


def test_a_model_on_both_kinds_has_one_thread_on_the_gpu() -> None:
    work: Any = both(cores=4, vgg=HUGE)
    jobs = make_jobs(["vgg"], ["cosine", "step"], FOLDS[:2], 0)
    plan = replace(work.plan, jobs=jobs).with_devices({"vgg/cosine": "cpu", "vgg/step": "cuda"})
    work = replace(work, plan=plan)
    choice = choice_of(work)
    assert choice.threads["vgg"] > 1
    stepped = [job.id for job in plan.jobs if job.lr_schedule == "step"]
    assert {choice.last_threads[name] for name in stepped} == {1}
    assert choice.why["vgg"].startswith("on cores ")
    assert "; on GPUs 1 thread: the work is done by a GPU" in choice.why["vgg"]
    made = requests(choice, work)
    assert {name for name, item in made.items() if item.gpu} == {*stepped}
    assert decoded(Choice, parsed(encoded(choice))) == choice
    # Continued, with a candidate more: nothing that was decided changes.
    more = replace(plan, jobs=make_jobs(["vgg"], ["cosine", "step", "warm"], FOLDS[:2], 0))
    kinds = choose_devices(replace(work, plan=more), KINDS, plan).kinds
    again = replace(work, plan=more.with_devices(kinds))
    then = choose(again, None, choice, None)
    stored = plan.with_threads(choice.threads, choice.last_threads)
    assert stored.obstacle(again.plan.with_threads(then.threads, then.last_threads)) is None


def test_requested_threads_of_jobs_on_a_gpu_stay_when_a_run_continues() -> None:
    work = workload(device="cuda")
    first = choice_of(work, requested=2)
    again = choice_of(work, before=first)
    assert (again.threads, again.last_threads) == ({"M": 2}, {})


def test_the_forecast_runs_both_kinds_at_once() -> None:
    work = both(100, 2, tiny=SMALL, vgg=HUGE)
    facts = replace(work.facts, fusible={"tiny": ""}, gpu_fusible={"vgg": "too large"})
    work = with_devices(replace(work, facts=facts))
    choice = choice_of(work)
    groups = group(work, choice, None, True, None)
    assert {name.split("/")[0] for item in groups.groups for name in item} == {"tiny"}
    assert groups.why["vgg"] == "not fused: too large"
    made = forecast(work, choice, groups)
    assert {span.job.split("/")[0]: span.gpu for span in made.simulation.spans} == {
        "tiny": None,
        "vgg": 0,
    }
