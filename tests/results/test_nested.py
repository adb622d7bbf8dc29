"""Nested cross-validation: inner folds choose the candidate, their outer fold scores it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.model_selection import TimeSeriesSplit
from torch import nn, optim

from asynckfold import AsyncKFold, Fold, InputError, Plan, load_results
from tests.interrupted import interrupted
from tests.outcomes import NAN, folds_of, results_of, written
from tests.toy import samples


def still() -> nn.Module:
    """Return a model without draws: in full batches, its job depends on its samples alone."""
    return nn.Linear(8, 3, bias=False).apply(lambda model: nn.init.zeros_(model.weight))


def swept(root: Path, kfolds: Any = 3, does: str = "__call__", **settings: Any) -> Any:
    rates = settings.pop("lr", [0.03, 1.0, 0.1])
    settings |= {"engine": "serial", "fuse": False, "verbose": 0, "report": False}
    settings |= {"scoring": "neg_log_loss", "threads_per_job": 1}
    kfold = AsyncKFold(kfolds, samples(96), root, nn.CrossEntropyLoss(), "full", **settings)
    call = [still], ["constant"], lambda model, lr: optim.SGD(model.parameters(), lr)
    return getattr(kfold, does)(*call, {"epochs": 2}, params={"lr": rates})


def test_the_best_inner_mean_chooses_unless_an_inner_job_failed(tmp_path: Path) -> None:
    part = np.arange(2)
    inner = [Fold(0, fold, part, part, inner=number) for fold in (0, 1) for number in (0, 1)]
    scores = {
        "A/step": [0.9, 0.5, 0.6, 0.8, 0.9, NAN],
        "B/step": [0.8, 0.6, 0.7, 0.7, 0.5, 0.7],  # a tie with A on the first fold
    }
    made = results_of(scores, folds=[*folds_of(2), *inner])
    nested = load_results(written(tmp_path, made)).nested
    assert nested is not None
    assert "0.7500 ± 0.1500" in str(nested)
    assert [(item.fold, item.candidate, item.outer_score) for item in nested.folds] == [
        *((0, "A/step", 0.9), (1, "B/step", 0.6))
    ]
    assert (nested.mean, nested.std, nested.bias) == pytest.approx((0.75, 0.15, 0.7 - 0.75))


def test_inner_jobs_train_on_inner_folds_and_change_no_bit_of_the_outer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, plain = swept(tmp_path / "nested", nested=2), swept(tmp_path / "plain")
    assert (results.counts["done"], plain.nested) == (3 * 3 * (1 + 2), None)
    digests = [{name: it.digest for name, it in run.results.items()} for run in (results, plain)]
    assert digests[0] == digests[1]
    nested, (_, folds) = results.nested, swept(tmp_path, 3, "plan", nested=2)
    # A choice again, by a call that knows the inner folds of this fold alone.
    item = nested.folds[1]
    mine = [it for it in folds if it.index == item.fold and it.inner is not None]
    alone = swept(tmp_path / "alone", [(it.train, it.valid) for it in mine])
    rows = nested.inner_scores.query("fold == @item.fold")
    scores = [row.scores["neg_log_loss"] for row in alone.candidates]
    assert rows.neg_log_loss.to_numpy() == pytest.approx(np.concatenate(scores))
    best, chosen = alone.best_index_, (item.candidate, item.inner_score)
    assert chosen == (alone.candidates[best].name, pytest.approx(alone.best_score_))
    assert item.outer_score == plain.candidates[best].scores["neg_log_loss"][item.fold]
    with interrupted(monkeypatch, "training.training_run.Training", "score", 20):
        swept(tmp_path / "cut", nested=2)
    with pytest.raises(InputError, match="nested: 2 there, 3 here"):
        swept(tmp_path / "cut", nested=3)
    assert swept(tmp_path / "cut", nested=2).fingerprint == results.fingerprint


def test_inner_folds_are_divided_as_the_outer_ones_are(tmp_path: Path) -> None:
    groups, classes = np.arange(96) // 4, samples(96)[1]
    (plan, strata), (plain, _) = swept(tmp_path, 3, "plan", nested=3), swept(tmp_path, 3, "plan")
    _, grouped = swept(tmp_path, 3, "plan", nested=3, groups=groups, stratify=False, n_repeats=2)
    _, ordered = swept(tmp_path, TimeSeriesSplit(3), "plan", nested=2)
    for made in (grouped, strata):
        whole = {fold.key: set(fold.train) for fold in made}
        for fold in made[len(made) // 4 :]:
            assert {*fold.train, *fold.valid} == whole[fold.key[:2]]
    assert all(not np.isin(groups[fold.train], groups[fold.valid]).any() for fold in grouped)
    assert all(np.ptp(np.bincount(classes[fold.valid])) <= 1 for fold in strata)
    assert all(fold.train.max() < fold.valid.min() for fold in ordered)
    assert len({job.seed for job in plan.jobs}) == 3 * (1 + 3)
    assert Plan.from_json(plan.to_json()) == plan
    assert '"inner":' not in plain.to_json()  # as in plans that were written before


def test_what_cannot_be_nested_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nested must be a whole number of at least 2"):
        swept(tmp_path, 3, "plan", nested=1)
    with pytest.raises(InputError, match="nested must go without race"):
        swept(tmp_path, 3, "plan", nested=3, race=True)
    with pytest.raises(InputError, match="nested, the training part of fold 0: each class"):
        swept(tmp_path, 3, "plan", nested=30)
    with pytest.raises(InputError, match="nested needs two candidates"):
        swept(tmp_path, 3, "plan", nested=2, lr=[0.1])
