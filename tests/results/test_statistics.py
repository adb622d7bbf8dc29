"""Candidates are compared fold by fold."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.results.statistics import paired_difference

scores = st.lists(st.floats(0, 1), min_size=2, max_size=12)


@given(st.data(), scores, st.floats(0.05, 2))
def test_paired_difference_is_antisymmetric(
    data: st.DataObject, first: list[float], ratio: float
) -> None:
    second = data.draw(st.lists(st.floats(0, 1), min_size=len(first), max_size=len(first)))
    one, other = (
        paired_difference(first, second, ratio),
        paired_difference(second, first, ratio),
    )
    assert one.mean == pytest.approx(-other.mean)
    assert math.isnan(one.p) == math.isnan(other.p)
    if not math.isnan(one.p):
        assert one.p == pytest.approx(other.p)
        assert one.ci_low == pytest.approx(-other.ci_high)
        # The test and the interval are one statement.
        if abs(one.p - 0.05) > 1e-6:
            assert (one.p < 0.05) == (one.ci_low > 0 or one.ci_high < 0)


def test_paired_difference_is_wider_than_the_plain_t_test() -> None:
    from scipy import stats

    first, second = [0.9, 0.8, 0.85, 0.95], [0.8, 0.78, 0.8, 0.85]
    plain = stats.ttest_rel(first, second)
    assert paired_difference(first, second, 0.0).p == pytest.approx(plain.pvalue)
    assert paired_difference(first, second, 0.25).p > plain.pvalue


@pytest.mark.parametrize("second", [[0.5, 0.5], [0.4, 0.4]])
def test_equal_differences_cannot_be_tested(second: list[float]) -> None:
    found = paired_difference([0.5, 0.5], second, 0.25)
    assert math.isnan(found.p)
    assert math.isnan(found.ci_low)
