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
import sys
import time
from dataclasses import replace
from typing import Any

from asynckfold.api import process_choice, reading, score_checks
from asynckfold.api.argument_checks import (
    call_problems,
    joblib_problems,
    read_trainer_params,
    unmeasured_problems,
)
from asynckfold.api.arguments import Settings
from asynckfold.api.context import Call, dry_run_notes, make_bundle, make_recipe, software_of
from asynckfold.engines import warm_pool
from asynckfold.errors import refuse
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.digests.run import of_run
from asynckfold.jobs.grid import Parts, make_grid
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import WORKER_BYTES, Command
from asynckfold.jobs.recipe import named_lr_schedules, named_models, sending_problems
from asynckfold.planning import feasibility, memory_format
from asynckfold.planning.choice import choose, choose_devices
from asynckfold.planning.forecast import Forecast, forecast, predicted
from asynckfold.planning.fusion_groups import group
from asynckfold.planning.workload import Workload
from asynckfold.store import open_run, refuse_other
from asynckfold.sweep.engine_factory import Engines
from asynckfold.sweep.tasks import DryRun

MOST_THREADS = 8
"""Of a dry run where GPUs will train: on one core, a step of ResNet18 takes seconds."""


def check(
    settings: Settings,
    models: Any,
    schedulers: Any,
    opt_fn: Any,
    trainer_params: Any,
    grid_params: Any = None,
    n_iter: Any = None,
) -> Call:
    """Check the arguments of a call."""
    started = time.monotonic()
    params, problems = read_trainer_params(settings, trainer_params)
    is_imported = {"lightning.pytorch", "pytorch_lightning"} & sys.modules.keys()
    if is_imported:
        from asynckfold.integrations import lightning
    # A refit passes on what the first call got of the modules.
    is_configured = is_imported and (
        (schedulers is None and opt_fn is None) or isinstance(opt_fn, lightning.ConfiguredOptimizer)
    )
    if is_configured:
        schedulers, opt_fn = lightning.schedules_and_optimizer(params.epochs)
    elif schedulers is None:
        schedulers = "constant"
    named, bad_models, notes = named_models(models)
    lr_schedules, bad_schedules = named_lr_schedules(schedulers)
    parts = Parts(named, lr_schedules, opt_fn)
    grid, bad_grid, drawn = make_grid(parts, grid_params, n_iter, settings.random_state)
    problems = [*bad_models, *bad_schedules, *problems, *bad_grid]
    if is_configured and not problems:
        settings, params, problems = lightning.with_steps(
            settings, grid.models, params, trainer_params
        )
    elif is_imported and not settings.trains_itself:
        notes += lightning.module_notes(named)
    if settings.refit is not False and not bad_grid:
        from asynckfold.api.refit import refit_problems

        pairs = grid.pairs or itertools.product(named, lr_schedules)
        problems += refit_problems(settings, [candidate_name(*pair) for pair in pairs])
    bad_backend, about_backend = joblib_problems(settings)
    refuse([*problems, *bad_backend, *call_problems(settings, params, parts, grid)])
    recipe = make_recipe(settings, grid, opt_fn)
    notes += [*drawn, *about_backend]
    return Call(settings, params, trainer_params, recipe, grid, notes, started)


def open_data(call: Call) -> None:
    """Start the pool, read the data and divide them; they stay open until the call ends."""
    settings, keep = call.settings, call.stack.enter_context
    # First: the user's code may change what it refers to.
    call.digest = of_run(call.recipe, settings)
    lend = functools.cache(lambda: keep(warm_pool.lent(settings.nice, call.digest.modules)))
    if settings.engine in ("auto", "process"):
        # A server imports torch while this process reads and checks.
        call.pool = lend()
        call.is_fresh = not call.pool.workers
        # Before they read: what warm workers used until now would count as foreign.
        call.machine.sample(call.pool.processes)
    elif settings.engine == "ray":
        call.display.doing("starting Ray")
        call.cluster = keep(reading.cluster_of(call))
    call.display.doing("reading the data")
    data = keep(reading.prepared(call, lend))
    keep(call.signals.noted())
    call.folds = reading.folds_of(settings, data)
    call.data = reading.with_leaks_noted(settings, data, call.folds)
    call.samples = data.checked


