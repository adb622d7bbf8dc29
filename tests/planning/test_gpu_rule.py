"""How many jobs share a GPU, and when they are fused there: by operations, memory and cores."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold import TrainerParams
from asynckfold.jobs.placement import GPU_CONTEXT_BYTES, Gpu, Load, fused, units
from asynckfold.planning import gpu_rule
from asynckfold.planning.choice import KINDS, choose, choose_devices
from asynckfold.planning.forecast import forecast
from asynckfold.planning.fusion_groups import MOST_ON_A_GPU, group, grouped
from asynckfold.planning.fusion_rule import Fuse, why_not_paying
from asynckfold.planning.gpu_rule import gpu_cost, jobs_per_gpu, memory_share, shared
from asynckfold.planning.workload import Workload, requests
from asynckfold.scheduling.place import place
from tests.planning.test_choice import FOLDS, HUGE, SMALL, workload
from tests.toy import make_jobs

GIB = 1 << 30
flops = st.integers(0, 10**12)


def on_gpus(gpus: int = 1, cores: int = 16, memory: int = 80 * GIB, **models: int) -> Workload:
    """Twelve jobs of each model."""
    work = workload(10, cores, "cuda", **models)
    names = models or {"M": 0}
    reasons, checks = dict.fromkeys(names, ""), dict.fromkeys(names, "ok")
    facts = replace(work.facts, gpu_fusible=reasons, fused=checks)
    return replace(work, gpus=gpus, gpu_memory=memory, facts=facts)


def idle(memory: int) -> Load:
    cores = tuple(range(16))
    return Load(cores, cores, 1 << 40, (Gpu(0, memory, memory),))


@given(flops, st.integers(1, 400), st.integers(1, 64), st.integers(0, 80 * GIB))
def test_jobs_share_a_gpu_only_where_they_slow_nobody_down_and_fit(
    operations: int, products: int, cores: int, memory: int
) -> None:
    cost = gpu_cost(operations, 1.0, products, memory)
    jobs = jobs_per_gpu(cost, 80 * GIB, cores)
    assert 1 <= jobs <= min(gpu_rule.MOST_SHARING, cores)
    assert shared(cost, jobs).step_seconds[1] == pytest.approx(cost.step_seconds[1])
    if jobs > 1:
        assert jobs * (cost.gpu_memory + GPU_CONTEXT_BYTES) <= 80 * GIB
    assert jobs_per_gpu(cost, 0, cores) == 1


@given(st.integers(2, 80), flops, flops, st.none() | st.integers(1, 16), st.integers(1, 9))
def test_jobs_on_one_gpu_never_have_more_than_its_memory(
    gib: int, small: int, large: int, most: int | None, parts: int
) -> None:
    total = gib * GIB
    work = replace(on_gpus(memory=total, M=small, L=large), jobs_per_gpu=most)
    made = requests(choose(work, None, None, None), work).values()
    times = {True: 1 / parts, False: 1.0}
    measured = [replace(item, gpu_share=item.gpu_share * times[item.measures_gpu]) for item in made]
    there = place(measured, [], idle(total))
    contexts = len(there) * GPU_CONTEXT_BYTES / total if len(there) > 1 else 0
    assert 1 <= len(there) <= (most or gpu_rule.MOST_SHARING)
    assert sum(memory_share(total, item) for item in there) + contexts <= 1.0 + 1e-9


def test_small_models_share_a_gpu_and_large_ones_have_it_alone() -> None:
    work = on_gpus(M=SMALL, L=100 * HUGE)
    choice = choose(work, None, None, None)
    assert choice.threads == {"M": 1, "L": 1}
    assert choice.per_gpu == {"M": 4, "L": 1}
    assert choice.why["M"] == "1 thread: the work is done by a GPU; 4 jobs on a GPU"
    each = requests(choice, work)
    assert {(item.job_id[0], 0.9 / item.gpu_share) for item in each.values()} == {
        ("M", 4),
        ("L", 1),
    }
    # As many as cores, and as fit.
    assert choose(on_gpus(cores=2, M=SMALL), None, None, None).per_gpu == {"M": 2}
    assert choose(on_gpus(memory=4 * GIB, M=SMALL), None, None, None).per_gpu == {"M": 2}
    assert choose(workload(10), None, None, None).per_gpu == {}


def test_a_fixed_number_of_jobs_on_a_gpu_is_kept_and_a_later_call_may_pass_another() -> None:
    work = on_gpus(M=SMALL, L=100 * HUGE)
    first, devices = choose(work, None, None, None), choose_devices(work, KINDS, None)
    for count in (1, 3, 7, 10):
        work = replace(work, jobs_per_gpu=count)
        again = choose(work, None, first, None)
        assert choose_devices(work, KINDS, None) == devices
        assert replace(again, per_gpu={}, why={}) == replace(first, per_gpu={}, why={})
        assert len(place(list(requests(again, work).values()), [], idle(80 * GIB))) == count


LENET, RESNET18 = {"flops": 145_000_000, "products": 15}, {"flops": 58 * 10**9, "products": 63}


def test_steps_that_are_launches_rather_than_work_are_fused_on_a_gpu() -> None:
    work = on_gpus(M=SMALL)
    plan = replace(work.plan, params=TrainerParams(epochs=3))

    def reason(fuse: Fuse = "auto", kind: str = "cuda", **model: int) -> str:
        return why_not_paying(fuse, plan, work.folds, "M", **model, kind=kind)

    assert reason(**LENET) == ""
    assert "a fused step takes 37.8 ms for each further job" in reason(**RESNET18)
    assert "MFLOP" in reason("auto", "cpu", **RESNET18)
    assert reason(True, **RESNET18) == reason(4, **RESNET18) == ""
    assert reason(False, **LENET) == "fuse is False"
    plan = replace(plan, params=TrainerParams(epochs=1))
    assert "is the least" in reason(**LENET)


@given(flops, st.integers(1, 400))
def test_a_fused_step_is_never_expected_to_be_slower(operations: int, products: int) -> None:
    cost = gpu_cost(operations, 1.0, products)
    if not gpu_rule.why_not_fused(cost):
        gains = [gpu_rule.fused_gain(cost, jobs) for jobs in (2, 5, 10, 64)]
        assert min(gains) >= 1.0
        # Where a further job costs the GPU more than the first, the widest group gains less.
        if operations / gpu_rule.GROUPED_FLOPS <= cost.gpu_seconds:
            assert gains == sorted(gains)


@given(st.integers(1, 200), st.integers(1, 4), st.integers(2, 80))
def test_groups_on_a_gpu_are_as_wide_as_memory_allows(jobs: int, gpus: int, fitting: int) -> None:
    """Equal groups over all LR schedules and settings of a model, one for a GPU at least."""
    made = make_jobs(["M"], [f"s{number}" for number in range(jobs)], FOLDS[:1], 0)
    plan = replace(on_gpus().plan, jobs=made)
    sizes = [
        len(names) for names in grouped(plan, True, {"M": ""}, gpus, most={"M": fitting}).groups
    ]
    most = min(MOST_ON_A_GPU, fitting)
    count = max(math.ceil(jobs / most), min(gpus, jobs))
    assert len(sizes) <= count
    assert max(sizes, default=1) == math.ceil(jobs / count)
    assert jobs - sum(sizes) <= count


def test_ten_lenets_are_one_group_on_a_gpu_and_a_run_keeps_it() -> None:
    work = on_gpus(M=SMALL)
    jobs = make_jobs(["M"], ["cosine", "step"], FOLDS[:5], 0)
    work = replace(work, plan=replace(work.plan, jobs=jobs))
    choice = choose(work, None, None, None)
    groups = group(work, choice, None, "auto", None)
    assert [len(names) for names in groups.groups] == [10]
    assert groups.why == {"M": "fused: 10 of 10 jobs; ok"}
    kept = replace(work.plan, groups=groups.groups)
    assert group(work, choice, kept, False, None).groups == groups.groups
    work = on_gpus(M=SMALL)
    assert [len(names) for names in group(work, choice, None, 4, None).groups] == [4, 4, 4]
    refused = replace(work, facts=replace(work.facts, gpu_fusible={"M": "it is recurrent"}))
    assert group(refused, choice, None, True, None).why == {"M": "not fused: it is recurrent"}


def test_a_group_reserves_the_memory_of_all_its_jobs_and_its_gpu_alone() -> None:
    work = on_gpus(M=SMALL)
    choice = choose(work, None, None, None)
    names = list(requests(choice, work))[:3]
    each = requests(choice, work, [names])
    made = fused([each[name] for name in names], names)
    assert made.gpu_memory == GPU_CONTEXT_BYTES + 3 * choice.costs["M"].gpu_memory
    assert made.gpu_share == 1.0
    load = Load((0, 1), (0, 1), 1 << 40, (Gpu(0, 8 * GIB, 8 * GIB),))
    (placed,) = place(list(units(each, [names]).values()), [], load)
    assert (placed.gpu, placed.gpu_memory, placed.jobs) == (0, made.gpu_memory, tuple(names))


def test_a_job_with_one_process_on_a_gpu_reserves_that_and_a_core_for_each() -> None:
    params = TrainerParams(
        epochs=10, trainer="averaging", processes=2, partition_size=320, gpu_partition_size=3200
    )
    work = on_gpus(M=SMALL)
    work = replace(work, plan=replace(work.plan, params=params))
    choice = choose(work, None, None, None)
    assert (choice.threads, choice.per_gpu) == ({"M": 1}, {"M": 1})
    each = list(requests(choice, work).values())
    assert {(item.threads, item.gpu, item.gpu_share) for item in each} == {(2, True, 0.9)}
    gpus = (Gpu(0, 8 * GIB, 8 * GIB), Gpu(1, 8 * GIB, 8 * GIB))
    load = Load(tuple(range(6)), tuple(range(6)), 1 << 40, gpus)
    assert [(item.cores, item.gpu) for item in place(each, [], load)] == [((0, 1), 0), ((2, 3), 1)]
    assert len(place(each, [], replace(load, cores=(0, 1, 2), idle=(0, 1, 2)))) == 1
    # 12 jobs on one GPU, one after another.
    longest = max(item.seconds for item in each)
    assert forecast(work, choice).simulation.makespan == pytest.approx(12 * longest)
