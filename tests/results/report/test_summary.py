from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from asynckfold import Job, RunStore
from asynckfold.results.report.attempts import USE_POINTS
from asynckfold.results.report.sanitize import NAME_LIMIT
from asynckfold.results.report.summary import summarize
from tests.results.report.conftest import Summarize
from tests.synthetic import FakeClockStore, Synthetic, write_run


def test_candidates_are_ranked_by_their_mean_over_stored_folds(complete: Path) -> None:
    with RunStore.read(complete) as store:
        summary, results = summarize(store), store.results()
    means = [row.mean["accuracy"] for row in summary.candidates]
    assert means == sorted(means, reverse=True)
    assert [row.rank for row in summary.candidates] == [1, 2, 3, 4]
    assert summary.highest == summary.candidates[0].name
    for row in summary.candidates:
        stored = [results[f"{row.name}/fold-{fold}"].scores["accuracy"] for fold in range(5)]
        assert row.scores["accuracy"] == tuple(stored)
        assert row.mean["accuracy"] == pytest.approx(np.mean(stored))
        assert row.ci_low < row.mean["accuracy"] < row.ci_high


def test_incomplete_candidates_are_unranked_below_the_complete_ones(summarized: Summarize) -> None:
    def status(job: Job) -> str:
        return "failed" if (job.candidate, job.fold) == ("LeNet5/warm", 4) else "done"

    summary = summarized(Synthetic(status=status))
    last = summary.candidates[-1]
    assert (last.name, last.rank, last.folds_done, last.status) == (
        "LeNet5/warm",
        None,
        4,
        "failed",
    )
    assert [row.rank for row in summary.candidates] == [1, 2, 3, None]
    assert last.mean["accuracy"] == pytest.approx(np.nanmean(last.scores["accuracy"]))
    assert math.isnan(last.ci_low)


def test_nan_scores_make_no_best_candidate(summarized: Summarize) -> None:
    summary = summarized(Synthetic(score=math.nan))
    assert summary.highest is None
    assert summary.verdict.best is None
    assert [row.rank for row in summary.candidates] == [None] * 4
    json.dumps(summary.to_dict(), allow_nan=False)


def test_confusion_counts_every_held_out_sample_once(complete: Path) -> None:
    with RunStore.read(complete) as store:
        summary = summarize(store)
    for row in summary.candidates:
        assert row.confusion is not None
        counts = np.array(row.confusion)
        assert counts.sum() == summary.facts.samples
        assert counts.trace() / counts.sum() == pytest.approx(row.mean["accuracy"])
        assert row.class_accuracy is not None
        assert np.mean(row.class_accuracy) == pytest.approx(row.mean["accuracy"])
        assert counts[8, 3] > counts[8, 4]


def test_regression_has_no_classes(summarized: Summarize) -> None:
    summary = summarized(Synthetic(classes=(), metrics=("r2",)))
    assert summary.metric == "r2"
    assert summary.highest is not None
    assert all(row.confusion is None and row.class_accuracy is None for row in summary.candidates)
    measures = {curve.measure for row in summary.candidates for curve in row.curves}
    assert measures == {"train_loss", "valid_loss", "lr"}
    assert summary.predictions is not None
    assert summary.predictions.total == summary.facts.samples
    true, predicted = map(np.array, (summary.predictions.true, summary.predictions.predicted))
    assert np.corrcoef(true, predicted)[0, 1] > 0.9


def test_curves_average_the_folds(complete: Path) -> None:
    with RunStore.read(complete) as store:
        row = summarize(store).candidates[0]
    measures = ["train_loss", "valid_loss", "accuracy", "lr"]
    assert [curve.measure for curve in row.curves] == measures
    for curve in row.curves:
        assert curve.mean == pytest.approx(np.mean(curve.folds, axis=0))
        assert np.shape(curve.folds) == (5, 5)


def test_equal_failures_are_one_group_with_the_first_traceback(summarized: Summarize) -> None:
    def status(job: Job) -> str:
        return {0: "failed", 1: "diverged"}.get(job.fold, "done")

    summary = summarized(Synthetic(status=status, error="ValueError: no", traceback="T: "))
    groups = {group.status: group for group in summary.failures}
    assert groups.keys() == {"failed", "diverged"}
    assert len(groups["failed"].jobs) == 4
    assert groups["failed"].jobs[0] == "LeNet5/cosine/fold-0"
    assert groups["failed"].traceback == "T: ValueError: no"
    assert groups["diverged"].traceback == ""


