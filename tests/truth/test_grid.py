"""Scores of `AsyncKFold` against scikit-learn's ``cross_validate`` over an ordinary loop."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

from asynckfold import AsyncKFold
from tests.size import NIGHTLY
from tests.truth.grid import (
    EPOCHS,
    SAMPLES,
    Cell,
    affine,
    brought,
    cells,
    expected,
    make_optimizer,
)

EVERY = 1 if NIGHTLY else 11
"""Of the cells, one in so many is computed in `make test`; all of them are 1,600 scores."""

CELLS = cells()
WITHIN = 2e-5
"""Rounding of float32 over the steps, as a share of the greater score."""


class Transformed(Dataset[Any]):
    """A data set with a transform by sample, as torchvision's have it."""

    def __init__(self, X: Any, y: Any) -> None:
        self.X, self.y, self.transform = X, y, affine

    def __len__(self) -> int:
        return len(self.X)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.transform(self.X[index]), self.y[index]


def observed(cell: Cell, scorers: list[str], root: Path) -> dict[str, Any]:
    """Return the scores of a cell by `AsyncKFold`: name → one number for each fold."""
    given = brought(cell)
    dataset = Transformed(given.X, given.y) if cell.transform == "dataset" else (given.X, given.y)
    views = {"train_transform": affine, "eval_transform": affine}
    kfold = AsyncKFold(
        given.splitter,
        dataset,
        root,
        given.criterion,
        SAMPLES,
        parallelize=False,
        groups=given.groups,
        scoring=scorers,
        preprocess=given.preprocess,
        fuse=cell.fuse == "fused",
        baseline=None,
        verbose=0,
        **(views if cell.transform == "views" else {}),
    )
    table = kfold(
        {"linear": given.model}, ["constant"], make_optimizer, {"epochs": EPOCHS}
    ).cv_results_
    folds = sum(name.startswith("split") for name in table) // len(scorers)
    return {
        name: np.array([table[f"split{fold}_test_{name}"][0] for fold in range(folds)])
        for name in scorers
    }


def test_the_grid_has_at_least_300_cells_and_all_values_meet() -> None:
    assert sum(len(brought(cell).scorers) for cell in CELLS) >= 300
    assert len(set(CELLS)) == len(CELLS)


@pytest.mark.parametrize("cell", CELLS[::EVERY], ids=str)
def test_scores_are_those_of_cross_validate(cell: Cell, tmp_path: Path, one_thread: None) -> None:
    wanted = expected(cell)
    assert wanted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = observed(cell, list(wanted), tmp_path / "run")
    for name, values in wanted.items():
        np.testing.assert_allclose(
            found[name], values, rtol=WITHIN, atol=WITHIN, err_msg=f"{cell}: {name}"
        )
