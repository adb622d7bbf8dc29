"""Cores or a GPU for each candidate, in virtual time."""

from __future__ import annotations

from asynckfold.jobs.placement import Request
from asynckfold.scheduling.device_split import OnEither, requests_on, split
from asynckfold.scheduling.simulate import OtherProcess, VirtualMachine, simulate


def job(name: str, cores: float, gpu: float, number: int = 0) -> OnEither:
    request = Request(f"{name}/{number}", cores)
    return OnEither(name, {1: request}, Request(request.job_id, gpu, gpu=True))


def test_a_kind_that_is_fixed_stays_and_the_others_follow() -> None:
    jobs = [job("a", 50.0, 1.0), job("b", 40.0, 1.0), job("c", 2.0, 9.0)]
    machine = VirtualMachine(2, 1)
    assert split(jobs, machine) == {"a": "cuda", "b": "cuda", "c": "cpu"}
    fixed = split(jobs, machine, {"a": "cpu", "c": "cuda"})
    assert (fixed["a"], fixed["c"]) == ("cpu", "cuda")


def test_few_jobs_on_cores_have_the_threads_that_fit() -> None:
    threads = {count: Request("a/0", 8.0 / count, count) for count in (1, 2, 4)}
    one = OnEither("a", threads, Request("a/0", 3.0, gpu=True))
    machine = VirtualMachine(4, 1)
    assert [item.threads for item in requests_on([one], {"a": "cpu"}, machine)] == [4]
    # Four threads take two seconds, and the GPU three.
    assert split([one], machine) == {"a": "cpu"}


def test_a_gpu_never_waits_for_a_core_that_a_longer_job_took() -> None:
    jobs = [Request(f"cpu{n}", 100.0) for n in range(4)] + [Request("gpu", 1.0, gpu=True)]
    found = simulate(jobs, VirtualMachine(2, 1))
    assert found.spans[0].job == "gpu"


def test_the_bound_counts_only_the_time_that_others_leave_on_a_gpu() -> None:
    jobs = [Request(f"{n}", 10.0, gpu=True) for n in range(4)]
    machine = VirtualMachine(8, 2)
    assert simulate(jobs, machine).bounds.gpus == 20.0
    late = simulate(jobs, machine, others=[OtherProcess(None, 0.0, 20.0, gpu=1)])
    assert (late.makespan, late.bounds.gpus) == (30.0, 30.0)
    # A job that runs when others come goes on.
    among = simulate(jobs, machine, others=[OtherProcess(None, 5.0, 10.0, gpu=1)])
    assert (among.makespan, among.bounds.gpus) == (20.0, 20.0)
