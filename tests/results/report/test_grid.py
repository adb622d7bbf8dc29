"""The report of a grid: short names, the verdict on its best, and which parameter matters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asynckfold import Job
from tests.results.report.reports import Report, report_of
from tests.synthetic import Synthetic

RATES, WIDTHS = (0.001, 0.003, 0.01, 0.03, 0.1), (16, 32, 64, 128)


def of_rate(job: Job) -> float:
    """Return a score that the learning rate decides, and nothing else but the fold moves."""
    rate = float(job.lr_schedule.partition("lr=")[2].partition(",")[0])
    return 0.5 + 0.1 * RATES.index(rate) + 0.01 * job.fold + 0.001 * (hash_of(job.id) % 5)


def hash_of(text: str) -> int:
    return sum(map(ord, text))


GRID = Synthetic(
    models=tuple(f"net/dropout=0.1,width={width}" for width in WIDTHS),
    lr_schedules=tuple(
        f"cosine/lr={rate},weight_decay={decay}" for rate in RATES for decay in (0.0, 0.01)
    ),
    folds=3,
    epochs=1,
    baseline=None,
    score=of_rate,
)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of 40 candidates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asynckfold.results.report.page.update_figures", lambda *_, **__: None)
        return report_of(tmp_path_factory.mktemp("grid") / "run", GRID)


def tables_of(page: str, label: str) -> list[list[str]]:
    """Return the cells of the tables whose label begins so, a list for each row."""
    tables = re.findall(rf'<table[^>]*aria-label="{label}.*?</table>', page, re.S)
    rows = [row for table in tables for row in re.findall(r"<tr.*?</tr>", table, re.S)]
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S) for row in rows]
    return [[re.sub("<[^>]*>", "", cell) for cell in row] for row in cells]


def test_the_ranking_has_a_column_for_each_value_that_varies(grid: Report) -> None:
    head, *rows = tables_of(grid.page, "Ranking")
    assert head[:5] == ["rank", "lr", "weight_decay", "width", "accuracy"]
    best, rest = rows[:10], rows[11:]
    assert rows[10] == head  # of the table that folds open
    names = [row["name"] for row in grid.numbers["candidates"]]
    pattern = r"lr=(.*),weight_decay=(.*),width=(.*)"
    values = [list(re.search(pattern, name).groups()) for name in names]  # type: ignore[union-attr]
    assert [row[1:4] for row in (*best, *rest)] == values
    assert "<summary>30 more rows</summary>" in grid.page
    assert "The same in all candidates: model net, LR schedule cosine, dropout 0.1." in grid.page


def test_no_name_of_a_candidate_is_cut_to_the_same_text(grid: Report) -> None:
    names = [text for text in grid.texts("forest", "text") if "lr=" in text]
    assert len(names) == len(set(names)) == 12
    assert all("lr=" in name and "width=" in name for name in names)


def test_the_headline_is_about_the_best(grid: Report) -> None:
    first, second = grid.numbers["candidates"][:2]
    (title,) = re.findall("<h1>(.*?)</h1>", grid.page)
    values = first["name"].partition("/lr")[2] or first["name"].split("dropout=0.1,")[1]
    assert title.startswith(values.replace(",", ", "))
    assert f"{first['mean']['accuracy']:.4f}" in title
    beaten = sum(row["to_first"]["p"] < 0.05 for row in grid.numbers["candidates"][1:])
    assert f"It beats {beaten or 'none'} of the other 39 candidates" in grid.page
    (verdict,) = re.findall('<div id="verdict">(.*?)</div>', grid.page, re.S)
    assert len(re.findall("against|beats|Closest", verdict)) <= 3  # two lines, and the outlook
    assert second["name"] not in verdict


@pytest.mark.parametrize("run", [Synthetic(folds=2), Synthetic(folds=2, models=("a=1, b=2",))])
def test_a_run_without_a_grid_ranks_candidates_by_name(tmp_path: Path, run: Synthetic) -> None:
    report = report_of(tmp_path / "run", run)
    head, *rows = tables_of(report.page, "Ranking")
    assert head[:2] == ["rank", "candidate"]
    assert [row[1] for row in rows] == [row["name"] for row in report.numbers["candidates"]]
    assert report.numbers["grid"] is None
