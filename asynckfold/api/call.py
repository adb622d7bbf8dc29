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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from asynckfold.api import reading, score_checks
from asynckfold.api.argument_checks import (
    argument_problems,
    joblib_problems,
    read_trainer_params,
    unmeasured_problems,
)
from asynckfold.api.arguments import Settings
from asynckfold.api.context import Call, software_of
from asynckfold.engines import warm_pool
from asynckfold.engines.process import preloads
from asynckfold.errors import Problem, refuse
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.criteria import is_factory
from asynckfold.jobs.digests import changes
from asynckfold.jobs.digests.run import of_run
from asynckfold.jobs.grid import Parts, make_grid
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import WORKER_BYTES, Command
from asynckfold.jobs.plan import Plan, folds_fingerprint, jobs_of
from asynckfold.jobs.recipe import Recipe, named_lr_schedules, named_models, sending_problems
from asynckfold.jobs.result import MakeAccumulator
from asynckfold.planning import memory_format
from asynckfold.planning.choice import choose, choose_devices
from asynckfold.planning.feasibility import (
    held_bytes,
    node_problems,
    outputs_problems,
    part_problems,
    process_problems,
    room_problems,
    why_not_kept,
)
from asynckfold.planning.forecast import Forecast, forecast, predicted
from asynckfold.planning.fusion_groups import group
from asynckfold.planning.fusion_rule import Fuse
from asynckfold.planning.workload import Workload
from asynckfold.results.score_fit import accumulator_of, why_not_by_batch
from asynckfold.results.scoring import resolve
from asynckfold.store import open_run, refuse_other
from asynckfold.sweep.engine_factory import Engines
from asynckfold.sweep.tasks import DryRun
from asynckfold.system.machine import total_memory

