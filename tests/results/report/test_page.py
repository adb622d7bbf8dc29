from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold import Job, RunStore, StorageError
from asynckfold.jobs.result import DONE, FAILED
from asynckfold.results.report.page import (
    embedded_numbers,
    inert_json,
    write_report,
)
from asynckfold.results.report.sanitize import clean
from asynckfold.results.report.summary import summarize
from asynckfold.results.report.table_files import csv_table
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


def walk(page: Path) -> Walker:
    walker = Walker()
    walker.feed(page.read_text("utf-8"))
    walker.close()
    assert walker.open == []
    assert all(link.startswith("#") and link[1:] in walker.ids for link in walker.links)
    return walker


def report(root: Path, run: Synthetic | None = None) -> Path:
    with RunStore.read(write_run(root, run)) as store:
        return write_report(store)


def numbers(walker: Walker) -> dict[str, Any]:
    _, text = walker.texts["script"]
    return dict(json.loads(text, parse_constant=_refuse))


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture(scope="module")
def folder(complete: Path) -> Path:
    """The report of the complete run."""
    with RunStore.read(complete) as store:
        return write_report(store).parent


def test_the_first_screen_shows_best_lead_speedup_and_failures(folder: Path) -> None:
    walker = walk(folder / "index.html")
    # Numbers and their units are joined by spaces at which no line breaks.
    first = " ".join(" ".join(walker.texts["p"] + walker.texts["h1"]).split())
    data = numbers(walker)
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


def test_the_page_is_self_contained_and_small(folder: Path) -> None:
    page = folder / "index.html"
    text = page.read_text("utf-8")
    figures = [name for name in walk(page).ids if name.startswith("figure-")]
    assert len(figures) == 7
    assert page.stat().st_size < 400_000
    script = walk(page).texts["script"][0]
    told = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src"
    assert f"{policy} 'sha256-{told}'" in text
    assert "http://" not in text
    assert "https://" not in text


def test_embedded_and_written_numbers_equal_the_summary(complete: Path, folder: Path) -> None:
    with RunStore.read(complete) as store:
        expected = json.loads(json.dumps(summarize(store).to_dict()))
    assert json.loads((folder / "results.json").read_text("utf-8")) == expected
    assert numbers(walk(folder / "index.html")) == expected
    assert expected["counts"]["done"] == 20


def test_figures_lie_beside_the_page(folder: Path) -> None:
    assert len(list(folder.glob("*.png"))) == 9
    assert not list(folder.glob("*.tmp"))


def test_tables_hold_one_row_per_candidate_fold_and_epoch(folder: Path) -> None:
    tables = {
        name: list(csv.DictReader(io.StringIO((folder / name).read_text("utf-8"))))
        for name in ("results.csv", "folds.csv", "epochs.csv")
    }
    assert [len(rows) for rows in tables.values()] == [4, 20, 100]
    assert [row["rank"] for row in tables["results.csv"]] == ["1", "2", "3", "4"]
    best = tables["results.csv"][0]
    assert {row["bit_identity"] for row in tables["results.csv"]} == {"reproducible"}
    assert len({row["fingerprint"] for row in tables["results.csv"]}) == 1
    mine = [
        float(row["accuracy"])
        for row in tables["folds.csv"]
        if (row["model"], row["scheduler"]) == (best["model"], best["scheduler"])
    ]
    assert float(best["mean_accuracy"]) == pytest.approx(sum(mine) / 5)


@pytest.mark.nightly
def test_averaging_is_shown_in_the_page_and_the_tables(root: Path) -> None:
    run = Synthetic(
        processes=3, rounds=77, folds=2, epochs=1, baseline=None, status=all_but_the_first
    )
    page = report(root, run)
    text = page.read_text("utf-8")
    assert "samples × epochs of each process" in text
    assert text.count('data-label="rounds">77</td>') == 7
    assert text.count('process">200, 100, 100</td>') == 7
    first, *others = numbers(walk(page))["averaged"]
    assert (first["job"], len(others)) == ("LeNet5/cosine/fold-1", 6)
    assert (first["rounds"], first["samples"]) == (77, [200, 100, 100])
    folds = list(csv.DictReader(io.StringIO((page.parent / "folds.csv").read_text("utf-8"))))
    assert [row["samples_epochs"] for row in folds] == ["", *["200, 100, 100"] * 7]
    assert [row["rounds"] and float(row["rounds"]) for row in folds] == ["", *[77] * 7]


def all_but_the_first(job: Job) -> str:
    return FAILED if (job.candidate, job.fold) == ("LeNet5/cosine", 0) else DONE


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
    page = report(root, run)
    walker = walk(page)
    text = walker.text()
    for payload in PAYLOADS:
        assert clean(payload) in text
    assert numbers(walker)["counts"]["failed"] == 1
    for table in ("results.csv", "folds.csv", "epochs.csv"):
        rows = csv.reader(io.StringIO((page.parent / table).read_text("utf-8")))
        assert not any(cell.startswith(("=", "@")) for row in rows for cell in row)


