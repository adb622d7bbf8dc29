from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold import Job
from asynckfold.cli import main
from asynckfold.jobs.result import AveragingSummary
from asynckfold.results.report.files import csv_table
from asynckfold.results.report.page import embedded_numbers, inert_json
from asynckfold.results.report.sanitize import clean
from asynckfold.results.report.summary import summarize
from asynckfold.store import open_run
from tests.results.report.reports import Report, report_of
from tests.synthetic import Synthetic, write_run

ALLOWED: Mapping[str, set[str]] = {
    "html": {"lang"},
    "meta": {"charset", "name", "content", "http-equiv"},
    "a": {"href"},
    "img": {"class", "src", "alt"},
    "nav": {"aria-label", "class"},
    "script": {"type", "id"},
    "figure": {"id"},
    "h2": {"id"},
    "ul": {"class"},
    "li": {"data-legend", "style"},
    "th": {"class", "scope", "data-label"},
    "td": {"class", "data-label", "style"},
    "div": {"aria-label", "class", "id", "role", "tabindex"},
    "section": {"class", "id", "aria-label"},
    "table": {"class", "aria-label"},
    **{name: {"class"} for name in ("tr", "p")},
}
PLAIN = {
    "head", "title", "style", "body", "header", "main", "footer", "h1", "h3",
    "thead", "tbody", "figcaption", "pre", "code", "details", "summary", "wbr",
}  # fmt: skip
DRAWN = {"svg", "g", "text", "line", "circle", "path", "rect", "polyline", "polygon"}
LOOKS = {
    "aria-label", "class", "color", "cx", "cy", "d", "data-series", "dx", "fill", "fill-opacity",
    "font-family", "font-size", "font-weight", "height", "overflow", "points",
    "preserveaspectratio", "r", "role", "stroke", "stroke-dasharray", "stroke-opacity",
    "stroke-width", "style", "text-anchor", "vector-effect", "viewbox", "width", "x", "x1",
    "x2", "y", "y1", "y2",
}  # fmt: skip
VOID = {"meta", "img", "wbr"}

PAYLOADS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><script>alert(1)</script>",
    "{{7*7}}{% for x in y %}",
    "javascript:alert(1)",
    "$\\frac{",
    "' onmouseover='alert(1)",
    "</title></style></pre></td>--><!-- ]]>",
    "\u2028\u2029\x00\x1b[31m",
    "=HYPERLINK(1)",
    "网络 🎉 \u202eabc",
]


