"""What a sweep will do by what was decided for it: its jobs placed in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import Request, units
from asynckfold.jobs.plan import Plan
from asynckfold.planning.fusion_groups import Grouping, grouped
from asynckfold.planning.thread_search import Prediction
from asynckfold.planning.workload import Choice, Workload, decided_of, requests
from asynckfold.scheduling.simulate import Simulation, VirtualMachine, simulate
from asynckfold.store import RunStore
from asynckfold.store.database import decoding


@dataclass(frozen=True)
class Forecast:
    """What a call would do.

    Parameters
    ----------
    plan : Plan
        Its jobs, with their threads and groups.
    folds : tuple of Fold
        Who would be held out when.
    choice : Choice
        The threads of each model, why, and the seconds that the sweep should take.
    requests : Mapping of str to Request
        By job id: expected seconds, threads and bytes of memory.
    units : Mapping of str to Request
        The same of what is placed as one: of each group by its first job, with the seconds of all
        of its jobs, and of each job in none.
    fusing : Mapping of str to str
        By model which jobs are trained as one, or why none; empty where that was not asked for.
    simulation : Simulation
        The sweep with all allotted cores and as much memory as it wants, nobody else being there.
    failures : Mapping of str to str
        By candidate whose dry run failed: the last line of the traceback.
    notes : tuple of str
        What the dry run has to tell, and forbids nothing.
    """

    plan: Plan
    folds: tuple[Fold, ...]
    choice: Choice
    requests: Mapping[str, Request]
    units: Mapping[str, Request]
    fusing: Mapping[str, str]
    simulation: Simulation
    failures: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def forecast(work: Workload, choice: Choice, grouping: Grouping | None = None) -> Forecast:
    """Return what a sweep will do by a choice.

    Parameters
    ----------
    work : Workload
        The jobs of the sweep, and what they run on.
    choice : Choice
        What was decided for it.
    grouping : Grouping, optional
        Which jobs are trained as one.
    """
    grouping = grouping or Grouping()
    asked = requests(choice, work, grouping.groups)
    placed = units(asked, grouping.groups)
    simulation = simulate(list(placed.values()), VirtualMachine(choice.cores, work.gpus))
    return Forecast(
        replace(
            work.plan.with_threads(choice.threads, choice.last_threads), groups=grouping.groups
        ),
        tuple(work.folds),
        choice,
        asked,
        placed,
        grouping.why,
        simulation,
        {name: _last_line(trace) for name, trace in work.facts.failures.items()},
        work.facts.notes,
    )


def foreseen(work: Workload, choice: Choice, grouping: Grouping) -> Choice:
    """Return a choice with what is predicted of the sweep in groups, and of its last jobs."""
    if not grouping.groups and not choice.last_threads:
        return choice
    return replace(choice, prediction=Prediction.of(forecast(work, choice, grouping).simulation))


def forecast_of(store: RunStore) -> Forecast | None:
    """Return what was foreseen for a run; None where that was not recorded."""
    decided = decided_of(store)
    if decided is None:
        return None
    folds: Sequence[Fold] = store.splits()[0]
    nothing = Facts({}, {}, {})
    plan = store.plan
    with decoding(store.root):
        gpus = len(store.about["machine"]["gpus"]) if plan.device == "cuda" else 0
    kept = grouped(plan, False, {}, decided.cores, plan) if plan.groups else None
    return forecast(Workload(plan, folds, nothing, decided.cores, {}, gpus), decided, kept)


def _last_line(trace: str) -> str:
    return trace.strip().splitlines()[-1]