_DIVIDES_GROUPS = (
    "the LR schedule reacts to a loss on single samples of the training fold, whose groups are "
    "divided; inner_valid=0.1 sets whole groups aside"
)


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
        All problems of the arguments.
    """
    started = time.monotonic()
    params, bad_params = read_trainer_params(settings, trainer_params)
    lightning = _lightning()
    # A refit passes on what the first call got of the modules.
    is_configured = lightning is not None and (
        (schedulers is None and opt_fn is None) or isinstance(opt_fn, lightning.ConfiguredOptimizer)
    )
    if is_configured:
        schedulers, opt_fn = lightning.schedules_and_optimizer(params.epochs)
    named, problems, notes = named_models(models)
    lr_schedules, bad_schedules = named_lr_schedules(schedulers)
    parts = Parts(named, lr_schedules, opt_fn)
    grid, bad_grid, drawn = make_grid(parts, grid_params, n_iter, settings.random_state)
    problems += [*bad_schedules, *bad_params, *bad_grid]
    if is_configured and not problems:
        settings, params, bad_modules = lightning.with_steps(
            settings, grid.models, params, trainer_params
        )
        problems += bad_modules
    elif lightning is not None and not settings.trains_itself:
        notes += lightning.module_notes(named)
    if settings.refit is not False and not bad_grid:
        from asynckfold.api.refit import refit_problems

        pairs = grid.pairs or itertools.product(named, lr_schedules)
        problems += refit_problems(settings, [candidate_name(*pair) for pair in pairs])
    bad_backend, about_backend = joblib_problems(settings)
    problems += [*bad_backend, *argument_problems(settings, params, parts, grid)]
    refuse(problems)
    criterion = settings.criterion
    if criterion is None:
        from asynckfold.training.losses import NoLoss

        criterion = NoLoss()
    recipe = Recipe(
        grid.models,
        grid.lr_schedules,
        opt_fn,
        criterion,
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


def _lightning() -> Any:
    """Return the integration if this process has imported Lightning, else None."""
    if "lightning.pytorch" not in sys.modules and "pytorch_lightning" not in sys.modules:
        return None
    from asynckfold.integrations import lightning

    return lightning


def open_data(call: Call) -> None:
    """Start the pool, read the data and divide them; they stay open until the call ends.

    Raises
    ------
    InputError
        The data cannot be read, divided or scored.
    """

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
    data = keep(reading.prepared(call, lend))
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
    call.bundle = _drafted(call)
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
    # Workers that are there already import what they lack.
    if call.pool is not None and call.is_fresh:
        call.pool.preload(preloads(call.bundle, streams=not call.data.held))
    refuse(_misfits(call))
    call.display.doing("checking the candidates")
    call.facts = _checked_candidates(call)
    kind = call.data.labels.objective.kind
    refuse(unmeasured_problems(settings, call.facts.measured, kind))
    samples = call.facts.output_samples
    if score_checks.must_be_numbered(call.data, settings.known_criterion, samples):
        call.data = call.data.numbered()
        call.make = replace(call.make, data=call.data)
        call.bundle = _drafted(call)
        call.facts = _checked_candidates(call)
    draft, notes = score_checks.with_objective(
        settings, call.bundle.plan, call.data, call.facts.output_samples, call.folds
    )
    reacting = tuple(name for name in draft.candidate_names if name in call.facts.reacting)
    call.bundle = replace(call.bundle, plan=replace(draft, reacting=reacting))
    call.notes += [*notes, *_dry_run_notes(call)]


def make_plan(call: Call) -> None:
    """Choose memory formats, threads and fusion groups; a run that has a plan keeps it.

    Raises
    ------
    InputError
        There is not enough memory for a model.
    """
    settings, machine, make = call.settings, call.machine, call.make
    stored, folder = call.stored, settings.plan_from
    taken = None
    if folder is not None:
        with open_run(folder, "plan_from") as store:
            taken = store.plan
    before = stored or taken
    last = memory_format.chosen(call.bundle.plan, call.facts.formats, before)
    draft = _with_outputs(call, replace(call.bundle.plan, channels_last=last), before)
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


# Parts of the dry run and of the plan


def _misfits(call: Call) -> Iterator[Problem]:
    """Yield why the sweep cannot run on this machine, or on the nodes of the cluster."""
    plan, make, gpus = call.bundle.plan, call.make, call.machine.gpus()
    if call.settings.engine != "serial" and not call.data.held:
        yield from sending_problems({"dataset": call.bundle.data})
    devices = call.settings.devices
    yield from process_problems(plan, call.folds, call.data.held, devices, gpus.reason)
    yield from node_problems(plan, {name: s.cores for name, s in make.found_nodes.items()})
    yield from part_problems(plan, call.folds)


def _checked_candidates(call: Call) -> Facts:
    """Run the dry run of all candidates on all cores that are free."""
    make = call.make
    # The run may have been begun with keep_going and hold candidates that are refused without.
    plan = call.bundle.plan if call.settings.keep_going else call.stored
    spared = {job.candidate for job in plan.jobs} if plan else set()
    everywhere = make.everything(Command.DRY_RUN, 1)
    return DryRun(make, everywhere, make.allotted, make.max_wait, make.signals, spared)(call.bundle)


def _dry_run_notes(call: Call) -> Iterator[str]:
    """Yield notes on LR schedules, and on objects that cannot be compared between sessions."""
    reacting, settings = call.bundle.plan.reacting, call.settings
    if reacting and settings.groups is not None and settings.inner_valid is None:
        yield f"{', '.join(reacting)}: {_DIVIDES_GROUPS}"
    if call.digest.skipped:
        skipped = "; ".join(call.digest.skipped)
        yield f"a later call will compare only the type of these, or nothing: {skipped}"
    if call.stored is not None:
        why = changes.incomparable(call.stored.recipe.get("code", {}), call.digest.parts)
        if why:
            yield f"functions cannot be compared with those of the run: {why}"


def make_draft(call: Call) -> Plan:
    """Return the plan without what only a dry run tells of the live objects."""
    settings, recipe, data, folds = call.settings, call.recipe, call.data, call.folds
    # Smaller folds, and parts of them, make smaller steps.
    largest = max(len(fold.train) for fold in folds)
    return Plan(
        jobs_of(recipe.candidates, folds, settings.random_state),
        call.params,
        largest if settings.batch_size == "full" else settings.batch_size,
        settings.threads or 1,
        settings.random_state,
        # Kept open until the models are known: then on cores, as in the dry run.
        "cuda" if settings.kinds(call.machine, call.params) == ("cuda",) else "cpu",
        score_checks.ranked(settings, resolve(settings.scoring, data.labels.objective)),
        data.fingerprint,
        folds_fingerprint(folds),
        data.classes,
    ).with_objective(data.labels.objective)


def _drafted(call: Call) -> Any:
    """Return what workers need, with a plan that knows nothing yet of the live objects."""
    import torch

    from asynckfold.training import torch_settings
    from asynckfold.training.bundle import Bundle

    settings, data = call.settings, call.data
    draft = make_draft(call)
    return Bundle(
        draft,
        call.folds,
        call.recipe,
        data.handle(),
        settings.root.absolute(),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        deterministic=torch.get_deterministic_debug_mode(),
        numerics=torch_settings.current(),
        fuse=_fuse(settings, draft, call.stored),
        job_timeout_s=settings.job_timeout_s,
        highest=data.labels.highest,
        may_be_numbered=data.labels.may_be_numbered,
        code=call.digest.parts if call.digest.modules else {},
        refits=_refits(settings.refit, draft.candidate_names),
    )


def _refits(refit: bool | str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the candidates that `refit` may choose."""
    return (refit,) if isinstance(refit, str) and refit in names else tuple(names) if refit else ()


