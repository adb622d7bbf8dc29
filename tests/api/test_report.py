"""The report that a call leaves behind, results by their folder, and figures on request."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from asynckfold import (
    AllJobsFailedError,
    AsyncKFold,
    CVResults,
    InputError,
    InterruptedRunError,
    RunStore,
    StoreCorruptError,
    load_results,
    plots,
)
from asynckfold.cli import main
from asynckfold.results.report.page import render
from asynckfold.results.report.summary import summarize
from tests.interrupted import interrupted
from tests.synthetic import Synthetic, write_run
from tests.toy import Tiny, adam, samples


class Broken(Tiny):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise RuntimeError("broken")
        return super().forward(inputs)


PAGES: list[str] = []


class Looks(Tiny):
    """Reads the page of its own run."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        PAGES.extend(page.read_text("utf-8") for page in Path.cwd().glob("run/report/index.html"))
        return super().forward(inputs)


def call(root: Path, model: type[nn.Module] = Tiny, **settings: Any) -> CVResults:
    words: dict[str, Any] = {"verbose": 0, "parallelize": False, "baseline": None, **settings}
    kfold = AsyncKFold(2, samples(30), root, nn.CrossEntropyLoss(), 8, **words)
    return kfold([model], ["constant"], adam, {"epochs": 1})


def refuses(*_: Any, **settings: Any) -> Path:
    raise ValueError("no ink")


def rows_of(report: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((report / "results.csv").read_text().splitlines()))


def links_of(page: Path) -> set[str]:
    """Return the addresses of files that a page links."""
    return {*re.findall(r'href="([^"#][^"]*)"', page.read_text("utf-8"))}


@pytest.mark.reports
def test_what_lies_beside_the_page_is_linked(root: Path) -> None:
    call(root)
    assert main(["report", str(root), "--figures", "pdf"]) == 0
    page = root / "report/index.html"
    tables = {f"{name}.csv" for name in ("results", "folds", "epochs")} | {"results.json"}
    weights = {f"../Tiny/constant/fold-{fold}/final.safetensors" for fold in (0, 1)}
    assert tables | weights | {"scores.png", "scores.pdf"} <= links_of(page)
    assert all((page.parent / link).is_file() for link in links_of(page))
    with RunStore.read(root) as store:
        page.write_text(render(summarize(store)))
    assert links_of(page) == set()


def test_settings_that_were_set_stand_apart_from_defaults(root: Path) -> None:
    kfold = AsyncKFold(2, samples(30), root, nn.CrossEntropyLoss(), 8, False, verbose=0)
    kfold([Tiny], ["constant"], adam, {"epochs": 1, "clip_grad_norm": 0.5})
    assert main(["report", str(root)]) == 0
    text = (root / "report/index.html").read_text("utf-8").replace("<wbr>", "")
    chosen, kept = (
        text.partition(f'<table class="settings" aria-label="{label}">')[2].partition("</table>")[0]
        for label in ("Plan", "At their defaults")
    )
    assert "params.clip_grad_norm" in chosen
    assert "params.clip_grad_norm" not in kept
    assert "params.eval_batch_size" in kept
    assert "params.eval_batch_size" not in chosen


# Of its own accord