class Walker(HTMLParser):
    """Collects elements and text, and refuses what the template does not write."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {*ALLOWED, *PLAIN, *DRAWN}, f"<{tag}> is not in the template"
        names = {name for name, _ in attrs}
        assert names <= (LOOKS if tag in DRAWN else ALLOWED.get(tag, set())), f"<{tag}> has {names}"
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag == "a":
            self.links.append(values["href"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def text(self) -> str:
        return " ".join(
            piece
            for tag, found in self.texts.items()
            if tag not in ("style", "script")
            for piece in found
        )


def walk(report: Report) -> Walker:
    walker = Walker()
    walker.feed(report.page)
    walker.close()
    assert walker.open == []
    assert all(link.startswith("#") and link[1:] in walker.ids for link in walker.links)
    assert embedded(walker)["counts"] == report.numbers["counts"]
    return walker


def embedded(walker: Walker) -> Any:
    """Return the numbers inside the page, which are JSON."""
    _, text = walker.texts["script"]
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def rows_of(report: Report, table: str) -> list[dict[str, str]]:
    text = (report.root / "report" / table).read_text("utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def test_the_first_screen_shows_best_lead_speedup_and_failures(complete: Report) -> None:
    walker, data = walk(complete), complete.numbers
    # Numbers and their units are joined by spaces at which no line breaks.
    first = " ".join(" ".join(walker.texts["p"] + walker.texts["h1"]).split())
    assert data["highest"] in first
    assert f"{data['speedup']['ratio']:.2f}× as fast" in first
    assert "measured" in first
    assert all(sentence.removesuffix(".") in first for sentence in data["verdict"]["sentences"])
    assert "Nothing failed" in first
    assert "20 of 20 jobs finished" in first
    assert data["bit_identity"] == {"claimed": True, "reasons": []}
    assert ", reproducible." in first
    (short, *_) = walker.texts["code"]
    assert data["fingerprint"].startswith(short)
    assert "Diamond: mean over the folds; bar: its 95 % interval; dots: folds." in complete.page
    assert "Line: mean over the folds; band: from the lowest fold to the highest" in complete.page
    assert "±\u00a0" in complete.page
    assert "200\u00a0MiB" in complete.page


def test_the_page_is_self_contained_and_its_files_lie_beside_it(complete: Report) -> None:
    walker, page = walk(complete), complete.page
    assert embedded(walker) == complete.numbers
    assert len([name for name in walker.ids if name.startswith("figure-")]) == 7
    assert len(page.encode()) < 400_000
    script = base64.b64encode(hashlib.sha256(walker.texts["script"][0].encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src"
    assert f"{policy} 'sha256-{script}'" in page
    assert "http://" not in page
    assert "https://" not in page
    folder = complete.root / "report"
    assert len(list(folder.glob("*.png"))) == 9
    assert not list(folder.glob("*.tmp"))
    candidates, folds = rows_of(complete, "results.csv"), rows_of(complete, "folds.csv")
    assert [len(rows) for rows in (candidates, folds)] == [4, 20]
    assert len(rows_of(complete, "epochs.csv")) == 100
    assert [row["rank"] for row in candidates] == ["1", "2", "3", "4"]
    assert {row["bit_identity"] for row in candidates} == {"reproducible"}
    assert len({row["fingerprint"] for row in candidates}) == 1
    mine = [
        float(row["accuracy"])
        for row in folds
        if (row["model"], row["scheduler"]) == (candidates[0]["model"], candidates[0]["scheduler"])
    ]
    assert float(candidates[0]["mean_accuracy"]) == pytest.approx(sum(mine) / 5)


@pytest.mark.nightly
def test_averaging_is_shown_in_the_page_and_the_tables(root: Path) -> None:
    run = Synthetic(
        processes=3,
        averaged=AveragingSummary(77, (200, 100, 100)),
        folds=2,
        epochs=1,
        baseline=None,
        status=all_but_the_first,
    )
    report = report_of(root, run)
    assert "samples × epochs of each process" in report.page
    assert report.page.count('data-label="rounds">77</td>') == 7
    assert report.page.count('process">200, 100, 100</td>') == 7
    first, *others = report.numbers["averaged"]
    assert (first["job"], len(others)) == ("LeNet5/cosine/fold-1", 6)
    assert (first["rounds"], first["samples"]) == (77, [200, 100, 100])
    folds = rows_of(report, "folds.csv")
    assert [row["samples_epochs"] for row in folds] == ["", *["200, 100, 100"] * 7]
    assert [row["rounds"] and float(row["rounds"]) for row in folds] == ["", *[77] * 7]


def all_but_the_first(job: Job) -> str:
    return "failed" if (job.candidate, job.fold) == ("LeNet5/cosine", 0) else "done"


def test_user_text_is_inert(root: Path) -> None:
    together = " ".join(PAYLOADS)
    run = Synthetic(
        models=[*PAYLOADS, *(f"{payload}/2" for payload in PAYLOADS)],
        lr_schedules=(together,),
        folds=2,
        epochs=1,
        classes=tuple(PAYLOADS),
        metrics=(together, PAYLOADS[0]),
        error=together,
        traceback=together,
        events=tuple((payload, payload) for payload in PAYLOADS),
        about={"command": together, **{payload: payload for payload in PAYLOADS}},
        status=lambda job: "failed" if (job.model, job.fold) == (PAYLOADS[0], 1) else "done",
    )
    report = report_of(root, run)
    text = walk(report).text()
    for payload in PAYLOADS:
        assert clean(payload) in text
    assert report.numbers["counts"]["failed"] == 1
    for table in ("results.csv", "folds.csv", "epochs.csv"):
        cells = [cell for row in rows_of(report, table) for cell in row.values()]
        assert not any(cell.startswith(("=", "@")) for cell in cells)


INTERVAL = "bar: its 95 % interval"
SOFTWARE = "the software that some of its jobs were trained with was not recorded"
STATES = {
    "nothing ran": Synthetic(
        status=lambda job: "pending", baseline=None, cpu_samples=False, events=(), about={}
    ),
    "all failed": Synthetic(status=lambda job: "failed"),
    "NaN scores": Synthetic(score=float("nan"), folds=2, models=("A",)),
    "one fold": Synthetic(folds=[(list(range(200)), list(range(200, 300)))], baseline=None),
    "regression": Synthetic(classes=(), metrics=("r2",), folds=2, epochs=1),
    "incomplete": Synthetic(
        status=lambda job: "failed" if job.id == "MLP/warm/fold-3" else "done", epochs=1
    ),
    "no candidate is complete": Synthetic(
        status=lambda job: "failed" if job.fold % 2 else "done", folds=4
    ),
    "other software": Synthetic(software={}, cpu_samples=False, epochs=1, folds=2),
    "disturbed": Synthetic(others=0.8, epochs=1, folds=2),
}

SAID = {
    "nothing ran": (["No job was started", "No finished job"], ["Hard samples"]),
    "all failed": (["20 failed", "none is best", "no job succeeded"], ["as fast", "Hard samples"]),
    "NaN scores": (["none is best"], []),
    "one fold": (["Diamond: the score on the only fold.", "Line: the only fold."], [INTERVAL]),
    "regression": (
        ["Scores are r2; every candidate was scored on the same folds."],
        ["accuracy, serial", "Accuracies are means"],
    ),
    "incomplete": (["4 of 5, failed", "Incomplete candidates are not ranked"], []),
    "no candidate is complete": (["Diamond: mean over the folds; dots: folds."], [INTERVAL]),
    "other software": ([f"not reproducible: {SOFTWARE}"], []),
    "disturbed": (
        [
            "Speedup not reported: other programs used 0.8 of 2 cores while the serial",
            "Solid: packed. A point is an epoch",
            "included. Packed seconds are",
            "Jobs of several candidates run at once",
        ],
        ["dashed: the measured serial loop", "× as fast"],
    ),
}
"""What the page of each state says, and what it does not."""


@pytest.mark.parametrize("name", STATES)
def test_every_state_of_a_run_has_a_page_that_says_so(root: Path, name: str) -> None:
    report = report_of(root, STATES[name])
    text, counts = walk(report).text(), report.numbers["counts"]
    said, unsaid = SAID[name]
    assert all(part in text for part in said)
    assert not any(part in text for part in unsaid)
    assert counts["planned"] == sum(
        counts[state] for state in ("done", "failed", "diverged", "cancelled", "pending")
    )
    for table in ("results.csv", "folds.csv", "epochs.csv"):
        header = (root / "report" / table).read_text("utf-8").splitlines()[0]
        assert header.count("model") == 1


def test_long_names_of_scores_may_break(root: Path) -> None:
    run = Synthetic(classes=(), metrics=("neg_mean_absolute_error",), folds=2, epochs=1)
    page = report_of(root, run).page
    assert ">neg_<wbr>mean_<wbr>absolute_<wbr>error</th>" in page
    assert 'data-label="neg_mean_absolute_error"' in page


@pytest.mark.nightly
def test_a_thousand_jobs_and_many_epochs_make_pages_of_moderate_size(tmp_path: Path) -> None:
    few = Synthetic(epochs=1, samples=400, cpu_samples=False, models=tuple("ABCDE"))
    runs = {
        "jobs": (replace(few, lr_schedules=("x",), folds=200), 3_000_000),
        "models": (Synthetic(epochs=120, folds=2, models=tuple("ABCDE")), 400_000),
        "epochs": (Synthetic(epochs=120), 400_000),
    }
    for name, (run, most) in runs.items():
        assert len(report_of(tmp_path / name, run).page.encode()) < most


def test_bulky_numbers_are_left_out_of_the_page_by_name(complete: Report) -> None:
    with open_run(complete.root) as store:
        summary = summarize(store)
    text, left_out = embedded_numbers(summary, limit=12_000)
    assert left_out[0] == "curves"
    assert len(text) <= 12_000
    assert "curves" not in json.loads(text)["candidates"][0]


def test_a_file_in_the_way_of_the_report_is_an_error(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (write_run(root, STATES["nothing ran"]) / "report").write_text("")
    assert main(["report", str(root)]) == 5
    assert str(root / "report") in capsys.readouterr().err


def test_a_report_needs_neither_torch_nor_a_display(root: Path, tmp_path: Path) -> None:
    write_run(root, STATES["one fold"])
    code = (
        "import sys; from asynckfold.cli import main; main(['report', sys.argv[1]]);"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)],
        env={
            "MPLBACKEND": "QtAgg",
            "HOME": str(tmp_path),
            "PATH": "",
            "MPLCONFIGDIR": matplotlib.get_cachedir(),
        },
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    assert (root / "report" / "index.html").exists()
    assert (root / "report" / "scores.png").exists()


@given(st.recursive(st.text() | st.none() | st.integers(), st.lists))
def test_inert_json_is_json_without_markup(value: Any) -> None:
    text = inert_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value


@given(st.text())
def test_no_cell_is_a_formula(text: str) -> None:
    table = csv_table(pd.DataFrame({"a": [text]})).decode()
    cell = next(csv.reader(io.StringIO(table.split("\r\n", 1)[1], newline="")), [""])
    first = cell[0][:1] if cell else ""
    if first in ("=", "+", "-", "@", "\t"):
        float(cell[0])


def test_numbers_stay_numbers_in_tables() -> None:
    table = csv_table(pd.DataFrame({"a": [-0.5, float("nan")], "b": ["-0.5", "-x"]}))
    assert table == b"a,b\r\n-0.5,-0.5\r\n,'-x\r\n"
