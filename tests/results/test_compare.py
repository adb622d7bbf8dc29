"""Two runs are held against each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, RunStore
from asynckfold.cli import main
from asynckfold.jobs.result import StageEpoch
from asynckfold.results.compare import Comparison, compare_runs
from tests.toy import Tiny, adam, samples


def make(root: Path, **changes: object) -> None:
    settings = {"random_state": 0, "parallelize": False, "baseline": None, "verbose": 0}
    kfold = AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, **{**settings, **changes})  # type: ignore[arg-type]
    kfold([Tiny], ["cosine"], adam, {"epochs": 2})


def compare(one: Path, other: Path) -> Comparison:
    with RunStore.read(one) as first, RunStore.read(other) as second:
        return compare_runs(first, second)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("golden") / "run"
    make(root)
    return root


def test_repeated_runs_are_identical(golden: Path, root: Path) -> None:
    make(root)
    found = compare(golden, root)
    assert found.identical
    assert (found.equal_jobs, found.jobs) == (3, 3)
    assert found.fingerprints[0] == found.fingerprints[1]


def test_a_different_seed_is_reported(golden: Path, root: Path) -> None:
    make(root, random_state=1)
    found = compare(golden, root)
    assert not found.identical
    assert found.plan == "random_state: 0 there, 1 here"
    assert found.results.startswith("Tiny/cosine/fold-0: epoch 1, ")
    assert found.equal_jobs == 0


def test_one_changed_output_is_reported(golden: Path, root: Path) -> None:
    make(root)
    with RunStore.hold(root) as store:
        plan, results = store.reader.plan, store.reader.results()
        folds, targets = store.reader.splits()
    name = plan.jobs[1].id
    outputs = results[name].outputs
    assert outputs is not None
    changed = outputs.copy()
    changed[7, 0] = torch.nextafter(torch.tensor(changed[7, 0]), torch.tensor(9.0)).item()
    other = root.parent / "other"
    with RunStore.hold(other) as store:
        store.begin(plan, folds, targets)
        for job in plan.jobs:
            attempt = store.start_attempt(job.id, (), 1, "cpu", 0.0)
            result = replace(results[job.id], attempt=attempt)
            store.record(replace(result, outputs=changed) if job.id == name else result)
    found = compare(golden, other)
    assert not found.identical
    assert found.plan == ""
    assert found.results == f"{name}: out-of-fold outputs of 1 samples, first in row 7"
    assert found.equal_jobs == 2


def test_different_pretraining_is_reported(golden: Path, root: Path) -> None:
    with RunStore.read(golden) as store:
        plan, results = store.plan, store.results()
        folds, targets = store.splits()
    for place, gap in ((root, 0.25), (root.parent / "other", 0.5)):
        stages = (StageEpoch("layer 1", 1, {"gap": float("nan")}, gap),
                  StageEpoch("layer 2", 1, {"gap": gap}, 1.0))  # fmt: skip
        with RunStore.hold(place) as store:
            store.begin(plan, folds, targets)
            for job in plan.jobs:
                attempt = store.start_attempt(job.id, (), 1, "cpu", 0.0)
                store.record(replace(results[job.id], attempt=attempt, pretraining=stages))
    assert compare(root, root).identical
    assert compare(root, root.parent / "other").results == (
        "Tiny/cosine/fold-0: pretraining ('layer 2', 1, {'gap': 0.25}) there, "
        "('layer 2', 1, {'gap': 0.5}) here"
    )
    assert "2 epochs pretrained there, 0 here" in compare(root, golden).results


def test_an_incomplete_run_is_not_identical_to_itself(golden: Path, root: Path) -> None:
    with RunStore.read(golden) as store:
        plan = store.plan
        folds, targets = store.splits()
    with RunStore.hold(root) as store:
        store.begin(plan, folds, targets)
    assert not compare(root, root).identical
    assert compare(golden, root).results == "Tiny/cosine/fold-0: done there, pending here"


def test_the_command_reports_differences_in_words_and_exit_code(
    golden: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(root, random_state=1)
    assert main(["compare", str(golden), str(golden), "--bits"]) == 0
    assert capsys.readouterr().out.startswith("identical: 3 jobs, fingerprint ")
    assert main(["compare", str(golden), str(root), "--bits", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["plan"] == "random_state: 0 there, 1 here"
    assert main(["compare", str(golden), str(root.parent / "nothing")]) == 2
    assert "DIR must be the folder of a run" in capsys.readouterr().err