@pytest.mark.reports
def test_the_page_is_there_during_a_run_and_renews_itself(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    monkeypatch.setattr("asynckfold.api.execution.PUBLISH_SECONDS", 0.0)
    PAGES.clear()
    call(root.with_name("short"), Looks)
    assert not PAGES
    monkeypatch.setattr("asynckfold.api.execution.SHORT_SECONDS", -1.0)
    call(root, Looks)
    assert "<progress" in PAGES[-1]
    assert '<meta name="renewal-seconds"' in PAGES[-1]
    last = (root / "report" / "index.html").read_text("utf-8")
    assert "<progress" not in last
    assert '<meta name="renewal-seconds"' not in last


@pytest.mark.reports
def test_a_call_leaves_a_report_that_costs_the_run_no_seconds(root: Path) -> None:
    results = call(root, baseline="measure")
    results.report()
    assert {path.name for path in (root / "report").iterdir()} > {
        "index.html",
        "results.json",
        "scores.png",
        "loss_vs_time.png",
    }
    (row,) = rows_of(root / "report")
    (told,) = json.loads((root / "report" / "results.json").read_text())["candidates"]
    assert results.baseline is not None
    assert float(row["serial_seconds"]) == told["serial_seconds"]
    assert told["serial_seconds"] == pytest.approx(results.baseline.seconds)
    # The only candidate has all of the wall time, none of it spent on the report.
    assert float(row["packed_seconds"]) == told["packed_seconds"]
    assert told["packed_seconds"] == pytest.approx(results.seconds)
    assert load_results(root).seconds == results.seconds
    assert row["baseline"] == "measured"
    known = results.baseline.accuracy["Tiny/constant"]
    assert float(row["serial_accuracy"]) == told["serial_accuracy"] == pytest.approx(known)
    assert float(row["packed_accuracy"]) == pytest.approx(results.best_score_)


@pytest.mark.reports
def test_a_call_whose_jobs_all_fail_leaves_a_report(root: Path) -> None:
    with pytest.raises(AllJobsFailedError, match=r"(?s)2 of 2 jobs failed.*2 × RuntimeError"):
        call(root, Broken)
    with RunStore.read(root) as store:
        assert store.counts()["failed"] == 2
    assert "RuntimeError: broken" in (root / "report" / "index.html").read_text()


@pytest.mark.reports
def test_a_fault_in_drawing_is_a_warning_and_a_line_in_the_log(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynckfold.results.report.page.write_report", refuses)
    with pytest.warns(RuntimeWarning, match=r"no ink.*asynckfold report .* tries again") as told:
        results = call(root)
    assert results.counts["done"] == 2
    assert [item.filename for item in told] == [__file__]
    with RunStore.read(root) as store:
        (line,) = [event for event in store.events() if event.kind == "report"]
        assert line.text == "there is no report: no ink"
        assert line.at == pytest.approx(max(item.end for item in store.sessions()), abs=0.5)


def unfinished(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a run of which one job is done, as Ctrl-C came while its second one trained."""
    with interrupted(monkeypatch, "training.training_run.Training", "score", 2):
        call(root, report=True)


@pytest.mark.reports
def test_an_interrupted_call_leaves_a_partial_report(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished(root, monkeypatch)
    assert " of 2 jobs finished" in (root / "report" / "index.html").read_text()


# Results by their folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of two candidates, with a serial baseline."""
    root = tmp_path_factory.mktemp("plots") / "run"
    words: dict[str, Any] = {"verbose": 0, "engine": "serial", "baseline": "measure", "fuse": False}
    kfold = AsyncKFold(2, samples(30), root, nn.CrossEntropyLoss(), 8, report=False, **words)
    kfold({"a": Tiny, "b": Tiny}, ["constant"], adam, {"epochs": 2})
    return root


def test_results_are_loaded_by_the_path_of_a_run(folder: Path) -> None:
    assert load_results(str(folder)).fingerprint == load_results(folder).fingerprint
    with RunStore.read(folder) as store:
        assert load_results(store).counts["done"] == 4


def test_a_path_that_holds_no_run_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no run.db\. Check the path\. Did you mean"):
        load_results(folder.with_name(f"{folder.name}s"))
    with pytest.raises(InputError, match=rf"Pass one of the runs in it: {folder.name}\."):
        load_results(folder.parent)
    (tmp_path / "page.txt").write_text("")
    with pytest.raises(InputError, match=r"page.txt, which holds no run.db"):
        load_results(tmp_path / "page.txt")


@pytest.mark.damages("run.db is none of asynckfold's")
def test_a_run_db_of_another_program_is_refused(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "run.db")
    database.execute("CREATE TABLE plan (name TEXT)")
    database.commit()
    database.close()
    with pytest.raises(StoreCorruptError, match=r"run.db"):
        load_results(tmp_path)


def test_an_unfinished_run_is_loaded_with_a_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished(root, monkeypatch)
    with pytest.warns(RuntimeWarning, match="of 2 jobs have no result yet; the call that"):
        assert load_results(root).counts["pending"] > 0
    with RunStore.hold(root), pytest.warns(RuntimeWarning, match="yet; process .* works on them"):
        load_results(root)


@pytest.mark.reports
def test_ctrl_c_while_the_report_is_drawn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def struck(*_: Any, **settings: Any) -> Path:
        signal.raise_signal(signal.SIGINT)
        return root

    monkeypatch.setattr("asynckfold.results.report.page.write_report", struck)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # By a handler that waits for imports, unlike that of Python.
        with pytest.raises(InterruptedRunError, match="by SIGINT"):
            call(root)
    finally:
        assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


# Figures on request


KINDS = {
    *("scores", "curves", "confusion", "timeline", "cpu_usage", "speedup", "class_accuracy"),
    "loss_vs_time",
}


def test_a_figure_that_a_run_does_not_have_is_refused(folder: Path) -> None:
    results = load_results(folder)
    with pytest.raises(InputError, match="predictions needs numbers that this run"):
        results.plot("predictions")
    with pytest.raises(InputError, match=r"kind must be one of .*'speedups'.*Did you mean 'speed"):
        results.plot("speedups")


def test_figures_are_drawn_on_the_callers_axes(folder: Path) -> None:
    results, given = load_results(folder), Figure(figsize=(24, 12), layout="constrained")
    axes = given.subplots(2, 4)
    for ax, kind in zip(axes[0], ("scores", "curves", "confusion", "timeline"), strict=True):
        assert results.plot(kind, ax=ax) is given
        assert ax.has_data()
        assert ax.get_xlabel()
    assert axes[0, 1].get_title(loc="left") == "valid loss"
    results.plot("curves", ax=axes[1, :3])
    titles = [ax.get_title(loc="left") for ax in axes[1]]
    assert titles == ["train loss", "valid loss", "accuracy", ""]
    assert given.get_suptitle() == ""
    given.savefig(io.BytesIO(), format="png")


def test_each_figure_says_what_it_lacks(root: Path) -> None:
    with pytest.raises(AllJobsFailedError):
        call(root, Broken)
    for kind in {*KINDS, "predictions"} - {"cpu_usage", "timeline"}:
        with pytest.raises(InputError, match=f"{kind} needs "):
            load_results(root).plot(kind)


@pytest.mark.parametrize(
    ("kind", "count", "message"),
    [
        ("speedup", 1, "ax is one Axes for scores, curves, confusion, timeline, importance, "),
        ("scores", 2, "received 2 for scores"),
    ],
)
def test_axes_that_do_not_fit_are_refused(
    folder: Path, kind: str, count: int, message: str
) -> None:
    given = Figure().subplots(1, count, squeeze=False)[0]
    with pytest.raises(InputError, match=message):
        load_results(folder).plot(kind, ax=given)


def test_results_show_scores_and_a_link_to_the_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = load_results(folder)
    monkeypatch.chdir(folder.parent)
    page = results._repr_html_()
    assert page.startswith(f"<p><b>{html.escape(str(results.verdict))}</b></p>")
    assert "data:image/svg+xml;base64," in page
    assert "<code>results.report()</code> writes it" in page
    link: Any = results.report()
    assert link == folder / "report" / "index.html"
    assert 'href="run/report/index.html"' in link._repr_html_()
    assert 'href="run/report/index.html"' in results._repr_html_()


def test_a_cell_does_not_wait_for_the_pictures(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", Synthetic(models=("MLP",), folds=2, baseline=None))
    script = (
        "import sys, types\n"
        "shell = types.SimpleNamespace(kernel=object())\n"
        "sys.modules['IPython'] = types.SimpleNamespace(get_ipython=lambda: shell)\n"
        "from asynckfold import load_results\n"
        f"page = load_results({str(root)!r}).report()\n"
        "print(page.is_file(), 'matplotlib' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.stdout.split() == ["True", "False"], shown.stderr
    # The end of the process waits for them.
    assert (root / "report" / "timeline.png").is_file()


def test_the_ancestors_figures_take_a_folder_results_or_arrays(folder: Path) -> None:
    results = load_results(folder)
    for draw in (plots.class_accuracy, plots.loss_vs_time):
        assert draw(folder).get_suptitle() == draw(results).get_suptitle() != ""
    line = [1.0, 2.0], [0.5, 0.2]
    figures = [
        plots.cpu_usage(packed=line, serial=(np.arange(3), np.ones(3))),
        plots.speedup(packed={"a": 2.0, "b": 1.0}, serial={"a": 4.0, "b": 1.0}, ideal=2),
        plots.class_accuracy(packed={"a": np.array([0.5, 1])}, classes=["x", "y"]),
        plots.loss_vs_time(packed={"a": line}, serial={"a": line}),
    ]
    assert [len(figure.axes) for figure in figures] == [2, 1, 2, 1]
    assert figures[0].get_suptitle() == "CPU use: 0.35 of 1 core"
    assert plots.cpu_usage(packed=np.array(line)).get_suptitle() == "CPU use: 0.35 of 1 core"
    assert figures[1].get_suptitle() == "1.67× as fast: 3.0 s packed against 5.0 s serial"


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (lambda: plots.cpu_usage(), "either a run, or packed and serial: received neither"),
        (lambda: plots.cpu_usage("runs/x", packed=([1], [1])), "received both"),
        (lambda: plots.speedup(packed={"a": 1}), "for the same models"),
        (lambda: plots.speedup(packed={"a": 0}, serial={"a": 1}), "seconds above 0"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(draw: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        draw()


@pytest.mark.reports
def test_report_false_leaves_none(root: Path) -> None:
    call(root, report=False)
    assert not (root / "report").exists()
