"""Cross-validate many PyTorch models at once.

>>> from asynckfold import AsyncKFold
>>> AsyncKFold.__call__.__doc__.splitlines()[0]
'Train every model with every LR schedule on every fold.'
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynckfold.api.estimator import AsyncKFoldClassifier, AsyncKFoldRegressor
    from asynckfold.api.export import export
    from asynckfold.api.fit import Accuracy, DistributedTester, DistributedTrainer, Fitted, fit
    from asynckfold.api.kfold import AsyncKFold, JobsFailedWarning
    from asynckfold.api.saved_models import load_model
    from asynckfold.api.stored_results import load_results
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
        SignatureError,
        StorageError,
        StoreCorruptError,
    )
    from asynckfold.jobs.folds import Fold
    from asynckfold.jobs.plan import Job, Plan
    from asynckfold.jobs.result import Baseline, Epoch, Result
    from asynckfold.jobs.trainer_params import TrainerParams
    from asynckfold.results.audit import Audit, Finding
    from asynckfold.results.cv_results import CVResults
    from asynckfold.results.decisions import Calibrator, Threshold
    from asynckfold.results.ensemble import Blend, FoldEnsemble
    from asynckfold.results.estimator_scores import EstimatorComparison
    from asynckfold.results.report.charts import plots
    from asynckfold.results.statistics import Difference
    from asynckfold.results.verdict import Verdict
    from asynckfold.store import RunReader, RunStore
    from asynckfold.training.callbacks import (
        BestWeights,
        EarlyStopping,
        FitState,
        GradientNorm,
        WeightAverage,
    )
    from asynckfold.training.lr_schedules import get_scheduler
    from asynckfold.training.parameter_server import Hogwild, Server

__all__ = [
    "Accuracy",
    "AllJobsFailedError",
    "AsyncKFold",
    "AsyncKFoldClassifier",
    "AsyncKFoldError",
    "AsyncKFoldRegressor",
    "Audit",
    "Baseline",
    "BestWeights",
    "Blend",
    "CVResults",
    "Calibrator",
    "Difference",
    "DistributedTester",
    "DistributedTrainer",
    "EarlyStopping",
    "Epoch",
    "EstimatorComparison",
    "Finding",
    "FitState",
    "Fitted",
    "Fold",
    "FoldEnsemble",
    "GradientNorm",
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
    "RunReader",
    "RunStore",
    "Server",
    "SignatureError",
    "StorageError",
    "StoreCorruptError",
    "Threshold",
    "TrainerParams",
    "Verdict",
    "WeightAverage",
    "export",
    "fit",
    "get_scheduler",
    "load_model",
    "load_results",
    "plots",
]

_MODULES = {
    "results.audit": ("Audit", "Finding"),
    "results.cv_results": ("CVResults",),
    "results.decisions": ("Calibrator", "Threshold"),
    "results.ensemble": ("Blend", "FoldEnsemble"),
    "results.estimator_scores": ("EstimatorComparison",),
    "errors": (
        "AllJobsFailedError",
        "AsyncKFoldError",
        "InputError",
        "InterruptedRunError",
        "JobFailedError",
        "NoRoomError",
        "PeerLostError",
        "PlanMismatchError",
        "Problem",
        "RefitFailedError",
        "RunHeldError",
        "SignatureError",
        "StorageError",
        "StoreCorruptError",
    ),
    "api.estimator": ("AsyncKFoldClassifier", "AsyncKFoldRegressor"),
    "api.export": ("export",),
    "api.fit": ("Accuracy", "DistributedTester", "DistributedTrainer", "Fitted", "fit"),
    "jobs.folds": ("Fold",),
    "api.kfold": ("AsyncKFold", "JobsFailedWarning"),
    "api.saved_models": ("load_model",),
    "api.stored_results": ("load_results",),
    "jobs.plan": ("Job", "Plan"),
    "jobs.result": ("Baseline", "Epoch", "Result"),
    "results.report.charts": ("plots",),
    "results.statistics": ("Difference",),
    "results.verdict": ("Verdict",),
    "store": ("RunReader", "RunStore"),
    "jobs.trainer_params": ("TrainerParams",),
    "training.callbacks": (
        "BestWeights",
        "EarlyStopping",
        "FitState",
        "GradientNorm",
        "WeightAverage",
    ),
    "training.lr_schedules": ("get_scheduler",),
    "training.parameter_server": ("Hogwild", "Server"),
}
"""Where each name is, imported on use: ``import asynckfold`` costs nothing.

So the command takes a Ctrl-C from its first milliseconds on.
"""

_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("asynckfold")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
