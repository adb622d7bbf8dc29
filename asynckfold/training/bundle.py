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

    ``ordinary`` are train view and eval view as plain datasets, which only the serial baseline
    needs; ``default_dtype``, ``deterministic`` (0 to 2) and ``numerics`` are torch's settings in
    the caller's process, ``code`` digests of the live objects (empty where they need no module of
    the user's). For the dry run: ``fuse`` says which models to check for fusion, ``kinds`` on which
    devices they may be trained, ``highest`` is the greatest class index of any sample (-1 if it
    need not check it), and ``may_be_numbered`` whether class indices beyond a model's outputs may
    be renumbered. ``refits`` are candidates that may be trained on all samples, too;
    ``accumulators`` score the outputs of each model, where the plan scores by batch. ``earlier``
    are fingerprints of plans whose checkpoints may be continued.
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
    kinds: tuple[str, ...] = ("cpu",)
    job_timeout_s: float | None = None
    code: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    highest: int = -1
    may_be_numbered: bool = False
    refits: tuple[str, ...] = ()
    accumulators: Mapping[str, MakeAccumulator] = field(default_factory=dict)
    earlier: tuple[str, ...] = ()

    def fold_of(self, job: Job) -> Fold:
        """Return the fold that `job` holds out, with what the job sets aside."""
        return self.plan.fold_of(job, self.folds)
