"""The ranking and the figures as files for a README or a paper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asynckfold import RunStore
from asynckfold.cli import main
from asynckfold.results.cv_results import read_results
from asynckfold.results.report import charts
from asynckfold.results.report.charts import drawings
from asynckfold.results.report.summary import Summary, summarize
from asynckfold.results.report.table_files import table_files
from tests.synthetic import Synthetic, write_run

NAMES = ("Le_Net & 5%", "a|b<i>", "\\input{x}\n# 网络")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tables") / "run"
    return write_run(
        root, Synthetic(models=NAMES, lr_schedules=("step",), metrics=("accuracy", "f1"))
    )


@pytest.fixture(scope="module")
def summary(run: Path) -> Summary:
    with RunStore.read(run) as store:
        return summarize(store)


def tables(run: Path) -> dict[str, bytes]:
    with RunStore.read(run) as store:
        return table_files(read_results(store), summarize(store))


def test_the_ranking_is_a_table_in_markdown_whatever_names_hold(
    run: Path, summary: Summary
) -> None:
    head, ruler, *rows = tables(run)["results.md"].decode().splitlines()
    assert head.startswith("| rank | model | LR schedule | accuracy | f1 | 95 % interval | diff")
    assert len(rows) == 3
    cells = [re.split(r" (?<!\\)\| ", f" {line[1:-1]}") for line in (ruler, *rows)]
    assert {len(line) for line in cells} == {10}
    assert not re.search(r"(?<!\\)<", "".join(rows))
    best, second = summary.candidates[:2]
    assert cells[1][0].strip() == "1"
    assert cells[1][3] == f"{best.mean['accuracy']:.4f} ± {best.std['accuracy']:.4f}"
    assert cells[1][6].strip() == "", "the best is not compared with itself"
    assert float(cells[2][6]) == pytest.approx(
        second.mean["accuracy"] - best.mean["accuracy"], abs=1e-4
    )


def test_the_ranking_is_a_booktabs_table_whatever_names_hold(run: Path) -> None:
    text = tables(run)["results.tex"].decode()
    package, verdict, *table = text.splitlines()
    assert package == "% \\usepackage{booktabs}"
    assert verdict.startswith("% ")
    assert table[0] == "\\begin{tabular}{lll" + "r" * 7 + "}"
    assert [line for line in table if line.endswith("rule")] == [
        "\\toprule", "\\midrule", "\\bottomrule",
    ]  # fmt: skip
    assert "Le\\_Net \\& 5\\%" in text
    assert "a\\textbar{}b$<$i$>$" in text
    assert "\\input" not in "\n".join(table)
    assert "$\\pm$" in text
    rows = [line for line in table if line.endswith("\\\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in rows} == {9}


@pytest.fixture
def _one_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawings, "FIGURES", {"scores": drawings.draw_scores})


@pytest.mark.usefixtures("_one_figure")
@pytest.mark.parametrize("kind", ["svg", "pdf"])
def test_figures_are_vectors_and_the_same_each_time(summary: Summary, kind: str) -> None:
    begins = {"svg": b"<?xml", "pdf": b"%PDF"}
    one, other = charts.draw(summary, kind), charts.draw(summary, kind)
    data = one[f"scores.{kind}"]
    assert data.startswith(begins[kind])
    assert one == other
    if kind == "pdf":
        assert b"/FontFile2" in data, "TrueType, not outlines of type 3"


@pytest.mark.usefixtures("_one_figure")
def test_the_command_adds_figures_to_the_report(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), "--figures", "doc"]) == 2
    assert "--figures must be one of png, svg, pdf: received 'doc'" in capsys.readouterr().err
    assert not (run / "report").exists()
    assert main(["report", str(run), "--figures", "pdf"]) == 0
    names = {path.name for path in (run / "report").iterdir()}
    assert {"scores.pdf", "results.md", "results.tex", "index.html"} <= names
