"""What was decided for a run before it started, from the store alone."""

from __future__ import annotations

from asynckfold.jobs.messages import Facts
from asynckfold.planning.forecast import Forecast, forecast
from asynckfold.planning.fusion_groups import grouped
from asynckfold.planning.workload import Choice, Workload
from asynckfold.store import RunReader
from asynckfold.store.database import decoding


def decided_of(store: RunReader) -> Choice | None:
    """Return what was decided for a run, if anything.

    Raises
    ------
    StoreCorruptError
        The record is damaged.
    """
    with decoding(store.root):
        decided = store.about.get("decision")
        return Choice.from_dict(decided) if decided else None


def forecast_of(store: RunReader) -> Forecast | None:
    """Return the forecast of a stored run; None if it was not recorded."""
    decided = decided_of(store)
    if decided is None:
        return None
    folds, plan = store.splits()[0], store.plan
    with decoding(store.root):
        gpus = len(store.about["machine"]["gpus"]) if plan.device == "cuda" else 0
    kept = grouped(plan, False, {}, decided.cores, plan) if plan.groups else None
    work = Workload(plan, folds, Facts({}, {}, {}), decided.cores, {}, gpus)
    return forecast(work, decided, kept)
