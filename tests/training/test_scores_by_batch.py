"""Scores that accumulate in a job's worker: each sample once, after the last epoch, and kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold import TrainerParams
from asynckfold.training.bundle import Bundle
from tests.training.tiny import Noisy, Tiny, checkpoints, two_epochs

NOISY = {"noisy": lambda: Noisy(noisy_evaluation=True)}
PARAMS = TrainerParams(epochs=3, eval_batch_size=8)


class Sums:
    """An accumulator: sums, and a score that is undefined."""

    def __init__(self, made: list[Sums]) -> None:
        made.append(self)
        self.targets: list[int] = []
        self.sizes: list[int] = []
        self.total = 0.0

    def update(self, targets: Any, outputs: Any) -> None:
        assert outputs.dtype == np.float32
        self.targets += targets.tolist()
        self.sizes.append(len(outputs))
        self.total += float(outputs.sum(dtype=np.float64))

    def scores(self) -> dict[str, float]:
        return {"total": self.total, "undefined": math.nan}


@dataclass
class ByBatch(Tiny):
    made: list[Sums] = field(default_factory=list)

    @cached_property
    def bundle(self) -> Bundle:
        whole = Tiny.bundle.func(self)  # type: ignore[attr-defined]
        make: Callable[[], Any] = lambda: Sums(self.made)  # noqa: E731
        plan = replace(whole.plan, by_batch=True)
        return replace(whole, plan=plan, accumulators=dict.fromkeys(self.models, make))


def by_batch(root: Path, **settings: Any) -> ByBatch:
    return ByBatch(root, NOISY, params=PARAMS, **settings)


def test_each_held_out_sample_is_scored_once_after_the_last_epoch(tmp_path: Path) -> None:
    tiny = by_batch(tmp_path)
    result = tiny.train()
    (sums,) = tiny.made
    fold = tiny.bundle.fold_of(tiny.jobs[0])
    assert sums.targets == tiny.prepared.targets[fold.valid].tolist()
    assert sums.sizes == [8, 8, 4]
    assert result.outputs is None
    assert result.scores["total"] == sums.total
    assert math.isnan(result.scores["undefined"])


def test_losses_are_those_of_all_outputs(tmp_path: Path) -> None:
    models = {"noisy": Noisy}
    found = ByBatch(tmp_path / "a", models, params=PARAMS, inner_valid=0.2).train()
    whole = Tiny(tmp_path / "b", models, params=PARAMS, inner_valid=0.2).train()
    assert found.weights == whole.weights
    for mine, theirs in zip(found.epochs, whole.epochs, strict=True):
        assert mine.train_loss == theirs.train_loss
        assert mine.valid_loss == pytest.approx(theirs.valid_loss, rel=1e-6)
        assert mine.accuracy == theirs.accuracy
        assert mine.logged == pytest.approx(theirs.logged, rel=1e-6)


@pytest.mark.parametrize("fit_fn", [None, two_epochs], ids=["built-in", "own loop"])
def test_a_finished_job_whose_result_was_lost_keeps_its_scores(fit_fn: Any, tmp_path: Path) -> None:
    tiny = by_batch(tmp_path, fit_fn=fit_fn)
    first, events = tiny.attempt()
    again, _ = tiny.attempt(None, 2, checkpoints(events))
    assert first is not None
    assert again is not None
    # The model draws random numbers: a second evaluation would score it otherwise.
    assert len(tiny.made) == 1
    assert again.digest == first.digest
    assert again.scores["total"] == first.scores["total"]


def test_a_job_that_is_stopped_after_each_batch_has_the_scores_of_one_that_is_not(
    tmp_path: Path,
) -> None:
    parts, attempts = by_batch(tmp_path / "parts").train_with_stops()
    whole = by_batch(tmp_path / "whole").train()
    assert attempts == 12
    assert parts.digest == whole.digest
