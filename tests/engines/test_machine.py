"""The machine from fake series: counters, control groups, GPUs; and a few looks at the real one."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.engines import machine
from asynckfold.engines.limits import Host
from asynckfold.engines.machine import (
    LoadSampler,
    Machine,
    OwnUse,
    Readers,
    foreign_shares,
    resolve_n_jobs,
    settle,
    visible_order,
)
from asynckfold.errors import InputError
from asynckfold.placement import Gpu, Placement, Request, place

ME = os.getpid()


class FakeMachine:
    """Counters that grow as told: the share of each core, by others and by own processes."""

    def __init__(self, cores: int = 2) -> None:
        self.now = 100.0
        self.cores = dict.fromkeys(range(cores), 50.0)
        self.processes: dict[int, tuple[float, int]] = {ME: (1.0, 0)}
        self.parents: dict[int, int] = {}
        self.memory: dict[int, int] = {}
        self.broken: Exception | None = None

    def clock(self) -> float:
        return self.now

    def core_seconds(self) -> Mapping[int, float]:
        if self.broken:
            raise self.broken
        return dict(self.cores)

    def process(self, pid: int) -> tuple[float, int]:
        if pid not in self.processes:
            raise psutil.NoSuchProcess(pid)
        return self.processes[pid]

    def run(
        self,
        seconds: float,
        foreign: Mapping[int, float] | None = None,
        own: Mapping[int, tuple[float, int]] | None = None,
    ) -> None:
        """Let time pass; `foreign` is core → share, `own` is pid → (share, core)."""
        self.now += seconds
        for core, share in (foreign or {}).items():
            self.cores[core] += share * seconds
        for pid, (share, core) in (own or {}).items():
            self.cores[core] += share * seconds
            self.processes[pid] = (self.processes[pid][0] + share * seconds, core)

    def readers(self) -> Readers:
        return Readers(
            self.core_seconds,
            self.process,
            lambda: dict(self.parents),
            lambda pid: self.memory[pid],
            lambda: 1000,
            lambda: 4000,
        )

    def sampler(self) -> LoadSampler:
        return LoadSampler(range(len(self.cores)), self.readers(), self.clock)


def watch(
    fake: FakeMachine,
    sampler: LoadSampler,
    seconds: float,
    workers: Mapping[int, tuple[int, ...]],
    foreign: Mapping[int, float] | None = None,
    own: Mapping[int, tuple[float, int]] | None = None,
) -> list[frozenset[int]]:
    """Sample every quarter of a second while the machine is used as told."""
    seen = []
    for _ in range(round(seconds / 0.25)):
        fake.run(0.25, foreign, own)
        sampler.sample(workers)
        seen.append(sampler.busy)
    return seen


# The sampler


def test_nothing_is_known_before_the_first_window() -> None:
    fake = FakeMachine()
    sampler = fake.sampler()
    sampler.sample()
    assert sampler.busy == {0, 1}
    fake.run(0.25)
    sampler.sample()
    assert sampler.busy == frozenset()


def test_counters_since_boot_are_not_taken_for_load() -> None:
    fake = FakeMachine()
    fake.cores = {0: 9e6, 1: 9e6}
    sampler = fake.sampler()
    fake.run(0.25)
    sampler.sample()
    assert sampler.busy == frozenset()


def test_a_window_that_is_too_short_is_not_read() -> None:
    fake = FakeMachine()
    sampler = fake.sampler()
    fake.run(0.1, foreign={0: 1.0})
    fake.broken = AssertionError("read within the window")
    sampler.sample()


def test_a_lasting_foreign_load_is_seen_within_a_second_and_forgotten_within_three() -> None:
    fake = FakeMachine()
    sampler = fake.sampler()
    assert watch(fake, sampler, 2, {})[-1] == frozenset()
    during = watch(fake, sampler, 10, {}, foreign={1: 1.0})
    assert during.index(frozenset({1})) < 4
    assert set(during[4:]) == {frozenset({1})}
    after = watch(fake, sampler, 10, {})
    assert after.index(frozenset()) < 12
    assert set(after[12:]) == {frozenset()}


def test_a_short_burst_changes_nothing() -> None:
    fake = FakeMachine()
    sampler = fake.sampler()
    watch(fake, sampler, 2, {})
    assert watch(fake, sampler, 0.25, {}, foreign={0: 1.0}) == [frozenset()]
    assert set(watch(fake, sampler, 2, {})) == {frozenset()}


def test_a_load_between_the_thresholds_changes_no_mind() -> None:
    fake = FakeMachine()
    sampler = fake.sampler()
    watch(fake, sampler, 2, {})
    assert set(watch(fake, sampler, 20, {}, foreign={0: 0.22})) == {frozenset()}
    watch(fake, sampler, 5, {}, foreign={0: 1.0})
    assert set(watch(fake, sampler, 20, {}, foreign={0: 0.22})) == {frozenset({0})}


def test_own_workers_are_not_foreign_load() -> None:
    fake = FakeMachine()
    fake.processes |= {11: (0.0, 0), 12: (0.0, 1)}
    sampler = fake.sampler()
    own = {11: (0,), 12: (1,)}
    watch(fake, sampler, 1, own)
    seen = watch(fake, sampler, 60, own, own={11: (0.98, 0), 12: (0.98, 1), ME: (0.01, 0)})
    changes = sum(before != after for before, after in itertools.pairwise(seen))
    assert changes == 0
    assert seen[-1] == frozenset()


def test_a_hog_on_the_core_of_an_own_worker_is_seen() -> None:
    fake = FakeMachine()
    fake.processes[11] = (0.0, 0)
    sampler = fake.sampler()
    watch(fake, sampler, 1, {11: (0,)})
    seen = watch(fake, sampler, 3, {11: (0,)}, foreign={0: 0.5}, own={11: (0.5, 0)})
    assert seen[-1] == {0}


def test_this_process_is_own_wherever_it_ran() -> None:
    fake = FakeMachine()
    sampler = fake.sampler()
    watch(fake, sampler, 1, {})
    for _ in range(20):
        fake.run(0.125, own={ME: (1.0, 0)})
        fake.run(0.125, own={ME: (1.0, 1)})
        sampler.sample({})
        assert sampler.busy == frozenset()


def test_children_of_workers_count_as_own_and_other_children_do_not() -> None:
    fake = FakeMachine()
    fake.processes |= {11: (0.0, 0), 21: (0.0, 0), 31: (0.0, 1)}
    fake.parents = {11: ME, 21: 11, 31: ME}
    sampler = fake.sampler()
    watch(fake, sampler, 1, {11: (0,)})
    seen = watch(fake, sampler, 5, {11: (0,)}, own={21: (1.0, 0), 31: (1.0, 1)})
    assert seen[-1] == {1}


def test_a_worker_that_ended_leaves_its_core_as_it_was_thought_of() -> None:
    fake = FakeMachine()
    fake.processes[11] = (0.0, 0)
    sampler = fake.sampler()
    watch(fake, sampler, 1, {11: (0,)}, own={11: (1.0, 0)})
    fake.run(0.25, own={11: (1.0, 0)})
    del fake.processes[11]
    sampler.sample({11: (0,)})
    assert sampler.busy == frozenset()


@pytest.mark.parametrize(
    "error",
    [
        psutil.AccessDenied(1),
        psutil.NoSuchProcess(1),
        OSError("no"),
        ValueError("no"),
        IndexError("no"),
        RuntimeError("no"),
        NotImplementedError("no"),
    ],
)
def test_a_reading_that_fails_keeps_the_last_state_then_is_busy(error: Exception) -> None:
    fake = FakeMachine()
    sampler = fake.sampler()
    watch(fake, sampler, 1, {})
    fake.broken = error
    assert set(watch(fake, sampler, machine.STALE_SECONDS, {})) == {frozenset()}
    assert watch(fake, sampler, 1, {})[-1] == {0, 1}
    fake.broken = None
    assert watch(fake, sampler, 3, {})[-1] == frozenset()


def test_a_first_reading_that_fails_is_busy_and_recovers() -> None:
    fake = FakeMachine()
    fake.broken = OSError("no")
    sampler = fake.sampler()
    assert watch(fake, sampler, 1, {})[-1] == {0, 1}
    fake.broken = None
    assert watch(fake, sampler, 1, {})[-1] == frozenset()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_a_core_with_a_wrong_counter_is_unknown_alone(wrong: float) -> None:
    fake = FakeMachine()
    sampler = fake.sampler()
    watch(fake, sampler, 1, {})
    fake.cores[1] = wrong
    seen = watch(fake, sampler, 8, {}, foreign={0: 1.0})
    assert seen[0] == frozenset()
    assert 0 in seen[4]
    assert sampler.shares[0] > 0.9


def test_cores_may_go_and_come() -> None:
    fake = FakeMachine(4)
    sampler = fake.sampler()
    watch(fake, sampler, 1, {})
    gone = {core: fake.cores.pop(core) for core in (2, 3)}
    assert watch(fake, sampler, 8, {})[-1] == {2, 3}
    fake.cores |= gone | {7: 1.0}
    assert watch(fake, sampler, 3, {})[-1] == frozenset()


def test_an_own_process_that_may_not_be_read_leaves_its_core_unknown() -> None:
    fake = FakeMachine()
    sampler = fake.sampler()
    watch(fake, sampler, 1, {99: (0,)})
    assert 0 in sampler.busy
    assert 1 not in sampler.busy


def test_the_idlest_core_comes_first_and_equals_by_number() -> None:
    fake = FakeMachine(4)
    sampler = fake.sampler()
    watch(fake, sampler, 3, {}, foreign={0: 0.9, 1: 0.01, 2: 0.25, 3: 0.0})
    assert sampler.idlest == (1, 3, 2, 0)


def test_usage_is_the_last_window_in_cores_worth() -> None:
    fake = FakeMachine()
    fake.processes[11] = (0.0, 1)
    sampler = fake.sampler()
    sampler.sample({11: (1,)})
    watch(fake, sampler, 0.25, {11: (1,)})
    watch(fake, sampler, 0.25, {11: (1,)}, foreign={0: 0.5}, own={11: (1.0, 1)})
    used, own, cores = sampler.usage()
    assert used == pytest.approx(1.5)
    assert own == pytest.approx(1.0)
    assert cores == pytest.approx((0.5, 1.0))


use_of = st.floats(0, 2)


@given(
    st.lists(use_of, min_size=3, max_size=3),
    st.lists(st.tuples(use_of, st.permutations([0, 1, 2]), st.booleans()), max_size=4),
)
def test_what_is_foreign_and_own_adds_up(
    busy: list[float], own: list[tuple[float, list[int], bool]]
) -> None:
    uses = [OwnUse(seconds, tuple(cores), pinned) for seconds, cores, pinned in own]
    shares = foreign_shares(dict(enumerate(busy)), uses, 2.0)
    assert all(0 <= share <= 1 for share in shares.values())
    rest = max(0.0, sum(busy) - sum(use.seconds for use in uses))
    assert sum(shares.values()) * 2.0 == pytest.approx(rest, abs=1e-9)


@given(
    st.lists(
        st.tuples(st.one_of(st.floats(0, 1), st.just(math.nan)), st.floats(0.2, 30)), max_size=30
    )
)
def test_a_core_that_settled_is_on_the_right_side_of_the_thresholds(
    windows: list[tuple[float, float]],
) -> None:
    state, now = settle(None, math.nan, 0.0, 0.0), 0.0
    for share, window in windows:
        now += window
        state = settle(state, share, window, now)
        assert state.busy or state.share <= machine.BUSY_SHARE
        assert not state.busy or state.share >= machine.IDLE_SHARE


# What this run may use


def fake_host(tmp_path: Path, cores: Iterable[int] = (0, 1, 2, 3), **environ: str) -> Host:
    found = frozenset(cores)
    return Host(tmp_path / "proc", tmp_path / "cgroup", environ, lambda: found)


def fake_load(
    fake: FakeMachine,
    tmp_path: Path,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **environ: str,
) -> tuple[Machine, Callable[..., Any]]:
    host = fake_host(tmp_path, range(len(fake.cores)), **environ)
    found = Machine("cpu", host=host, readers=fake.readers(), clock=fake.clock, **settings)

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


def test_a_reserve_comes_on_top_of_a_quota_and_leaves_one_core(tmp_path: Path) -> None:
    found, load = fake_load(
        FakeMachine(4), tmp_path, {"reserve_cores": 1}, ASYNCKFOLD_CPU_COUNT="3"
    )
    assert found.max_cores == len(load().cores) == 2
    limits = found.describe(n_jobs=7)["cpu"]
    assert (limits["limit"], limits["allowed"]) == ("reserve_cores", 2)
    assert limits["limits"] | {"affinity": 4, "ASYNCKFOLD_CPU_COUNT": 3} == limits["limits"]
    assert limits["limits"]["n_jobs"] == 7
    assert fake_load(FakeMachine(4), tmp_path, {"reserve_cores": 9})[1]().cores == (0,)


@pytest.mark.parametrize(("floor", "blocked"), [(0, False), (1000, False), (1001, True)])
def test_below_the_floor_of_free_memory_nothing_may_start(
    tmp_path: Path, floor: int, blocked: bool
) -> None:
    fake = FakeMachine()
    fake.memory = {11: 5000}  # what own workers hold is not free
    _, load = fake_load(fake, tmp_path, {"min_free_memory": floor})
    found = load(own={11: ()})
    assert bool(found.blocked) == blocked
    assert bool(place([Request("a", 1.0)], [], found)) != blocked


def test_memory_of_own_workers_is_added_back(tmp_path: Path) -> None:
    fake = FakeMachine()
    fake.memory = {11: 50, 12: 7}
    found, _ = fake_load(fake, tmp_path)
    assert found.free_memory({11: (), 12: ()}) == 1057


def test_memory_is_cut_by_the_control_group(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/\n")
    (group / "memory.max").write_text("900\n")
    (group / "memory.current").write_text("500\n")
    found, _ = fake_load(FakeMachine(), tmp_path)
    assert found.free_memory({}) == 400


def test_memory_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    def refuse() -> int:
        raise OSError("no")

    def gone(pid: int) -> int:
        raise psutil.NoSuchProcess(pid)

    fake = FakeMachine()
    readers = Readers(fake.core_seconds, fake.process, dict, gone, refuse)
    found = Machine("cpu", host=fake_host(tmp_path), readers=readers, clock=fake.clock)
    assert found.free_memory({11: ()}) == 0


@pytest.mark.parametrize(("n_jobs", "jobs"), [(1, 1), (7, 7), (-1, 4), (-4, 1), (-5, 1)])
def test_n_jobs_means_what_it_means_in_joblib(n_jobs: int, jobs: int) -> None:
    assert resolve_n_jobs(n_jobs, 4) == jobs


@pytest.mark.parametrize("n_jobs", [0, True, 1.5, "all", None])
def test_another_n_jobs_is_refused(n_jobs: Any) -> None:
    with pytest.raises(InputError, match="n_jobs must be 'auto' or a whole number other than 0"):
        resolve_n_jobs(n_jobs, 4)


# GPUs


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """NVML with GPUs of (free, total, use); None is a GPU that fell off the bus."""

    NVMLError = FakeNvmlError

    def __init__(self, *gpus: tuple[int, int, int] | None) -> None:
        self.gpus = gpus

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'abc'[handle]}00"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"Fake"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        gpu = self.gpus[handle]
        if gpu is None:
            raise FakeNvmlError("GPU is lost")
        return SimpleNamespace(free=gpu[0], total=gpu[1])

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        gpu = self.gpus[handle]
        if gpu is None or gpu[2] < 0:
            raise FakeNvmlError("Not Supported")
        return SimpleNamespace(gpu=gpu[2])


def gpu_machine(tmp_path: Path, nvml: FakeNvml, devices: Any = "auto", **environ: str) -> Machine:
    fake = FakeMachine()
    host = fake_host(tmp_path, (0, 1), **environ)
    return Machine(devices, host=host, readers=fake.readers(), clock=fake.clock, nvml=nvml)


THREE = FakeNvml((1, 10, 0), (2, 10, 50), (3, 10, -1))


def test_gpus_have_free_memory_and_use(tmp_path: Path) -> None:
    expected = (Gpu(0, 1, 10, 0.0), Gpu(1, 2, 10, 0.5), Gpu(2, 3, 10, 0.0))
    assert gpu_machine(tmp_path, THREE).load().gpus == expected
    assert gpu_machine(tmp_path, THREE).load(reserve_gpu_memory=2).gpus[2].free == 1


class Crowded(FakeNvml):
    """Its first GPU is held by processes with these bytes; the second does not know by whom."""

    holders: ClassVar[list[tuple[int, Any]]] = [(7, 3), (8, 2), (9, None), (10, -5)]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        if handle:
            raise FakeNvmlError("Not Supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.holders]


def test_what_own_processes_hold_of_a_gpu_is_known_where_nvml_says_so(tmp_path: Path) -> None:
    found = gpu_machine(tmp_path, Crowded((4, 10, 0), (4, 10, 0)))
    own: dict[int, tuple[int, ...]] = {7: (), 9: (), 10: ()}
    assert [(gpu.free, gpu.own) for gpu in found.load(own=own).gpus] == [(4, 3), (4, 0)]
    assert [gpu.own for gpu in found.load().gpus] == [0, 0]
    # Never more than is taken at all.
    full = gpu_machine(tmp_path, Crowded((9, 10, 0)))
    assert [gpu.own for gpu in full.load(own=own).gpus] == [1]
    # Without the call, as in an old NVML.
    assert [gpu.own for gpu in gpu_machine(tmp_path, THREE).load(own=own).gpus] == [0, 0, 0]


@pytest.mark.parametrize(
    ("visible", "free"),
    [
        ("2,0", [3, 1]),
        ("GPU-b, GPU-c00", [2, 3]),
        ("", []),
        ("-1", []),
        ("1,-1,0", [2]),
        ("1,9,0", [2]),
        ("1,1", []),
        ("GPU-", []),
        ("none", []),
    ],
)
def test_only_gpus_that_cuda_shows_are_used_under_its_index(
    tmp_path: Path, visible: str, free: list[int]
) -> None:
    found = gpu_machine(tmp_path, THREE, CUDA_VISIBLE_DEVICES=visible).gpus()
    assert [(gpu.index, gpu.free) for gpu in found.gpus] == list(enumerate(free))
    assert bool(found.reason) == (not free)
    if not free:
        assert "CUDA_VISIBLE_DEVICES" in found.reason


@pytest.mark.parametrize(
    ("devices", "indices", "reason"),
    [
        ("cuda", [0, 1, 2], ""),
        ("cpu", [], "devices is 'cpu'"),
        ([2, 0], [2, 0], ""),
        ([1, 7], [1], "GPU 7 is not there: 3 visible"),
    ],
)
def test_devices_choose_among_the_visible_gpus(
    tmp_path: Path, devices: Any, indices: list[int], reason: str
) -> None:
    found = gpu_machine(tmp_path, THREE, devices).gpus()
    assert [gpu.index for gpu in found.gpus] == indices
    assert found.reason == reason


def test_a_lost_gpu_hides_no_other(tmp_path: Path) -> None:
    found = gpu_machine(tmp_path, FakeNvml(None, (2, 10, 0))).gpus()
    assert [gpu.index for gpu in found.gpus] == [1]
    assert found.reason == "GPU 0 cannot be read: GPU is lost"


def test_nvml_that_fails_is_no_gpu_with_a_reason(tmp_path: Path) -> None:
    class Failing(FakeNvml):
        def nvmlDeviceGetCount(self) -> int:
            raise FakeNvmlError("driver mismatch")

    found = gpu_machine(tmp_path, Failing()).gpus()
    assert found.gpus == ()
    assert "driver mismatch" in found.reason
    assert gpu_machine(tmp_path, FakeNvml()).gpus().reason == "NVML sees no GPU"


def test_missing_nvml_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.load_nvml() == (
        None,
        "nvidia-ml-py is not installed: pip install 'asynckfold[gpu]'",
    )


@given(st.lists(st.sampled_from(["0", "1", "2", "-1", "GPU-a", "GPU-", "x", ""]), max_size=5))
def test_visible_gpus_exist_and_are_named_once(entries: list[str]) -> None:
    order = visible_order(",".join(entries), ["GPU-aa", "GPU-bb"])
    assert len(set(order)) == len(order) <= 2
    assert set(order) <= {0, 1}


@pytest.mark.parametrize(
    ("free", "total"), [(-1, 10), (11, 10), (math.nan, 10), (5, math.inf), (None, 10), ("5", None)]
)
def test_a_gpu_whose_memory_makes_no_sense_is_not_used_and_hides_no_other(
    tmp_path: Path, free: Any, total: Any
) -> None:
    found = gpu_machine(tmp_path, FakeNvml((free, total, 0), (2, 10, 0))).gpus()
    assert [gpu.index for gpu in found.gpus] == [1]
    assert found.reason.startswith("GPU 0 cannot be read")


@pytest.mark.parametrize("use", [math.nan, 101, 1e9, "busy", None])
def test_the_use_of_a_gpu_that_makes_no_sense_is_unknown(tmp_path: Path, use: Any) -> None:
    class Odd(FakeNvml):
        def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
            return SimpleNamespace(gpu=use)

    assert [gpu.use for gpu in gpu_machine(tmp_path, Odd((2, 10, 0))).gpus().gpus] == [0.0]


@pytest.mark.parametrize("error", [OSError("gone"), AttributeError("old"), TypeError("odd")])
@pytest.mark.parametrize("call", ["nvmlDeviceGetCount", "nvmlDeviceGetUUID"])
def test_nvml_that_disappears_is_no_gpu_with_a_reason(
    tmp_path: Path, call: str, error: Exception
) -> None:
    found = gpu_machine(tmp_path, FakeNvml((2, 10, 0)))
    assert len(found.load().gpus) == 1

    def broken(*arguments: Any) -> Any:
        raise error

    setattr(found._nvml, call, broken)
    assert found.load().gpus == ()
    assert str(error) in found.gpus().reason


# Readings that make no sense


def raises(*arguments: Any) -> Any:
    raise ModuleNotFoundError("psutil disappeared")


@pytest.mark.parametrize(
    "returned",
    [
        raises,
        lambda: None,
        dict,
        lambda: {0: 1.0},
        lambda: {7: 1.0, 8: 1.0, 9: 1.0},
        lambda: dict.fromkeys(range(4), math.nan),
        lambda: dict.fromkeys(range(4), -1.0),
        lambda: dict.fromkeys(range(4), "busy"),
        lambda: {core: 1e6 * time.monotonic() for core in range(4)},
    ],
)
def test_cores_of_which_nothing_sensible_is_read_are_busy_and_one_job_runs(
    tmp_path: Path, returned: Callable[[], Any]
) -> None:
    fake = FakeMachine(4)
    found = Machine(
        "cpu",
        host=fake_host(tmp_path),
        readers=replace(
            fake.readers(),
            core_seconds=lambda: returned() if fake.broken else fake.core_seconds(),
        ),
        clock=fake.clock,
    )
    for _ in range(12):
        fake.run(0.25)
        found.sample()
    fake.broken = OSError()
    for _ in range(40):
        fake.run(0.25)
        load = found.load()
    assert not {1, 2, 3} & set(load.idle)
    assert len(place([Request(name, 1.0) for name in "abc"], [], load)) == 1
    found.describe()


@pytest.mark.parametrize("value", [raises, math.nan, math.inf, -1, None, "much"])
@pytest.mark.parametrize("reader", ["available_memory", "private_memory", "total_memory"])
def test_memory_of_which_nothing_sensible_is_read_is_none_and_one_job_runs(
    tmp_path: Path, reader: str, value: Any
) -> None:
    fake = FakeMachine()
    fake.memory = {11: 50}
    read = value if value is raises else lambda *arguments: value
    readers = replace(fake.readers(), **{reader: read})
    found = Machine(
        "cpu", host=fake_host(tmp_path), readers=readers, clock=fake.clock, min_free_memory=10
    )
    fake.run(0.25)
    free = {"available_memory": 50, "private_memory": 1000, "total_memory": 1050}[reader]
    load = found.load(own={11: ()})
    assert load.free_memory == free
    assert not load.blocked
    assert len(place([Request("a", 1.0, memory=5000)], [], load)) == 1
    assert found.describe()["memory"]["total"] == (None if reader == "total_memory" else 4000)


@pytest.mark.parametrize(
    "process", [raises, lambda pid: None, lambda pid: (math.nan, 0), lambda pid: (-1.0, -7),
                lambda pid: (1e9 * time.monotonic(), 99), lambda pid: ("x", "y")]
)  # fmt: skip
def test_own_processes_of_which_nothing_sensible_is_read_crash_nothing(
    tmp_path: Path, process: Callable[[int], Any]
) -> None:
    fake = FakeMachine()
    readers = replace(fake.readers(), process=process, descendants=raises)
    found = Machine("cpu", host=fake_host(tmp_path), readers=readers, clock=fake.clock)
    for _ in range(40):
        fake.run(0.25, foreign={0: 1.0})
        load = found.load(own={11: (0,)})
    assert load.cores
    assert all(0 <= share <= 1 for share in load.use)


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
        "import sys; from asynckfold.engines.machine import Machine; Machine().describe(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_counters_of_the_real_machine_have_a_core_each() -> None:
    seconds = machine.read_core_seconds()
    assert set(seconds) >= os.sched_getaffinity(0)
    assert all(value >= 0 for value in seconds.values())


def test_a_real_worker_is_own_and_a_real_hog_is_foreign() -> None:
    """The same busy loop, pinned, told as own and not told: only the latter makes its core busy."""
    core = max(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{core}])\nprint('up', flush=True)\nwhile True: pass"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as hog:
        try:
            assert hog.stdout is not None
            hog.stdout.readline()
            own, foreign = LoadSampler([core]), LoadSampler([core])
            shares: list[float] = []
            own.sample({hog.pid: (core,)})
            for _ in range(5):
                time.sleep(0.25)
                own.sample({hog.pid: (core,)})
                foreign.sample()
                shares.append(foreign.shares[core] - own.shares[core])
        finally:
            hog.kill()
    assert foreign.busy == {core}
    # Others may use the core as well: what the hog got is what the two views differ by.
    assert max(shares) > 0.2
