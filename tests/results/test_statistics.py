"""Candidates are compared fold by fold, and the p values of many comparisons are corrected."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from asynckfold import Difference
from asynckfold.results.statistics import Pairs, holm, paired_differences
from tests.outcomes import NAN, folds_of, results_of

GRID = st.integers(-99, 99).map(lambda number: number / 64)
"""Differences of such scores are exact."""


def pairs_of(
    scores: Any, metric: str = "profit", names: Sequence[str] = (), **folds: Any
) -> list[Difference]:
    """Compare all candidates, called m0, m1 and so on."""
    names = names or [f"m{number}/x" for number in range(len(scores))]
    table = dict(zip(names, np.asarray(scores).tolist(), strict=True))
    results = results_of(table, metric, folds=folds_of(len(scores[0]), **folds))
    return [Difference(*row) for row in results.compare().itertuples(index=False)]


def compared(first: Sequence[float], second: Sequence[float], ratio: float = 0.25) -> Difference:
    (pair,) = pairs_of([first, second], ratio=ratio)
    return pair


@st.composite
def tables(draw: st.DrawFn) -> npt.NDArray[np.float64]:
    """Scores of two to five candidates on two to eight folds, some of them missing."""
    n_folds = draw(st.integers(2, 8))
    row = st.lists(GRID | st.just(math.nan), min_size=n_folds, max_size=n_folds)
    return np.array(draw(st.lists(row, min_size=2, max_size=5)))


@pytest.mark.parametrize("ratio", [0.11, 0.25, 1.0])
def test_the_test_is_scipys_with_a_corrected_variance(ratio: float) -> None:
    for count in (2, 5, 50):
        first, second = np.random.default_rng(count).normal(size=(2, count))
        plain = stats.ttest_rel(first, second)
        t = plain.statistic * math.sqrt((1 / count) / (1 / count + ratio))
        half = stats.t.ppf(0.975, count - 1) * abs(np.mean(first - second) / t)
        pair = compared(first.tolist(), second.tolist(), ratio)
        assert pair.p == pytest.approx(2 * stats.t.sf(abs(t), count - 1))
        assert pair.p > plain.pvalue
        assert pair.mean == pytest.approx(abs(np.mean(first - second)))
        assert (pair.ci_low, pair.ci_high) == pytest.approx((pair.mean - half, pair.mean + half))
        assert pair.first == ("m0/x" if t > 0 else "m1/x")


@given(tables(), st.randoms(use_true_random=False))
def test_neither_order_nor_sign_nor_scale_matters(
    scores: npt.NDArray[np.float64], random: object
) -> None:
    names = [f"m{number}/x" for number in range(len(scores))]
    by_names = {frozenset((x.first, x.second)): x for x in pairs_of(scores)}
    assert len(by_names) == math.comb(len(names), 2)
    order = list(range(len(names)))
    random.shuffle(order)  # type: ignore[attr-defined]
    ways = {
        "order": pairs_of(scores[order], names=[names[at] for at in order]),
        "sign": pairs_of(-scores),
        "scale": pairs_of(1024 * scores),
        "shift": pairs_of(1 + scores),
    }
    for way, others in ways.items():
        for other in others:
            pair = by_names[frozenset((other.first, other.second))]
            scale = 1024 if way == "scale" else 1
            numbers = [scale * x for x in (pair.mean, pair.ci_low, pair.ci_high)]
            assert [other.mean, other.ci_low, other.ci_high] == pytest.approx(numbers, nan_ok=True)
            assert other.p == pytest.approx(pair.p, nan_ok=True)
            assert (other.conclusion, other.folds) == (pair.conclusion, pair.folds)
            if pair.mean > 0:
                assert (other.first == pair.first) == (way != "sign")
                assert way == "sign" or other.won == pair.won


@given(tables().filter(lambda scores: len(scores) == 2))
def test_the_interval_and_the_test_are_one_statement(scores: npt.NDArray[np.float64]) -> None:
    (pair,) = pairs_of(scores)
    assert pair.p != 0
    if not math.isnan(pair.ci_low) and abs(pair.p - 0.05) > 1e-6:
        assert (pair.conclusion == "beats") == (pair.ci_low > 0)


def test_a_pair_is_compared_on_the_folds_that_both_have() -> None:
    pair = compared([0.9, 0.8, NAN, 0.9, 0.7], [0.8, 0.75, 0.9, 0.75, NAN])
    assert replace(pair, folds=0) == replace(compared([0.9, 0.8, 0.9], [0.8, 0.75, 0.75]), folds=0)
    assert (pair.folds, pair.won) == (3, 3)
    nothing = compared([0.9, NAN], [NAN, 0.9])
    assert (nothing.folds, nothing.conclusion) == (0, "untestable")
    assert math.isnan(nothing.mean)


def test_identical_differences_prove_nothing() -> None:
    for count in (1, 2, 10):
        ahead = compared([0.7] * count, [0.6] * count)
        assert (ahead.conclusion, ahead.won, ahead.first) == ("untestable", count, "m0/x")
        assert math.isnan(ahead.p)
        equal = compared([0.7] * count, [0.7] * count)
        assert (equal.conclusion, equal.mean, equal.won) == ("equal", 0, 0)
        assert equal.p == 1 or count == 1
        assert math.isnan(equal.ci_low)


def test_one_more_sample_in_every_fold_proves_nothing() -> None:
    sizes = [360, 360, 359, 359, 359]
    scores = np.array([[(300 + more) / size for size in sizes] for more in (0, 1)])
    (pair,) = pairs_of(scores, valid=sizes)
    assert (pair.first, pair.conclusion) == ("m1/x", "untestable")
    # Two more in one of them is a spread.
    scores[1, 0] += 1 / 360
    (pair,) = pairs_of(scores, valid=sizes)
    assert not math.isnan(pair.p)


def test_intervals_stay_within_what_is_possible() -> None:
    (pair,) = pairs_of([[0.0, 0.2], [0.9, 0.5]], "accuracy")
    assert (pair.ci_low, pair.ci_high) == (-1, 1)


def by_hand(values: Sequence[float], others: int) -> list[float]:
    """Holm's method by its definition: a p is adjusted to the smallest level that rejects it."""
    ordered = sorted(values)
    steps = [min(1.0, (len(values) - i + others) * p) for i, p in enumerate(ordered)]
    return [max(steps[: ordered.index(p) + 1]) for p in values]


