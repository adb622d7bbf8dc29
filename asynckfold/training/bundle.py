"""What every worker of a sweep needs, sent once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.recipe import Recipe
from asynckfold.jobs.result import MakeAccumulator
from asynckfold.planning.fusion_rule import Fuse

if TYPE_CHECKING:
    from asynckfold.data.batches import DataHandle


@dataclass(frozen=True, eq=False)
class Bundle:
    """Plan, folds, live objects and a handle to the data.

    Parameters
    ----------
    plan : Plan
        Jobs and trainer parameters.
    folds : tuple of Fold
        Train and held-out indices.
    recipe : Recipe
        Models, LR schedules, optimizer function, criterion.
    data : DataHandle
        Opened by each worker with the file descriptors that are sent beside it.
    root : Path
        The run's folder, for checkpoints and logs.
    ordinary : tuple of two torch Datasets, optional
        Train view and eval view as plain datasets; only the serial baseline needs them.
    default_dtype : str
        ``torch.get_default_dtype`` of the caller's process.
    deterministic : {0, 1, 2}
        ``torch.get_deterministic_debug_mode`` of the caller's process.
    numerics : Mapping
        `torch_settings.current` of the caller's process.
    fuse : "auto", bool or int
        Which models the dry run checks for fusion.
    job_timeout_s : float or None
        Longest training time of a job, see `Stopwatch`.
    code : Mapping
        Digests of the live objects, see `asynckfold.jobs.digests`; empty where they need no module
        of the user's.
    highest : int
        Greatest class index of any sample; -1 if the dry run need not check it.
    may_be_numbered : bool
        Whether class indices beyond a model's outputs may be renumbered.
    refits : tuple of str
        Candidates that may be trained on all samples, too.
    accumulators : Mapping of str to MakeAccumulator
        What scores the outputs of each model, where the plan scores by batch.
    """

    plan: Plan
    folds: tuple[Fold, ...]
    recipe: Recipe
    data: DataHandle
    root: Path
    ordinary: Any = None
    default_dtype: str = "float32"
    deterministic: int = 0
    numerics: Mapping[str, Any] = field(default_factory=dict)
    fuse: Fuse = False
    job_timeout_s: float | None = None
    code: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    highest: int = -1
    may_be_numbered: bool = False
    refits: tuple[str, ...] = ()
    accumulators: Mapping[str, MakeAccumulator] = field(default_factory=dict)

    def fold_of(self, job: Job) -> Fold:
        """Return the fold that `job` holds out, with what the job sets aside."""
        return self.plan.fold_of(job, self.folds)
