"""What this run may use of a machine, from fake series; and a few looks at the real one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from asynckfold import InputError
from asynckfold.jobs.placement import Placement, Request
from asynckfold.scheduling.place import place
from asynckfold.system.limits import Host
from asynckfold.system.machine import Machine, resolve_n_jobs
from tests.system.fakes import FakeMachine, fake_host


def fake_load(
    fake: FakeMachine,
    tmp_path: Path,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **environ: str,
) -> tuple[Machine, Callable[..., Any]]:
    host = fake_host(tmp_path, range(len(fake.cores)), **environ)
    found = Machine("cpu", host=host, readers=fake, clock=fake.clock, **settings)

    def load(foreign: Mapping[int, float] | None = None, **arguments: Any) -> Any:
        for _ in range(12):
            fake.run(0.25, foreign=foreign)
            found.sample()
        return found.load(**arguments)

    return found, load


def test_idle_cores_are_those_that_others_leave_alone(tmp_path: Path) -> None:
    _, load = fake_load(FakeMachine(4), tmp_path)
    found = load({1: 1.0})
    assert found.cores == (0, 1, 2, 3)
    assert found.idle == (0, 2, 3)
    assert found.gpus == ()


def test_a_number_of_jobs_switches_the_live_gate_off(tmp_path: Path) -> None:
    _, load = fake_load(FakeMachine(4), tmp_path)
    assert load({0: 1.0, 1: 1.0, 2: 1.0}, n_jobs=2).idle == (3, 0)
    assert load({0: 1.0}, n_jobs=1, threads=3).idle == (1, 2, 3)
    assert len(load({0: 1.0}, n_jobs=9).idle) == 4


def test_a_quota_leaves_the_choice_of_cores_to_the_load(tmp_path: Path) -> None:
    found, load = fake_load(FakeMachine(4), tmp_path, ASYNCKFOLD_CPU_COUNT="2")
    assert found.max_cores == 2
    assert load({0: 1.0, 1: 1.0}).idle == (2, 3)
    held = [Placement(("job",), (0,))]
    assert load({0: 1.0, 1: 1.0}, running=held).cores == (0, 2)
    assert load({}, running=held).cores == (0, 1)


def test_reserved_cores_and_memory_are_not_touched(tmp_path: Path) -> None:
    found, load = fake_load(FakeMachine(4), tmp_path, {"reserve_cores": 1, "max_memory": 700})
    assert (found.max_cores, found.unreserved()) == (3, (0, 1, 2))
    assert load().idle == (0, 1, 2)
    assert load({1: 1.0}).idle == (0, 2, 3)
    assert load().free_memory == 700
    assert load(n_jobs=4).cores == (0, 1, 2)


@pytest.mark.parametrize(("floor", "blocked"), [(0, False), (1000, False), (1001, True)])
def test_below_the_floor_of_free_memory_nothing_may_start(
    tmp_path: Path, floor: int, blocked: bool
) -> None:
    fake = FakeMachine()
    fake.memory = {11: 4000, 12: 1000}  # what own workers hold is not free, but theirs
    machine, load = fake_load(fake, tmp_path, {"min_free_memory": floor})
    found = load(workers={11: (), 12: ()})
    assert machine.free_memory({11: (), 12: ()}) == 6000
    assert bool(found.blocked) == blocked
    assert bool(place([Request("a", 1.0)], [], found)) != blocked


def test_memory_is_cut_by_the_control_group(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/\n")
    (group / "memory.max").write_text("900\n")
    (group / "memory.current").write_text("500\n")
    found, _ = fake_load(FakeMachine(), tmp_path)
    assert found.free_memory({}) == 400


@pytest.mark.parametrize(("n_jobs", "jobs"), [(1, 1), (7, 7), (-1, 4), (-4, 1), (-5, 1)])
def test_n_jobs_means_what_it_means_in_joblib(n_jobs: int, jobs: int) -> None:
    assert resolve_n_jobs(n_jobs, 4) == jobs


@pytest.mark.parametrize("n_jobs", [0, True, 1.5, "all"])
def test_another_n_jobs_is_refused(n_jobs: Any) -> None:
    with pytest.raises(InputError, match="n_jobs must be 'auto' or a whole number other than 0"):
        resolve_n_jobs(n_jobs, 4)


# The real machine


def test_the_real_machine_is_described_as_plain_data_without_secrets() -> None:
    host = Host(environ={"OMP_NUM_THREADS": "1", "X_TOKEN": "canary", "SLURM_CPUS_ON_NODE": "1"})
    found = Machine("cpu", host=host).describe()
    assert "canary" not in json.dumps(found)
    assert found["environment"] == {"OMP_NUM_THREADS": "1", "SLURM_CPUS_ON_NODE": "1"}
    assert found["cpu"]["allowed"] == 1
    assert found["memory"]["total"] >= found["memory"]["available"] > 0
    assert found["versions"]["torch"]
    assert found["gpu_reason"] == "devices is 'cpu'"


def test_looking_at_the_machine_does_not_import_torch() -> None:
    code = (
        "import sys; from asynckfold.system.machine import Machine; Machine().describe(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
