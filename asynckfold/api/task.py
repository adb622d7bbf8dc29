"""What is asked of the models, where the user says it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from asynckfold.data.reconstruction import lacks_targets, with_input_as_target
from asynckfold.errors import Problem
from asynckfold.jobs.argument import argument, one_line
from asynckfold.jobs.objective import CUSTOM, RECONSTRUCTION

Word = Literal[
    "binary",
    "multiclass",
    "multilabel",
    "regression",
    "segmentation",
    "reconstruction",
    "custom",
]


@dataclass(frozen=True, eq=False, kw_only=True)
class Asked:
    """The task, the score that ranks, and what is kept of the outputs.

    Parameters
    ----------
    task : str, optional
        What is asked of the models, where criterion, targets and outputs do not say it.
        "segmentation" is a class for each pixel, or for each step of a sequence; "reconstruction"
        takes the input as the target; "custom" needs functions in `scoring`. A task that
        contradicts criterion or targets is refused.
    rank_by : str, optional
        Name of the score that ranks the candidates. Default: the first of `scoring`.
    keep_outputs_gib : float
        Outputs of held-out samples are kept if all of them take at most so many GiB. Else each
        fold is scored, and its outputs are dropped: then there is no `CVResults.oof`. Metrics of
        torchmetrics and scores of pixels then get a batch at a time, so that no more is held.
    """

    task: Word | None = argument(None, group="training", none="")
    rank_by: str | None = argument(None, group="training", metavar="SCORE", none="")
    keep_outputs_gib: float = argument(
        2.0, group="output", spelled="keep-outputs", unit="GiB", least=0
    )


def with_task(given: dict[str, Any]) -> dict[str, Any]:
    """Return what task, data set and scoring of some arguments become for a reconstruction."""
    task, dataset = given["task"], given["dataset"]
    if task != RECONSTRUCTION and (task is not None or not lacks_targets(dataset)):
        return {}
    return {
        "task": RECONSTRUCTION,
        "dataset": with_input_as_target(dataset),
        "scoring": given["scoring"] or "neg_mean_squared_error",
    }


def task_problems(given: dict[str, Any]) -> Iterator[Problem]:
    """Yield the arguments that contradict the task."""
    for name in ("preprocess", "targets") if given["task"] == RECONSTRUCTION else ():
        if given[name] is not None:
            yield Problem(
                "task='reconstruction' takes the input as the target",
                f"{name}={one_line(given[name])}",
                f"Leave {name} out, or pass pairs (input, target) with task='regression'.",
            )
    if given["task"] == CUSTOM and given["scoring"] is None:
        yield Problem(
            "task='custom' needs functions that score it",
            "scoring=None",
            "Pass scoring={'name': function}, of (targets, outputs) → float.",
        )
