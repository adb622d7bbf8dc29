"""What is foreseen is what was decided, job by job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from asynckfold import RunStore
from asynckfold.planning.forecast import forecast, predicted
from asynckfold.planning.fusion_groups import Grouping, grouped
from asynckfold.results.utilization import forecast_of
from tests.planning.test_choice import LARGE, SMALL, choice_of, workload
from tests.synthetic import Synthetic, write_run


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_the_simulated_sweep_takes_what_was_predicted(gpus: int) -> None:
    work = replace(workload(3, 4, "cuda" if gpus else "cpu", A=LARGE, B=SMALL), gpus=gpus)
    found = forecast(work, predicted(work, choice_of(work), Grouping()))
    assert found.simulation.makespan == pytest.approx(found.choice.prediction.makespan)
    assert found.simulation.lower_bound == pytest.approx(found.choice.prediction.lower_bound)
    spans = found.simulation.spans
    assert sorted(span.job for span in spans) == sorted(job.id for job in work.plan.jobs)
    if gpus:
        # One job at a time on each GPU, however many cores there are.
        seconds = sum(request.seconds for request in found.requests.values())
        assert found.simulation.makespan >= seconds / gpus * (1 - 1e-9)
    assert {span.gpu for span in spans} == (set(range(gpus)) or {None})


def test_a_group_takes_the_seconds_of_all_its_jobs_on_the_cores_of_one() -> None:
    work = workload(3, 4, "cpu", A=LARGE, B=SMALL)
    alone = predicted(work, choice_of(work), Grouping())
    grouping = grouped(work.plan.with_threads(alone.threads), 4, {"A": "", "B": "no"}, 4)
    decided = predicted(work, alone, grouping)
    found = forecast(work, decided, grouping)
    assert decided.threads == alone.threads
    assert decided.prediction.makespan == found.simulation.makespan
    assert decided.prediction.longest > alone.prediction.longest
    assert found.plan.groups == grouping.groups
    spans = {span.job: span for span in found.simulation.spans}
    assert len(spans) == 3 + 12
    for group in grouping.groups:
        span, seconds = spans[group[0]], [found.requests[name].seconds for name in group]
        assert span.end - span.start == pytest.approx(sum(seconds))
        assert len(span.cores) == found.choice.threads["A"]


def test_a_run_that_recorded_no_decision_has_no_forecast(root: Path) -> None:
    with RunStore.read(write_run(root, Synthetic())) as store:
        assert forecast_of(store) is None
