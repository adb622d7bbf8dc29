"""The steps of one call, from its arguments to the results, in the order in which they run.

::

    check ── hold_run ── open_data ── dry_run ── make_plan ─┬─ begin ── training ── Sweep.run
                                                            └─ look_ahead

Each step is a function of the `Call`, and adds its results to it. `AsyncKFold` calls them one after
another.
"""

from __future__ import annotations

import functools
import itertools
import queue
import time
from dataclasses import replace
from typing import Any

from asynckfold.api import lightning_modules, planner, reading, score_checks
from asynckfold.api.argument_checks import (
    argument_problems,
    joblib_problems,
    read_trainer_params,
    unmeasured_problems,
)
from asynckfold.api.arguments import Settings
from asynckfold.api.context import Call, software_of
from asynckfold.api.refit import refit_problems
from asynckfold.engines import warm_pool
from asynckfold.engines.process import preloads
from asynckfold.errors import refuse
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.criteria import is_factory
from asynckfold.jobs.digests.run import of_run
from asynckfold.jobs.grid import Parts, make_grid
from asynckfold.jobs.placement import WORKER_BYTES
from asynckfold.jobs.recipe import Recipe, named_lr_schedules, named_models
from asynckfold.planning import memory_format
from asynckfold.planning.choice import choose, choose_devices
from asynckfold.planning.feasibility import room_problems
from asynckfold.planning.forecast import Forecast, forecast, predicted
from asynckfold.planning.fusion_groups import group
from asynckfold.planning.workload import Workload
from asynckfold.store import refuse_other


def check(
    settings: Settings,
    models: Any,
    schedulers: Any,
    opt_fn: Any,
    trainer_params: Any,
    grid_params: Any = None,
    n_iter: Any = None,
) -> Call:
    """Check the arguments of a call.

    Raises
    ------
    InputError
        All problems, those of labels and folds among them.
    """
    started = time.monotonic()
    is_configured = lightning_modules.are_meant(schedulers, opt_fn)
    params, bad_params = read_trainer_params(settings, trainer_params)
    if is_configured:
        schedulers = lightning_modules.schedulers()
        opt_fn = lightning_modules.opt_fn(params.epochs)
    named, problems, notes = named_models(models)
    lr_schedules, bad_schedules = named_lr_schedules(schedulers)
    parts = Parts(named, lr_schedules, opt_fn)
    grid, bad_grid, drawn = make_grid(parts, grid_params, n_iter, settings.random_state)
    problems += [*bad_schedules, *bad_params, *bad_grid]
    if is_configured and not problems:
        taken = lightning_modules.with_steps(settings, grid.models, params, trainer_params)
        settings, params = taken.settings, taken.params
        problems += taken.problems
    elif settings.training_step is None and settings.fit_fn is None:
        notes += lightning_modules.notes(named)
    if not bad_grid:
        pairs = grid.pairs or itertools.product(named, lr_schedules)
        problems += refit_problems(settings, [candidate_name(*pair) for pair in pairs])
    bad_backend, about_backend = joblib_problems(settings)
    problems += [*bad_backend, *argument_problems(settings, params, parts, grid)]
    if problems:
        refuse([*problems, *reading.data_problems(settings)])
    from asynckfold.training.losses import NoLoss

    recipe = Recipe(
        grid.models,
        grid.lr_schedules,
        opt_fn,
        NoLoss() if settings.criterion is None else settings.criterion,
        settings.preprocess,
        training_step=settings.training_step,
        validation_step=settings.validation_step,
        fit_fn=settings.fit_fn,
        callbacks=settings.called_back,
        sampler=settings.sampler,
        make_criterion=settings.criterion if is_factory(settings.criterion) else None,
        optimizers=grid.optimizers,
        pairs=grid.pairs,
    )
    notes += [*drawn, *about_backend]
    return Call(settings, params, trainer_params, recipe, grid, notes, started)


