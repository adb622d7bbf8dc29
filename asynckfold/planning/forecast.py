"""Forecasts a sweep: its jobs, placed in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from asynckfold.jobs.folds import Fold
from asynckfold.jobs.placement import NodeSize, Request, units
from asynckfold.jobs.plan import Plan
from asynckfold.planning.fusion_groups import Grouping
from asynckfold.planning.workload import Choice, TimeEstimate, Workload, requests
from asynckfold.scheduling.simulate import Simulation, simulate


@dataclass(frozen=True)
class Forecast:
    """What a call would do.

    Parameters
    ----------
    plan : Plan
        Its jobs, with their threads and groups.
    folds : tuple of Fold
        Its folds.
    choice : Choice
        The threads of each model, why, and the expected seconds of the sweep.
    requests : Mapping of str to Request
        By job id: expected seconds, threads and bytes of memory.
    units : Mapping of str to Request
        The same by unit of placement: a fusion group, named by its first job, or a single job.
    fusing : Mapping of str to str
        By model its groups, or why it has none; empty if fusion was not requested.
    simulation : Simulation
        The sweep on all allotted cores, with unlimited memory and no other processes.
    failures : Mapping of str to str
        Last line of the traceback, by candidate whose dry run failed.
    notes : tuple of str
        Remarks of the dry run that forbid nothing.
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
    """Return the forecast of a sweep with these decisions."""
    grouping = grouping or Grouping()
    each = requests(choice, work, grouping.groups)
    placed = units(each, grouping.groups)
    nodes = choice.nodes or [NodeSize(choice.cores, work.gpus)]
    simulation = simulate(list(placed.values()), nodes)
    return Forecast(
        replace(
            work.plan.with_threads(choice.threads, choice.last_threads), groups=grouping.groups
        ),
        tuple(work.folds),
        choice,
        each,
        placed,
        grouping.why,
        simulation,
        {name: trace.strip().splitlines()[-1] for name, trace in work.facts.failures.items()},
        work.facts.notes,
    )


def predicted(work: Workload, choice: Choice, grouping: Grouping) -> Choice:
    """Return the choice with the prediction of the whole sweep."""
    simulation = forecast(work, choice, grouping).simulation
    longest = max((span.end - span.start for span in simulation.spans), default=0.0)
    prediction = TimeEstimate(simulation.makespan, simulation.lower_bound, longest)
    return replace(choice, prediction=prediction)
