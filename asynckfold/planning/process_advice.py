"""Whether several processes of a job are worth it: told before a run, and nothing is decided by it.

What a trainer adds to the steps of its processes was measured, see `ADDED`; the seconds of a step
are those of the dry run. Where both together say that one process is faster, or where an epoch has
too few batches to be shared, the run says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from asynckfold.jobs.cost import Cost, at
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.trainer_params import TrainerParams


@dataclass(frozen=True)
class Added:
    """What a trainer adds to the steps of two processes.

    Parameters
    ----------
    seconds : float
        To each exchange, about.
    exchange : str
        Its name.
    """

    seconds: float
    exchange: str


ADDED = {
    "hogwild": Added(0.00008, "an update of the shared model"),
    "allreduce": Added(0.0006, "the exchange of a batch"),
    "averaging": Added(0.0006, "the average of a round"),
    "parameter_server": Added(0.0009, "a push and a fetch"),
}
"""Seconds beyond a plain step, or half of one for all-reduce, in rank 0 of two processes on two
cores of an x86-64 server (torch 2.15, batches of 32, Adam): the lower 5th percentile of 100 to 350
steps in the best of three runs, for an MLP 64-64-10 and an MLP 784-128-10, whose plain steps took
0.5 and 0.8 ms: hogwild 0.09 and 0.08 ms, allreduce 0.9 and 1.2, averaging by rounds of one step 0.6
and 0.9, parameter_server 0.6 and 1.0. Other programs ran meanwhile, which made exchanges longer: so
no number here is above the least that was seen of the second MLP, and all-reduce, where most was in
doubt, stays a third below the least of both. `bench trainers`, with nobody else on the machine,
came to 0.24 ms for hogwild, 1.0 for all-reduce and 1.5 for the parameter server by medians of whole
epochs of the second, an evaluation in each included. What larger parameters add is left out. Of
LeNet5, whose step takes some 4 ms, nothing is said.
"""

FEW = 4
"""Batches of a process in an epoch. At its end, a process waits for at most a batch of another:
with fewer, that is a fifth of the epoch or more."""


def seconds(params: TrainerParams, step: float, batches: int) -> float:
    """Return the seconds of an epoch's steps on the processes of a job, or on its only one.

    Parameters
    ----------
    params : TrainerParams
        The trainer and its processes.
    step : float
        Seconds of a step of one process on a whole batch.
    batches : int
        Of an epoch.

    Examples
    --------
    >>> seconds(TrainerParams(), 0.001, 100)
    0.1
    """
    count = params.processes
    if count == 1:
        return batches * step
    added = ADDED[params.trainer].seconds
    if params.trainer == "allreduce":
        return batches * (step / count + added)
    rounds = math.ceil(batches / count)
    exchanges = {
        "averaging": math.ceil(rounds / params.steps_per_round),
        "parameter_server": rounds / min(params.n_push, params.n_pull),
    }.get(params.trainer, rounds)
    return rounds * step + exchanges * added


def notes(plan: Plan, folds: Sequence[Fold], costs: Mapping[str, Cost]) -> Iterator[str]:
    """Yield why fewer processes should do the same in less time, where that is expected.

    Parameters
    ----------
    plan : Plan
        The trainer, its processes, the size of a batch.
    folds : sequence of Fold
        The smallest training fold counts.
    costs : Mapping of str to Cost
        By model.
    """
    params, count = plan.params, plan.params.processes
    if count == 1 or params.deals_parts:
        # One process would not train the parts that several are dealt.
        return
    batches = math.ceil(min(len(fold.train) for fold in folds) / plan.batch_size)
    if params.trainer != "allreduce" and batches < FEW * count:
        yield (
            f"an epoch has {batches} batches for {count} processes, which wait for each other at "
            f"its end: with fewer than {FEW} for each, for a fifth of the time or more; pass fewer "
            "processes or a smaller batch_size"
        )
    added = ADDED[params.trainer]
    for model, cost in costs.items():
        step = at(cost.step_seconds, 1)
        if seconds(params, step, batches) > seconds(replace(params, processes=1), step, batches):
            yield (
                f"{model}: 1 process is expected to be faster than {count}: a step takes about "
                f"{_milliseconds(step)}, {added.exchange} about {_milliseconds(added.seconds)} "
                "more; pass processes=1"
            )


def _milliseconds(value: float) -> str:
    return f"{1000 * value:.2g} ms"
