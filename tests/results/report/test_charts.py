from __future__ import annotations

import io
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from asynckfold import RunStore
from asynckfold.results.report import sentences
from asynckfold.results.report.charts import FIGURES, draw, style
from asynckfold.results.report.charts.drawings import rendered
from asynckfold.results.report.charts.style import plotted
from asynckfold.results.report.summary import Summary, summarize
from tests.results.report.conftest import Summarize
from tests.synthetic import Synthetic

ALL = [
    "scores",
    "curves",
    "loss_vs_time",
    "class_accuracy",
    "confusion",
    "probabilities",
    "cpu_usage",
    "timeline",
    "speedup",
]
"""Those of classes."""

NO_CLASSES = {"class_accuracy", "confusion", "probabilities"}


def titles(summary: Summary) -> dict[str, str]:
    """Return the titles of all figures that a run has."""
    drawn = {name: make(summary) for name, make in FIGURES.items()}
    return {name: figure.get_suptitle() for name, figure in drawn.items() if figure is not None}


def test_a_complete_run_has_every_figure(complete: Path) -> None:
    with RunStore.read(complete) as store:
        summary = summarize(store)
    drawn = draw(summary)
    assert list(drawn) == [f"{name}.png" for name in ALL]
    for name, png in drawn.items():
        assert np.asarray(Image.open(io.BytesIO(png)).convert("L")).std() > 5, f"{name} is empty"
    found = titles(summary)
    assert summary.highest is not None
    assert found["scores"] == sentences.headline(summary)
    assert "Hardest class" in found["class_accuracy"]
    assert "8 for 3" in found["confusion"]
    assert "(measured)" in found["speedup"]
    assert "20 jobs on 2 cores" in found["timeline"]


@pytest.mark.parametrize(
    ("run", "absent"),
    [
        (
            Synthetic(classes=(), metrics=("r2",), baseline=None, cpu_samples=False, folds=2),
            NO_CLASSES | {"loss_vs_time", "cpu_usage", "speedup"},
        ),
        (
            Synthetic(status=lambda job: "failed"),
            NO_CLASSES | {"scores", "curves", "loss_vs_time", "speedup"},
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
    drawn = titles(summarized(run)).keys()
    assert drawn - {"predictions"} == set(ALL) - absent
    assert ("predictions" in drawn) == (not run.classes)


@pytest.mark.parametrize(
    "run",
    [
        Synthetic(baseline="estimated"),
        Synthetic(baseline=None),
        Synthetic(status=lambda job: "failed"),
        Synthetic(status=lambda job: "pending"),
    ],
)
def test_no_loss_over_time_without_both(summarized: Summarize, run: Synthetic) -> None:
    assert FIGURES["loss_vs_time"](summarized(run)) is None


def test_seconds_and_speedups_of_models_add_up_to_those_of_the_run(complete: Path) -> None:
    with RunStore.read(complete) as store:
        summary = summarize(store)
    drawing = FIGURES["speedup"](summary)
    assert drawing is not None
    assert summary.speedup is not None
    seconds, ratios = drawing.axes
    assert [label.get_text() for label in seconds.get_yticklabels()] == [
        *dict.fromkeys(row.model for row in summary.candidates),
        "whole sweep",
    ]
    serial, packed = ([bar.get_width() for bar in bars] for bars in seconds.containers[:2])
    assert sum(packed[:-1]) == pytest.approx(packed[-1])
    assert sum(serial[:-1]) == pytest.approx(serial[-1])
    own, ideal = ([bar.get_width() for bar in bars] for bars in ratios.containers[:2])
    assert own == pytest.approx([a / b for a, b in zip(serial, packed, strict=True)])
    assert own[-1] == pytest.approx(summary.speedup.ratio)
    assert set(ideal) == {2}


def test_an_estimate_has_seconds_and_no_ratios(summarized: Summarize) -> None:
    drawing = FIGURES["speedup"](summarized(Synthetic(baseline="estimated")))
    assert drawing is not None
    assert len(drawing.axes) == 1
    (legend,) = drawing.legends
    assert "estimated" in legend.get_texts()[0].get_text()


def test_the_callers_matplotlib_style_is_neither_used_nor_changed(complete: Path) -> None:
    with RunStore.read(complete) as store:
        summary = summarize(store)
    plain = draw(summary)["scores.png"]
    with matplotlib.rc_context({"figure.facecolor": "black", "font.size": 30}):
        before = dict(matplotlib.rcParams)
        styled = draw(summary)["scores.png"]
        assert dict(matplotlib.rcParams) == before
    assert plain == styled


def test_mathtext_is_drawn_literally(summarized: Summarize) -> None:
    names = ("$\\frac{$", "$x^2$", "a_b $", "%d {} \\n")
    summary = summarized(Synthetic(models=names, lr_schedules=("c",), folds=2, epochs=2))
    assert len(draw(summary)) == len(ALL)


@pytest.mark.filterwarnings("error")
@pytest.mark.skipif(len(style.fonts()) == 1, reason="no font for Chinese is installed")
def test_names_in_chinese_are_drawn_in_an_installed_font() -> None:
    name = "网络"
    assert plotted(f"{name}/warm") == f"{name}/warm"
    drawing = style.applied(lambda: style.new_figure(1, f"LeNet {name}"))()
    # A missing glyph is a warning.
    assert all(rendered(drawing, kind) for kind in ("png", "svg", "pdf"))


def test_a_legend_of_wide_letters_fits_the_figure(summarized: Summarize) -> None:
    models = tuple("卷积神经网络与残差连接的大模型" + sign for sign in "甲乙丙丁")
    drawing = FIGURES["timeline"](summarized(Synthetic(models=models, baseline=None, epochs=1)))
    assert drawing is not None
    drawing.canvas.draw()
    (legend,) = drawing.legends
    assert legend.get_window_extent().x1 <= drawing.bbox.x1
