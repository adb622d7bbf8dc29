"""Racing as a law: what is left out depends on complete folds alone, and seldom is the best."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from asynckfold.scheduling.racing import left_out

SIZES = [(80, 20)] * 5


def drawn(seed: int, candidates: int = 4, folds: int = 5, gap: float = 0.0) -> np.ndarray:
    """Return scores of candidates, each `gap` worse than the one before."""
    noise = np.random.default_rng(seed).normal(0, 0.01, (candidates, folds))
    return 0.9 - gap * np.arange(candidates)[:, None] + noise


def test_the_level_is_shared_by_looks_and_pairs() -> None:
    scores = drawn(1, candidates=2, gap=0.02)
    scores[:, 2:] = np.nan
    ahead = scores[0, :2] - scores[1, :2]
    t = ahead.mean() / np.sqrt((1 / 2 + 20 / 80) * ahead.var(ddof=1))
    # The copy of the loser makes two pairs; folds beyond the third are further looks.
    for rows, folds, tests in ((2, 3, 1), (3, 3, 2), (3, 5, 6)):
        level, table = tests * stats.t.sf(t, 1), scores[[0, 1, 1][:rows], :folds]
        assert left_out(table, SIZES[:folds], 0.999 * level) == {}
        assert left_out(table, SIZES[:folds], 1.001 * level) == dict.fromkeys(range(1, rows), 2)


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.02, 0.1]), st.integers(0, 5))
def test_later_folds_change_nothing_and_nobody_comes_back(seed: int, gap: float, at: int) -> None:
    scores = drawn(seed, gap=gap)
    scores[np.random.default_rng(seed).random(scores.shape) < 0.05] = -np.inf
    whole, early = left_out(scores, SIZES, 0.2), scores.copy()
    early[:, at:] = np.nan
    assert left_out(early, SIZES, 0.2) == {row: look for row, look in whole.items() if look <= at}
    for row, look in whole.items():
        # What was started ahead of the look is never used.
        scores[row, look:] = np.nan
    assert left_out(scores, SIZES, 0.2) == whole


def test_the_best_is_lost_with_at_most_the_probability_of_the_bound() -> None:
    # All are equal, the hardest case; what folds share is in every score.
    lost, others = 0, 0
    for seed in range(600):
        out = left_out(drawn(seed, 5, 10), [(90, 10)] * 10, 0.2)
        lost += 0 in out
        others += len(out)
    assert lost <= 0.2 * 600
    assert others > lost


def test_neither_the_size_of_folds_nor_infinite_scores_decide_but_missing_ones() -> None:
    sizes = [(71, 36), (72, 35), (71, 36), (72, 35)]
    right = np.array([[30, 29, 31, 30], [29, 28, 30, 29]])
    assert left_out(right / [valid for _, valid in sizes], sizes, 0.5) == {}
    scores = drawn(0)
    scores[2, 0] = np.inf
    assert left_out(scores, SIZES, 0.05) == {}
    scores[2, 0] = -np.inf
    assert left_out(scores, SIZES, 0.05)[2] == 1
    assert left_out(np.full((2, 5), -np.inf), SIZES, 0.05) == {0: 1, 1: 1}
