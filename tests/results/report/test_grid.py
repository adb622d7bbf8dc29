"""The report of a grid: short names, the verdict on its best, and which parameter matters."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asynckfold import InputError, Job, load_results
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


def test_the_sections_of_a_large_grid_fold(grid: Report, tmp_path: Path) -> None:
    assert 'class="section"' not in grid.page
    many = replace(GRID, models=tuple(f"net/width={width}" for width in range(5)))
    page = report_of(tmp_path / "many", many).page
    headings = re.findall(r'<details class="section"><summary><h[23] id="(\w+)', page)
    assert {"effects", "heatmap", "parallel", "folds", "curves", "failures"} <= {*headings}
    assert not {"ranking", "parameters"} & {*headings}


def test_the_headline_is_about_the_best(grid: Report) -> None:
    first, second = grid.numbers["candidates"][:2]
    title = re.findall("<h1>(.*?)</h1>", grid.page)[0].replace("\u00a0", " ")
    values = first["name"].partition("/lr")[2] or first["name"].split("dropout=0.1,")[1]
    assert title.startswith(values.replace(",", ", "))
    assert f"{first['mean']['accuracy']:.4f}" in title
    tests = [row["to_first"]["p"] for row in grid.numbers["candidates"][1:]]
    beaten = sum(p is not None and p < 0.05 for p in tests)
    assert f"It beats {beaten or 'none'} of the other 39 candidates" in grid.page
    (verdict,) = re.findall('<div id="verdict">(.*?)</div>', grid.page, re.S)
    assert len(re.findall("<p>", verdict)) == 2
    assert second["name"] not in verdict


@pytest.mark.parametrize("run", [Synthetic(folds=2), Synthetic(folds=2, models=("a=1, b=2",))])
def test_a_run_without_a_grid_ranks_candidates_by_name(tmp_path: Path, run: Synthetic) -> None:
    report = report_of(tmp_path / "run", run)
    head, *rows = tables_of(report.page, "Ranking")
    assert head[:2] == ["rank", "candidate"]
    assert [row[1] for row in rows] == [row["name"] for row in report.numbers["candidates"]]
    assert report.numbers["grid"] is None


def test_the_parameter_that_decides_has_all_the_importance(grid: Report) -> None:
    effects = grid.numbers["effects"]
    importance = effects["importance"]
    assert next(iter(importance)) == "lr"
    assert importance["lr"] > 1  # shuffled, it misleads more than no forest at all
    assert max(importance["width"], importance["weight_decay"]) < 0.05
    assert effects["explained"] > 0.9
    assert f"an out-of-bag R² of {effects['explained']:.2f}" in grid.page
    assert "lr matters most" in grid.page


def test_the_effect_of_a_value_is_the_mean_over_its_candidates(grid: Report) -> None:
    rows = grid.numbers["candidates"]
    assert len(grid.numbers["effects"]["effects"]["lr"]) == len(RATES)
    for effect in grid.numbers["effects"]["effects"]["lr"]:
        scores = [
            row["scores"]["accuracy"] for row in rows if f"lr={effect['name']}," in row["name"]
        ]
        folds = [sum(column) / len(scores) for column in zip(*scores, strict=True)]
        assert effect["candidates"] == len(scores) == 8
        assert effect["scores"]["accuracy"] == pytest.approx(folds)
        # The corrected resampled t interval: the quantile of t with 2 degrees of freedom.
        mean = sum(folds) / 3
        variance = sum((score - mean) ** 2 for score in folds) / 2
        half = 4.302653 * ((1 / 3 + 1 / 2) * variance) ** 0.5
        assert effect["ci_low"] == pytest.approx(mean - half, rel=1e-5)
        assert effect["ci_high"] == pytest.approx(min(1.0, mean + half), rel=1e-5)


def test_the_heat_map_has_the_mean_of_each_pair_of_values(grid: Report) -> None:
    effects, rows = grid.numbers["effects"], grid.numbers["candidates"]
    first, second = effects["pair"]
    assert first == "lr"
    for down, means in zip(effects["effects"][first], effects["means"], strict=True):
        for across, mean in zip(effects["effects"][second], means, strict=True):
            pairs = {f"{first}={down['name']}", f"{second}={across['name']}"}
            kept = [
                row["mean"]["accuracy"]
                for row in rows
                if pairs <= {*row["name"].split("/")[-1].split(",")}
            ]
            assert mean == pytest.approx(sum(kept) / len(kept))


def test_a_value_without_a_complete_candidate_has_no_place_in_the_map(tmp_path: Path) -> None:
    """As of a race, or where each of its candidates failed."""

    def score(job: Job) -> float:
        return np.nan if "width=64" in job.model or "lr=0.003," in job.id else of_rate(job)

    report = report_of(tmp_path / "run", replace(GRID, score=score))
    effects = report.numbers["effects"]
    first, second = effects["pair"]
    means = np.array(effects["means"], dtype=float)
    assert np.isfinite(means).all()
    assert means.shape == tuple(len(effects["effects"][title]) for title in (first, second))
    assert sorted(means.shape) == [3, 4]
    table = tables_of(report.page, f"Mean by {first} and {second}")
    assert (len(table), len(table[0])) == (1 + means.shape[0], 1 + means.shape[1])


def test_no_importance_is_given_where_the_forest_predicts_nothing(tmp_path: Path) -> None:
    run = replace(GRID, score=lambda job: 0.5 + (hash_of(job.id) * 7919 % 1000) / 1e4)
    report = report_of(tmp_path / "run", run)
    effects = report.numbers["effects"]
    assert (effects["importance"] == {}) == (effects["explained"] <= 0)
    assert ("matters most" in report.page) == (effects["explained"] > 0)


def test_the_pictures_are_drawn_by_name(grid: Report, complete: Report) -> None:
    results, plain = load_results(grid.root), load_results(complete.root)
    effects = grid.numbers["effects"]
    (axes,) = results.plot("importance").axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx(list(effects["importance"].values()))
    assert [axes.get_xlabel() for axes in results.plot("effects").axes] == [*effects["effects"]]
    cells = results.plot("heatmap").axes[0].images[0].get_array()
    assert np.asarray(cells) == pytest.approx(np.array(effects["means"]))
    assert len(results.plot("parallel").axes[0].lines) >= 40
    for kind in ("importance", "effects", "heatmap", "parallel"):
        with pytest.raises(InputError, match="Search a grid"):
            plain.plot(kind)