STATES = {
    "nothing ran": Synthetic(
        status=lambda job: "pending", baseline=None, cpu_samples=False, events=(), about={}
    ),
    "all failed": Synthetic(status=lambda job: "failed"),
    "NaN scores": Synthetic(score=float("nan"), folds=2, models=("A",)),
    "one fold": Synthetic(folds=[(list(range(200)), list(range(200, 300)))]),
    "regression": Synthetic(classes=(), metrics=("r2",), folds=2),
    "no baseline, no samples": Synthetic(
        baseline=None, cpu_samples=False, folds=2, classes=(), epochs=1
    ),
}


@pytest.mark.nightly(but=["nothing ran", "NaN scores", "no baseline, no samples"])
@pytest.mark.parametrize("name", STATES)
def test_every_state_of_a_run_has_a_valid_page(root: Path, name: str) -> None:
    run = STATES[name]
    page = report(root, run)
    data = numbers(walk(page))
    assert data["counts"]["planned"] == sum(
        data["counts"][state] for state in ("done", "failed", "diverged", "cancelled", "pending")
    )
    for table in ("results.csv", "folds.csv", "epochs.csv"):
        assert (page.parent / table).read_text("utf-8").splitlines()[0].count("model") == 1


def test_a_page_without_success_says_so(root: Path) -> None:
    text = walk(report(root, STATES["all failed"])).text()
    assert "20 failed" in text
    assert "none is best" in text
    assert "no job succeeded" in text
    assert "as fast" not in text


def test_incomplete_candidates_are_shown_as_such(root: Path) -> None:
    run = Synthetic(
        status=lambda job: "failed" if job.id == "MLP/warm/fold-3" else "done",
        classes=(),
        epochs=1,
        cpu_samples=False,
    )
    text = walk(report(root, run)).text()
    assert "4 of 5, failed" in text
    assert "Incomplete candidates are not ranked" in text


def test_the_page_says_why_a_run_is_not_reproducible(root: Path) -> None:
    page = report(root, Synthetic(software={}, cpu_samples=False, epochs=1))
    walker = walk(page)
    sentence = "the software that some of its jobs were trained with was not recorded"
    assert f"not reproducible: {sentence}" in walker.text()
    assert numbers(walker)["bit_identity"] == {"claimed": False, "reasons": [sentence]}


def test_a_disturbed_timing_is_reported_on_the_first_screen(root: Path, folder: Path) -> None:
    page = report(root, Synthetic(others=0.8, epochs=1))
    first = " ".join(walk(page).texts["p"])
    assert "Speedup not reported: other programs used 0.8 of 2 cores while the serial" in first
    assert "×" not in first.replace("models × ", "")
    leads = r'class="big">[^<]*× as fast'
    assert not re.search(leads, page.read_text())
    assert re.search(leads, (folder / "index.html").read_text())


@pytest.mark.nightly
def test_a_thousand_jobs_make_a_page_of_moderate_size(root: Path) -> None:
    run = Synthetic(
        models=tuple("ABCDE"),
        lr_schedules=("x",),
        folds=200,
        samples=400,
        epochs=1,
        cpu_samples=False,
    )
    page = report(root, run)
    assert numbers(walk(page))["counts"]["done"] == 1000
    assert page.stat().st_size < 3_000_000


@pytest.mark.nightly
def test_many_epochs_do_not_bloat_the_page(root: Path) -> None:
    page = report(root, Synthetic(epochs=120, folds=2, models=tuple("ABCDE")))
    assert page.stat().st_size < 400_000
    page = report(root.with_name("few"), Synthetic(epochs=120))
    assert page.stat().st_size < 400_000


def test_bulky_numbers_are_left_out_of_the_page_by_name(complete: Path) -> None:
    with RunStore.read(complete) as store:
        summary = summarize(store)
    text, left_out = embedded_numbers(summary, limit=12_000)
    assert left_out[0] == "curves"
    assert len(text) <= 12_000
    assert "curves" not in json.loads(text)["candidates"][0]


@pytest.mark.nightly
def test_a_file_in_the_way_is_a_storage_error(complete: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with RunStore.read(complete) as store, pytest.raises(StorageError, match="taken"):
        write_report(store, tmp_path / "taken")


def test_another_folder_can_be_named(root: Path, tmp_path: Path) -> None:
    with RunStore.read(write_run(root, STATES["nothing ran"])) as store:
        page = write_report(store, tmp_path / "deep" / "folder")
    assert page == tmp_path / "deep" / "folder" / "index.html"
    assert page.exists()


def test_a_report_needs_neither_torch_nor_a_display(complete: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from asynckfold.store import RunStore;"
        "from asynckfold.results.report.page import write_report;"
        "from pathlib import Path;"
        "write_report(RunStore.read(sys.argv[1]), Path(sys.argv[2]));"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(complete), str(tmp_path / "out")],
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
    assert (tmp_path / "out" / "index.html").exists()


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