def test_speedup_is_serial_over_packed(complete: Path) -> None:
    with RunStore.read(complete) as store:
        found, baseline = summarize(store).speedup, store.baseline
        assert found is not None
        assert baseline is not None
        assert found.ratio == baseline.seconds / store.sessions()[0].packed_seconds
    assert found.kind == "measured"
    assert [pair.serial for pair in found.accuracy] == pytest.approx([0.91] * 4)
    for pair in found.accuracy:
        assert [item.fold for item in pair.folds] == ["0", "1", "2", "3", "4"]
        assert {item.serial for item in pair.folds} == {0.91}
        assert sum(item.packed for item in pair.folds) / 5 == pytest.approx(pair.packed)
        assert {item.together for item in pair.folds} == {1}


def test_accuracies_are_compared_whatever_is_scored(summarized: Summarize) -> None:
    summary = summarized(Synthetic(metrics=("f1_macro",)))
    assert summary.speedup is not None
    pairs = {pair.candidate: pair for pair in summary.speedup.accuracy}
    for row in summary.candidates:
        accuracy = next(curve for curve in row.curves if curve.measure == "accuracy")
        assert pairs[row.name].packed == row.packed_accuracy == pytest.approx(accuracy.mean[-1])
        assert pairs[row.name].serial == row.serial_accuracy == pytest.approx(0.91)


def test_a_regression_has_seconds_and_no_accuracy(summarized: Summarize) -> None:
    summary = summarized(Synthetic(metrics=("r2",), classes=()))
    assert all(math.isfinite(row.packed_seconds) for row in summary.candidates)
    assert all(math.isnan(row.packed_accuracy) for row in summary.candidates)


def test_use_starts_at_zero_in_each_phase_and_keeps_its_mean(complete: Path) -> None:
    with RunStore.read(complete) as store:
        summary, samples = summarize(store), store.samples()
    assert [use.phase for use in summary.use] == ["serial", "packed"]
    for use in summary.use:
        mine = [item.used for item in samples if item.phase == use.phase]
        assert use.seconds[0] == 0
        assert use.cores == 2
        assert use.mean_used == pytest.approx(np.mean(mine))


def test_long_runs_are_thinned_without_moving_the_mean(summarized: Summarize) -> None:
    summary = summarized(Synthetic(models=tuple("ABCDEFGH"), folds=20))
    serial = summary.use[0]
    assert len(serial.seconds) == USE_POINTS
    assert list(serial.seconds) == sorted(serial.seconds)
    assert np.mean(serial.used) == pytest.approx(serial.mean_used, rel=0.02)


def test_bars_show_every_attempt_and_what_was_lost(summarized: Summarize) -> None:
    summary = summarized(Synthetic(retried=("MLP/warm/fold-1",)))
    outcomes = {(bar.job, bar.attempt): bar.outcome for bar in summary.bars}
    assert len(outcomes) == 21
    assert outcomes["MLP/warm/fold-1", 1] == "died"
    assert outcomes["MLP/warm/fold-1", 2] == "ok"
    assert all(bar.start <= bar.end for bar in summary.bars)


def test_an_attempt_without_an_end_is_lost_when_nobody_runs(root: Path) -> None:
    write_run(root, Synthetic(status=lambda job: "pending"))
    with RunStore.hold(root) as store:
        store.begin(store.reader.plan, *store.reader.splits())
        store.start_attempt("MLP/warm/fold-0", (1,), 1, "cpu", 1.0)
        assert summarize(store.reader).bars[0].outcome == "running"
    with RunStore.read(root) as store:
        assert summarize(store).bars[0].outcome == "lost"


def test_command_is_quoted_and_settings_are_flat(complete: Path) -> None:
    with RunStore.read(complete) as store:
        summary = summarize(store)
    assert summary.command == "asynckfold run --data digits --root 'runs/x y'"
    assert summary.about["versions.torch"] == "2.6.0"
    assert "command" not in summary.about


def test_jobs_of_overlong_names_stay_apart(summarized: Summarize) -> None:
    summary = summarized(Synthetic(models=("x" * 3000,), baseline=None))
    assert len({bar.job for bar in summary.bars}) == 10
    assert len(summary.candidates[0].model) < NAME_LIMIT + 20


def test_an_attempt_lost_with_its_session_ends_with_it_and_not_with_the_run(root: Path) -> None:
    write_run(root, Synthetic(status=lambda job: "pending"))
    job = "MLP/warm/fold-0"
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        for pause in (100.0, 50.0):
            store.clock = pause + store.reader.sessions()[-1].end
            store.begin(store.reader.plan, *store.reader.splits())
            store.start_attempt(job, (1,), 1, "cpu", 1.0)
            store.clock += 5.0
            store.flush()
    with RunStore.read(root) as reader:
        bars = summarize(reader).bars
    assert [(bar.end - bar.start, bar.outcome) for bar in bars] == [(5.0, "lost")] * 2
