"""Cores or a GPU for each candidate, in virtual time."""

from __future__ import annotations

import itertools
import json
import math
from random import Random

import pytest

from asynckfold.cli import main
from asynckfold.jobs.placement import Request
from asynckfold.scheduling.device_split import OnEither, requests_on, split
from asynckfold.scheduling.random_sweep import EitherSweep, draw_either
from asynckfold.scheduling.simulate import OtherProcess, VirtualMachine, simulate

CORES, GPUS, MOST = 16, 2, 1.15


def job(name: str, cores: float, gpu: float, number: int = 0) -> OnEither:
    request = Request(f"{name}/{number}", cores)
    return OnEither(name, {1: request}, Request(request.job_id, gpu, gpu=True))


NIGHTLY = [pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 4, *range(6, 12))]


@pytest.mark.parametrize("busy_share", [0.5, 1.0, 100.0])
@pytest.mark.parametrize("seed", [0, 3, 5, *NIGHTLY])
def test_a_sweep_ends_near_its_bound_while_others_use_a_gpu(seed: int, busy_share: float) -> None:
    found = draw_either(60, CORES, GPUS, seed, busy_share)
    assert found.simulation.ratio <= MOST
    started = [span for span in found.simulation.spans if span.gpu == GPUS - 1]
    assert all(span.start > 0 for span in started)
    if busy_share > 1:
        assert not started  # left alone to the end


@pytest.mark.parametrize("seed", [0, 3])
def test_no_other_division_could_be_much_faster(seed: int) -> None:
    found = draw_either(60, CORES, GPUS, seed, busy_share=0.0)
    assert found.simulation.makespan <= MOST * best_bound(found)
    assert found.simulation.makespan <= min(found.alone.values())


def best_bound(found: EitherSweep) -> float:
    """The smallest lower bound of all divisions: 4096 for 12 candidates."""
    names = list(found.kinds)
    jobs = {name: [item for item in found.jobs if item.candidate == name] for name in names}
    cores = [sum(item.core_seconds() for item in jobs[name]) / CORES for name in names]
    gpus = [sum(item.gpu_seconds() for item in jobs[name]) / GPUS for name in names]
    longest = [(jobs[name][0].on_cores[1].seconds, jobs[name][0].on_gpu.seconds) for name in names]
    return min(
        max(
            *(each[on_gpu] for each, on_gpu in zip(longest, way, strict=True)),
            math.fsum(part for part, on_gpu in zip(cores, way, strict=True) if not on_gpu),
            math.fsum(part for part, on_gpu in zip(gpus, way, strict=True) if on_gpu),
        )
        for way in itertools.product((False, True), repeat=len(names))
    )


def test_the_order_of_the_jobs_does_not_matter() -> None:
    found = draw_either(60, CORES, GPUS, seed=3)
    shuffled = [*found.jobs]
    Random(0).shuffle(shuffled)
    assert split(shuffled, VirtualMachine(CORES, GPUS)) == found.kinds


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


def test_the_command_tells_of_a_sweep_on_cores_or_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dev", "simulate", "--jobs", "20", "--cores", "8", "--gpus", "2", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["cores_or_gpus"]
    assert found["jobs"] == 60
    assert set(found["kinds"].values()) <= {"cpu", "cuda"}
    assert 1.0 <= found["ratio"] <= MOST
    assert main(words[:-1]) == 0
    assert "60 jobs of 12 candidates" in " ".join(capsys.readouterr().out.split())
    assert main(["dev", "simulate", "--jobs", "20", "--cores", "8", "--gpus", "0"]) == 0
    assert "candidates" not in capsys.readouterr().out
