"""A run in parts: each in a folder of its own, and one run of them at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults, InputError, load_results
from asynckfold.cli import main
from tests.toy import Tiny, samples

LINE = "--data digits --limit 60 --folds 3 --epochs 1 --no-report --engine serial"


def trained(root: Path, number: int = 0, **settings: Any) -> CVResults:
    if number:
        root, settings["part"] = root / "parts" / f"{number}-of-2", (number, 2)
    given = {"verbose": 0, "engine": "serial", "report": False, **settings}
    kfold = AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, **given)
    opt_fn = lambda model: torch.optim.SGD(model.parameters(), 0.1)  # noqa: E731
    return kfold([Tiny], ["constant", "cosine"], opt_fn, {"epochs": 1})


def test_two_parts_are_the_run_of_one_machine(tmp_path: Path) -> None:
    whole, root = trained(tmp_path / "whole"), tmp_path / "run"
    halves = [trained(root, number, refit=True) for number in (1, 2)]
    assert [(half.counts["done"], half.counts["pending"]) for half in halves] == [(3, 3)] * 2
    assert main(["slurm", "merge", str(root)]) == 0
    merged = load_results(root)
    assert (merged.fingerprint, merged.counts) == (whole.fingerprint, whole.counts)
    assert (merged.oof["Tiny/cosine"] == whole.oof["Tiny/cosine"]).all()
    for name, tensor in whole.state_dict("Tiny/cosine", fold=2).items():
        assert torch.equal(merged.state_dict("Tiny/cosine", fold=2)[name], tensor)
    assert {item.node for item in merged.results.values()} == {"1-of-2", "2-of-2"}
    assert trained(root, refit=True).refitted is not None


def test_what_a_part_lacks_is_named_and_trained_by_the_same_call_or_merged_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, root, late = trained(tmp_path / "whole"), tmp_path / "run", tmp_path / "late"
    for place, number, code in ((root, 1, 124), (late, 1, 124), (late, 2, 0)):
        trained(place, number)
        assert main(["slurm", "merge", str(place)]) == code
    assert "part 2 of 2: 3 jobs have no result" in capsys.readouterr().err
    assert trained(root).fingerprint == load_results(late).fingerprint == whole.fingerprint


def test_an_array_job_and_one_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted, parameters = list[Any](), dict[str, Any]()

    def submit(function: Any, number: int) -> Any:
        submitted.append((number, {**parameters}))
        function(number)
        return SimpleNamespace(job_id=f"7_{number}")

    executor = SimpleNamespace(cluster="slurm", submit=submit)
    executor.update_parameters = lambda **given: parameters.update(given)
    executor.map_array = lambda function, numbers: [submit(function, each) for each in numbers]
    fake = SimpleNamespace(AutoExecutor=lambda folder, cluster: executor)
    monkeypatch.setitem(sys.modules, "submitit", fake)
    own = ["--root", str(tmp_path / "run"), "--cluster", "slurm", "--slurm", "partition=gpu,time=9"]
    words = [*own, "--", *LINE.split(), "--refit"]
    assert main(["slurm", "--tasks", "2", *words]) == 0
    first = {"name": "asynckfold", "slurm_partition": "gpu", "slurm_time": 9}
    last = {**first, "slurm_dependency": "afterany:7"}
    assert submitted == [(1, first), (2, first), (0, last)]
    assert main(["run", *LINE.split(), "--root", str(tmp_path / "whole")]) == 0
    merged = load_results(tmp_path / "run")
    assert merged.fingerprint == load_results(tmp_path / "whole").fingerprint
    assert merged.refitted is not None
    assert main(["slurm", "--tasks", "3", *words]) == 2
    assert "a run keeps its number of parts, 2" in capsys.readouterr().err


def test_submitit_runs_the_parts(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs the extra slurm")
    own = ["--tasks", "2", "--root", str(tmp_path / "run"), "--cluster", "debug"]
    assert main(["slurm", *own, "--", *LINE.split()]) == 0
    assert load_results(tmp_path / "run").counts["done"] == 3


def test_what_is_no_part_is_refused(tmp_path: Path) -> None:
    for wrong in ((0, 2), (3, 2), "1/2", (True, 2)):
        with pytest.raises(InputError, match="part must be the number of a part"):
            trained(tmp_path / "run", part=wrong)
    with pytest.raises(InputError, match="so race must go without part"):
        trained(tmp_path / "run", part=(1, 2), race=True)
    trained(tmp_path / "run", 1)
    trained(tmp_path / "run", 2, random_state=1)
    assert main(["slurm", "merge", str(tmp_path / "run")]) == 2
