from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asynckfold import RunStore
from asynckfold.results.report import sentences
from asynckfold.results.report.candidate_rows import AccuracyPair
from asynckfold.results.report.summary import Summary, summarize
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


def test_tied_candidates_are_named_or_counted(summarized: Summarize) -> None:
    summary = summarized(Synthetic(score=0.9, models=tuple("ABCDE"), lr_schedules=("x",)))
    assert sentences.highest(summary) == "A/x, B/x, C/x and 2 more"
    assert sentences.decision(summary) == "Undecided"
    two = replace(summary, candidates=summary.candidates[:2])
    assert sentences.highest(two) == "A/x and B/x"


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


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (Synthetic(others=0.8), "Speedup not reported: other programs used 0.8 of"),
        (Synthetic(status=lambda job: "failed"), "no job succeeded"),
        (
            Synthetic(status=lambda job: "failed" if job.fold else "done"),
            "16 of 20 jobs did not succeed: the packed time includes",
        ),
    ],
)
def test_no_speedup_is_claimed_of_disturbed_or_unequal_work(
    summarized: Summarize, run: Synthetic, why: str
) -> None:
    text = sentences.speed(summarized(run))
    assert "×" not in text
    assert why in text
