"""What the page says of its charts and tables is true of this run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asynckfold import RunStore
from asynckfold.results.report.page import render
from asynckfold.results.report.summary import summarize
from tests.synthetic import Synthetic, write_run

Page = Callable[..., str]
INTERVAL = "bar: its 95 % interval"


@pytest.fixture
def page(tmp_path: Path) -> Page:
    """Render the page of a synthetic run."""

    def rendered(**changes: object) -> str:
        run = Synthetic(cpu_samples=False, **changes)  # type: ignore[arg-type]
        with RunStore.read(write_run(tmp_path / "run", run)) as store:
            return render(summarize(store))

    return rendered


def test_captions_name_the_marks_that_are_drawn(page: Page) -> None:
    text = page()
    assert f"Diamond: mean over the folds; {INTERVAL}; dots: folds." in text
    assert "Line: mean over the folds; band: from the lowest fold to the highest." in text


def test_one_fold_has_no_mean_interval_or_band(page: Page) -> None:
    text = page(folds=[(list(range(200)), list(range(200, 300)))], baseline=None)
    assert "Diamond: the score on the only fold." in text
    assert "Line: the only fold." in text
    assert INTERVAL not in text


def test_no_interval_is_explained_where_every_candidate_is_incomplete(page: Page) -> None:
    text = page(status=lambda job: "failed" if job.fold % 2 else "done", folds=4)
    assert "Diamond: mean over the folds; dots: folds." in text
    assert INTERVAL not in text


def test_a_serial_loop_that_is_not_drawn_is_not_in_the_caption(page: Page) -> None:
    text = page(others=1.7)
    assert "Solid: packed. A point is an epoch" in text
    assert "included. Packed seconds are" in text
    assert "dashed: the measured serial loop" not in text
    assert "Jobs of several candidates run at once" in text


def test_a_regression_has_no_columns_of_accuracies(page: Page) -> None:
    text = page(classes=(), metrics=("r2", "neg_mean_absolute_error"))
    assert "accuracy, serial" not in text
    assert "Accuracies are means" not in text
    assert "Scores are r2; every candidate was scored on the same folds." in text
    assert ">neg_<wbr>mean_<wbr>absolute_<wbr>error</th>" in text
    assert 'data-label="neg_mean_absolute_error"' in text


def test_numbers_keep_to_their_signs_and_units(page: Page) -> None:
    text = page()
    assert "±\u00a0" in text
    assert "95\u00a0% interval" in text or "p\u00a0=\u00a00." in text
    assert "200\u00a0MiB" in text
