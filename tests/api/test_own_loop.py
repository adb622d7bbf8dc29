"""`fit_fn=`: a loop of the user's own in workers, its scores, its table of epochs, its report."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from asynckfold import AllJobsFailedError, AsyncKFold, InputError
from tests.toy import Tiny, adam, samples
from tests.training.test_own_loop import as_built_in, one_step

JOB = "Tiny/cosine/fold-0"


def fading(context: Any) -> None:
    """Reports a score that scikit-learn does not know, and the number of the fold's seed."""
    for epoch in range(context.epochs):
        losses = [one_step(context, *batch) for batch in context.train_loader]
        context.report(train_loss=np.mean(losses), inception=10.0 - epoch)


def silent(context: Any) -> None:
    for batch in context.train_loader:
        one_step(context, *batch)


def called(root: Path, fit_fn: Any = fading, params: Any = None, **settings: Any) -> Any:
    given = {"engine": "serial", "verbose": 0, "threads_per_job": 1, "report": False, **settings}
    kfold = AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, fit_fn=fit_fn, **given)
    return kfold({"Tiny": Tiny}, ["cosine"], adam, {"epochs": 2, **(params or {})})


def test_workers_run_the_loop_with_the_bits_of_the_built_in_one(tmp_path: Path) -> None:
    own = called(tmp_path / "own", as_built_in, engine="process", n_jobs=1)
    built_in = called(tmp_path / "built-in", None, fuse=False)
    assert own.results[JOB].weights == built_in.results[JOB].weights
    assert own.best_score_ == built_in.best_score_
    state, expected = (found.state_dict("Tiny/cosine", 0) for found in (own, built_in))
    assert all(np.array_equal(state[name], expected[name]) for name in expected)
    again = called(tmp_path / "own", as_built_in, engine="process", n_jobs=1)
    assert again.fingerprint == own.fingerprint


def test_a_reported_metric_is_the_score_of_its_name(tmp_path: Path) -> None:
    results = called(tmp_path, scoring=["inception", "accuracy"], report=True)
    assert results.best_score_ == 9.0
    scores = results.results[JOB].scores
    assert set(scores) == {"inception", "accuracy"}
    assert 0 < scores["accuracy"] <= 1
    rows = results.to_frame("epoch")
    assert rows["inception"].tolist() == [10.0, 9.0] * 3
    assert rows["train_loss"].notna().all()
    assert rows["valid_loss"].isna().all()
    assert results.report().is_file()
    with (tmp_path / "report" / "epochs.csv").open() as file:
        assert [row["inception"] for row in csv.DictReader(file)] == ["10.0", "9.0"] * 3


def test_without_a_report_the_model_is_scored_as_always(tmp_path: Path) -> None:
    own = called(tmp_path / "own", silent, {"epochs": 1})
    built_in = called(tmp_path / "built-in", None, {"epochs": 1}, fuse=False)
    assert own.best_score_ == built_in.best_score_
    assert own.results[JOB].weights == built_in.results[JOB].weights
    assert len(own.results[JOB].epochs) == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no function": ({"fit_fn": 1}, r"fit_fn must be a function of one context: received 1\."),
    "two": (
        {"training_step": lambda model, batch, state: None},
        "a job alone, so fit_fn must go without training_step: received ",
    ),
    "another trainer": (
        {"trainer": "hogwild", "processes": 2, "engine": "process"},
        "fit_fn must go without trainer: received trainer='hogwild'",
    ),
    "clipping and precision": (
        {"params": {"clip_grad_norm": 1.0, "lr_step": "batch"}, "precision": "bf16"},
        "a fit_fn sets precision, .*: received precision='bf16'",
    ),
    "a baseline": ({"baseline": "measure"}, "fit_fn must go without baseline: "),
    "a near miss": ({"scoring": "acuracy"}, "received 'acuracy'. Did you mean 'accuracy'"),
    "an error as score": (
        {"scoring": "my_loss"},
        "scores must be such that greater is better, and my_loss is an error by its name",
    ),
    "an unknown score without a loop": (
        {"fit_fn": None, "scoring": "inception"},
        "scoring must name scikit-learn scorers: received 'inception'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_anything_starts(tmp_path: Path, name: str) -> None:
    settings, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        called(tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "run.db").exists()


def test_a_score_that_was_never_reported_fails_the_jobs(tmp_path: Path) -> None:
    with pytest.raises(AllJobsFailedError, match="'inception' was never reported"):
        called(tmp_path, silent, scoring="inception")
