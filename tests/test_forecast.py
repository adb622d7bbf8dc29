"""What is foreseen is what was decided, job by job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from asynckfold.forecast import forecast, forecast_of
from asynckfold.store import RunStore
from tests.synthetic import Synthetic, write_run
from tests.test_choice import LARGE, SMALL, choose, sweep


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_the_simulated_sweep_takes_what_was_predicted(gpus: int) -> None:
    work = replace(sweep(3, 4, "cuda" if gpus else "cpu", A=LARGE, B=SMALL), gpus=gpus)
    found = forecast(work, choose(work))
    assert found.simulation.makespan == pytest.approx(found.choice.prediction.makespan)
    assert found.simulation.lower_bound == pytest.approx(found.choice.prediction.lower_bound)
    spans = found.simulation.spans
    assert sorted(span.job for span in spans) == sorted(job.id for job in work.plan.jobs)
    if gpus:
        # One job at a time on each GPU, however many cores there are.
        seconds = sum(request.seconds for request in found.requests.values())
        assert found.simulation.makespan >= seconds / gpus * (1 - 1e-9)
    assert {span.gpu for span in spans} == (set(range(gpus)) or {None})


def test_a_run_that_recorded_no_decision_has_no_forecast(root: Path) -> None:
    with RunStore.read(write_run(root, Synthetic())) as store:
        assert forecast_of(store) is None
