"""Laws of `decide`, over every history that can happen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asynckfold.scheduling.retries import CLASS_OF, PAUSE_SECONDS, RETRIES, decide

OUTCOMES = st.sampled_from(sorted(CLASS_OF))

MOST_ATTEMPTS = 1 + sum(RETRIES.values())
"""Of a job in one session, whatever happens to it."""


@given(st.lists(OUTCOMES, min_size=MOST_ATTEMPTS, max_size=20))
def test_attempts_are_bounded_and_each_class_by_its_own_number(outcomes: list[str]) -> None:
    history: list[str] = []
    for outcome in outcomes:
        retry = decide(history, outcome)
        history.append(outcome)
        if retry is None:
            break
    classes = [CLASS_OF[outcome] for outcome in history]
    assert retry is None
    assert len(history) <= MOST_ATTEMPTS
    assert classes.count(classes[-1]) == RETRIES[classes[-1]] + 1
    assert all(classes.count(name) <= most + 1 for name, most in RETRIES.items())


@given(st.lists(OUTCOMES, max_size=6), OUTCOMES)
def test_a_job_runs_alone_from_the_first_out_of_memory_on(history: list[str], outcome: str) -> None:
    retry = decide(history, outcome)
    if retry is not None:
        assert retry.alone == ("oom" in [*history, outcome])
        assert retry.alone_on_gpu == ("gpu_oom" in [*history, outcome])


@given(st.lists(OUTCOMES, max_size=6), OUTCOMES)
def test_only_the_machine_gets_a_pause(history: list[str], outcome: str) -> None:
    retry = decide(history, outcome)
    if retry is not None:
        assert (retry.after_s > 0) == (CLASS_OF[outcome] == "infra")


def test_pauses_grow() -> None:
    retries = [decide(["died"] * count, "died") for count in range(3)]
    assert [retry and retry.after_s for retry in retries] == [
        PAUSE_SECONDS,
        4 * PAUSE_SECONDS,
        None,
    ]


@given(st.lists(OUTCOMES, max_size=6))
def test_what_the_users_code_raises_is_final(history: list[str]) -> None:
    assert decide(history, "error") is None
