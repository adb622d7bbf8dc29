"""What a sweep will do by what was decided for it: its jobs placed in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asynckfold.choice import Choice, Sweep, requests
from asynckfold.folds import Fold
from asynckfold.messages import Facts
from asynckfold.packing import choice_of
from asynckfold.placement import Request
from asynckfold.plan import Plan
from asynckfold.simulate import Simulation, VirtualMachine, simulate
from asynckfold.store import RunStore


@dataclass(frozen=True)
class Forecast:
    """What a call would do.

    Parameters
    ----------
    plan : Plan
        Its jobs, with their threads.
    folds : tuple of Fold
        Who would be held out when.
    choice : Choice
        The threads of each model, why, and the seconds that the sweep should take.
    requests : Mapping of str to Request
        By job id: expected seconds, threads and bytes of memory.
    simulation : Simulation
        The sweep with all allotted cores and as much memory as it wants, nobody else being there.
    failures : Mapping of str to str
        By candidate whose dry run failed: the last line of the traceback.
    """

    plan: Plan
    folds: tuple[Fold, ...]
    choice: Choice
    requests: Mapping[str, Request]
    simulation: Simulation
    failures: Mapping[str, str] = field(default_factory=dict)


def forecast(work: Sweep, choice: Choice) -> Forecast:
    """Return what a sweep will do by a choice.

    Parameters
    ----------
    work : Sweep
        The sweep.
    choice : Choice
        What was decided for it.
    """
    asked = requests(choice, work)
    return Forecast(
        work.plan.with_threads(choice.threads),
        tuple(work.folds),
        choice,
        asked,
        simulate(list(asked.values()), VirtualMachine(choice.cores, work.gpus)),
        {name: _last_line(trace) for name, trace in work.facts.failures.items()},
    )


def forecast_of(store: RunStore) -> Forecast | None:
    """Return what was foreseen for a run; None where that was not recorded."""
    decided = choice_of(store.about)
    if decided is None:
        return None
    folds: Sequence[Fold] = store.splits()[0]
    nothing = Facts({}, {}, {})
    gpus = len(store.about["machine"]["gpus"]) if store.plan.device == "cuda" else 0
    return forecast(Sweep(store.plan, folds, nothing, decided.cores, {}, gpus), decided)


def _last_line(trace: str) -> str:
    return trace.strip().splitlines()[-1]
