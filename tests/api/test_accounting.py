"""Nothing vanishes: planned = done + failed + diverged + cancelled + pending, everywhere."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import (
    AsyncKFold,
    InterruptedRunError,
    JobsFailedWarning,
    RunStore,
    load_results,
)
from asynckfold.cli import main
from asynckfold.jobs.placement import Request
from asynckfold.jobs.result import ENDED
from asynckfold.planning import workload
from asynckfold.results.report.page import write_report
from tests.toy import Tiny, adam, samples


class Raises(Tiny):
    """Fails where the first sample is held out."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training and (inputs[:, 0] == samples()[0][0, 0]).any():
            raise ValueError("not this fold")
        return super().forward(inputs)


class Explodes(Tiny):
    """Has no finite loss."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * float("nan")


class Struck(Tiny):
    """Is interrupted while it is trained, once the dry run is over."""

    batches = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        Struck.batches += self.training
        if Struck.batches == 12 and "CALM" not in os.environ:
            signal.raise_signal(signal.SIGINT)
        return super().forward(inputs)


def call(root: Path) -> None:
    kfold = AsyncKFold(
        3,
        samples(),
        root,
        nn.CrossEntropyLoss(),
        10,
        baseline=None,
        verbose=0,
        parallelize=False,
    )
    kfold([Tiny, Raises, Explodes, Struck], ["cosine"], adam, {"epochs": 2})


def told(root: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, int]]:
    """Return the counts from everywhere that tells them."""
    capsys.readouterr()
    assert main(["status", str(root), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    with RunStore.read(root) as store:
        folder = write_report(store).parent
        results = load_results(store)
    numbers = json.loads((folder / "results.json").read_text())
    found: list[dict[str, Any]] = [status, numbers["counts"], results.counts]
    with (folder / "folds.csv").open() as file:
        states = [row["status"] for row in csv.DictReader(file)]
    names = (*ENDED, "pending")
    found.append({"planned": len(states), **{name: states.count(name) for name in names}})
    return [{name: item[name] for name in ("planned", *names)} for item in found]


@pytest.mark.nightly
def test_every_job_is_somewhere_before_and_after_an_interruption(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def struck_last(
        threads: workload.Choice, work: workload.Workload, groups: object
    ) -> dict[str, Request]:
        return {job.id: Request(job.id, float(job.model != "Struck")) for job in work.plan.jobs}

    monkeypatch.setattr(workload, "requests", struck_last)
    Struck.batches = 0
    with pytest.raises(InterruptedRunError):
        call(root)
    # The same model again, as it stands in the plan.
    Struck.batches = 0
    monkeypatch.setenv("CALM", "yes")
    counts = told(root, capsys)
    assert all(item == counts[0] for item in counts)
    assert counts[0]["planned"] == sum(counts[0][name] for name in (*ENDED, "pending")) == 12
    assert min(counts[0][name] for name in ("done", "failed", "diverged", "pending")) >= 1
    with pytest.warns(JobsFailedWarning):
        call(root)
    counts = told(root, capsys)
    assert all(item == counts[0] for item in counts)
    assert counts[0] == {
        "planned": 12,
        "done": 8,
        "failed": 1,
        "diverged": 3,
        "cancelled": 0,
        "pending": 0,
    }
    assert main(["report", str(root)]) == 0
    page = (root / "report" / "index.html").read_text()
    assert "8 of 12 jobs finished, 1 failed, 3 diverged" in page
    assert ">2 of 3, failed<" in page
    with RunStore.read(root) as store:
        results = load_results(store)
    frame = results.to_frame().set_index("model")
    assert frame.loc[["Raises", "Explodes"], "rank"].isna().all()
    assert set(frame.loc[["Tiny", "Struck"], "rank"]) <= {1, 2}
    assert "2 of 3 folds, incomplete" in repr(results)
