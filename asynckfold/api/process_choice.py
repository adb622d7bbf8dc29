"""Chooses for ``engine="auto"``: this process, or workers.

::

    begin    workers are still to start ──► the dry run of a few models here, meanwhile
    settle   by `planning.process_rule` ──► the jobs here, or with workers
"""

from __future__ import annotations

import threading
from dataclasses import replace

from asynckfold.api.context import Call
from asynckfold.engines.process import preloads
from asynckfold.engines.server_process import LIBRARY_SECONDS
from asynckfold.planning import gpu_rule
from asynckfold.planning.forecast import seconds_in_turn
from asynckfold.planning.process_rule import why_here

MOST_MODELS = 8
"""Models that are checked in this process, one after another."""


def begin(call: Call) -> None:
    """Let this process check the models if workers are still to start."""
    if call.pool is None:
        return
    call.may_be_here = _may_be_here(call)
    # A worker would import what the models need first.
    is_cold = call.is_fresh or call.pool.server.seconds_to_serve > 0
    if call.may_be_here and is_cold and len(call.recipe.models) <= MOST_MODELS:
        call.make = replace(call.make, is_here=True)
    else:
        _preload(call)


def settle(call: Call) -> None:
    """Train here or with workers, whichever is predicted to end first."""
    if not call.may_be_here or call.pool is None:
        return
    from asynckfold.training.torch_settings import can_flush_denormals

    choice, why = call.choice, ""
    lacking = call.pool.lacking(preloads(call.bundle, streams=False)) if call.is_fresh else []
    if can_flush_denormals(max([*choice.threads.values(), *choice.last_threads.values()])):
        here = seconds_in_turn(call.work, choice, call.groups)
        start = call.pool.server.seconds_to_serve + LIBRARY_SECONDS * len(lacking)
        plan = call.work.plan
        if any(plan.device_of(name) == "cuda" for name in plan.candidate_names):
            start += gpu_rule.OPENING_SECONDS
        why = why_here(here, choice.prediction.makespan, start)
    was_here = call.make.is_here
    call.make = replace(call.make, is_here=bool(why))
    if why:
        call.notes.append(why)
        # For the next call: meanwhile it would take time from this one.
        call.stack.callback(call.pool.preload, lacking)
    elif was_here:
        call.pool.preload(lacking)


def _may_be_here(call: Call) -> bool:
    """Whether this process can train with the bits of workers, and does all that was asked for."""
    settings = call.settings
    return (
        settings.engine == "auto"
        and call.data.held
        and call.params.processes == 1
        # A slice of a GPU is seen by a new process only.
        and not any(gpu.uuid.startswith("MIG-") for gpu in call.machine.gpus().gpus)
        and not settings.nice
        and not settings.yield_to_others
        and settings.stall_timeout == "auto"
        # What packing gains is to be measured.
        and settings.baseline in (None, "none")
        # Others of this process may draw random numbers meanwhile.
        and threading.current_thread() is threading.main_thread()
    )


def _preload(call: Call) -> None:
    """Let a new server import what workers need; those that run already import what they lack."""
    if call.pool is not None and call.is_fresh:
        call.pool.preload(preloads(call.bundle, streams=not call.data.held))
