"""A run in ClearML: a task for each candidate, with a curve for each of its jobs."""

from __future__ import annotations

from asynckfold.integrations.mlflow import summary
from asynckfold.integrations.tensorboard import curves
from asynckfold.jobs.candidate_names import base_of
from asynckfold.results.cv_results import CVResults


def write(results: CVResults, project: str | None = None) -> int:
    """Write the candidates of which a job has ended an epoch; return how many there are.

    Writing again, during the run or after it, replaces what was written before, as ``Task.init``
    does with the last task of the same name.

    Parameters
    ----------
    results : CVResults
        Of a call, or by `load_results` of a run that goes on.
    project : str, optional
        Of ClearML. Default: the name of the run's folder.
    """
    from clearml import Task

    begun, count = list(curves(results)), 0
    off = ("arg_parser", "frameworks", "streams")
    for row in results.candidates:
        jobs = [(job, epochs) for job, _, epochs in begun if job.candidate == row.name]
        if not jobs:
            continue
        count += 1
        task = Task.init(
            project_name=project or results.root_dir.resolve().name,
            task_name=row.name,
            auto_resource_monitoring=False,
            **{f"auto_connect_{name}": False for name in off},
        )
        names = {"model": base_of(row.model), "lr_schedule": base_of(row.lr_schedule)}
        task.connect({**names, **jobs[0][0].params}, name="candidate")
        logger = task.get_logger()
        for job, epochs in jobs:
            series = job.id.removeprefix(f"{row.name}/")
            for number, values in epochs:
                for title, value in values.items():
                    logger.report_scalar(title=title, series=series, value=value, iteration=number)
        for name, value in summary(row.scores).items():
            logger.report_single_value(name=name, value=value)
        task.close()
    return count
