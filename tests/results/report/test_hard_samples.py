"""The samples that most candidates got wrong, and their pictures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold import RunStore
from asynckfold.results.cv_results import read_results
from asynckfold.results.report.page import render
from asynckfold.results.report.summary import PICTURES, pictures_of, summarize
from tests.synthetic import Synthetic, write_run

RUN = Synthetic(models=("A", "B", "C"), lr_schedules=("x",), folds=2, epochs=1, baseline=None)
NUMBERS = Synthetic(classes=(), metrics=("r2",), folds=2, n_repeats=2, epochs=1, baseline=None)


def read(root: Path, run: Synthetic) -> Any:
    """Return summary, out-of-fold outputs and targets."""
    with RunStore.read(write_run(root, run)) as store:
        found = read_results(store)
        return summarize(store, found), found.oof, store.splits()[1]


def test_samples_are_counted_over_all_candidates(root: Path) -> None:
    summary, oof, targets = read(root, RUN)
    guesses = np.stack([outputs.argmax(axis=1) for outputs in oof.values()])
    wrong = (guesses != targets).sum(axis=0)
    found = summary.hard_samples
    assert found.total == 300
    assert found.wrong_by_most == (wrong > 1.5).sum() > 0
    assert len(found.samples) == min(24, found.wrong_by_most)
    for item in found.samples:
        assert item.wrong == wrong[item.index] > 1
        assert item.predictions == 3
        assert item.true == targets[item.index] != item.predicted
        assert item.predicted in guesses[:, item.index]
    counts = [item.wrong for item in found.samples]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == wrong.max()


def test_numbers_are_those_with_the_largest_mean_error_over_all_repeats(root: Path) -> None:
    summary, oof, targets = read(root, NUMBERS)
    outputs = np.concatenate(list(oof.values()))[..., 0]
    error = np.abs(outputs - targets[:, 0]).mean(axis=0)
    found = summary.hard_samples
    assert [item.index for item in found.samples] == np.argsort(-error)[:24].tolist()
    first = found.samples[0]
    assert first.error == pytest.approx(error.max(), rel=1e-5)
    assert first.predicted == pytest.approx(outputs[:, first.index].mean(), rel=1e-5)
    assert first.predictions == 8


def test_a_run_without_outputs_has_none(root: Path) -> None:
    summary, _, _ = read(root, Synthetic(status=lambda job: "failed", baseline=None))
    assert summary.hard_samples is None
    assert "Hard samples" not in render(summary)


def keep(root: Path, **arrays: Any) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    (root / "oof").mkdir(exist_ok=True)
    (root / PICTURES).write_bytes(buffer.getvalue())


def test_kept_pictures_stand_beside_their_samples(root: Path) -> None:
    summary, _, _ = read(root, RUN)
    numbers = [item.index for item in summary.hard_samples.samples]
    keep(root, samples=np.array(numbers), pictures=np.zeros((len(numbers), 9, 8, 3), np.uint8))
    with RunStore.read(root) as store:
        page = render(summary, pictures_of(store))
    assert page.count('<img class="picture" src="data:image/png;base64,') == len(numbers)
    assert f'alt="picture of sample {numbers[0]}"' in page


@pytest.mark.parametrize(
    "arrays",
    [
        {"samples": np.array([1])},
        {"samples": np.array([1]), "pictures": np.zeros((1, 900, 900, 3), np.uint8)},
        {"samples": np.array([1, 2]), "pictures": np.zeros((1, 9, 9, 3), np.uint8)},
        {"samples": np.array([1]), "pictures": np.zeros((1, 9, 9, 3))},
        {"samples": np.array([1]), "pictures": np.array([[object()]])},
    ],
)
def test_a_file_that_holds_something_else_is_no_picture(root: Path, arrays: Any) -> None:
    write_run(root, RUN)
    keep(root, **arrays)
    with RunStore.read(root) as store:
        assert pictures_of(store) == {}
    (root / PICTURES).write_bytes(b"PK damaged")
    with RunStore.read(root) as store:
        assert pictures_of(store) == {}
