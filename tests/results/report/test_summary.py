"""The numbers of a report, as ``results.json`` has them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import softmax
from sklearn.metrics import average_precision_score, roc_auc_score

from asynckfold import Job, RunStore, load_results
from asynckfold.jobs.objective import Objective
from tests.results.report.reports import Report, report_again, report_of
from tests.synthetic import FakeClockStore, Synthetic, write_run

TWO_FOLDS = Synthetic(folds=2, epochs=1, baseline=None, cpu_samples=False)
BINARY = replace(TWO_FOLDS, classes=("no", "yes"))
THREE = replace(TWO_FOLDS, models=("A", "B", "C"), lr_schedules=("x",))


def targets_of(report: Report) -> npt.NDArray[Any]:
    with RunStore.read(report.root) as store:
        return store.splits()[1]


# Candidates


def test_candidates_are_ranked_by_their_mean_over_stored_folds(complete: Report) -> None:
    rows, results = complete.numbers["candidates"], load_results(complete.root)
    means = [row["mean"]["accuracy"] for row in rows]
    assert means == sorted(means, reverse=True)
    assert [row["rank"] for row in rows] == [1, 2, 3, 4]
    assert complete.numbers["highest"] == rows[0]["name"]
    for row in rows:
        scores = [results.results[f"{row['name']}/fold-{at}"].scores["accuracy"] for at in range(5)]
        assert row["scores"]["accuracy"] == scores
        assert row["mean"]["accuracy"] == pytest.approx(np.mean(scores))
        assert row["ci_low"] < row["mean"]["accuracy"] < row["ci_high"]
        counts = np.array(row["confusion"])
        assert counts.sum() == complete.numbers["facts"]["samples"]
        assert counts.trace() / counts.sum() == pytest.approx(row["mean"]["accuracy"])
        assert np.mean(row["class_accuracy"]) == pytest.approx(row["mean"]["accuracy"])
        assert counts[8, 3] > counts[8, 4]
        measures = ["train_loss", "valid_loss", "accuracy", "lr"]
        assert [curve["measure"] for curve in row["curves"]] == measures
        for curve in row["curves"]:
            assert curve["mean"] == pytest.approx(np.mean(curve["folds"], axis=0))
            assert np.shape(curve["folds"]) == (5, 5)


def test_failures_are_grouped_and_incomplete_candidates_are_unranked(root: Path) -> None:
    def status(job: Job) -> str:
        states = {("LeNet5/warm", 4): "failed", ("MLP/cosine", 0): "failed"}
        return {**states, ("MLP/warm", 1): "diverged"}.get((job.candidate, job.fold), "done")

    numbers = report_of(
        root, Synthetic(status=status, error="ValueError: no", traceback="T: ")
    ).numbers
    first, *others = numbers["candidates"]
    assert (first["name"], first["rank"]) == ("LeNet5/cosine", 1)
    assert {row["rank"] for row in others} == {None}
    last = next(row for row in others if row["name"] == "LeNet5/warm")
    assert (last["folds_done"], last["status"], last["ci_low"]) == (4, "failed", None)
    assert last["mean"]["accuracy"] == pytest.approx(np.mean(last["scores"]["accuracy"][:4]))
    failed, diverged = numbers["failures"]
    assert failed["jobs"] == ["LeNet5/warm/fold-4", "MLP/cosine/fold-0"]
    assert failed["traceback"] == "T: ValueError: no"
    assert (diverged["status"], diverged["traceback"]) == ("diverged", "")


def test_regression_has_numbers_in_place_of_classes(root: Path) -> None:
    report = report_of(root, Synthetic(classes=(), metrics=("r2",), folds=2, n_repeats=2))
    numbers = report.numbers
    assert (numbers["metric"], numbers["highest"] is not None) == ("r2", True)
    for row in numbers["candidates"]:
        assert (row["confusion"], row["class_accuracy"], row["packed_accuracy"]) == (None,) * 3
        assert row["packed_seconds"] > 0
        assert [curve["measure"] for curve in row["curves"]] == ["train_loss", "valid_loss", "lr"]
    drawn = numbers["predictions"]
    assert drawn["total"] == 2 * numbers["facts"]["samples"]
    assert np.corrcoef(drawn["true"], drawn["predicted"])[0, 1] > 0.9
    # The hardest samples are those with the largest mean error over all repeats.
    outputs = np.concatenate(list(load_results(root).oof.values()))[..., 0]
    error = np.abs(outputs - targets_of(report)[:, 0]).mean(axis=0)
    hard = numbers["hard_samples"]["samples"]
    assert [item["index"] for item in hard] == np.argsort(-error)[:24].tolist()
    assert hard[0]["error"] == pytest.approx(error.max(), rel=1e-5)
    mean = outputs[:, hard[0]["index"]].mean()
    assert (hard[0]["predicted"], hard[0]["predictions"]) == (pytest.approx(mean, rel=1e-5), 8)


# The serial loop


def test_losses_end_at_the_seconds_of_a_candidate(complete: Report) -> None:
    rows = {row["name"]: row for row in complete.numbers["candidates"]}
    assert [pair["candidate"] for pair in complete.numbers["loss_over_time"]] == sorted(rows)
    for pair in complete.numbers["loss_over_time"]:
        row = rows[pair["candidate"]]
        assert len(pair["packed"]) == len(pair["serial"]) == 5
        assert pair["packed"][-1][0] == pytest.approx(row["packed_seconds"])
        (curve,) = (curve for curve in row["curves"] if curve["measure"] == "train_loss")
        assert [loss for _, loss in pair["packed"]] == pytest.approx(curve["mean"])


def test_accuracies_are_compared_whatever_is_scored(root: Path) -> None:
    numbers = report_of(root, Synthetic(metrics=("f1_macro",), folds=2)).numbers
    for row in numbers["candidates"]:
        (curve,) = (curve for curve in row["curves"] if curve["measure"] == "accuracy")
        assert row["packed_accuracy"] == pytest.approx(curve["mean"][-1])
        assert row["serial_accuracy"] == pytest.approx(0.91)


# How sure the candidates are


def test_the_calibration_counts_how_often_the_best_is_right_when_it_is_sure(root: Path) -> None:
    report = report_of(root, TWO_FOLDS)
    highest, sure = report.numbers["highest"], report.numbers["calibration"]
    shares = softmax(load_results(root).oof[highest].astype(float), axis=1)
    right, most = shares.argmax(axis=1) == targets_of(report), shares.max(axis=1)
    assert sure["candidate"] == highest
    assert sum(sure["counts"]) == 300
    assert sure["right"] == pytest.approx(right.mean())
    assert sure["sure"] == pytest.approx(most.mean())
    last = most >= 0.9
    assert sure["counts"][-1] == last.sum()
    assert sure["accuracy"][-1] == pytest.approx(right[last].mean())
    by_hand = 0.0
    for low in np.arange(0, 1, 0.1):
        inside = (most >= low) & (most < low + 0.1)
        if inside.any():
            by_hand += inside.mean() * abs(right[inside].mean() - most[inside].mean())
    assert sure["error"] == pytest.approx(by_hand, abs=1e-3)
    assert report.numbers["two_classes"] is None
    assert report.page.count('id="figure-probabilities"') == 1
    assert len(report.texts("probabilities", "p")) == 1


def test_two_classes_have_the_curves_of_scikit_learn(root: Path) -> None:
    report = report_of(root, BINARY)
    oof, targets = load_results(root).oof, targets_of(report)
    two = report.numbers["two_classes"]
    assert (two["positive"], two["share"]) == ("yes", 0.5)
    names = [row["name"] for row in report.numbers["candidates"]]
    assert [each["candidate"] for each in two["curves"]] == names
    for each in two["curves"]:
        odds = np.diff(oof[each["candidate"]].astype(float), axis=1)[:, 0]
        assert each["roc_area"] == pytest.approx(roc_auc_score(targets, odds))
        assert each["average_precision"] == pytest.approx(average_precision_score(targets, odds))
        assert (each["roc"][0], each["roc"][-1]) == ([0.0, 0.0], [1.0, 1.0])
        assert len(each["roc"]) <= 100
        recalls = [recall for recall, _ in each["precision_recall"]]
        assert recalls == sorted(recalls)
        assert recalls[-1] == 1.0
    assert len(report.texts("probabilities", "p")) == 3


@pytest.mark.parametrize("scale", ["logits", "margins"])
def test_the_positive_class_is_the_users_and_margins_are_no_probabilities(
    root: Path, scale: str
) -> None:
    objective = Objective("multiclass", scale, pos_label=0)
    report = report_of(root, replace(BINARY, objective=objective))
    (first, *_), targets = report.numbers["two_classes"]["curves"], targets_of(report)
    assert report.numbers["two_classes"]["positive"] == "no"
    odds = load_results(root).oof[first["candidate"]].astype(float)
    area = roc_auc_score(targets == 0, odds[:, 0] - odds[:, 1])
    assert first["roc_area"] == pytest.approx(area)
    assert (report.numbers["calibration"] is None) == (scale == "margins")


# Hard samples, and their pictures


def keep(root: Path, **arrays: Any) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    (root / "oof").mkdir(exist_ok=True)
    (root / "oof" / "pictures.npz").write_bytes(buffer.getvalue())


def test_hard_samples_are_those_that_most_candidates_got_wrong(root: Path) -> None:
    report = report_of(root, THREE)
    targets = targets_of(report)
    guesses = np.stack([item.argmax(axis=1) for item in load_results(root).oof.values()])
    wrong = (guesses != targets).sum(axis=0)
    hard = report.numbers["hard_samples"]
    assert hard["total"] == 300
    assert hard["wrong_by_most"] == (wrong > 1.5).sum() > 0
    assert len(hard["samples"]) == min(24, hard["wrong_by_most"])
    for item in hard["samples"]:
        assert item["wrong"] == wrong[item["index"]] > 1
        assert item["predictions"] == 3
        assert item["true"] == targets[item["index"]] != item["predicted"]
        assert item["predicted"] in guesses[:, item["index"]]
    counts = [item["wrong"] for item in hard["samples"]]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == wrong.max()
    # Kept pictures stand beside their samples.
    numbers = [item["index"] for item in hard["samples"]]
    keep(root, samples=np.array(numbers), pictures=np.zeros((len(numbers), 9, 8, 3), np.uint8))
    page = report_again(root).page
    assert page.count('<img class="picture" src="data:image/png;base64,') == len(numbers)
    assert f'alt="picture of sample {numbers[0]}"' in page


@pytest.mark.parametrize(
    "arrays",
    [
        {"samples": np.array([1]), "pictures": np.zeros((1, 900, 900, 3), np.uint8)},
        {"samples": np.array([1]), "pictures": np.array([[object()]])},
        {},
    ],
)
def test_a_file_that_holds_something_else_is_no_picture(root: Path, arrays: Any) -> None:
    write_run(root, THREE)
    keep(root, **arrays)
    if not arrays:
        (root / "oof" / "pictures.npz").write_bytes(b"PK damaged")
    assert "<img" not in report_again(root).page


# Use of the machine, attempts


def test_use_starts_at_zero_in_each_phase_and_keeps_its_mean(complete: Report) -> None:
    with RunStore.read(complete.root) as store:
        samples = store.samples()
    assert [use["phase"] for use in complete.numbers["use"]] == ["serial", "packed"]
    for use in complete.numbers["use"]:
        mine = [item.used for item in samples if item.phase == use["phase"]]
        assert (use["seconds"][0], use["cores"]) == (0, 2)
        assert use["mean_used"] == pytest.approx(np.mean(mine))


def test_long_runs_are_thinned_and_overlong_names_stay_apart(root: Path) -> None:
    models = ("A", "x" * 3000)
    numbers = report_of(root, Synthetic(models=models, folds=24, epochs=1)).numbers
    serial = numbers["use"][0]
    assert len(serial["seconds"]) == 400
    assert serial["seconds"] == sorted(serial["seconds"])
    assert np.mean(serial["used"]) == pytest.approx(serial["mean_used"], rel=0.02)
    assert len({bar["job"] for bar in numbers["bars"]}) == 2 * 2 * 24


def test_bars_show_every_attempt_and_what_was_lost(root: Path) -> None:
    run = replace(TWO_FOLDS, retried=("MLP/warm/fold-1",))
    bars = report_of(root, run).numbers["bars"]
    outcomes = {(bar["job"], bar["attempt"]): bar["outcome"] for bar in bars}
    assert len(outcomes) == 9
    assert outcomes["MLP/warm/fold-1", 1] == "died"
    assert outcomes["MLP/warm/fold-1", 2] == "ok"
    assert all(bar["start"] <= bar["end"] for bar in bars)


def test_an_attempt_lost_with_its_session_ends_with_it_and_not_with_the_run(root: Path) -> None:
    write_run(root, replace(TWO_FOLDS, status=lambda job: "pending"))
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        for pause in (100.0, 50.0):
            store.clock = pause + store.reader.sessions()[-1].end
            store.begin(store.reader.plan, *store.reader.splits())
            store.start_attempt("MLP/warm/fold-0", (1,), 1, "cpu", 1.0)
            store.clock += 5.0
            store.flush()
        assert report_again(root).numbers["bars"][1]["outcome"] == "running"
    bars = report_again(root).numbers["bars"]
    assert [(bar["end"] - bar["start"], bar["outcome"]) for bar in bars] == [(5.0, "lost")] * 2


def test_command_is_quoted_and_settings_are_flat(complete: Report) -> None:
    numbers = complete.numbers
    assert numbers["command"] == "asynckfold run --data digits --root 'runs/x y'"
    assert numbers["about"]["versions.torch"] == "2.6.0"
    assert "command" not in numbers["about"]