@given(st.lists(st.floats(0, 1), max_size=8, unique=True), st.integers(0, 5), st.data())
def test_holm(values: list[float], others: int, data: st.DataObject) -> None:
    def corrected(values: Sequence[float]) -> list[float]:
        return holm(np.array(values, float), others).tolist()

    known = corrected(values)
    assert known == pytest.approx(by_hand(values, others))
    # What cannot be tested counts for nothing.
    place = data.draw(st.integers(0, len(values)))
    again = corrected([*values[:place], math.nan, *values[place:]])
    assert math.isnan(again.pop(place))
    assert again == known
    if not others:
        assert corrected([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@given(tables())
def test_all_pairs_at_once_equal_each_pair_alone(scores: npt.NDArray[np.float64]) -> None:
    names = [f"m{number}/x" for number in range(len(scores))]
    together = Pairs(paired_differences(names, scores, folds_of(len(scores[0]))))
    assert together.conclusions.tolist() == [pair.conclusion for pair in together]
    alone = [
        pairs_of(scores[[one, other]], names=[names[one], names[other]])[0]
        for one, other in itertools.combinations(range(len(scores)), 2)
    ]
    # As text, in which NaN equals NaN.
    assert repr([replace(pair, p=0) for pair in together]) == repr(
        [replace(pair, p=0) for pair in alone]
    )
    p_values = [pair.p for pair in alone if not math.isnan(pair.p)]
    assert [pair.p for pair in together if not math.isnan(pair.p)] == by_hand(p_values, 0)
