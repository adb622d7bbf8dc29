"""Cross-validate many PyTorch models at once.

>>> from asynckfold import AsyncKFold
>>> AsyncKFold.__call__.__doc__.splitlines()[0]
'Train every model with every LR schedule on every fold.'
"""

from asynckfold.errors import (
    AllJobsFailedError,
    AsyncKFoldError,
    InputError,
    InterruptedRunError,
    JobFailedError,
    NoRoomError,
    PlanMismatchError,
    Problem,
    RunHeldError,
    StorageError,
    StoreCorruptError,
)
from asynckfold.folds import Fold
from asynckfold.kfold import AsyncKFold, JobsFailedWarning, load_results
from asynckfold.plan import Job, Plan, TrainerParams
from asynckfold.result import Baseline, CVResults, Epoch, Result
from asynckfold.store import RunStore

__all__ = [
    "AllJobsFailedError",
    "AsyncKFold",
    "AsyncKFoldError",
    "Baseline",
    "CVResults",
    "Epoch",
    "Fold",
    "InputError",
    "InterruptedRunError",
    "Job",
    "JobFailedError",
    "JobsFailedWarning",
    "NoRoomError",
    "Plan",
    "PlanMismatchError",
    "Problem",
    "Result",
    "RunHeldError",
    "RunStore",
    "StorageError",
    "StoreCorruptError",
    "TrainerParams",
    "load_results",
]