def open_data(call: Call) -> None:
    """Start the pool, read the data and divide them; they stay open until the call ends.

    Raises
    ------
    InputError
        The data cannot be read, divided or scored.
    """
    from asynckfold.training.isolation.guard import open_autocast

    refuse(open_autocast())
    settings, keep = call.settings, call.stack.enter_context
    # First: the user's code may change what it refers to.
    call.digest = of_run(call.recipe, settings)
    lend = functools.cache(lambda: keep(warm_pool.lent(settings.nice, call.digest.modules)))
    if settings.engine == "process":
        call.pool = lend()
        call.is_fresh = not call.pool.workers
    elif settings.engine == "ray":
        call.display.doing("starting Ray")
        call.cluster = keep(reading.cluster_of(call))
    call.display.doing("reading the data")
    # The samples are read by workers of this machine, whoever trains.
    readers = reading.readers_of(settings, call.machine, lend, call.signals, call.display)
    data = keep(reading.prepared(settings, call.machine, readers))
    keep(call.signals.noted())
    call.folds = reading.folds_of(settings, data)
    call.data = reading.with_leaks_noted(settings, data, call.folds)
    call.samples = data.checked


def dry_run(call: Call) -> None:
    """Check every candidate on a few samples, without training.

    Raises
    ------
    InputError
        The sweep cannot work here, or the run was begun with other software.
    """
    settings = call.settings
    call.bundle, call.make = planner.drafted(call), planner.engines_of(call, queue.SimpleQueue())
    call.software = software_of(call, call.bundle.plan)
    # Workers that are there already import what they lack.
    if call.pool is not None and call.is_fresh:
        call.pool.preload(preloads(call.bundle, streams=not call.data.held))
    refuse(planner.misfits(call))
    call.display.doing("checking the candidates")
    call.facts = planner.checked_candidates(call)
    kind = call.data.labels.objective.kind
    refuse(unmeasured_problems(settings, call.facts.measured, kind))
    samples = call.facts.output_samples
    if score_checks.must_be_numbered(call.data, settings.known_criterion, samples):
        call.data = call.data.numbered()
        call.make = replace(call.make, data=call.data)
        call.bundle = planner.drafted(call)
        call.facts = planner.checked_candidates(call)
    draft, notes = score_checks.with_objective(
        settings, call.bundle.plan, call.data, call.facts.output_samples, call.folds
    )
    reacting = tuple(name for name in draft.candidate_names if name in call.facts.reacting)
    call.bundle = replace(call.bundle, plan=replace(draft, reacting=reacting))
    call.notes += [*notes, *planner.dry_run_notes(call)]


def make_plan(call: Call) -> None:
    """Choose memory formats, threads and fusion groups; a run that has a plan keeps its own.

    Raises
    ------
    InputError
        There is not enough memory for a model.
    """
    settings, machine, make = call.settings, call.machine, call.make
    stored, folder = call.stored, settings.other_run
    taken = None if folder is None else planner.plan_of(folder)
    before = stored or taken
    last = memory_format.chosen(call.bundle.plan, call.facts.formats, before)
    draft = planner.with_outputs(call, replace(call.bundle.plan, channels_last=last), before)
    allowed = settings.kinds(machine, draft.params)
    # A run keeps the nodes that it was planned for, wherever it goes on.
    nodes = make.nodes if call.before is None else call.before.nodes
    if call.before is None and "cuda" not in allowed:
        nodes = tuple(replace(node, gpus=0) for node in nodes)
    work = Workload(
        draft,
        call.folds,
        call.facts,
        min((node.cores for node in nodes), default=make.allotted),
        len(machine.gpus().gpus),
        min((gpu.total for gpu in machine.gpus().gpus), default=0),
        nodes=nodes,
    )
    devices = choose_devices(work, allowed, before)
    work = replace(work, plan=draft.with_devices(devices.kinds))
    threads = choose(work, settings.threads, call.before, taken)
    threads = replace(threads, devices=devices.why or threads.devices)
    groups = group(work, threads, before, settings.fuse, machine.max_memory)
    threads = predicted(work, threads, groups)
    expected = {name: cost.memory for name, cost in threads.costs.items()}
    workers = WORKER_BYTES * work.plan.params.processes
    refuse(room_problems(expected, machine.max_memory, workers, groups.widths))
    call.work, call.choice, call.groups = work, threads, groups
    call.bundle = replace(call.bundle, plan=work.plan)
    if stored is None and work.plan.device != draft.device:
        call.software = software_of(call, work.plan)


def look_ahead(call: Call) -> Forecast:
    """Return what a run would do; refuse a folder that holds another plan."""
    if call.stored is not None:
        refuse_other(call.settings.root, call.stored, call.plan, call.settings.free)
    return forecast(call.work, call.choice, call.groups)