def _with_outputs(call: Call, draft: Plan, before: Plan | None) -> Plan:
    """Decide whether outputs are scored by batch; count what of them a job holds as its memory.

    Raises
    ------
    InputError
        Outputs do not fit in memory, or what scores them cannot be sent to workers.
    """
    settings, folds, samples = call.settings, call.folds, call.facts.output_samples
    objective = draft.objective_of(draft.jobs[0].model)
    why = why_not_by_batch(settings.scoring, objective, _measured(call.facts))
    if before is not None:
        by_batch, why = before.by_batch, why or "a run that was begun with them"
    else:
        is_large = bool(why_not_kept(draft, folds, samples, settings.keep_outputs_gib))
        by_batch = is_large and not why
    draft = replace(draft, by_batch=by_batch)
    if by_batch and settings.engine != "serial":
        refuse(
            sending_problems(
                {"scoring": settings.scoring, "output_transform": settings.output_transform}
            )
        )
    held = held_bytes(draft, folds, samples)
    refuse(outputs_problems(held, total_memory(), "" if by_batch else why))
    memory = {name: size + held.get(name, 0) for name, size in call.facts.memory.items()}
    call.facts = replace(call.facts, memory=memory)
    return draft


def accumulators(call: Call, plan: Plan) -> dict[str, MakeAccumulator]:
    """Return by model what scores outputs by batch; nothing where the plan does not."""
    settings, measured = call.settings, _measured(call.facts)
    return {
        model: accumulator_of(
            settings.scoring, plan.objective_of(model), settings.transform, measured
        )
        for model in dict.fromkeys(job.model for job in plan.jobs if plan.by_batch)
    }


def _measured(facts: Facts) -> set[str]:
    """Return what a validation step measures of every model."""
    every = [set(names) for names in facts.measured.values()]
    return set.intersection(*every) if every else set()


def _fuse(settings: Settings, plan: Plan, stored: Plan | None) -> Fuse:
    """Return `fuse` for the jobs that are not in the plan yet; False if all are."""
    known = set() if stored is None else set(stored.jobs)
    taken_over = stored is None and settings.plan_from is not None
    return False if taken_over or known.issuperset(plan.jobs) else settings.fuse
