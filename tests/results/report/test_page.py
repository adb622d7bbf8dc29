from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from asynckfold import RunStore
from asynckfold.cli import main
from asynckfold.results.report.page import render
from asynckfold.results.report.summary import summarize
from tests.results.report.reports import Report, report_of
from tests.synthetic import Synthetic, write_run

ACTIVE = {"iframe", "object", "embed", "link", "form", "base", "input", "button", "audio", "video"}
"""Elements that the template does not write."""
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
    "@SUM(1)",
    "+x",
    "-x",
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
        assert tag not in ACTIVE, f"<{tag}> is not in the template"
        assert tag != "script" or "script" not in self.texts
        values = {name: value or "" for name, value in attrs}
        assert not any(name.startswith("on") for name in values)
        assert values.get("src", "data:").startswith("data:")
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
    anchors = {link for link in walker.links if link.startswith("#")}
    assert {link[1:] for link in anchors} <= walker.ids
    # Figures are drawn by another process.
    files = [link for link in walker.links if link not in anchors and not link.endswith(".png")]
    assert all((report.root / "report" / link).is_file() for link in files)
    return walker


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
    assert len([name for name in walker.ids if name.startswith("figure-")]) == 7
    assert len(page.encode()) < 400_000
    script = base64.b64encode(hashlib.sha256(walker.texts["script"][0].encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src"
    assert f"{policy} 'sha256-{script}'" in page
    assert "http://" not in page
    assert "https://" not in page
    folder = complete.root / "report"
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


def test_user_text_is_inert(root: Path) -> None:
    together = " ".join(PAYLOADS)
    run = Synthetic(
        models=PAYLOADS,
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
    for payload in filter(str.isprintable, PAYLOADS):
        assert payload in text
    assert "\x1b" not in report.page
    assert report.numbers["counts"]["failed"] == 1
    for table in ("results.csv", "folds.csv", "epochs.csv"):
        cells = [cell for row in rows_of(report, table) for cell in row.values()]
        assert not any(cell.startswith(("=", "@", "+", "-x")) for cell in cells)


INTERVAL = "bar: its 95 % interval"
SOFTWARE = "the software that some of its jobs were trained with was not recorded"
STATES = {
    "nothing ran": Synthetic(
        status=lambda job: "pending", baseline=None, cpu_samples=False, events=(), about={}
    ),
    "all failed": Synthetic(status=lambda job: "failed"),
    "NaN scores": Synthetic(score=float("nan"), folds=2, models=("A",)),
    "one fold": Synthetic(folds=[(list(range(200)), list(range(200, 300)))], baseline=None),
    "regression": Synthetic(
        classes=(), metrics=("r2", "neg_mean_absolute_error"), folds=2, epochs=1
    ),
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
    assert (">neg_<wbr>mean_<wbr>absolute_<wbr>error</th>" in report.page) == (name == "regression")
    assert counts["planned"] == sum(
        counts[state] for state in ("done", "failed", "diverged", "cancelled", "pending")
    )
    for table in ("results.csv", "folds.csv", "epochs.csv"):
        header = (root / "report" / table).read_text("utf-8").splitlines()[0]
        assert header.count("model") == 1


def test_a_file_in_the_way_of_the_report_is_an_error(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (write_run(root, STATES["nothing ran"]) / "report").write_text("")
    assert main(["report", str(root)]) == 5
    assert str(root / "report") in capsys.readouterr().err


def test_a_report_needs_neither_torch_nor_a_display(root: Path, tmp_path: Path) -> None:
    write_run(root, Synthetic())
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
    images = sorted((root / "report").glob("*.png"))
    assert len(images) == 9
    assert all(np.asarray(Image.open(path).convert("L")).std() > 5 for path in images)


def test_the_page_of_a_thousand_candidates_is_small(root: Path) -> None:
    with RunStore.read(write_run(root)) as store:
        few = summarize(store)
    ends = ["", *(f"/dropout=0.25,lr=0.001,width={number}" for number in range(249))]
    rows = [replace(row, name=row.name + end) for end in ends for row in few.candidates]
    bars = [replace(bar, candidate=bar.candidate + end) for end in ends for bar in few.bars]
    many = render(replace(few, candidates=tuple(rows), bars=tuple(bars)))
    assert (len(rows), len(bars)) == (1000, 5000)
    assert len(many.encode()) < 3_000_000
    assert many.count('class="scroll tall"') == render(few).count('class="scroll"') > 5


def test_what_to_try_next_follows_from_the_numbers(tmp_path: Path) -> None:
    plain = Synthetic(baseline=None)
    runs = {
        "plain": plain,
        "three epochs": replace(plain, epochs=3),
        "repeats": replace(plain, n_repeats=3, folds=3, samples=120),
        "one model": replace(plain, models=("MLP",), lr_schedules=("cosine",), epochs=3),
    }
    seen = set()
    for name, run in runs.items():
        report = report_of(tmp_path / name, run)
        first, *others = report.numbers["candidates"]
        expected = []
        (losses,) = (each["mean"] for each in first["curves"] if each["measure"] == "valid_loss")
        if losses[-1] < min(losses[:-1]):
            expected.append(f"lowest at the last of {run.epochs} epochs, {losses[-1]:.4f} after")
        if others and report.numbers["verdict"]["best"] is None:
            gap = first["mean"]["accuracy"] - others[0]["mean"]["accuracy"]
            scores = np.array(first["scores"]["accuracy"]).reshape(run.n_repeats, -1)
            means = scores.mean(axis=1)
            if np.ptp(means) > gap:
                expected.append(f"have means from {means.min():.4f} to {means.max():.4f}")
        page = report.page.replace("\u00a0", " ")
        (said,) = re.findall('<h2 id="next">.*?<ul>(.*?)</ul>', page, re.S) or [""]
        steps = re.findall("<li>(.*?)</li>", said)
        assert all(part in step for part, step in zip(expected, steps, strict=True)), steps
        assert all(first["name"] in step for step in steps)
        seen |= {step.partition(":")[0] for step in steps}
    assert seen == {"Train longer", "Average over seeds"}
