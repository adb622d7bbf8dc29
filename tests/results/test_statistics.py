"""Candidates are compared fold by fold, and the p values of many comparisons are corrected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from asynckfold import Difference, Fold
from asynckfold.results.statistics import holm, paired_differences

GRID = st.integers(-99, 99).map(lambda number: number / 64)
"""Differences of such scores are exact."""


def folds_of(count: int, train: int = 80, valid: int | Sequence[int] = 20) -> list[Fold]:
    sizes = [valid] * count if isinstance(valid, int) else valid
    return [Fold(0, index, np.arange(train), np.arange(size)) for index, size in enumerate(sizes)]


def compared(first: Sequence[float], second: Sequence[float], ratio: float = 0.25) -> Difference:
    folds = folds_of(len(first), 100, round(100 * ratio))
    (found,) = paired_differences(["A", "B"], np.array([first, second]), folds)
    return found


@st.composite
def tables(draw: st.DrawFn) -> npt.NDArray[np.float64]:
    """Scores of two to five candidates on two to eight folds, some of them missing."""
    n_folds = draw(st.integers(2, 8))
    row = st.lists(GRID | st.just(math.nan), min_size=n_folds, max_size=n_folds)
    return np.array(draw(st.lists(row, min_size=2, max_size=5)))


@pytest.mark.parametrize("ratio", [0.11, 0.25, 1.0])
@pytest.mark.parametrize("count", [2, 5, 50])
def test_the_test_is_scipys_with_a_corrected_variance(count: int, ratio: float) -> None:
    first, second = np.random.default_rng(count).normal(size=(2, count))
    plain = stats.ttest_rel(first, second)
    shrunk = math.sqrt((1 / count) / (1 / count + ratio))
    t = plain.statistic * shrunk
    half = stats.t.ppf(0.975, count - 1) * abs(np.mean(first - second) / t)
    found = compared(first.tolist(), second.tolist(), ratio)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(t), count - 1))
    assert found.p > plain.pvalue
    assert found.mean == pytest.approx(abs(np.mean(first - second)))
    assert (found.ci_low, found.ci_high) == pytest.approx((found.mean - half, found.mean + half))
    assert found.first == ("A" if t > 0 else "B")


@given(tables(), st.randoms(use_true_random=False))
def test_neither_order_nor_sign_nor_scale_matters(
    scores: npt.NDArray[np.float64], random: object
) -> None:
    names = [f"m{number}" for number in range(len(scores))]
    folds = folds_of(scores.shape[1])
    found = {frozenset((x.first, x.second)): x for x in paired_differences(names, scores, folds)}
    assert len(found) == math.comb(len(names), 2)
    order = list(range(len(names)))
    random.shuffle(order)  # type: ignore[attr-defined]
    ways = {
        "order": paired_differences([names[i] for i in order], scores[order], folds),
        "sign": paired_differences(names, -scores, folds),
        "scale": paired_differences(names, 1024 * scores, folds),
        "shift": paired_differences(names, 1 + scores, folds),
    }
    for way, others in ways.items():
        for other in others:
            pair = found[frozenset((other.first, other.second))]
            scale = 1024 if way == "scale" else 1
            numbers = [scale * x for x in (pair.mean, pair.ci_low, pair.ci_high)]
            assert [other.mean, other.ci_low, other.ci_high] == pytest.approx(numbers, nan_ok=True)
            assert other.p == pytest.approx(pair.p, nan_ok=True)
            assert (other.conclusion, other.folds) == (pair.conclusion, pair.folds)
            if pair.mean > 0:
                assert (other.first == pair.first) == (way != "sign")
                assert way == "sign" or other.won == pair.won


@given(tables())
def test_the_interval_and_the_test_are_one_statement(scores: npt.NDArray[np.float64]) -> None:
    names = [f"m{number}" for number in range(len(scores))]
    for pair in paired_differences(names, scores, folds_of(scores.shape[1])):
        assert pair.p != 0
        if not math.isnan(pair.ci_low) and abs(pair.p - 0.05) > 1e-6:
            assert (pair.conclusion == "beats") == (pair.ci_low > 0)


def test_a_pair_is_compared_on_the_folds_that_both_have() -> None:
    nan = math.nan
    found = compared([0.9, 0.8, nan, 0.9, 0.7], [0.8, 0.75, 0.9, 0.75, nan])
    assert replace(found, folds=0) == replace(compared([0.9, 0.8, 0.9], [0.8, 0.75, 0.75]), folds=0)
    assert (found.folds, found.won) == (3, 3)
    nothing = compared([0.9, nan], [nan, 0.9])
    assert (nothing.folds, nothing.conclusion) == (0, "untestable")
    assert math.isnan(nothing.mean)


@pytest.mark.parametrize("count", [1, 2, 10])
def test_identical_differences_prove_nothing(count: int) -> None:
    ahead = compared([0.7] * count, [0.6] * count)
    assert (ahead.conclusion, ahead.won, ahead.first) == ("untestable", count, "A")
    assert math.isnan(ahead.p)
    equal = compared([0.7] * count, [0.7] * count)
    assert (equal.conclusion, equal.mean, equal.won) == ("equal", 0, 0)
    assert equal.p == 1 or count == 1
    assert math.isnan(equal.ci_low)


def test_one_more_sample_in_every_fold_proves_nothing() -> None:
    sizes = [360, 360, 359, 359, 359]
    first = np.array([[(300 + more) / size for size in sizes] for more in (0, 1)])
    (found,) = paired_differences(["A", "B"], first, folds_of(5, 1438, sizes))
    assert (found.first, found.conclusion) == ("B", "untestable")
    # Two more in one of them is a spread.
    first[1, 0] += 1 / 360
    (found,) = paired_differences(["A", "B"], first, folds_of(5, 1438, sizes))
    assert not math.isnan(found.p)


def test_infinite_scores_are_not_tested() -> None:
    for second in ([-math.inf, 0.1, 0.1], [-math.inf] * 3):
        found = compared([-math.inf, 0.5, 0.4], second)
        assert found.conclusion == "untestable"
    assert compared([0.3, 0.5, 0.4], [-math.inf] * 3).first == "A"


def test_intervals_stay_within_what_is_possible() -> None:
    scores = np.array([[0.0, 0.2], [0.9, 0.5]])
    (found,) = paired_differences(["A", "B"], scores, folds_of(2), 1.0)
    assert (found.ci_low, found.ci_high) == (-1, 1)


def pairs_of(values: Sequence[float]) -> list[Difference]:
    return [Difference("A", f"m{n}", 0.1, 0, 1, p, 5, 5) for n, p in enumerate(values)]


def by_hand(values: Sequence[float], others: int) -> list[float]:
    """Holm's method by its definition: a p is adjusted to the smallest level that rejects it."""
    ordered = sorted(values)
    steps = [min(1.0, (len(values) - i + others) * p) for i, p in enumerate(ordered)]
    return [max(steps[: ordered.index(p) + 1]) for p in values]


@given(st.lists(st.floats(0, 1), max_size=8, unique=True), st.integers(0, 5), st.data())
def test_holm(values: list[float], others: int, data: st.DataObject) -> None:
    found = [pair.p for pair in holm(pairs_of(values), others)]
    assert found == pytest.approx(by_hand(values, others))
    # What cannot be tested counts for nothing.
    place = data.draw(st.integers(0, len(values)))
    more = [*values[:place], math.nan, *values[place:]]
    again = [pair.p for pair in holm(pairs_of(more), others)]
    assert math.isnan(again.pop(place))
    assert again == found


def test_holm_by_the_book() -> None:
    found = [pair.p for pair in holm(pairs_of([0.01, 0.04, 0.03, 0.005]))]
    assert found == pytest.approx([0.03, 0.06, 0.06, 0.02])
