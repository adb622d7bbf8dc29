"""Cross-validate many PyTorch models at once.

>>> from asynckfold import AsyncKFold
>>> AsyncKFold.__call__.__doc__.splitlines()[0]
'Train every model with every LR schedule on every fold.'
"""

import importlib
from typing import TYPE_CHECKING, Any

from asynckfold.cv_results import CVResults
from asynckfold.ensemble import FoldEnsemble
from asynckfold.errors import (
    AllJobsFailedError,
    AsyncKFoldError,
    InputError,
    InterruptedRunError,
    JobFailedError,
    NoRoomError,
    PeerLostError,
    PlanMismatchError,
    Problem,
    RefitFailedError,
    RunHeldError,
    StorageError,
    StoreCorruptError,
)
from asynckfold.fitting import Accuracy, DistributedTester, DistributedTrainer, Fitted, fit
from asynckfold.folds import Fold
from asynckfold.kfold import AsyncKFold, JobsFailedWarning, load_results
from asynckfold.plan import Job, Plan
from asynckfold.result import Baseline, Epoch, Result
from asynckfold.store import RunStore
from asynckfold.trainer_params import TrainerParams

if TYPE_CHECKING:
    from asynckfold.training.parameter_server import Hogwild, Server

__all__ = [
    "Accuracy",
    "AllJobsFailedError",
    "AsyncKFold",
    "AsyncKFoldError",
    "Baseline",
    "CVResults",
    "DistributedTester",
    "DistributedTrainer",
    "Epoch",
    "Fitted",
    "Fold",
    "FoldEnsemble",
    "Hogwild",
    "InputError",
    "InterruptedRunError",
    "Job",
    "JobFailedError",
    "JobsFailedWarning",
    "NoRoomError",
    "PeerLostError",
    "Plan",
    "PlanMismatchError",
    "Problem",
    "RefitFailedError",
    "Result",
    "RunHeldError",
    "RunStore",
    "Server",
    "StorageError",
    "StoreCorruptError",
    "TrainerParams",
    "fit",
    "load_results",
]

_IMPORTED_ON_USE = {
    "Hogwild": "asynckfold.training.parameter_server",
    "Server": "asynckfold.training.parameter_server",
}
"""What needs torch, and where it is: ``import asynckfold`` costs no torch."""


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_IMPORTED_ON_USE[name]), name)
