"""Parts of the dry run and of the plan: what workers get, what is refused, what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.api import score_checks
from asynckfold.api.arguments import Settings
from asynckfold.api.context import Call
from asynckfold.api.refit import refits
from asynckfold.errors import Problem, refuse
from asynckfold.jobs.digests import changes
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import Command
from asynckfold.jobs.plan import Plan, folds_fingerprint, jobs_of
from asynckfold.jobs.recipe import sending_problems
from asynckfold.jobs.result import MakeAccumulator
from asynckfold.planning.feasibility import (
    held_bytes,
    node_problems,
    outputs_problems,
    part_problems,
    precision_problems,
    process_problems,
    why_not_kept,
)
from asynckfold.planning.fusion_rule import Fuse
from asynckfold.results.score_fit import accumulator_of, why_not_by_batch
from asynckfold.results.scoring import resolve
from asynckfold.store import RunStore
from asynckfold.sweep.dry_run import DryRun
from asynckfold.sweep.engine_factory import Engines
from asynckfold.sweep.loop import Inbox
from asynckfold.system.machine import total_memory

if TYPE_CHECKING:
    pass


_DIVIDES_GROUPS = (
    "the LR schedule reacts to a loss on single samples of the training fold, whose groups are "
    "divided; inner_valid=0.1 sets whole groups aside"
)


def engines_of(call: Call, inbox: Inbox) -> Engines:
    """Return what makes the engine of a call."""
    settings, params = call.settings, call.params
    return Engines(
        settings.engine,
        call.pool,
        call.data,
        call.machine,
        inbox,
        call.signals,
        settings.n_jobs,
        (settings.threads or 1) * params.processes,
        settings.stall_timeout,
        settings.max_wait,
        call.cluster,
    )


def misfits(call: Call) -> Iterator[Problem]:
    """Yield why the sweep cannot run on this machine, or on the nodes of the cluster."""
    plan, make, gpus = call.bundle.plan, call.make, call.machine.gpus()
    if call.settings.engine != "serial" and not call.data.held:
        yield from sending_problems({"dataset": call.bundle.data})
    devices = call.settings.devices
    yield from process_problems(plan, call.folds, call.data.held, devices, gpus.reason)
    yield from node_problems(plan, {name: s.cores for name, s in make.found_nodes.items()})
    yield from part_problems(plan, call.folds)
    yield from precision_problems(plan)


def checked_candidates(call: Call) -> Facts:
    """Run the dry run of all candidates on all cores that are free."""
    make = call.make
    # The run may have been begun with keep_going and hold candidates that are refused without.
    plan = call.bundle.plan if call.settings.keep_going else call.stored
    spared = {job.candidate for job in plan.jobs} if plan else set()
    everywhere = make.everything(Command.DRY_RUN, 1)
    return DryRun(make, everywhere, make.allotted, make.max_wait, make.signals, spared)(call.bundle)


def dry_run_notes(call: Call) -> Iterator[str]:
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
    return Plan(
        jobs_of(recipe.candidates, folds, settings.random_state),
        call.params,
        settings.samples_per_step(folds),
        settings.threads or 1,
        settings.random_state,
        # Kept open until the models are known: then on cores, as in the dry run.
        "cuda" if settings.kinds(call.machine, call.params) == ("cuda",) else "cpu",
        score_checks.ranked(settings, resolve(settings.scoring, data.labels.objective)),
        data.fingerprint,
        folds_fingerprint(folds),
        data.classes,
    ).with_objective(data.labels.objective)


def drafted(call: Call) -> Any:
    """Return what workers need, with a plan that knows nothing yet of the live objects."""
    import torch

    from asynckfold.training.bundle import Bundle
    from asynckfold.training.isolation import torch_settings

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
        refits=refits(settings.refit, draft.candidate_names),
    )


def with_outputs(call: Call, draft: Plan, before: Plan | None) -> Plan:
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


def plan_of(folder: Path) -> Plan:
    """Return the plan of a run on disk."""
    with RunStore.read(folder) as store:
        return store.plan