def dry_run(call: Call) -> None:
    """Check every candidate on a few samples, without training."""
    settings = call.settings
    call.bundle = make_bundle(call)
    call.make = Engines(
        settings.engine,
        call.pool,
        call.data,
        call.machine,
        queue.SimpleQueue(),
        call.signals,
        settings.n_jobs,
        (settings.threads or 1) * call.params.processes,
        settings.stall_timeout,
        settings.max_wait,
        call.cluster,
    )
    call.software = software_of(call, call.bundle.plan)
    process_choice.begin(call)
    plan, why_no_gpu = call.bundle.plan, call.machine.gpus().reason
    if settings.engine != "serial" and not call.data.held:
        refuse(sending_problems({"dataset": call.bundle.data}))
    cores = {name: size.cores for name, size in call.make.found_nodes.items()}
    refuse(
        feasibility.plan_problems(
            plan, call.folds, call.data.held, settings.devices, why_no_gpu, cores
        )
    )
    call.display.doing("checking the candidates")
    call.facts = _checked_candidates(call)
    kind = call.data.labels.objective.kind
    refuse(unmeasured_problems(settings, call.facts.measured, kind))
    samples = call.facts.output_samples
    if score_checks.must_be_numbered(call.data, settings.known_criterion, samples):
        call.data = call.data.numbered()
        call.make = replace(call.make, data=call.data)
        call.bundle = make_bundle(call)
        call.facts = _checked_candidates(call)
    draft, notes = score_checks.with_objective(
        settings, call.bundle.plan, call.data, call.facts.output_samples, call.folds
    )
    reacting = tuple(name for name in draft.candidate_names if name in call.facts.reacting)
    call.bundle = replace(call.bundle, plan=replace(draft, reacting=reacting))
    alike = score_checks.model_notes(call.bundle.plan, call.facts)
    call.notes += [*notes, *alike, *dry_run_notes(call)]


def make_plan(call: Call) -> None:
    """Choose memory formats, threads and fusion groups; a run that has a plan keeps it."""
    settings, machine, make = call.settings, call.machine, call.make
    stored, folder = call.stored, settings.plan_from
    taken = None
    if folder is not None:
        with open_run(folder, "plan_from") as store:
            taken = store.plan
    before = stored or taken
    last = memory_format.chosen(call.bundle.plan, call.facts.formats, before)
    draft = score_checks.with_outputs(call, replace(call.bundle.plan, channels_last=last), before)
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
        jobs_per_gpu=None if isinstance(settings.jobs_per_gpu, str) else settings.jobs_per_gpu,
    )
    devices = choose_devices(work, allowed, before)
    work = replace(work, plan=draft.with_devices(devices.kinds))
    threads = choose(work, settings.threads, call.before, taken)
    threads = replace(threads, devices=devices.why or threads.devices)
    groups = group(work, threads, before, settings.fuse, machine.max_memory)
    threads = predicted(work, threads, groups)
    expected = {name: cost.memory for name, cost in threads.costs.items()}
    workers = WORKER_BYTES * work.plan.params.processes
    refuse(feasibility.room_problems(expected, machine.max_memory, workers, groups.widths))
    call.work, call.choice, call.groups = work, threads, groups
    process_choice.settle(call)
    call.bundle = replace(call.bundle, plan=work.plan)
    if stored is None and work.plan.device != draft.device:
        call.software = software_of(call, work.plan)


def look_ahead(call: Call) -> Forecast:
    """Return what a run would do; refuse a folder that holds another plan."""
    if call.stored is not None:
        refuse_other(call.settings.root, call.stored, call.plan, call.settings.free, call.folds)
    return forecast(call.work, call.choice, call.groups)


def _checked_candidates(call: Call) -> Facts:
    """Run the dry run of all candidates on all cores that are free."""
    make = call.make
    # The run may have been begun with keep_going and hold candidates that are refused without.
    plan = call.bundle.plan if call.settings.keep_going else call.stored
    spared = {job.candidate for job in plan.jobs} if plan else set()
    # Sweeps on cores are planned by the seconds of a step, with one thread.
    has_gpus = "cuda" in call.settings.kinds(call.machine, call.params)
    threads = min(make.allotted, MOST_THREADS) if has_gpus else 1
    everywhere = make.everything(Command.DRY_RUN, threads)
    tried = DryRun(make, everywhere, make.allotted, make.max_wait, make.signals, spared)
    facts = tried(call.bundle)
    return (
        replace(facts, step_seconds=dict.fromkeys(facts.step_seconds, 0.0)) if has_gpus else facts
    )
