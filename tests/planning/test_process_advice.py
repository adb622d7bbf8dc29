"""Whether one process of a job is expected to be faster: what is said, and that nothing else is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckfold import CVResults, RunStore
from asynckfold.cli import main
from asynckfold.jobs.cost import Cost
from asynckfold.jobs.trainer_params import SEVERAL, TrainerParams
from asynckfold.planning import process_advice
from asynckfold.planning.process_advice import ADDED, FEW, Added, notes, seconds
from tests.faults.test_hogwild import kfold
from tests.planning.test_thread_choice import FOLDS, workload
from tests.toy import Tiny, adam

PLAN = workload().plan
"""Of 100 batches an epoch."""


def told(params: TrainerParams, step: float, batch_size: int = 32) -> list[str]:
    plan = replace(PLAN, params=params, batch_size=batch_size)
    return list(notes(plan, FOLDS, {"M": Cost({1: step}, {1: step})}))


@pytest.mark.parametrize("trainer", SEVERAL)
def test_a_tiny_step_is_told_and_a_long_one_is_not(trainer: str) -> None:
    params = TrainerParams(trainer=trainer, processes=2, steps_per_round=1)
    (note,) = told(params, 1e-6)
    assert note.startswith("M: 1 process is expected to be faster than 2: a step takes about 0.001")
    assert f"{ADDED[trainer].exchange} about" in note
    assert note.endswith("more; pass processes=1")
    assert told(params, 1.0) == []
    assert told(replace(params, processes=1), 1e-6) == []
    # One process would not train the parts that several are dealt.
    if trainer == "averaging":
        assert told(replace(params, partition_size=1600), 1e-6) == []


def test_few_batches_for_many_processes_are_told() -> None:
    params = TrainerParams(trainer="hogwild", processes=4)
    assert told(params, 1.0, batch_size=3200 // (4 * FEW)) == []
    (note,) = told(params, 1.0, batch_size=3200 // (4 * FEW - 1) + 1)
    assert note.startswith(f"an epoch has {4 * FEW - 1} batches for 4 processes")
    # Of all-reduce, each process has a part of each batch.
    assert told(replace(params, trainer="allreduce"), 1.0, batch_size=3200) == []


@given(
    st.sampled_from(SEVERAL),
    st.integers(2, 16),
    st.integers(1, 1000),
    st.floats(1e-6, 10),
    st.floats(1, 100),
)
def test_what_pays_for_a_step_pays_for_a_longer_one(
    trainer: str, count: int, batches: int, step: float, longer: float
) -> None:
    several = TrainerParams(trainer=trainer, processes=count)
    one = replace(several, processes=1)
    if seconds(several, step, batches) <= seconds(one, step, batches):
        most = seconds(one, step * longer, batches) * (1 + 1e-9)
        assert seconds(several, step * longer, batches) <= most


def run(root: Path, **settings: Any) -> CVResults:
    asked = kfold(root, trainer="allreduce", **settings)
    return asked({"tiny": Tiny}, ["cosine"], adam, {"epochs": 1})


def test_a_run_says_it_before_it_starts_and_changes_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = run(root)
    monkeypatch.setitem(process_advice.ADDED, "allreduce", Added(1e3, "an exchange"))
    found = run(root.with_name("told"))
    assert found.fingerprint == silent.fingerprint
    with RunStore.read(root.with_name("told")) as store:
        said = [event for event in store.events() if "expected to be faster" in event.text]
        assert [event.kind for event in said] == ["note"]
        assert all(said[0].at <= attempt.started for attempt in store.attempts())
    assert found.plan.fingerprint == silent.plan.fingerprint
    assert main(["plan", str(found.root_dir)]) == 0
    assert said[0].text in capsys.readouterr().out
