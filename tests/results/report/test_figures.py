"""The figures: inline SVG of the page, and those of matplotlib."""

from __future__ import annotations

import math
import re
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold import InputError, RunStore, load_results
from asynckfold.jobs.placement import Gpu, Load
from asynckfold.sweep.tasks import Sampler
from tests.results.report.reports import Report, report_again, report_of
from tests.synthetic import FakeClockStore, Synthetic, write_run

NAN, METRIC = math.nan, "accuracy"
ALL = ["scores", "curves", "loss_vs_time", "class_accuracy", "confusion", "probabilities"]
ALL += ["cpu_usage", "timeline", "speedup"]
"""Figures of a run of classes."""
NO_CLASSES = {"class_accuracy", "confusion", "probabilities"}
SMALL = Synthetic(folds=2, models=("A",), lr_schedules=("x",))


def plotted(root: Path) -> dict[str, Any]:
    """Return all figures that a run has numbers for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a run is unfinished
        results = load_results(root)
    figures = {}
    for name in [*ALL, "predictions"]:
        with suppress(InputError):
            figures[name] = results.plot(name)
    return figures


# By matplotlib


def test_a_complete_run_has_every_figure(complete: Report) -> None:
    figures = plotted(complete.root)
    assert list(figures) == ALL
    titles = {name: figure.get_suptitle().replace("\n", " ") for name, figure in figures.items()}
    assert titles["scores"] == complete.numbers["verdict"]["sentences"][0].removesuffix(".")
    assert titles["class_accuracy"] == "Accuracy of each class: 4 candidates"
    assert "8 for 3" in titles["confusion"]
    assert titles["probabilities"].startswith(f"{complete.numbers['highest']} is right in ")
    assert "(measured)" in titles["speedup"]
    assert titles["timeline"].startswith("20 jobs in ")
    # Seconds of models add up to those of the run.
    (axes,) = figures["speedup"].axes
    models = dict.fromkeys(row["model"] for row in complete.numbers["candidates"])
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [*models, "whole sweep"]
    widths = [bar.get_width() for bars in axes.containers for bar in bars]
    serial, packed, ideal = widths[::3], widths[1::3], widths[2::3]
    assert sum(packed[:-1]) == pytest.approx(packed[-1])
    assert sum(serial[:-1]) == pytest.approx(serial[-1])
    assert ideal == pytest.approx([seconds / 2 for seconds in serial])
    assert f", {complete.numbers['speedup']['ratio']:.2f}× as fast" in axes.texts[-2].get_text()


@pytest.mark.parametrize(
    ("run", "absent"),
    [
        (
            Synthetic(classes=(), metrics=("r2",), baseline=None, cpu_samples=False, folds=2),
            NO_CLASSES | {"loss_vs_time", "cpu_usage", "speedup"},
        ),
        (
            replace(SMALL, status=lambda job: "failed"),
            NO_CLASSES | {"scores", "curves", "loss_vs_time", "speedup"},
        ),
        (replace(SMALL, others=0.8), {"speedup"}),
        (replace(SMALL, status=lambda job: "pending", baseline=None, cpu_samples=False), set(ALL)),
        (replace(SMALL, score=NAN), {"scores"}),
        (replace(SMALL, baseline="estimated"), {"loss_vs_time"}),
    ],
)
def test_figures_without_numbers_are_left_out(root: Path, run: Synthetic, absent: set[str]) -> None:
    figures = plotted(write_run(root, run))
    assert figures.keys() - {"predictions"} == set(ALL) - absent
    assert ("predictions" in figures) == (not run.classes)
    if run.baseline == "estimated":
        assert "serial (estimated)" in figures["speedup"].axes[0].texts[0].get_text()


def test_mathtext_is_drawn_literally(root: Path) -> None:
    names = ("$\\frac{$", "$x^2$", "a_b $", "%d {} \\n")
    write_run(root, Synthetic(models=names, lr_schedules=("c",), folds=2, epochs=2))
    for kind in ("scores", "timeline", "speedup"):
        load_results(root).plot(kind).canvas.draw()


# Inline


def test_a_forest_has_a_point_for_each_fold_and_says_its_value(complete: Report) -> None:
    rows, points = complete.numbers["candidates"], list(complete.figure("forest").iter("circle"))
    scores = [score for row in rows for score in row["scores"][METRIC]]
    assert complete.texts("forest", "circle") == [
        f"{row['name']}, fold {at}: {score:.4f}"
        for row in rows
        for at, score in enumerate(row["scores"][METRIC])
    ]
    places = [float(point.attrib["cx"].removesuffix("%")) for point in points]
    assert np.argsort(places, kind="stable").tolist() == np.argsort(scores, kind="stable").tolist()
    (label,) = re.findall(r'aria-label="(accuracy of 4 candidates[^"]*)"', complete.page)
    mean = f"mean {rows[0]['mean'][METRIC]:.4f} over 5 folds, 95 % interval "
    assert f"{rows[0]['name']}: {mean}{rows[0]['ci_low']:.4f} to " in label


def test_curves_have_a_band_and_the_learning_rate(complete: Report) -> None:
    titles = ["valid loss", "accuracy", "train loss", "learning rate"]
    assert complete.texts("curves", "p") == titles
    drawn = complete.figure("curves")
    counts = [len(list(drawn.iter(tag))) for tag in ("polygon", "polyline")]
    assert counts == [4 * 4, 4 * 4]
    said, rows = complete.texts("curves", "circle"), complete.numbers["candidates"]
    assert any(text.startswith(f"{rows[0]['name']}, epoch 3: accuracy") for text in said)
    assert sum("learning rate 0.0010" in text for text in said) == 4 * 5
    assert complete.texts("curves", "li") == [row["name"] for row in rows]


def test_the_timeline_has_a_row_for_each_core_and_gpu_and_one_bar_for_a_fusion_group(
    root: Path,
) -> None:
    write_run(root, replace(SMALL, folds=4, status=lambda job: "pending", baseline=None))
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        first, second, third, fourth = (job.id for job in store.reader.plan.jobs)
        store.clock = 1.0
        # Two jobs at the same time on one core are a fusion group.
        for name, core, device in (
            (first, 0, "cpu"),
            (second, 0, "cpu"),
            (third, 1, "cuda:10"),
            (fourth, 2, "cuda:2"),
        ):
            store.start_attempt(name, (core,), 1, device, 2.0)
        store.clock = 3.0
        for name in (first, second, third, fourth):
            store.end_attempt(name, 1, "failed", error="ValueError: bad")
    report = report_again(root)
    rows = [
        item.text
        for item in report.figure("timeline").iter("text")
        if "tick" in item.attrib.get("class", "")
    ]
    assert rows == ["GPU 2", "GPU 10", "core 0", "core 1", "core 2"]
    bars = report.texts("timeline", "rect")
    assert len(bars) == 5
    (facts,) = (bar.splitlines() for bar in bars if bar.startswith(first))
    assert facts[:2] == [first, second]
    assert facts[2] == "2.0 s on core 0; failed, attempt 1"


@pytest.mark.parametrize("kind", ["measured", "estimated"])
def test_serial_seconds_stand_beside_packed_ones_and_the_ideal(root: Path, kind: str) -> None:
    report = report_of(root, Synthetic(models=("A", "B"), baseline=kind, folds=2))
    words = report.texts("speedup", "text")
    assert any(f"serial ({kind})" in text for text in words)
    is_measured = kind == "measured"
    assert any("× as fast" in text for text in words) == is_measured
    ideals = sum("ideal: one job per core, 2× as fast" in text for text in words)
    assert ideals == (3 if is_measured else 0)
    bars = report.figure("speedup").iter("rect")
    widths = [float(bar.attrib["width"].rstrip("%")) for bar in bars]
    # Of A, B and the whole sweep: serial, packed, and the serial seconds on two cores.
    assert len(widths) == (9 if is_measured else 6)
    if is_measured:
        assert widths[2::3] == pytest.approx([serial / 2 for serial in widths[::3]], rel=1e-3)


def test_each_gpu_has_its_share_of_the_time(root: Path) -> None:
    """Two GPUs are sampled, of which this run is not allowed the one between them."""
    write_run(root, replace(SMALL, baseline=None, status=lambda job: "pending"))
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        store.set_software({"torch": "2.6.0"})
        for at, use in enumerate((0.0, 0.5, 1.0)):
            store.clock = 10.0 + at
            gpus = (Gpu(0, 1, 1, use=use), Gpu(2, 1, 1, use=0.25))
            load = Load((0,), (0,), 1, gpus=gpus, use=(0.75,), own=0.5)
            Sampler(store, "packed").look(load, at_end=True)
        store.start_attempt(store.reader.plan.jobs[0].id, (0,), 1, "cuda:2", 2.0)
    report = report_again(root)
    uses = report.numbers["gpu_use"]
    first, second = uses
    assert [use["index"] for use in uses] == [0, 2]
    assert (first["seconds"], first["used"]) == ([0.0, 1.0, 2.0], [0.0, 0.5, 1.0])
    assert (first["mean"], second["mean"]) == (pytest.approx(0.75), pytest.approx(0.25))
    assert "GPU 0: busy 75.0 % of the time" in report.texts("gpu_usage", "p")
    assert "after 2.0 s: GPU 2 busy 25.0 % of the time" in report.texts("gpu_usage", "circle")
    # What other programs used is read from the samples of cores alone.
    with RunStore.read(root) as reader:
        assert [item.cores for item in reader.samples()[-3:]] == [(0.75,)] * 3
