"""A run in MLflow: a run for each candidate, and in it one for each of its jobs.

::

    experiment, by default the name of the run's folder
    └── LeNet/cosine          mean and standard deviation of each score, parameters of the grid
        ├── LeNet/cosine/fold-0      curves and scores
        └── LeNet/cosine/fold-1

Written from the results, as for `asynckfold.integrations.tensorboard`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.integrations.tensorboard import points
from asynckfold.jobs.candidate_names import base_of
from asynckfold.jobs.result import CANCELLED, DONE
from asynckfold.results.cv_results import CVResults

_RUN, _STATE = "asynckfold.job", "asynckfold.digest"
"""Tags: whose run it is, and what was written of it."""

_MOST = 1000
"""Metrics of one request, at most."""


def write(
    results: CVResults, tracking_uri: str | None = None, experiment: str | None = None
) -> int:
    """Write the finished jobs of a run; return how many runs of MLflow are new.

    Writing again, during the run or after it, adds what is new, and replaces what changed.

    Parameters
    ----------
    results : CVResults
        Of a call, or by `load_results` of a run that goes on.
    tracking_uri : str, optional
        Of the server or database, such as ``"sqlite:///mlflow.db"``. Default: that of MLflow.
    experiment : str, optional
        Default: the name of the run's folder.
    """
    import mlflow

    into = _Experiment(
        mlflow.MlflowClient(tracking_uri), experiment or results.root_dir.resolve().name
    )
    new = 0
    for row in results.candidates:
        jobs = [job for job in results.plan.jobs if job.candidate == row.name]
        ended = {job.id: results.results[job.id] for job in jobs if job.id in results.results}
        if not ended:
            continue
        names = {"model": base_of(row.model), "lr_schedule": base_of(row.lr_schedule)}
        params = {**names, **jobs[0].params}
        at = max(result.ended for result in ended.values())
        parent, is_new = into.begin(row.name, "-".join(item.digest for item in ended.values()))
        if is_new:
            new += 1
            into.fill(parent, params, [(len(ended), at, summary(row.scores))])
        for name, result in ended.items():
            child, is_new = into.begin(name, result.digest, parent)
            if is_new:
                new += 1
                into.fill(child, params, points(result), _STATES.get(result.status, "FAILED"))
    return new


_STATES = {DONE: "FINISHED", CANCELLED: "KILLED"}


def summary(scores: Mapping[str, npt.NDArray[Any]]) -> dict[str, float]:
    """Return mean and standard deviation of each score over the folds that have it."""
    metrics = {}
    for name, values in scores.items():
        known = values[~np.isnan(values)]
        if len(known):
            metrics[f"mean/{name}"] = float(known.mean())
        if len(known) > 1:
            metrics[f"std/{name}"] = float(known.std(ddof=1))
    return metrics


class _Experiment:
    """The experiment that a run is written to."""

    def __init__(self, client: Any, name: str) -> None:
        self.client = client
        known = client.get_experiment_by_name(name)
        self.id = client.create_experiment(name) if known is None else known.experiment_id
        runs = client.search_runs([self.id], max_results=50_000)
        self.before = {run.data.tags[_RUN]: run for run in runs if _RUN in run.data.tags}

    def begin(self, name: str, digest: str, parent: str = "") -> tuple[str, bool]:
        """Return the id of a run, and whether it lacks what there is now."""
        before = self.before.get(name)
        if before is not None:
            run, is_new = before.info.run_id, before.data.tags[_STATE] != digest
            if not is_new:
                return run, False
            if not parent:
                self.client.set_tag(run, _STATE, digest)
                return run, True  # its jobs name it: it stays
            self.client.delete_run(run)
        tags = {_RUN: name, _STATE: digest, "mlflow.runName": name}
        tags |= {"mlflow.parentRunId": parent} if parent else {}
        return self.client.create_run(self.id, tags=tags).info.run_id, True

    def fill(
        self,
        run: str,
        params: Mapping[str, Any],
        points: Iterable[tuple[int, float, dict[str, float]]],
        status: str = "FINISHED",
    ) -> None:
        """Write parameters and numbers, and end the run."""
        from mlflow.entities import Metric, Param

        metrics = [
            Metric(name, value, int(at * 1000), step)
            for step, at, numbers in points
            for name, value in numbers.items()
        ]
        given = [Param(name, str(value)) for name, value in params.items()]
        self.client.log_batch(run, params=given)
        for low in range(0, len(metrics), _MOST):
            self.client.log_batch(run, metrics=metrics[low : low + _MOST])
        self.client.set_terminated(run, status)
