"""What results say adds up: ranks, out-of-fold outputs, seconds."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata
from sklearn.model_selection import RepeatedStratifiedKFold, ShuffleSplit
from torch import nn, optim

from asynckfold import AsyncKFold, CVResults, JobsFailedWarning, Result
from tests import outcomes
from tests.outcomes import divided
from tests.size import examples

SAMPLES = 12


def results_of(scores: Sequence[Sequence[float]], **changes: Any) -> CVResults:
    """Results of one LR schedule and a model for each row of scores, fold by fold."""
    folds = divided(SAMPLES, len(scores[0]))
    named = {f"m{number}/constant": row for number, row in enumerate(scores)}
    return outcomes.results_of(named, folds=folds, state="done", **changes)


def ranks(scores: Sequence[Sequence[float]]) -> list[int]:
    return list(results_of(scores).cv_results_["rank_test_accuracy"])


# Ties


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6, -1e-6])
def test_the_order_of_summation_does_not_change_ranks(size: float) -> None:
    one, other = [0.1 * size, 0.2 * size, 0.3 * size], [0.3 * size, 0.2 * size, 0.1 * size]
    assert size != 1 or np.mean(one) != np.mean(other)
    for scores in ([one, other], [other, one]):
        found = results_of(scores)
        assert list(found.cv_results_["rank_test_accuracy"]) == [1, 1]
        assert found.best_index_ == 0
        assert list(found.to_frame()["rank"]) == [1, 1]
        assert list(found.to_frame()["model"]) == ["m0", "m1"]
        (difference,) = found.verdict.models
        assert (difference.mean, difference.p) == (0, pytest.approx(1))
        assert found.verdict.best is None


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_differences_beyond_rounding_and_infinite_scores_rank() -> None:
    assert ranks([[0.5, 0.5], [0.5, 0.5 + 1e-7], [0.5, 0.5 - 1e-7]]) == [2, 1, 3]
    # One sample of a million more.
    assert ranks([[0.999998] * 2, [0.999999] * 2]) == [2, 1]
    # Small scores differ as shares of themselves.
    assert ranks([[1e-12, 1e-12], [2e-12, 2e-12]]) == [2, 1]
    (found,) = results_of([[1e-12, 2e-12, 1e-12], [2e-12, 4e-12, 3e-12]]).verdict.models
    assert found.conclusion in ("beats", "undecided")
    assert ranks([[-np.inf, 0.1], [0.2, 0.1], [-np.inf, 0.9]]) == [2, 1, 2]


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_permuting_folds_changes_no_rank(counts: list[list[int]], random: object) -> None:
    scores = [[count / 50 for count in row] for row in counts]
    # In whole numbers there is no rounding: these are scikit-learn's ranks.
    expected = rankdata([-sum(row) for row in counts], method="min").astype(int).tolist()
    assert ranks(scores) == expected
    shuffled = [list(row) for row in scores]
    for row in shuffled:
        random.shuffle(row)  # type: ignore[attr-defined]
    assert ranks(shuffled) == expected
    frame = results_of(shuffled).to_frame()
    assert list(frame["rank"]) == sorted(expected)


# Who is never best


@pytest.mark.parametrize("error_score", [float("nan"), 0.0, 1e9])
def test_a_failed_candidate_is_never_best_whatever_its_error_score(error_score: float) -> None:
    found = results_of([[0.9, 0.9], [0.5, 0.6]], error_score=error_score)
    jobs = found.plan.jobs
    results = {**found.results, jobs[1].id: Result(jobs[1].id, 1, "failed", error="bad")}
    found = replace(found, results=results)
    assert found.best_params_["model"] == "m1"
    assert list(found.cv_results_["rank_test_accuracy"]) == [2, 1]
    assert found.best_score_ == pytest.approx(0.55)
    # Nor is what stands for its score compared.
    assert [pair.folds for pair in found.verdict.models] == [1]
    assert list(found.compare()["folds"]) == [1]
    frame = found.to_frame()
    assert list(frame["model"]) == ["m1", "m0"]
    assert np.isnan(frame["rank"][1])
    # What stands for its score is no sample of it.
    assert frame[["ci_low", "ci_high"]].isna().all(axis=1).tolist() == [False, True]


def test_pending_or_nan_candidates_are_never_best() -> None:
    found = results_of([[0.9, 0.9], [0.5, 0.6], [float("nan"), 1.0]])
    results = dict(found.results)
    del results[found.plan.jobs[0].id]
    found = replace(found, results=results)
    assert found.best_params_["model"] == "m1"
    assert list(found.cv_results_["rank_test_accuracy"]) == [2, 1, 2]
    nothing = results_of([[float("nan"), 1.0]])
    assert not nothing.has_best
    with pytest.raises(ValueError, match="none is best"):
        _ = nothing.best_index_


# Out-of-fold outputs


def swept(root: Path, models: Any = None, **given: Any) -> CVResults:
    """A sweep over noisy classes: the model is far from perfect."""
    rng = np.random.default_rng(0)
    targets = np.arange(48) % 2
    inputs = rng.normal(size=(48, 4)).astype(np.float32)
    inputs[:, 0] += targets
    settings: dict[str, Any] = {
        "parallelize": False,
        "baseline": None,
        "report": False,
        "verbose": 0,
        **given,
    }
    folds = None if "cv" in given else 3
    kfold = AsyncKFold(folds, (inputs, targets), root, nn.CrossEntropyLoss(), 16, **settings)
    return kfold(
        models or {"linear": partial(nn.Linear, 4, 2)},
        ["constant"],
        lambda model: optim.SGD(model.parameters(), 0.1),
        {"epochs": 2},
    )


FOLDS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 1),
    "repeats": ({"n_repeats": 3}, 3),
    "splitter": ({"cv": RepeatedStratifiedKFold(n_splits=3, n_repeats=2, random_state=0)}, 2),
    "overlapping": ({"cv": ShuffleSplit(4, test_size=0.6, random_state=0)}, 4),
}


@pytest.mark.parametrize("kind", FOLDS)
def test_out_of_fold_outputs_are_those_that_were_scored(root: Path, kind: str) -> None:
    changes, layers = FOLDS[kind]
    found = swept(root, **changes)
    targets = np.arange(48) % 2
    outputs, mean = found.oof["linear/constant"], found.oof_mean["linear/constant"]
    assert outputs.shape == ((48, 2) if layers == 1 else (layers, 48, 2))
    assert mean.shape == (48, 2)
    assert outputs.dtype == mean.dtype == np.float32
    with np.load(root / "oof" / "linear-constant.npz") as file:
        np.testing.assert_array_equal(file["outputs"], outputs)
    stacked = outputs.reshape(layers, 48, 2)
    for place, fold in enumerate(found.folds):
        said = stacked[place * layers // len(found.folds), fold.valid].argmax(1)
        (score,) = (
            found.results[job.id].scores["accuracy"]
            for job in found.plan.jobs
            if (job.repeat, job.fold) == fold.key
        )
        assert float((said == targets[fold.valid]).mean()) == pytest.approx(score)
    held = sum(len(fold.valid) for fold in found.folds)
    assert int((~np.isnan(stacked[..., 0])).sum()) == held
    if layers > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a sample that was never held out
            np.testing.assert_allclose(mean, np.nanmean(outputs, axis=0), atol=1e-6)
    else:
        np.testing.assert_array_equal(mean, outputs)


# Seconds

PAUSE = 0.02


class Paused(nn.Linear):
    """Takes its time for each training batch; its third may raise or be no number."""

    third = 0.0

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.seen = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(PAUSE)
            self.seen += 1
            if self.seen == 3 and self.third is None:
                raise ValueError("bad")
        return super().forward(inputs) + (self.third if self.seen == 3 else 0.0)


class Raising(Paused):
    third = None  # type: ignore[assignment]


class Diverging(Paused):
    third = math.nan


def test_fit_seconds_run_until_the_end_of_the_job(root: Path) -> None:
    models = {"done": Paused, "failed": Raising, "diverged": Diverging}
    with pytest.warns(JobsFailedWarning):
        found = swept(root, models)
    for job in found.plan.jobs:
        result = found.results[job.id]
        assert result.status == job.model
        assert 2 * PAUSE < result.fit_seconds < 30


def test_jobs_of_a_fusion_group_share_its_seconds(root: Path) -> None:
    found = swept(root, fuse=3)
    (group,) = found.plan.groups
    jobs = [found.results[name] for name in group]
    seconds = [job.fit_seconds for job in jobs]
    assert seconds == pytest.approx([seconds[0]] * 3, rel=0.5)
    assert 0 < sum(seconds) < max(job.ended for job in jobs) - min(job.started for job in jobs)


def test_a_failed_fold_counts_in_every_table() -> None:
    found = results_of([[0.5, 0.6]])
    first, second = found.plan.jobs
    results = {
        first.id: replace(found.results[first.id], fit_seconds=4.0),
        second.id: Result(second.id, 1, "failed", fit_seconds=2.0, error="ValueError: bad"),
    }
    found = replace(found, results=results)
    assert found.cv_results_["mean_fit_time"].tolist() == [3.0]
    assert found.to_frame("fold")["fit_seconds"].tolist() == [4.0, 2.0]
    assert found.to_frame()["fit_seconds"].tolist() == [6.0]
