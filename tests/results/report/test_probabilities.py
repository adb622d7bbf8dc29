"""Calibration, ROC and precision-recall curves, against scikit-learn and by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import softmax
from sklearn.metrics import average_precision_score, roc_auc_score

from asynckfold import RunStore
from asynckfold.jobs.criteria import MARGINS
from asynckfold.jobs.objective import MULTICLASS, Objective
from asynckfold.results.cv_results import read_results
from asynckfold.results.report.charts import FIGURES
from asynckfold.results.report.inline import inline
from asynckfold.results.report.summary import Summary, summarize
from tests.synthetic import Synthetic, write_run

BINARY = Synthetic(classes=("no", "yes"), folds=2, epochs=1, baseline=None)
Outputs = Mapping[str, npt.NDArray[Any]]


def read(root: Path, run: Synthetic, objective: Objective | None = None) -> Any:
    """Return summary, out-of-fold outputs and targets."""
    with RunStore.read(write_run(root, run)) as store:
        found = read_results(store)
        if objective is not None:
            found = replace(found, plan=replace(found.plan, objective=objective))
        return summarize(store, found), found.oof, store.splits()[1]


def test_the_calibration_counts_how_often_the_best_is_right_when_it_is_sure(root: Path) -> None:
    summary, oof, targets = read(root, Synthetic(folds=2, epochs=1, baseline=None))
    sure = softmax(oof[summary.highest].astype(float), axis=1)
    right = sure.argmax(axis=1) == targets
    found = summary.calibration
    assert found.candidate == summary.highest
    assert sum(found.counts) == 300
    assert found.right == pytest.approx(right.mean())
    assert found.sure == pytest.approx(sure.max(axis=1).mean())
    last = sure.max(axis=1) >= 0.9
    assert found.counts[-1] == last.sum()
    assert found.accuracy[-1] == pytest.approx(right[last].mean())
    by_hand = 0.0
    for low in np.arange(0, 1, 0.1):
        inside = (sure.max(axis=1) >= low) & (sure.max(axis=1) < low + 0.1)
        if inside.any():
            gap = abs(right[inside].mean() - sure.max(axis=1)[inside].mean())
            by_hand += inside.mean() * gap
    assert found.error == pytest.approx(by_hand, abs=1e-3)


def test_two_classes_have_the_curves_of_scikit_learn(root: Path) -> None:
    summary, oof, targets = read(root, BINARY)
    found = summary.two_classes
    assert (found.positive, found.share) == ("yes", 0.5)
    assert [each.candidate for each in found.curves] == [row.name for row in summary.candidates]
    for each in found.curves:
        odds = np.diff(oof[each.candidate].astype(float), axis=1)[:, 0]
        assert each.roc_area == pytest.approx(roc_auc_score(targets, odds))
        assert each.average_precision == pytest.approx(average_precision_score(targets, odds))
        assert (each.roc[0], each.roc[-1]) == ((0.0, 0.0), (1.0, 1.0))
        assert len(each.roc) <= 100
        recalls = [recall for recall, _ in each.precision_recall]
        assert recalls == sorted(recalls)
        assert recalls[-1] == 1.0


def test_the_positive_class_is_the_users(root: Path) -> None:
    asked = Objective(MULTICLASS, "logits", pos_label=0)
    summary, oof, targets = read(root, BINARY, asked)
    first = summary.two_classes.curves[0]
    assert summary.two_classes.positive == "no"
    odds = oof[first.candidate].astype(float)
    assert first.roc_area == pytest.approx(roc_auc_score(targets == 0, odds[:, 0] - odds[:, 1]))


def test_margins_have_curves_but_no_calibration(root: Path) -> None:
    summary, _, _ = read(root, BINARY, Objective(MULTICLASS, MARGINS))
    assert summary.calibration is None
    assert len(summary.two_classes.curves) == 4


@pytest.mark.parametrize(
    "run",
    [
        Synthetic(classes=(), metrics=("r2",), folds=2, epochs=1, baseline=None),
        Synthetic(status=lambda job: "failed", folds=2, epochs=1, baseline=None),
    ],
)
def test_without_classes_or_outputs_there_is_neither(root: Path, run: Synthetic) -> None:
    summary: Summary = read(root, run)[0]
    assert (summary.calibration, summary.two_classes) == (None, None)
    assert "probabilities" not in inline(summary)


def test_the_figure_has_three_panels_for_two_classes_and_one_for_more(root: Path) -> None:
    two, _, _ = read(root, BINARY)
    assert inline(two)["probabilities"].count('role="img"') == 3
    many, _, _ = read(root.with_name("many"), replace(BINARY, classes=("a", "b", "c")))
    assert inline(many)["probabilities"].count('role="img"') == 1
    figure = FIGURES["probabilities"](many)
    assert figure is not None
    assert figure.get_suptitle().startswith(f"{many.highest} is right in ")
