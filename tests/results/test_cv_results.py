"""What the user gets back: scikit-learn's table, out-of-fold outputs, the fingerprint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import GridSearchCV

from asynckfold import Baseline, CVResults, Epoch, Result
from asynckfold.jobs.result import StageEpoch
from tests.outcomes import divided, folds_of, results_of

TARGETS = np.array([0, 1] * 6)
MODELS, SCHEDULES = ["B<b>", "A"], ["cosine", "warm"]


def make_results(
    scores: Mapping[str, Mapping[str, float]], n_repeats: int = 1, **changes: Any
) -> CVResults:
    """Results of jobs by id; a missing job is pending."""
    folds = divided(12, 3, n_repeats)
    names = {f"{model}/{lr}": [0.5] * len(folds) for model in MODELS for lr in SCHEDULES}
    made = results_of(names, folds=folds, scoring=("accuracy", "f1"))
    jobs, by_key = made.plan.jobs, {fold.key: fold for fold in folds}
    results = {
        job.id: Result(
            job.id,
            1,
            "done",
            scores[job.id],
            (Epoch(1, 0.5, 0.6, 0.7, 1e-3, 0.1), Epoch(2, 0.4, 0.5, 0.8, 1e-3, 0.1)),
            by_key[(job.repeat, job.fold)].valid[:, None].astype(np.float32) + job.repeat,
            fit_seconds=2.0,
            score_seconds=0.5,
        )
        for job in jobs
        if job.id in scores
    }
    if baseline := changes.get("baseline"):
        seconds = {job.id: baseline.seconds / len(jobs) for job in jobs}
        changes["baseline"] = replace(baseline, seconds_by_job=baseline.seconds_by_job or seconds)
    return replace(made, **{"results": results, "seconds": 10.0, **changes})


def all_scores(n_repeats: int = 1) -> dict[str, dict[str, float]]:
    jobs = make_results({}, n_repeats).plan.jobs
    return {
        job.id: {"accuracy": 0.5 + 0.01 * number, "f1": 0.1 * (job.fold + 1)}
        for number, job in enumerate(jobs)
    }


class Guess(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """The smallest classifier with our two parameters."""

    def __init__(self, model: str = "A", scheduler: str = "cosine") -> None:
        self.model = model
        self.scheduler = scheduler

    def fit(self, samples: Any, targets: Any) -> Guess:
        self.classes_ = np.unique(targets)
        return self

    def predict(self, samples: Any) -> Any:
        return np.zeros(len(samples), int)


def test_cv_results_has_keys_types_and_shapes_of_scikit_learn() -> None:
    search = GridSearchCV(
        Guess(),
        {"model": MODELS, "scheduler": SCHEDULES},
        scoring={"accuracy": "accuracy", "f1": "balanced_accuracy"},
        refit=False,
        cv=3,
    ).fit(np.zeros((12, 1)), TARGETS)
    theirs, ours = search.cv_results_, make_results(all_scores()).cv_results_
    assert set(ours) == set(theirs)
    assert ours["params"] == theirs["params"]
    for key in set(ours) - {"params"}:
        assert type(ours[key]) is type(theirs[key]), key
        assert np.shape(ours[key]) == np.shape(theirs[key]), key
        assert ours[key].dtype == theirs[key].dtype, key
    assert list(ours["param_model"]) == list(theirs["param_model"])


def test_cv_results_is_consistent() -> None:
    table = make_results(all_scores()).cv_results_
    splits = np.stack([table[f"split{fold}_test_accuracy"] for fold in range(3)])
    np.testing.assert_allclose(table["mean_test_accuracy"], splits.mean(axis=0))
    np.testing.assert_allclose(table["std_test_accuracy"], splits.std(axis=0))
    assert table["rank_test_accuracy"].tolist() == [4, 3, 2, 1]
    assert table["rank_test_f1"].tolist() == [1, 1, 1, 1]
    assert table["mean_fit_time"].tolist() == [2.0] * 4


def test_the_best_candidate_is_the_best_complete_one() -> None:
    scores = all_scores()
    results = make_results(scores)
    assert results.best_params_ == {"model": "A", "scheduler": "warm"}
    assert results.best_score_ == pytest.approx(0.6)
    del scores["A/warm/fold-1"]
    incomplete = make_results(scores)
    assert incomplete.best_params_ == {"model": "A", "scheduler": "cosine"}
    assert incomplete.cv_results_["rank_test_accuracy"].tolist() == [3, 2, 1, 4]
    assert math.isnan(incomplete.cv_results_["mean_test_accuracy"][3])


def test_without_a_complete_candidate_the_error_counts_jobs_by_state() -> None:
    with pytest.raises(ValueError, match=r"no candidate has a score on every fold.*12 pending"):
        _ = make_results({}).best_index_


def interval(scores: list[float], metric: str = "profit", ratio: float = 0.25) -> list[float]:
    folds = folds_of(len(scores), ratio)
    frame = results_of({"m/x": scores}, metric, folds=folds).to_frame()
    return [float(frame[name][0]) for name in ("ci_low", "ci_high")]


def test_the_interval_is_corrected_as_by_nadeau_and_bengio() -> None:
    """By hand: mean 0.8, variance 0.01, k = 3, ratio 1/2, t(0.975, 2) = 4.30265."""
    half = 4.30265 * math.sqrt((1 / 3 + 0.5) * 0.01)
    wanted = [0.8 - half, 0.8 + half]
    assert interval([0.7, 0.8, 0.9], ratio=0.5) == pytest.approx(wanted, abs=1e-5)
    assert all(map(math.isnan, interval([0.7])))
    assert all(map(math.isnan, interval([0.7, math.nan])))


def test_intervals_are_clipped_to_the_bounds_of_the_score() -> None:
    scores = [0.9, 0.99, 1.0]
    low, high = interval(scores)
    assert high > 1
    assert interval(scores, "accuracy") == [low, 1.0]
    assert interval([-score for score in scores], "neg_log_loss") == [-high, -low]
    assert interval([score - 0.9 for score in scores], "recall_macro")[0] == 0.0
    # Somebody's own accuracy, in percent.
    percent = interval([100 * score for score in scores], "accuracy")
    assert percent == pytest.approx([100 * low, 100 * high])


# Out-of-fold outputs


def test_oof_outputs_are_in_dataset_order() -> None:
    outputs = make_results(all_scores()).oof
    assert list(outputs) == ["B<b>/cosine", "B<b>/warm", "A/cosine", "A/warm"]
    for array in outputs.values():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, np.arange(12, dtype=np.float32)[:, None])


def test_samples_that_no_finished_fold_held_out_are_nan() -> None:
    scores = all_scores()
    del scores["A/warm/fold-2"]
    results = make_results(scores)
    missing = np.isnan(results.oof["A/warm"][:, 0])
    assert np.flatnonzero(missing).tolist() == sorted(results.folds[2].valid.tolist())
    assert "A/warm" not in make_results({"A/cosine/fold-0": {"accuracy": 1.0, "f1": 1.0}}).oof


# The fingerprint


RESULT = make_results(all_scores()).results["A/warm/fold-0"]


TIME_AND_PLACE: tuple[dict[str, Any], ...] = (
    {"attempt": 9, "pid": 9, "cores": (3,), "threads": 9, "device": "cuda:1"},
    {"started": 9.0, "ended": 10.0, "fit_seconds": 9.0, "score_seconds": 9.0, "peak_memory": 9},
    {"epochs": tuple(replace(item, seconds=9.0) for item in RESULT.epochs)},
    {"scores": dict(sorted(RESULT.scores.items(), reverse=True))},
)
BITS: tuple[dict[str, Any], ...] = (
    {"weights": "other"},
    {"status": "failed"},
    {"scores": {**RESULT.scores, "f1": np.nextafter(RESULT.scores["f1"], 1.0)}},
    {"scores": {**RESULT.scores, "f1": float("nan")}},
    {"outputs": RESULT.outputs[::-1] if RESULT.outputs is not None else None},
    {"outputs": None},
    {"epochs": RESULT.epochs[:1]},
    {"epochs": (RESULT.epochs[0], replace(RESULT.epochs[1], accuracy=None))},
    {"epochs": (RESULT.epochs[0], replace(RESULT.epochs[1], train_loss=0.4 + 1e-16))},
    {"job_id": "A/warm/fold-1"},
)


def test_every_bit_of_the_result_but_neither_time_nor_place_changes_the_digest() -> None:
    for change in TIME_AND_PLACE:
        assert replace(RESULT, **change).digest == RESULT.digest, change
    for change in BITS:
        assert replace(RESULT, **change).digest != RESULT.digest, change


def test_the_fingerprint_does_not_depend_on_the_order_of_the_results() -> None:
    results = make_results(all_scores())
    backwards = replace(results, results=dict(sorted(results.results.items(), reverse=True)))
    assert backwards.fingerprint == results.fingerprint
    assert replace(results, results={}).fingerprint != results.fingerprint


# Tables and text


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="level must be 'candidate', 'fold' or 'epoch'"):
        make_results({}).to_frame("job")


def test_repr_shows_counts_speedup_and_ranking() -> None:
    baseline = Baseline("measured", 25.0, 2)
    lines = repr(make_results(all_scores(), baseline=baseline)).splitlines()
    assert "12 of 12 jobs finished in 10.0 s" in lines[0]
    assert "speedup: 2.50x, serial loop 25.0 s (measured, 2 threads)" in lines[0]
    assert lines[1].split() == ["rank", "model", "scheduler", "accuracy", "folds", "seconds"]
    row = ["1", "A", "warm", "0.6000", "±", "0.0082", "3/3", "6.0"]
    assert lines[2].split() == row
    assert lines[6:] == [str(make_results(all_scores()).verdict)]


def test_html_repr_escapes_names() -> None:
    page = make_results(all_scores())._repr_html_()
    assert "B&lt;b&gt;" in page
    assert "B<b>" not in page


def test_a_run_without_results_can_be_shown() -> None:
    results = make_results({})
    assert "12 pending" in repr(results)
    assert "n/a" in repr(results)
    assert len(results.to_frame()) == 4
    assert results.oof == {}


def test_measures_of_pretraining_are_part_of_the_digest() -> None:
    result = Result("a", 1, "done")
    assert result.digest == "3c1e586e103f67415b53e83042f19231d3e4970d7a1a96fd532b6691c71fbe19"
    stage = StageEpoch("layer 1", 1, {"gap": 0.5}, 2.0)
    staged = replace(result, pretraining=(stage,))
    slower = replace(result, pretraining=(replace(stage, seconds=3.0),))
    other = replace(result, pretraining=(replace(stage, measures={"gap": 0.25}),))
    assert staged.digest == slower.digest
    assert len({result.digest, staged.digest, other.digest}) == 3


def test_compare_has_a_row_for_each_pair_of_candidates() -> None:
    scores = all_scores()
    scores["A/cosine/fold-1"]["accuracy"] += 0.03
    del scores["A/warm/fold-2"]
    found = make_results(scores, error_score=0.0)
    frame = found.compare()
    pairs = frame.set_index(["first", "second"])
    assert len(pairs) == 6
    row = pairs.loc["A/cosine", "B<b>/warm"]
    assert row["mean"] == pytest.approx(0.04)
    assert row["ci_low"] < 0.04 < row["ci_high"]
    assert (row["won"], row["folds"]) == (3, 3)
    # The score that stands for a missing fold is not compared.
    assert pairs.loc["A/warm", "B<b>/cosine"]["folds"] == 2
    # Three pairs have a spread; the others differ by the same on each fold.
    assert frame["p"].isna().sum() == 3
