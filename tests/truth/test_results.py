"""What results say adds up: ranks, out-of-fold outputs, seconds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata

from asynckfold.candidates import candidates, rank
from asynckfold.cv_results import CVResults
from asynckfold.folds import make_folds
from asynckfold.plan import Plan, folds_fingerprint, make_jobs
from asynckfold.result import DONE, Result
from asynckfold.trainer_params import TrainerParams

SAMPLES = 12


def results_of(
    scores: Sequence[Sequence[float]], n_repeats: int = 1, error_score: float = float("nan")
) -> CVResults:
    """Results of one LR schedule and a model for each row of scores, fold by fold."""
    folds = make_folds(
        SAMPLES, np.arange(SAMPLES) % 2, len(scores[0]) // n_repeats, n_repeats=n_repeats
    )
    models = [f"m{number}" for number in range(len(scores))]
    jobs = make_jobs(models, ["constant"], folds, 0)
    plan = Plan(
        jobs, TrainerParams(), 4, 1, 0, "cpu", ("accuracy",), "data", folds_fingerprint(folds)
    )
    values = itertools.chain.from_iterable(scores)
    results = {
        job.id: Result(job.id, 1, DONE, {"accuracy": value})
        for job, value in zip(jobs, values, strict=True)
    }
    return CVResults(plan, folds, SAMPLES, results, 1.0, None, Path("run"), error_score)


def ranks(scores: Sequence[Sequence[float]]) -> list[int]:
    return rank(results_of(scores).candidates, "accuracy")


# Ties


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6, -1e-6])
def test_the_order_in_which_folds_are_added_up_ranks_nobody(size: float) -> None:
    one, other = [0.1 * size, 0.2 * size, 0.3 * size], [0.3 * size, 0.2 * size, 0.1 * size]
    assert size != 1 or np.mean(one) != np.mean(other)
    for scores in ([one, other], [other, one]):
        found = results_of(scores)
        assert list(found.cv_results_["rank_test_accuracy"]) == [1, 1]
        assert found.best_index_ == 0
        assert list(found.to_frame()["rank"]) == [1, 1]
        assert list(found.to_frame()["model"]) == ["m0", "m1"]
        assert found.lead is not None
        assert found.lead.difference.verdict == "tie"
        assert found.lead.best == "m0/constant"


def test_a_difference_beyond_rounding_is_one() -> None:
    assert ranks([[0.5, 0.5], [0.5, 0.5 + 1e-7], [0.5, 0.5 - 1e-7]]) == [2, 1, 3]
    # One sample of a million more.
    assert ranks([[0.999998] * 2, [0.999999] * 2]) == [2, 1]
    # Small scores differ as shares of themselves.
    assert ranks([[1e-12, 1e-12], [2e-12, 2e-12]]) == [2, 1]
    found = results_of([[1e-12, 2e-12, 1e-12], [2e-12, 4e-12, 3e-12]]).lead
    assert found is not None
    assert found.difference.verdict in ("real", "chance")


def test_infinite_scores_are_ranked() -> None:
    assert ranks([[-np.inf, 0.1], [0.2, 0.1], [-np.inf, 0.9]]) == [2, 1, 2]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_permuting_folds_changes_no_rank(counts: list[list[int]], random: object) -> None:
    scores = [[count / 50 for count in row] for row in counts]
    # In whole numbers there is no rounding: these are scikit-learn's ranks.
    expected = rankdata([-sum(row) for row in counts], method="min").astype(int).tolist()
    assert ranks(scores) == expected
    shuffled = [list(row) for row in scores]
    for row in shuffled:
        random.shuffle(row)  # type: ignore[attr-defined]
    assert ranks(shuffled) == expected
    frame = results_of(shuffled).to_frame()
    assert list(frame["rank"]) == sorted(expected)
