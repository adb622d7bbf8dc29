"""The ranking and the figures as files for a README or a paper."""

from __future__ import annotations

import re

import matplotlib
import pytest

from asynckfold.cli import main
from asynckfold.results.report.charts import drawings
from tests.results.report.reports import Report, report_of
from tests.synthetic import Synthetic

NAMES = ("Le_Net & 5%", "a|b<i>", "\\input{x}\n# 网络")
RUN = Synthetic(models=NAMES, lr_schedules=("step",), metrics=("accuracy", "f1"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asynckfold.results.report.page.update_figures", lambda *_, **__: None)
        return report_of(tmp_path_factory.mktemp("tables") / "run", RUN)


def test_the_ranking_is_a_table_whatever_names_hold(run: Report) -> None:
    folder = run.root / "report"
    head, ruler, *rows = (folder / "results.md").read_text().splitlines()
    assert head.startswith(
        "| rank | candidate | accuracy | 95 % interval | difference to the first"
    )
    assert len(rows) == 3
    cells = [re.split(r" (?<!\\)\| ", f" {line[1:-1]}") for line in (ruler, *rows)]
    assert {len(line) for line in cells} == {10}
    assert not re.search(r"(?<!\\)<", "".join(rows))
    best, second = run.numbers["candidates"][:2]
    assert cells[1][0].strip() == "1"
    assert cells[1][2] == f"{best['mean']['accuracy']:.4f} ± {best['std']['accuracy']:.4f}"
    assert cells[1][4].strip() == "–", "the best is not compared with itself"
    behind = second["mean"]["accuracy"] - best["mean"]["accuracy"]
    assert float(cells[2][4]) == pytest.approx(behind, abs=1e-4)
    text = (folder / "results.tex").read_text()
    package, verdict, *table = text.splitlines()
    assert package == "% \\usepackage{booktabs}"
    assert verdict.startswith("% ")
    assert table[0] == "\\begin{tabular}{ll" + "r" * 8 + "}"
    assert [line for line in table if line.endswith("rule")] == [
        "\\toprule", "\\midrule", "\\bottomrule",
    ]  # fmt: skip
    assert "Le\\_Net \\& 5\\%" in text
    assert "a\\textbar{}b$<$i$>$" in text
    assert "\\input" not in "\n".join(table)
    assert "$\\pm$" in text
    lines = [line for line in table if line.endswith("\\\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {9}


def test_the_command_adds_vectors_that_are_the_same_each_time_in_any_style(
    run: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drawings, "FIGURES", {"scores": drawings.draw_scores})
    assert main(["report", str(run.root), "--figures", "doc"]) == 2
    assert "argument --figures: invalid choice: 'doc'" in capsys.readouterr().err

    def drawn(kind: str) -> bytes:
        assert main(["report", str(run.root), "--figures", kind]) == 0
        return (run.root / "report" / f"scores.{kind}").read_bytes()

    with matplotlib.rc_context({"figure.facecolor": "black", "font.size": 30}):
        before = dict(matplotlib.rcParams)
        styled = drawn("svg")
        assert dict(matplotlib.rcParams) == before
    assert styled == drawn("svg")
    assert styled.startswith(b"<?xml")
    assert b"/FontFile2" in drawn("pdf"), "TrueType, not outlines of type 3"
