from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.results.report import sentences
from asynckfold.results.report.attempts import FailureGroup
from asynckfold.results.report.candidate_rows import AccuracyPair
from asynckfold.results.report.summary import Summary, summarize
from asynckfold.store import RunStore
from tests.results.report.conftest import Summarize
from tests.synthetic import Synthetic


@pytest.fixture
def summary(complete: Path) -> Summary:
    with RunStore.read(complete) as store:
        return summarize(store)


@pytest.mark.parametrize(
    ("best", "models", "lr_schedules", "words"),
    [
        ("A/cosine", "A", "cosine", "A/cosine is best"),
        (None, "A", "cosine warm", "A is the best model"),
        (None, "A B", "warm", "warm is the best LR schedule"),
        (None, "A B", "cosine warm", "Undecided"),
        (None, "A", "", "A is the best model"),
        (None, "", "", "Nothing to compare"),
    ],
)
def test_the_decision_says_best_only_of_the_best(
    summary: Summary, best: str | None, models: str, lr_schedules: str, words: str
) -> None:
    pair = summary.verdict.models[:1]
    verdict = replace(
        summary.verdict,
        best=best,
        models=pair if models else (),
        lr_schedules=pair if lr_schedules else (),
        best_models=tuple(models.split()),
        best_lr_schedules=tuple(lr_schedules.split()) or ("cosine",),
    )
    assert len(pair) == 1
    assert sentences.decision(replace(summary, verdict=verdict)) == words


def test_the_headline_is_the_verdicts_first_sentence(summary: Summary) -> None:
    assert str(summary.verdict).startswith(f"{sentences.headline(summary)}. ")
    assert "LeNet5" in sentences.headline(summary)


def test_speed_names_both_times_and_their_kind(summary: Summary) -> None:
    assert summary.speedup is not None
    text = sentences.speed(summary)
    assert sentences.duration(summary.packed_seconds) in text
    assert sentences.duration(summary.speedup.serial_seconds) in text
    assert "measured" in text
    assert f"{summary.speedup.ratio:.2f}×" in text


def test_tied_candidates_are_named_or_counted(summarized: Summarize) -> None:
    summary = summarized(Synthetic(score=0.9, models=tuple("ABCDE"), lr_schedules=("x",)))
    assert sentences.highest(summary) == "A/x, B/x, C/x and 2 more"
    assert sentences.decision(summary) == "Undecided"
    two = replace(summary, candidates=summary.candidates[:2])
    assert sentences.highest(two) == "A/x and B/x"


def test_one_candidate_is_no_winner(summarized: Summarize) -> None:
    summary = summarized(Synthetic(score=0.9, models=("A",), lr_schedules=("x",)))
    assert sentences.headline(summary) == "A/x is the only candidate: accuracy 0.9 over 5 folds"
    assert sentences.decision(summary) == "Nothing to compare"


def test_a_disturbed_baseline_gives_no_speedup(summarized: Summarize) -> None:
    summary = summarized(Synthetic(others=0.8))
    assert summary.speedup is not None
    assert summary.speedup.ratio is None
    text = sentences.speed(summary)
    assert "×" not in text
    assert "Speedup not reported: other programs used 0.8 of" in text


def test_no_speedup_is_claimed_without_success(summarized: Summarize) -> None:
    text = sentences.speed(summarized(Synthetic(status=lambda job: "failed")))
    assert "×" not in text
    assert "no job succeeded" in text


def test_no_speedup_is_claimed_of_unequal_work(summarized: Summarize) -> None:
    text = sentences.speed(
        summarized(Synthetic(status=lambda job: "failed" if job.fold else "done"))
    )
    assert "×" not in text
    assert "16 of 20 jobs did not succeed: the packed time includes" in text


@pytest.mark.parametrize(
    ("packed", "serial", "expected"),
    [
        ((0.8, 0.9), (0.9, 0.9), True),
        ((0.9, 0.899), (0.9, 0.9), False),
        ((0.9, 0.7), (0.8, 0.8), False),
    ],
)
def test_loss_of_accuracy_is_reported(
    summary: Summary, packed: tuple[float, ...], serial: tuple[float, ...], expected: bool
) -> None:
    pairs = tuple(
        AccuracyPair(f"m{number}", *pair)
        for number, pair in enumerate(zip(packed, serial, strict=True))
    )
    assert summary.speedup is not None
    told = replace(summary, speedup=replace(summary.speedup, accuracy=pairs))
    assert sentences.costs_accuracy(told) is expected
    assert sentences.accuracies(told).startswith(f"accuracy {np.mean(packed):.4f} against 0.")


def test_an_estimate_has_no_accuracy(summary: Summary) -> None:
    assert summary.speedup is not None
    estimated = replace(summary, speedup=replace(summary.speedup, accuracy=()))
    for told in (estimated, replace(summary, speedup=None)):
        assert sentences.accuracies(told) == ""
        assert not sentences.costs_accuracy(told)


def test_retried_attempts_are_those_with_a_successor(summarized: Summarize) -> None:
    summary = summarized(Synthetic(retried=("MLP/warm/fold-1",)))
    found = [(bar.job, bar.attempt) for bar in sentences.retried(summary)]
    assert found == [("MLP/warm/fold-1", 1)]


@given(st.text(), st.integers(3, 40))
def test_shortened_names_fit_and_keep_both_ends(name: str, limit: int) -> None:
    short = sentences.shorten(name, limit)
    assert len(short) <= limit
    assert short[:1] == name[:1]
    assert short[-1:] == name[-1:]


@given(st.floats(0, 1e7))
def test_durations_are_readable(seconds: float) -> None:
    text = sentences.duration(seconds)
    assert not re.search(r"(?<![\d.])60 (s|min)", text)


def test_worst_confusion_ignores_the_diagonal() -> None:
    assert sentences.worst_confusion([[9, 1], [3, 9]]) == (1, 0, 3)
    assert sentences.worst_confusion([[9, 0], [0, 9]]) is None


def test_a_run_that_is_not_complete_says_whether_it_goes_on(summary: Summary) -> None:
    left = {**summary.counts, "done": 18, "pending": 2}
    assert sentences.state(summary) == ""
    stopped = replace(summary, counts=left)
    assert sentences.state(stopped).startswith("stopped")
    assert sentences.state(replace(stopped, going=True)) == "the run is still going"


def test_the_cause_of_most_failures_is_one_short_line(summary: Summary) -> None:
    assert sentences.cause(summary) == ""
    groups = (
        FailureGroup("failed", "ValueError: " + "x" * 300 + "\nmore", ("a", "b"), ""),
        FailureGroup("failed", "TypeError: y", ("c",), ""),
    )
    cause = sentences.cause(replace(summary, failures=groups))
    assert cause.startswith("ValueError: xxx")
    assert "\n" not in cause
    assert len(cause) == 160


def test_a_single_fold_has_no_deviation(summary: Summary) -> None:
    row = summary.candidates[0]
    assert " ± " in sentences.mean_std(row, "accuracy")
    assert " ± " not in sentences.mean_std(replace(row, folds_done=1), "accuracy")


def test_no_minus_stands_before_a_zero() -> None:
    assert [sentences.signed(value) for value in (-0.0, 0.0, -1e-17, 0.5)] == [
        "+0.0000",
        "+0.0000",
        "-1e-17",
        "+0.5000",
    ]
