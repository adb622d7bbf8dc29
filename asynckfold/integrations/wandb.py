"""A run in Weights & Biases: a run for each job, in a group by the name of the run's folder."""

from __future__ import annotations

import hashlib
from typing import Any

from asynckfold.integrations.tensorboard import curves
from asynckfold.jobs.candidate_names import base_of
from asynckfold.jobs.result import CANCELLED, DONE
from asynckfold.results.cv_results import CVResults


def write(
    results: CVResults, project: str = "asynckfold", mode: str | None = None, **settings: Any
) -> int:
    """Write the jobs that have ended an epoch; return how many there are.

    Writing again, during the run or after it, adds the epochs that are new.

    Parameters
    ----------
    results : CVResults
        Of a call, or by `load_results` of a run that goes on.
    project : str
        Of Weights & Biases.
    mode : str, optional
        ``"online"``, ``"offline"`` or ``"disabled"``, as for ``wandb.init``.
    **settings
        Further arguments of ``wandb.init``, such as `entity`, `dir` and `tags`.
    """
    import wandb

    group, jobs = results.root_dir.resolve().name, list(curves(results))
    for job, status, epochs in jobs:
        names = {"model": base_of(job.model), "lr_schedule": base_of(job.lr_schedule)}
        run = wandb.init(
            **{"project": project, "mode": mode, "settings": {"console": "off"}, **settings},
            group=group,
            job_type=job.candidate,
            name=job.id,
            # The same run of Weights & Biases when it is written again.
            id=hashlib.sha256(f"{group}/{job.id}".encode()).hexdigest()[:16],
            resume="allow",
            reinit="create_new",
            config={**names, "repeat": job.repeat, "fold": job.fold, **job.params},
        )
        before = run.step
        for number, values in epochs:
            if number >= before:
                run.log(values, step=number)
        run.summary.update(epochs[-1][1])
        run.finish(exit_code=0 if status in ("", DONE, CANCELLED) else 1)
    return len(jobs)
