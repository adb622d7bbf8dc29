"""Which cores others use, from fake counters; and a look at the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.system.cpu_load import STALE_SECONDS, LoadSampler, OwnUse, foreign_shares
from tests.system.fakes import ME, FakeMachine


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


def test_an_early_reading_counts_on_an_idle_machine() -> None:
    fake = FakeMachine()
    sampler = fake.sampler()
    fake.run(0.03)
    sampler.sample()
    assert not sampler.known
    fake.run(0.02)
    sampler.sample()
    assert sampler.known
    assert sampler.busy == frozenset()
    # What comes then is seen as soon as ever.
    seen = watch(fake, sampler, 2, {}, foreign={1: 1.0})
    assert seen.index(frozenset({1})) < 4


def test_an_early_reading_does_not_count_beside_others() -> None:
    fake = FakeMachine()
    sampler = fake.sampler()
    fake.run(0.05, foreign={1: 1.0})
    sampler.sample()
    assert not sampler.known
    fake.run(0.16, foreign={1: 1.0})
    sampler.sample()
    assert sampler.busy == frozenset({1})


def test_a_worker_that_was_pinned_within_a_window_is_own_where_it_ran_before() -> None:
    fake = FakeMachine()
    fake.processes[11] = (0.0, 1)
    sampler = fake.sampler()
    sampler.sample({11: ()})
    fake.run(0.15, own={11: (1.0, 1)})
    fake.run(0.15, own={11: (1.0, 0)})
    sampler.sample({11: (0,)})
    assert sampler.busy == frozenset()
    assert sampler.shares == pytest.approx({0: 0.0, 1: 0.0}, abs=0.01)


def test_a_load_between_the_thresholds_changes_nothing() -> None:
    fake = FakeMachine()
    sampler = fake.sampler()
    watch(fake, sampler, 2, {})
    assert set(watch(fake, sampler, 20, {}, foreign={0: 0.22})) == {frozenset()}
    watch(fake, sampler, 5, {}, foreign={0: 1.0})
    assert set(watch(fake, sampler, 20, {}, foreign={0: 0.22})) == {frozenset({0})}


def test_a_hog_on_the_core_of_an_own_worker_is_seen() -> None:
    fake = FakeMachine()
    fake.processes[11] = (0.0, 0)
    sampler = fake.sampler()
    watch(fake, sampler, 1, {11: (0,)})
    seen = watch(fake, sampler, 3, {11: (0,)}, foreign={0: 0.5}, own={11: (0.5, 0)})
    assert seen[-1] == {0}


def test_children_of_workers_count_as_own_and_other_children_do_not() -> None:
    fake = FakeMachine()
    fake.processes |= {11: (0.0, 0), 21: (0.0, 0), 31: (0.0, 1)}
    fake.parents = {11: ME, 21: 11, 31: ME}
    sampler = fake.sampler()
    watch(fake, sampler, 1, {11: (0,)})
    seen = watch(fake, sampler, 5, {11: (0,)}, own={21: (1.0, 0), 31: (1.0, 1)})
    assert seen[-1] == {1}


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), OSError("no")])
def test_a_reading_that_fails_keeps_the_last_state_then_is_busy(error: Exception) -> None:
    fake = FakeMachine()
    fake.cores = {0: 9e6, 1: 9e6}  # since boot, which is no load now
    fake.broken = error
    sampler = fake.sampler()
    assert watch(fake, sampler, 1, {})[-1] == {0, 1}
    fake.broken = None
    assert watch(fake, sampler, 1, {})[-1] == frozenset()
    fake.broken = error
    assert set(watch(fake, sampler, STALE_SECONDS, {})) == {frozenset()}
    assert watch(fake, sampler, 1, {})[-1] == {0, 1}
    fake.broken = None
    assert watch(fake, sampler, 3, {})[-1] == frozenset()


def test_a_warm_worker_is_not_foreign_in_the_first_window() -> None:
    fake = FakeMachine()
    fake.processes[11] = (70.0, 0)
    sampler = fake.sampler()
    fake.run(0.1)
    sampler.sample({11: (0,)})
    fake.run(0.4, own={11: (1.0, 0)})
    sampler.sample({11: (0,)})
    assert sampler.busy == frozenset()
    assert sampler.shares[0] == pytest.approx(0.0, abs=0.01)


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


# The real machine


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
            began, before = time.monotonic(), sum(psutil.Process(hog.pid).cpu_times()[:2])
            for _ in range(5):
                time.sleep(0.25)
                own.sample({hog.pid: (core,)})
                foreign.sample()
                shares.append(foreign.shares[core] - own.shares[core])
            got = sum(psutil.Process(hog.pid).cpu_times()[:2]) - before
            got /= time.monotonic() - began
        finally:
            hog.kill()
    assert foreign.busy == {core}
    # Others may use the core as well: what the hog got is what the two views differ by.
    assert max(shares) > got / 2
