"""What results say adds up: ranks, out-of-fold outputs, seconds."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
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

from asynckfold import AsyncKFold, CVResults, Result
from asynckfold.training import setup
from asynckfold.training.fusion import group as trainer
from asynckfold.training.stopwatch import Stopwatch
from tests import outcomes
from tests.outcomes import divided
from tests.size import examples
from tests.training.fusion.test_trainer import grouped
from tests.training.tiny import Plain, Tiny, checkpoints

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


def test_differences_beyond_rounding_rank() -> None:
    assert ranks([[0.5, 0.5], [0.5, 0.5 + 1e-7], [0.5, 0.5 - 1e-7]]) == [2, 1, 3]
    # One sample of a million more.
    assert ranks([[0.999998] * 2, [0.999999] * 2]) == [2, 1]
    # Small scores differ as shares of themselves.
    assert ranks([[1e-12, 1e-12], [2e-12, 2e-12]]) == [2, 1]
    (found,) = results_of([[1e-12, 2e-12, 1e-12], [2e-12, 4e-12, 3e-12]]).verdict.models
    assert found.conclusion in ("beats", "undecided")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_infinite_scores_are_ranked() -> None:
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


def swept(root: Path, **given: Any) -> CVResults:
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
        {"linear": partial(nn.Linear, 4, 2)},
        ["constant"],
        lambda model: optim.SGD(model.parameters(), 0.1),
        {"epochs": 1},
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


class Clock:
    """Seconds that pass when somebody says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all jobs that are built."""
    found = Clock()
    for module in (setup, trainer):
        monkeypatch.setattr(module, "Stopwatch", partial(Stopwatch, clock=found))
    return found


def stepping(
    clock: Clock, until: int, error: type[Exception] | float | None
) -> Callable[[], nn.Module]:
    """A model of which each training batch takes a second; batch `until` raises or diverges."""

    class Stepping(Plain):
        seen = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:
                clock.now += 1
                self.seen += 1
                if self.seen == until and isinstance(error, type):
                    raise error("bad")
            factor = float("nan") if self.seen >= until and isinstance(error, float) else 1.0
            return super().forward(inputs) * factor

    return Stepping


@pytest.mark.parametrize(
    ("error", "limit", "status", "seconds"),
    [
        (ValueError, None, "failed", 3.0),
        (math.nan, None, "diverged", 4.0),
        (None, None, "done", 8.0),
        (None, 5, "failed", 5.0),
    ],
    ids=["raises", "diverges", "done", "timed out"],
)
def test_fit_seconds_run_until_the_end_of_the_job(
    tmp_path: Path, clock: Clock, error: Any, limit: int | None, status: str, seconds: float
) -> None:
    words = {} if limit is None else {"job_timeout_s": limit}
    tiny = Tiny(tmp_path, {"m": stepping(clock, 3 if error else 99, error)}, **words)
    (result,) = tiny.execute(tiny.jobs[0])
    assert result.status == status
    assert result.fit_seconds == pytest.approx(seconds)


def test_fit_seconds_add_up_over_attempts_and_survive_a_kill(tmp_path: Path, clock: Clock) -> None:
    tiny = Tiny(tmp_path / "stopped", {"m": stepping(clock, 99, None)})
    result, attempts = tiny.train_with_stops()
    assert attempts > 2
    assert result.fit_seconds == pytest.approx(8.0)
    # Killed before its result was recorded.
    tiny = Tiny(tmp_path / "killed", {"m": stepping(clock, 99, None)})
    first, news = tiny.attempt()
    again, _ = tiny.attempt(attempt=2, refs=checkpoints(news))
    assert first is not None
    assert again is not None
    assert again.fit_seconds == pytest.approx(first.fit_seconds)
    assert again.score_seconds == pytest.approx(first.score_seconds)
    assert first.score_seconds > 0


def test_a_job_that_fails_before_training_has_fit_seconds(tmp_path: Path) -> None:
    def slow() -> nn.Module:
        time.sleep(0.05)
        raise ValueError("no model")

    tiny = Tiny(tmp_path, {"m": slow})
    (result,) = tiny.execute(tiny.jobs[0])
    assert result.status == "failed"
    assert result.fit_seconds >= 0.05


def test_jobs_of_a_fusion_group_share_its_seconds(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = optim.SGD.step

    def taking(optimizer: optim.SGD, closure: Any = None) -> Any:
        clock.now += 1
        return step(optimizer, closure)

    monkeypatch.setattr(optim.SGD, "step", taking)
    began = clock.now
    results, _ = grouped(tmp_path).group()
    seconds = [result.fit_seconds for result in results.values() if result is not None]
    assert len(set(seconds)) == 1
    assert sum(seconds) == pytest.approx(clock.now - began)


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
