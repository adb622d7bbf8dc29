"""The word that a worker shares with its sweep: any sign of life changes it, nothing else does."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.system import file_descriptors
from asynckfold.system.heartbeat import Heartbeat, Heartbeats, in_long_phase


@given(st.lists(st.booleans()))
def test_every_sign_makes_the_word_greater_and_says_what_it_was(signs: list[bool]) -> None:
    heartbeat = Heartbeat()
    for beats in signs:
        before = heartbeat.value
        (heartbeat.beat if beats else heartbeat.begin_long_phase)()
        assert heartbeat.value > before
        assert in_long_phase(heartbeat.value) is not beats


def test_another_mapping_sees_the_word_of_its_worker_only() -> None:
    file = file_descriptors.nameless_file(size=Heartbeats.SIZE)
    here, there = Heartbeats(file), Heartbeats(file)
    os.close(file)
    here[7].beat()
    here[7].beat()
    assert [there[worker].value for worker in (6, 7, 8)] == [0, 4, 0]
    assert there[7 + Heartbeats.COUNT].value == 4


def test_a_worker_rests_while_it_is_asked_to_and_not_when_it_is_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heartbeat, seen = Heartbeat(), list[bool]()
    heartbeat.rest(lambda: False)

    def sleep(seconds: float) -> None:
        seen.append(heartbeat.paused)
        heartbeat.ask(len(seen) < 3)
        assert heartbeat.paused is (len(seen) < 3)

    monkeypatch.setattr("asynckfold.system.heartbeat.time.sleep", sleep)
    heartbeat.ask(True)
    heartbeat.rest(lambda: False)
    assert seen == [True] * 3
    heartbeat.ask(True)
    heartbeat.rest(lambda: True)
    assert len(seen) == 3
    assert not heartbeat.paused
    assert heartbeat.value == 0  # no sign of life is made up


def test_a_forked_process_is_seen() -> None:
    file = file_descriptors.nameless_file(size=Heartbeats.SIZE)
    heartbeats = Heartbeats(file)
    os.close(file)
    pid = os.fork()
    if pid == 0:
        try:
            heartbeats[0].beat()
        finally:
            os._exit(0)  # or there would be two of this test run
    os.waitpid(pid, 0)
    assert heartbeats[0].value == 2
