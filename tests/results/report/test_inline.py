"""The figures that the page draws as inline SVG."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.results.report import sentences, svg
from asynckfold.results.report.inline import forest, inline
from asynckfold.results.report.sanitize import clean
from tests.results.report.conftest import Summarize
from tests.synthetic import Synthetic

NAN, METRIC = math.nan, "accuracy"
numbers = st.floats(allow_nan=True, allow_infinity=True, width=64)


def elements(drawn: str | None, tag: str) -> list[ElementTree.Element]:
    """Return all elements of a tag; the SVG must be valid XML."""
    assert drawn is not None
    return list(ElementTree.fromstring(f"<div>{drawn}</div>").iter(tag))


def shares(drawn: str | None, tag: str, key: str) -> Iterator[float]:
    for found in elements(drawn, tag):
        yield float(found.attrib[key].removesuffix("%"))


def row(name: str, scores: Sequence[float], low: float = NAN, high: float = NAN) -> Any:
    known = [score for score in scores if not math.isnan(score)]
    mean = {METRIC: sum(known) / len(known) if known else NAN}
    return SimpleNamespace(name=name, scores={METRIC: scores}, mean=mean, ci_low=low, ci_high=high)


def test_a_forest_has_a_point_for_each_fold_and_says_its_value() -> None:
    rows = [row("A/x", (0.9, 0.8, 1.0), 0.7, 1.0), row("B/x", (0.5, NAN, 0.6))]
    drawn = forest(rows, METRIC, ("fold 0", "fold 1", "fold 2"))
    points = elements(drawn, "circle")
    assert [point[0].text for point in points] == [
        "A/x, fold 0: 0.9000",
        "A/x, fold 1: 0.8000",
        "A/x, fold 2: 1.0000",
        "B/x, fold 0: 0.5000",
        "B/x, fold 2: 0.6000",
    ]
    at = list(shares(drawn, "circle", "cx"))
    assert at[1] < at[0] < at[2]
    assert at[3] == min(at)
    (label,) = {
        item.attrib["aria-label"] for item in elements(drawn, "svg") if "role" in item.attrib
    }
    assert "A/x: mean 0.9000 over 3 folds, 95 % interval 0.7000 to 1.0000" in label
    assert "B/x: mean 0.5500 over 2 folds" in label


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=3), st.text(max_size=60))
def test_any_numbers_and_names_stay_inside(
    scores: list[tuple[float, float, float]], name: str
) -> None:
    shown = clean(name)
    rows = [row(shown, line, min(line), max(line)) for line in scores]
    drawn = forest(rows, METRIC, ("fold 0", "fold 1", "fold 2"))
    if drawn is not None:
        assert all(0 <= share <= 100 for share in shares(drawn, "circle", "cx"))


@given(numbers, numbers, numbers, st.booleans())
def test_a_scale_stays_between_its_ends(low: float, high: float, value: float, log: bool) -> None:
    values = [abs(it) for it in (low, high) if math.isfinite(it) and (it or not log)]
    scale = svg.Scale.over(values, log=log and bool(values) and min(values) > 1e-300)
    if not math.isnan(value):
        assert 0 <= scale(abs(value)) <= 1
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks(5))


def test_curves_have_a_band_and_the_learning_rate(summarized: Summarize) -> None:
    summary = summarized(Synthetic(folds=2, epochs=3))
    drawn = inline(summary)["curves"]
    titles = [item.text for item in elements(drawn, "p")]
    assert titles == ["valid loss", "accuracy", "train loss", "learning rate"]
    assert len(elements(drawn, "polygon")) == len(elements(drawn, "polyline")) == 4 * 4
    said = [item[0].text or "" for item in elements(drawn, "circle")]
    first = summary.candidates[0].name
    assert any(text.startswith(f"{first}, epoch 3: accuracy") for text in said)
    assert sum("learning rate 0.0010" in text for text in said) == 4 * 3
    entries = [item.text for item in elements(drawn, "li")]
    assert entries == [row.name for row in summary.candidates]


def test_a_fusion_group_is_one_bar(summarized: Summarize) -> None:
    summary = summarized(Synthetic(folds=2, models=("A",), lr_schedules=("x",)))
    first = summary.bars[0]
    fused = replace(summary, bars=(first, replace(first, job="A/x/fold-9")))
    (bar,) = elements(inline(fused)["timeline"], "rect")
    facts = (bar[0].text or "").splitlines()
    assert first.score > 0
    assert facts[:2] == [
        f"{name}: accuracy {first.score:.4f}" for name in (first.job, "A/x/fold-9")
    ]
    assert facts[2].endswith(" s on core 0; ok, attempt 1")


def test_gpus_have_rows_of_their_own(summarized: Summarize) -> None:
    summary = summarized(Synthetic(folds=2, models=("A",), lr_schedules=("x",)))
    first, second = summary.bars
    moved = replace(first, device="cuda:10"), replace(second, device="cuda:2")
    drawn = inline(replace(summary, bars=moved))["timeline"]
    rows = [item.text for item in elements(drawn, "text") if "tick" in item.attrib.get("class", "")]
    assert rows == ["GPU 2", "GPU 10", "core 0", "core 1"]
    assert len(elements(drawn, "rect")) == 4


@pytest.mark.parametrize("kind", ["measured", "estimated"])
def test_an_estimated_serial_time_is_called_one(summarized: Summarize, kind: str) -> None:
    drawn = inline(summarized(Synthetic(baseline=kind, folds=2)))["speedup"]
    words = " ".join(item.text or "" for item in elements(drawn, "text"))
    assert f"serial ({kind})" in words
    assert ("× as fast" in words) == (kind == "measured")


def test_the_ideal_stands_beside_each_measured_model(summarized: Summarize) -> None:
    summary = summarized(Synthetic(models=("A", "B"), folds=2))
    drawn = inline(summary)["speedup"]
    widths = [float(bar.attrib["width"].rstrip("%")) for bar in elements(drawn, "rect")]
    # Of A, B and the whole sweep: serial, packed, and the serial seconds on two cores.
    assert len(widths) == 9
    assert sentences.ideal(summary) == 2
    assert widths[2::3] == pytest.approx([serial / 2 for serial in widths[::3]], rel=1e-3)
    words = [item.text or "" for item in elements(drawn, "text")]
    assert sum("ideal: one job per core, 2× as fast" in text for text in words) == 3
