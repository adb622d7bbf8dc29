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
from asynckfold.fitting import Accuracy, DistributedTester, DistributedTrainer, Fitted, fit
from asynckfold.folds import Fold
from asynckfold.kfold import AsyncKFold, JobsFailedWarning, load_results
from asynckfold.plan import Job, Plan, TrainerParams
from asynckfold.result import Baseline, CVResults, Epoch, Result
from asynckfold.store import RunStore

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
    "fit",
    "load_results",
]
