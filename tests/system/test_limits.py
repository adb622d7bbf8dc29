"""Limits from fake control groups and environments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import joblib
import pytest

from asynckfold import InputError
from asynckfold.system.limits import (
    GroupMemory,
    Host,
    allowed_cores,
    binding_limit,
    group_memory,
    limits,
)

CORES = frozenset({2, 3, 5, 8})


def host(
    tmp_path: Path,
    membership: str = "",
    files: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Host:
    """A host whose control groups hold these files, by path below the mount."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(membership)
    for name, text in (files or {}).items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(tmp_path / "proc", tmp_path / "cgroup", env or {}, lambda: CORES)


@pytest.mark.parametrize(
    ("membership", "files", "cores", "name"),
    [
        ("", {}, 4, "affinity"),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2, "cgroup v2 quota"),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2, "cgroup v2 quota"),
        ("0::/\n", {"cpu.max": "1000 100000\n"}, 1, "cgroup v2 quota"),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 4, "affinity"),
        ("0::/\n", {"cpu.max": "0 0\n"}, 4, "affinity"),
        ("0::/\n", {"cpu.max": "nonsense"}, 4, "affinity"),
        (
            "0::/a/b\n",
            {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"},
            3,
            "cgroup v2 quota",
        ),
        ("0::/of/the/host\n", {"cpu.max": "100000 100000"}, 1, "cgroup v2 quota"),
        ("0::/../..\n", {"cpu.max": "100000 100000"}, 1, "cgroup v2 quota"),
        ("0::/\n", {"unified/cpu.max": "100000 100000"}, 1, "cgroup v2 quota"),
        (
            "4:cpu,cpuacct:/x\n",
            {
                "cpu,cpuacct/x/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            },
            3,
            "cgroup v1 quota",
        ),
        (
            "1:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            4,
            "affinity",
        ),
        (
            "1:cpuset:/\n",
            {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "1"},
            4,
            "affinity",
        ),
        ("garbage\n", {}, 4, "affinity"),
    ],
)
def test_quotas_are_found_and_named(
    tmp_path: Path, membership: str, files: dict[str, str], cores: int, name: str
) -> None:
    found = host(tmp_path, membership, files)
    assert allowed_cores(found) == (2, 3, 5, 8)[:cores]
    assert binding_limit(limits(found)).name == name


@pytest.mark.parametrize(
    "name",
    ["SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "ASYNCKFOLD_CPU_COUNT", "LOKY_MAX_CPU_COUNT"],
)
def test_variables_limit_the_cores(tmp_path: Path, name: str) -> None:
    found = host(tmp_path, env={name: "2"})
    assert allowed_cores(found) == (2, 3)
    assert binding_limit(limits(found)).name == name
    more = Host(found.proc, found.cgroup, {name: "99"}, found.affinity)
    assert allowed_cores(more) == (2, 3, 5, 8)


@pytest.mark.parametrize("text", ["", "0", "-3", "many", "1.5", "2(x2)"])
def test_other_programs_variables_that_make_no_sense_are_ignored(tmp_path: Path, text: str) -> None:
    found = host(tmp_path, env={"SLURM_CPUS_ON_NODE": text, "LOKY_MAX_CPU_COUNT": text})
    assert len(allowed_cores(found)) == 4


@pytest.mark.parametrize("text", ["0", "-3", "many", "1.5"])
def test_the_own_variable_is_refused_when_it_makes_no_sense(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="ASYNCKFOLD_CPU_COUNT must be a whole number") as caught:
        limits(host(tmp_path, env={"ASYNCKFOLD_CPU_COUNT": text}))
    assert repr(text) in str(caught.value)


def test_the_real_machine_agrees_with_joblib() -> None:
    assert len(allowed_cores()) <= joblib.cpu_count()


STAT = "anon 5\ninactive_file 100\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max", "memory.current": "5"}, None),
        ("0::/\n", {}, None),
        ("0::/\n", {"memory.max": "900", "memory.current": "500"}, GroupMemory(900, 400)),
        (
            "0::/\n",
            {"memory.max": "900", "memory.current": "500", "memory.stat": STAT},
            GroupMemory(900, 500),
        ),
        ("0::/\n", {"memory.max": "900", "memory.current": "950"}, GroupMemory(900, 0)),
        (
            "0::/a\n",
            {
                "memory.max": "900",
                "memory.current": "800",
                "a/memory.max": "500",
                "a/memory.current": "100",
            },
            GroupMemory(900, 100),
        ),
        (
            "3:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": "900",
                "memory/a/memory.usage_in_bytes": "500",
                "memory/a/memory.stat": f"inactive_file 1\ntotal_{STAT.splitlines()[1]}\n",
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
                "memory/memory.usage_in_bytes": "5",
            },
            GroupMemory(900, 500),
        ),
    ],
)
def test_memory_limits_of_control_groups(
    tmp_path: Path, membership: str, files: dict[str, str], expected: GroupMemory | None
) -> None:
    assert group_memory(host(tmp_path, membership, files)) == expected
