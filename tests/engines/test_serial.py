"""What a run in this process records: one job at a time, each with its own times."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import joblib
import pytest
from torch import nn

from asynckfold import AsyncKFold, RunStore
from asynckfold.results.utilization import packing_of
from tests.toy import Tiny, adam, samples


@pytest.mark.parametrize("engine", ["serial", "joblib"])
def test_jobs_in_this_process_do_not_overlap_in_the_record(root: Path, engine: str) -> None:
    settings: dict[str, Any] = {"n_jobs": 2, "threads_per_job": 1, "verbose": 0, "report": False}
    with joblib.parallel_config(backend="threading"):
        kfold = AsyncKFold(4, samples(), root, nn.CrossEntropyLoss(), 16, engine=engine, **settings)
        results = kfold([Tiny], ["cosine", "warm"], adam, {"epochs": 1})
    assert results.counts["done"] == 8
    with RunStore.read(root) as store:
        attempts, packing = store.attempts(), packing_of(store)
        told = " ".join(event.text for event in store.events())
    assert ("one after another in this process" in told) is (engine == "joblib")
    for before, after in pairwise(attempts):
        assert before.ended is not None
        assert before.ended <= after.started
    spans = sorted((item.started, item.ended) for item in results.results.values())
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert packing is not None
    assert packing.cores is not None
    assert packing.held is not None
    assert packing.lower_bound is not None
    assert packing.held <= 1 / packing.cores
    assert packing.lower_bound <= packing.makespan
