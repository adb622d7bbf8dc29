from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from asynckfold.results.report import sentences
from asynckfold.results.report.charts import Chart, draw, draw_scores, plotted
from asynckfold.results.report.charts.style import name_candidates
from asynckfold.results.report.summary import summarize
from asynckfold.store import RunStore
from tests.results.report.conftest import Summarize
from tests.synthetic import Synthetic

ALL = ["scores", "curves", "classes", "confusion", "use", "gantt", "speedup"]


def _pixels(chart: Chart) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(Image.open(io.BytesIO(chart.png)).convert("L"))


@pytest.fixture(scope="module")
def charts(complete: Path) -> tuple[Chart, ...]:
    """All figures of the complete run."""
    with RunStore.read(complete) as store:
        return draw(summarize(store))


def test_a_complete_run_has_every_figure(charts: tuple[Chart, ...]) -> None:
    assert [chart.name for chart in charts] == ALL
    for chart in charts:
        pixels = _pixels(chart)
        assert pixels.shape == (chart.height, chart.width)
        assert pixels.std() > 5, f"{chart.name} is empty"
        assert chart.title in chart.alt


def test_titles_state_what_was_found(complete: Path, charts: tuple[Chart, ...]) -> None:
    with RunStore.read(complete) as store:
        summary = summarize(store)
    titles = {chart.name: chart.title for chart in charts}
    assert summary.best is not None
    assert titles["scores"] == sentences.winner(summary)
    assert "Hardest class" in titles["classes"]
    assert "8 for 3" in titles["confusion"]
    assert "(measured)" in titles["speedup"]
    assert "20 jobs on 2 cores" in titles["gantt"]


def test_a_legend_counts_what_is_drawn(summarized: Summarize) -> None:
    summary = summarized(Synthetic(models=tuple("ABCDEFGHIJKL"), lr_schedules=("x",), folds=2))
    names = [row.name for row in summary.candidates]
    for drawn, last in ((names, "the other 4"), (names[:9], "the other 1"), (names[:2], names[1])):
        figure = Figure()
        name_candidates(figure, summary, drawn, lines=True)
        assert figure.legends[0].get_texts()[-1].get_text() == last


@pytest.mark.parametrize(
    ("run", "absent"),
    [
        (
            Synthetic(classes=(), metrics=("r2",), baseline=None, cpu_samples=False, folds=2),
            {"classes", "confusion", "use", "speedup"},
        ),
        (
            Synthetic(status=lambda job: "failed"),
            {"scores", "curves", "classes", "confusion", "speedup"},
        ),
        (Synthetic(others=0.8, epochs=1, models=("A",)), {"speedup"}),
        (Synthetic(status=lambda job: "pending", baseline=None, cpu_samples=False), set(ALL)),
        (Synthetic(score=float("nan"), models=("A",), folds=2), {"scores"}),
        (Synthetic(epochs=1, models=("A",), lr_schedules=("x",)), set()),
    ],
)
def test_figures_without_numbers_are_left_out(
    summarized: Summarize, run: Synthetic, absent: set[str]
) -> None:
    assert {chart.name for chart in draw(summarized(run))} == set(ALL) - absent


def test_several_processes_are_compared_with_a_measured_baseline(
    summarized: Summarize,
) -> None:
    summary = summarized(Synthetic(processes=2, models=("A",), lr_schedules=("c",), folds=2))
    (race,) = summary.races
    assert (race.candidate, race.processes, race.threads) == ("A/c", 2, 2)
    assert [seconds for seconds, _ in race.several] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5])
    assert race.one[-1] == pytest.approx((4.5, 0.05 + np.exp(-5)))
    assert race.class_accuracy == (0.9,) * 10
    found = {chart.name: chart for chart in draw(summary)}
    assert list(found) == ["scores", "curves", "race", *ALL[2:]]
    assert found["race"].title.startswith(
        "A/c: 2 processes reach the final training loss of one in "
    )
    assert found["race"].title.endswith("instead of 4.5 s")
    alone = {chart.name: chart for chart in draw(replace(summary, races=()))}
    assert found["classes"].height > alone["classes"].height
    slow = replace(race, several=((9.0, 1.0),))
    told = {chart.name: chart.title for chart in draw(replace(summary, races=(slow,)))}
    assert "end at a training loss of 1.0000 in 9.0 s, one at" in told["race"]


@pytest.mark.parametrize(
    "run",
    [
        Synthetic(processes=2, baseline="estimated"),
        Synthetic(processes=2, status=lambda job: "failed"),
        Synthetic(processes=2, status=lambda job: "pending"),
        Synthetic(),
    ],
)
def test_no_race_without_both(summarized: Summarize, run: Synthetic) -> None:
    assert summarized(run).races == ()


def test_the_callers_matplotlib_style_is_neither_used_nor_changed(complete: Path) -> None:
    with RunStore.read(complete) as store:
        summary = summarize(store)
    plain = draw_scores(summary)
    with matplotlib.rc_context({"figure.facecolor": "black", "font.size": 30}):
        before = dict(matplotlib.rcParams)
        styled = draw_scores(summary)
        assert dict(matplotlib.rcParams) == before
    assert plain == styled


def test_mathtext_is_drawn_literally(summarized: Summarize) -> None:
    names = ("$\\frac{$", "$x^2$", "a_b $", "%d {} \\n")
    charts = draw(summarized(Synthetic(models=names, lr_schedules=("c",), folds=2, epochs=2)))
    assert [chart.name for chart in charts] == ALL


@given(st.text(max_size=200), st.integers(5, 40))
def test_plotted_text_is_one_short_line_that_the_font_knows(text: str, limit: int) -> None:
    shown = plotted(text, limit)
    assert 1 <= len(shown) <= limit
    assert "\n" not in shown


def test_unknown_glyphs_become_boxes() -> None:
    assert plotted("网络 é $x$") == "□□ é $x$"
