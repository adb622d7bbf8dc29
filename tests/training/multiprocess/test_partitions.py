"""Parts of the samples for each process of averaging: who has which, how often, in which rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold import Fold, InputError, Plan, Result, TrainerParams
from asynckfold.jobs.cost import work_of
from asynckfold.jobs.messages import Note, RunEvent
from asynckfold.jobs.result import AveragingSummary
from tests.training.multiprocess.attempts import (
    attempt,
    each_sample,
    noted,
    noting,
    samples_in,
    train,
    train_with_stops,
)
from tests.training.tiny import Tiny


def by_kind(**given: Any) -> TrainerParams:
    return TrainerParams.from_mapping({"trainer": "averaging", "processes": 3, **given})


# A training


def parted(root: Path, processes: int = 2, **given: Any) -> Tiny:
    found = {"epochs": 2, "trainer": "averaging", "processes": processes, **given}
    return Tiny(root, params=TrainerParams(**found), batch_size=5)


def told(news: list[RunEvent]) -> str:
    (remark,) = [item for item in news if isinstance(item, Note)]
    return remark.text


def test_parts_overlap_and_every_sample_is_in_one(tmp_path: Path) -> None:
    path = tmp_path / "noted"
    # 40 samples to train on.
    tiny = parted(tmp_path / "run", partition_size=30, steps_per_round=2)
    tiny.models = {"m": noting(path)}
    _, news = attempt(tiny)
    seen = samples_in(path)
    assert set(seen) == {int(number) for number in tiny.bundle.folds[0].train}
    assert sum(seen.values()) == 2 * 2 * 30
    assert max(seen.values()) <= 4
    assert len({pid for pid, _ in noted(path)}) == 2
    # 6 batches each an epoch; of the first epoch the very first is trained on alone.
    assert "6 rounds in" in told(news)
    assert "samples × epochs of each process: 60, 60" in told(news)


def test_a_round_may_be_some_passes_over_a_part(tmp_path: Path) -> None:
    path = tmp_path / "noted"
    tiny = parted(tmp_path / "run", epochs_per_round=3)
    tiny.models = {"m": noting(path)}
    result, news = attempt(tiny)
    assert samples_in(path) == each_sample(tiny, 2 * 3)
    assert "2 rounds in" in told(news)
    assert "samples × epochs of each process: 120, 120" in told(news)
    assert result is not None
    assert result.averaged == AveragingSummary(2, (120, 120))
    assert [item.number for item in result.epochs] == [1, 2]


def test_a_job_ends_after_the_epoch_that_reaches_the_target(tmp_path: Path) -> None:
    def tiny(name: str, **given: Any) -> Tiny:
        return parted(tmp_path / name, epochs=4, **given)

    def losses(result: Result) -> list[float]:
        return [item.train_loss for item in result.epochs]

    whole = losses(train(tiny("whole")))
    target = whole[1]
    assert whole[0] > target
    short, news = attempt(tiny("short", target_loss=target))
    assert short is not None
    assert losses(short) == whole[:2]
    assert told(news).endswith(f"reached a training loss of {target:.4g} after 2 epochs")
    # Stopped after every round, it ends there, too; out of reach, it changes no bit.
    result, attempts = train_with_stops(tiny("stopped", target_loss=target))
    assert attempts > 1
    assert result.digest == short.digest
    assert losses(train(tiny("never", target_loss=-1.0))) == whole


# Words


def test_a_plan_keeps_sizes_by_kind_of_process() -> None:
    def plan(**given: Any) -> str:
        params = TrainerParams.from_mapping({"trainer": "averaging", "processes": 2, **given})
        return Plan((), params, 32, 1, 0, "cpu", ("accuracy",), "d", "f").to_json()

    text = plan(partition_size={"cpu": np.int64(30)}, epochs_per_round=2)
    assert Plan.from_json(text).params.partition_size == 30
    assert text == plan(partition_size=30, epochs_per_round=2)
    assert text == plan(partition_size=30, epochs_per_round={"cpu": 2})
    given = plan(partition_size={"cpu": 30, "gpu": np.int64(30)}, epochs_per_round=2)
    kept = Plan.from_json(given)
    assert kept.to_json() == given != text
    assert kept.params == by_kind(
        processes=2, partition_size={"cpu": 30, "gpu": 30}, epochs_per_round=2
    )
    assert len({kept.params, Plan.from_json(text).params}) == 2
    assert kept.params.by_kind == "partition_size={'cpu': 30, 'gpu': 30}"
    difference = kept.first_difference(Plan.from_json(text))
    assert difference == "params.gpu_partition_size: 30 there, null here"
    assert Plan.from_json(plan(steps_per_round=3)).params.steps_per_round == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"partition_size": 0}, "partition_size must be a whole number of at least 1: received 0"),
        ({"epochs_per_round": 2, "steps_per_round": 4}, "a round is a number of steps or"),
        (
            {"epochs_per_round": {"cpu": "1", "gpu": 2.5}},
            "(?s)epochs_per_round must be a whole.*'1'.*of the kind 'gpu' must be a whole.*2.5",
        ),
        (
            {"processes": 1, "partition_size": {"cpu": 8, "gpu": 9}},
            r"beside those on a GPU.*processes=1, partition_size=\{'cpu': 8, 'gpu': 9\}. Pass proc",
        ),
        ({"processes": {"gpu": 2}}, r"received processes=\{'gpu': 2\}. Pass processes=2 or more"),
        ({"processes": None}, "^processes must be a whole number of at least 1: received None"),
        (
            {"trainer": "hogwild", "processes": {"cpu": 1, "gpu": 2}},
            r"are for the trainer 'averaging': received trainer='hogwild', processes=\{'cpu': 1",
        ),
        ({"trainer": "allreduce", "epochs_per_round": 2}, "epochs_per_round applies to the train"),
    ],
)
def test_words_that_make_no_sense_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainerParams.from_mapping({"trainer": "averaging", "processes": 2, **words})


def test_expected_work_counts_what_all_parts_have() -> None:
    fold = Fold(0, 0, np.arange(100), np.arange(100, 150))
    given = TrainerParams(
        epochs=2, trainer="averaging", processes=2, partition_size=80, epochs_per_round=3
    )
    assert work_of(fold, given, 10).steps == 2 * 3 * 16
