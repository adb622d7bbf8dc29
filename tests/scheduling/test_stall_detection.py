"""The rule of hangs, with a clock made of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.scheduling import stall_detection
from asynckfold.scheduling.stall_detection import StallAction, StallDetector, Step
from asynckfold.system.heartbeat import Heartbeat

TICK = 0.25
Timeouts = st.floats(1.5, 100)


def looks(
    rule: StallDetector, heartbeats: Mapping[str, int], start: float, end: float
) -> Iterator[tuple[float, StallAction]]:
    """Look once a tick at words that do not change."""
    now = start
    while now < end:
        for verdict in rule.look(now, heartbeats):
            yield now, verdict
        now += TICK


@given(Timeouts)
def test_a_silent_worker_is_asked_killed_and_given_up_once_each(timeout: float) -> None:
    rule = StallDetector(timeout)
    found = list(looks(rule, {"a": 2}, 100, 100 + timeout + 20))
    times = [now - 100 for now, _ in found]
    assert [verdict.step for _, verdict in found] == [Step.STACKS, Step.KILL, Step.LOST]
    assert timeout <= times[0] <= timeout + TICK
    assert (
        stall_detection.STACKS_SECONDS
        <= times[1] - times[0]
        <= stall_detection.STACKS_SECONDS + TICK
    )
    assert (
        stall_detection.KILL_SECONDS <= times[2] - times[1] <= stall_detection.KILL_SECONDS + TICK
    )
    assert times[1] == pytest.approx(found[1][1].silent_seconds)


@given(Timeouts, st.lists(st.floats(0.01, 0.99), min_size=1, max_size=30))
def test_one_that_makes_progress_in_time_is_never_touched(
    timeout: float, shares: list[float]
) -> None:
    rule, heartbeat, now = StallDetector(timeout), Heartbeat(), 0.0
    heartbeat.beat()
    for share in shares:
        quiet = share * (timeout - TICK)
        assert list(looks(rule, {"a": heartbeat.value}, now, now + quiet)) == []
        now += quiet
        heartbeat.beat()
        assert rule.look(now, {"a": heartbeat.value}) == []


@given(Timeouts, st.floats(0, 5000))
def test_the_time_of_a_pause_does_not_count(timeout: float, pause: float) -> None:
    rule, now = StallDetector(timeout), 0.0
    assert rule.look(now, {"a": 2}) == []
    while now < pause:
        now += 1.0
        assert rule.look(now, {"a": 2}, {"a"}) == []
    (first, _), *_ = looks(rule, {"a": 2}, now + TICK, now + timeout + 2)
    assert timeout <= first - now <= timeout + 2 * TICK


@given(Timeouts)
def test_aside_it_has_ten_times_as_long(timeout: float) -> None:
    rule = StallDetector(timeout)
    first, _ = next(looks(rule, {"a": 1}, 0, 1100))
    assert 10 * timeout <= first <= 10 * timeout + TICK


@given(Timeouts, st.floats(0, 2), st.floats(0.01, 1e6), st.sampled_from([1, 2]))
def test_after_our_own_sleep_everyone_has_the_whole_time_again(
    timeout: float, before: float, more: float, heartbeat: int
) -> None:
    """Whether this process alone slept or the workers did too: nothing was seen of them."""
    rule, heartbeats = StallDetector(timeout), {"a": heartbeat}
    limit = timeout * (10 if heartbeat % 2 else 1)
    begun = min(before, 0.9) * limit
    assert list(looks(rule, heartbeats, 0, begun)) == []
    woken = begun + max(stall_detection.GAP_SECONDS, stall_detection.GAP_SHARE * limit) + more
    found = [now for now, _ in looks(rule, heartbeats, woken, woken + limit + 2 * TICK)]
    assert found
    assert found[0] >= woken + limit - 1e-6


def test_who_moves_after_the_kill_is_not_forgotten() -> None:
    rule = StallDetector(2.0)
    steps = [verdict.step for _, verdict in looks(rule, {"a": 2}, 0, 3)]
    assert steps == [Step.STACKS, Step.KILL]
    assert [verdict.step for _, verdict in looks(rule, {"a": 4}, 3, 9)] == [Step.LOST]


def test_a_slow_disk_under_a_long_limit_does_not_put_it_off_for_ever() -> None:
    rule = StallDetector(100.0)
    found = [item.step for tick in range(30) for item in rule.look(5.0 * tick, {"a": 2})]
    assert found == [Step.STACKS, Step.KILL, Step.LOST]


# auto


def auto_limit(batches: int, seconds: float, *, long_phase: bool = False) -> float:
    """The limit after so many batches of so many seconds each."""
    rule, heartbeat = StallDetector("auto"), Heartbeat()
    heartbeat.begin_long_phase()
    now = 0.0
    rule.look(now, {"a": heartbeat.value})
    for batch in range(1, batches + 1):
        while now + 10 < batch * seconds:
            now += 10
            assert rule.look(now, {"a": heartbeat.value}) == []
        now = batch * seconds
        heartbeat.beat()
        assert rule.look(now, {"a": heartbeat.value}) == []
    if long_phase:
        heartbeat.begin_long_phase()
        rule.look(now + 0.1, {"a": heartbeat.value})
    return rule.limit("a")


@given(st.integers(1, 20), st.floats(0.001, 10))
def test_auto_waits_five_minutes_at_least(batches: int, seconds: float) -> None:
    assert auto_limit(batches, seconds) == stall_detection.AUTO_SECONDS
    assert auto_limit(batches, seconds, long_phase=True) == 10 * stall_detection.AUTO_SECONDS


@given(st.integers(1, 5), st.floats(20, 200))
def test_auto_waits_twenty_times_as_long_as_a_batch_took(batches: int, seconds: float) -> None:
    expected = max(stall_detection.AUTO_SECONDS, 20 * seconds)
    assert auto_limit(batches, seconds) == pytest.approx(expected)


def test_auto_waits_twice_the_longest() -> None:
    rule = StallDetector("auto")
    word = 0
    for now in [*range(0, 1000), *range(1000, 1291, 10)]:
        word += 2 if now < 1000 else 0
        assert rule.look(now, {"a": word}) == []
    rule.look(1299, {"a": word + 2})
    assert rule.limit("a") == pytest.approx(600)
