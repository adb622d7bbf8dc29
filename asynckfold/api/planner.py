"""Decides what a run does: a dry run of the candidates, then threads, fusion groups and formats.

::

    open_data ── dry_run ── Checked ── make_plan ── Planned ──┬─ train       carries it out
                                                              └─ look_ahead  predicts it
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.api import score_checks
from asynckfold.api.arguments import Settings
from asynckfold.api.open_data import OpenedData
from asynckfold.api.refit import refits
from asynckfold.api.session import Session, software_of
from asynckfold.engines.process import preloads
from asynckfold.engines.ray_cluster import RayCluster
from asynckfold.errors import Problem, refuse
from asynckfold.jobs.accumulator import MakeAccumulator
from asynckfold.jobs.digests import changes
from asynckfold.jobs.digests.run import Digest
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import Facts, Fusibility
from asynckfold.jobs.placement import NOTHING, WORKER_BYTES, Gpu, NodeSize
from asynckfold.jobs.plan import Plan, folds_fingerprint, jobs_of
from asynckfold.jobs.recipe import sending_problems
from asynckfold.planning import (
    calibration,
    cost_cache,
    device_choice,
    fusion_groups,
    gpu_sharing,
    memory_format,
)
from asynckfold.planning.feasibility import (
    collectives_backend,
    node_problems,
    part_of,
    part_problems,
    precision_problems,
    process_problems,
    room_problems,
    span_problems,
)
from asynckfold.planning.forecast import Forecast, forecast, foreseen
from asynckfold.planning.fusion_groups import Fuse, Grouping
from asynckfold.planning.group_choice import group
from asynckfold.planning.kept_outputs import held_bytes, outputs_problems, why_not_kept
from asynckfold.planning.workload import Choice, Probe, Workload
from asynckfold.results.by_batch import accumulator_of, why_not_by_batch
from asynckfold.results.scoring import resolve
from asynckfold.store import RunStore, refuse_other
from asynckfold.sweep.dry_run import DryRun
from asynckfold.sweep.engine_factory import Engines
from asynckfold.sweep.fusibility import FusibilityOnGpu
from asynckfold.sweep.loop import Inbox
from asynckfold.sweep.probe import Prober
from asynckfold.system.machine import Machine, total_memory

if TYPE_CHECKING:
    from asynckfold.api.call import Call
    from asynckfold.data.prepare import Prepared


_DIVIDES_GROUPS = (
    "the LR schedule reacts to a loss on single samples of the training fold, whose groups are "
    "divided; inner_valid=0.1 sets whole groups aside"
)


@dataclass(frozen=True, eq=False)
class Checked:
    """Candidates after their dry run: what is known of them, and what workers need."""

    bundle: Any
    facts: Facts
    folds: tuple[Fold, ...]
    make: Engines
    digest: Digest
    software: dict[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan that is decided and not yet written, and what stands ready to carry it out."""

    checked: Checked
    work: Workload
    choice: Choice
    groups: Grouping
    stored: Plan | None

    @property
    def make(self) -> Engines:
        """Makes the engine."""
        return self.checked.make

    @property
    def data(self) -> Prepared:
        """The samples."""
        return self.checked.make.data

    @property
    def digest(self) -> Digest:
        """Of the user's code."""
        return self.checked.digest

    @property
    def plan(self) -> Plan:
        """The plan to write."""
        recipe = self.work.facts.recipe | self._code()
        plan = replace(self.work.plan, recipe=recipe, groups=self.groups.groups)
        return plan.with_threads(self.choice.threads, self.choice.last_threads)

    def _code(self) -> dict[str, Any]:
        """Digests of the live objects; unchanged parts as the stored plan has them."""
        before = {} if self.stored is None else self.stored.recipe.get("code", {})
        return {"code": changes.kept(before, self.digest.parts)}

    def why_not_kept(self, most_gib: float) -> str:
        """Return why outputs of held-out samples are not kept, ``""`` where they are."""
        work = self.work
        return why_not_kept(work.plan, work.folds, work.facts.output_samples, most_gib)

    def accumulators(self, settings: Settings) -> dict[str, MakeAccumulator]:
        """Return by model what scores outputs by batch; nothing where the plan does not."""
        plan, measured = self.work.plan, _measured(self.work.facts)
        return {
            model: accumulator_of(
                settings.scoring, plan.objective_of(model), settings.transform, measured
            )
            for model in dict.fromkeys(job.model for job in plan.jobs if plan.by_batch)
        }

    @property
    def notes(self) -> Iterator[str]:
        """Notes on outputs, and on objects that cannot be compared between sessions."""
        yield from self.checked.notes
        if self.digest.skipped:
            skipped = "; ".join(self.digest.skipped)
            yield f"a later call will compare only the type of these, or nothing: {skipped}"
        if self.stored is not None:
            why = changes.incomparable(self.stored.recipe.get("code", {}), self.digest.parts)
            if why:
                yield f"functions cannot be compared with those of the run: {why}"


def dry_run(session: Session, opened: OpenedData) -> Checked:
    """Check every candidate on a few samples, without training.

    Raises
    ------
    InputError
        The sweep cannot work here, or the run was begun with other software.
    """
    from asynckfold.training.process_group.collectives import backend_problems

    settings, data, folds = session.settings, opened.data, opened.folds
    inbox: Inbox = queue.SimpleQueue()
    bundle = _drafted(session, data, opened)
    software = software_of(session, bundle.plan, bundle.backend) | _of_nodes(opened.cluster)
    make = Engines(
        settings.engine,
        opened.pool,
        data,
        session.machine,
        inbox,
        session.signals,
        settings.n_jobs,
        (settings.threads or 1) * session.call.params.processes,
        settings.stall_timeout,
        settings.max_wait,
        opened.cluster,
        session.call.params.nodes,
        part_of(session.call.params) if session.call.params.nodes > 1 else NOTHING,
    )
    if settings.engine != "serial" and not data.held:
        refuse(sending_problems({"dataset": bundle.data}))
    # Workers that are there already import what they lack.
    if opened.pool is not None and opened.is_fresh:
        opened.pool.preload(preloads(bundle, streams=not data.held))
    found = session.machine.gpus()
    refuse(
        [
            *process_problems(
                bundle.plan, folds, data.held, settings.devices, found.reason, found.gpus
            ),
            *backend_problems(bundle.backend),
            *node_problems(bundle.plan, {name: s.cores for name, s in make.found_nodes.items()}),
            *span_problems(bundle.plan.params, make.found_nodes),
            *part_problems(bundle.plan, folds),
            *precision_problems(bundle.plan),
        ]
    )
    session.display.doing("checking the candidates")
    facts = _check(session, make, bundle)
    kind = data.labels.objective.kind
    refuse(settings.unmeasured_problems(settings.scoring, facts.measured, kind))
    if score_checks.must_be_numbered(data, settings.known_criterion, facts.output_samples):
        data = data.numbered()
        make = replace(make, data=data)
        bundle = _drafted(session, data, opened)
        facts = _check(session, make, bundle)
    draft, notes = score_checks.with_objective(
        settings, bundle.plan, data, facts.output_samples, folds
    )
    reacting = tuple(name for name in draft.candidate_names if name in facts.reacting)
    if reacting and settings.groups is not None and settings.inner_valid is None:
        notes = (*notes, f"{', '.join(reacting)}: {_DIVIDES_GROUPS}")
    bundle = replace(bundle, plan=replace(draft, reacting=reacting))
    return Checked(bundle, facts, folds, make, opened.digest, software, notes)


def make_plan(session: Session, checked: Checked) -> Planned:
    """Choose memory formats, threads and fusion groups; a run that has a plan keeps its own.

    Raises
    ------
    InputError
        There is not enough memory for a model.
    """
    settings, machine, make = session.settings, session.machine, checked.make
    stored, folder = session.stored, settings.other_run
    taken = None if folder is None else _plan_of(folder)
    last = memory_format.chosen(checked.bundle.plan, checked.facts.formats, stored or taken)
    draft = replace(checked.bundle.plan, channels_last=last)
    checked, draft = _with_outputs(settings, checked, draft, stored or taken)
    allowed = settings.kinds(machine, draft.params)
    nodes = make.nodes if "cuda" in allowed else _without_gpus(make.nodes)
    here = min((node.cores for node in nodes), default=make.allotted)
    # A run keeps the nodes that it was planned for, wherever it goes on.
    nodes = nodes if session.before is None else session.before.nodes
    work = Workload(
        draft,
        checked.folds,
        checked.facts,
        min((node.cores for node in nodes), default=make.allotted),
        identity(machine),
        len(machine.gpus().gpus),
        nodes=nodes,
        exchange=calibration.recall(draft.params.trainer, identity(machine), cost_cache.folder())
        if draft.params.processes > 1
        else None,
    )
    with make(replace(checked.bundle, plan=draft)) as engine:
        facts, limit = checked.facts.memory, make.max_wait
        probers = {
            kind: Prober(
                engine, replace(draft, device=kind), facts, session.signals, limit, make.inbox
            )
            for kind in allowed
            if make.has_workers and work.cores <= here
        }
        probes = device_choice.Probes(probers, cost_cache.folder())
        session.display.doing("deciding devices and threads")
        devices = device_choice.decide(work, allowed, stored or taken, probes)
        work = replace(work, plan=draft.with_devices(devices.kinds))
        check = FusibilityOnGpu(engine, work.on("cuda").plan, session.signals, limit)
        work = replace(
            work, on_gpu=_fusible_on_gpu(session, checked, work, probers.get("cuda"), check)
        )
        threads = device_choice.chosen(
            work, settings.threads, session.before, taken, probes, stored
        )
    threads = replace(threads, devices=devices.why or threads.devices)
    bundle = replace(checked.bundle, plan=work.plan)
    gpu_bytes = min((gpu.total for gpu in machine.gpus().gpus), default=0)
    groups = group(work, threads, stored or taken, settings.fuse, machine.max_memory, gpu_bytes)
    threads = foreseen(work, threads, groups)
    expected = {name: cost.memory for name, cost in threads.costs.items()}
    workers = WORKER_BYTES * work.plan.params.processes
    refuse(room_problems(expected, machine.max_memory, workers, groups.widths))
    checked = replace(checked, bundle=bundle)
    if stored is None and work.plan.device != draft.device:
        software = software_of(session, work.plan, bundle.backend) | _of_nodes(make.cluster)
        checked = replace(checked, software=software)
    return Planned(checked, work, threads, groups, stored)


def look_ahead(session: Session, planned: Planned) -> Forecast:
    """Return what a run would do; refuse a folder that holds another plan."""
    stored, settings = planned.stored, session.settings
    if stored is not None:
        refuse_other(settings.root, stored, planned.plan, settings.free)
    return forecast(planned.work, planned.choice, planned.groups)


def make_draft(call: Call, data: Prepared, folds: tuple[Fold, ...], machine: Machine) -> Plan:
    """Return the plan without what only a dry run tells of the live objects."""
    settings, recipe = call.settings, call.recipe
    return Plan(
        jobs_of(recipe.candidates, folds, settings.random_state),
        call.params,
        settings.samples_per_step(folds),
        settings.threads or 1,
        settings.random_state,
        # Kept open until the models are known: then on cores, as in the dry run.
        "cuda" if settings.kinds(machine, call.params) == ("cuda",) else "cpu",
        score_checks.ranked(settings, resolve(settings.scoring, data.labels.objective)),
        data.fingerprint,
        folds_fingerprint(folds),
        data.classes,
    ).with_objective(data.labels.objective)


def _drafted(session: Session, data: Prepared, opened: OpenedData) -> Any:
    """Return what workers need, with a plan that knows nothing yet of the live objects."""
    import torch

    from asynckfold.training.bundle import Bundle
    from asynckfold.training.isolation import torch_settings

    settings, stored = session.settings, session.stored
    draft = make_draft(session.call, data, opened.folds, session.machine)
    if stored is not None and "code" not in stored.recipe:
        draft = replace(draft, dataset=data.fingerprint_before)
    return Bundle(
        draft,
        opened.folds,
        session.call.recipe,
        data.handle(),
        settings.root.absolute(),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        deterministic=torch.get_deterministic_debug_mode(),
        numerics=torch_settings.current(),
        fuse=_asked_to_fuse(settings, draft, stored),
        job_timeout_s=settings.job_timeout_s,
        highest=data.labels.highest,
        may_be_numbered=data.labels.may_be_numbered,
        code=opened.digest.parts if opened.digest.modules else {},
        backend=collectives_backend(draft.params, _gpus(session, opened.cluster)),
        refits=refits(settings.refit, draft.candidate_names),
    )


def _with_outputs(
    settings: Settings, checked: Checked, draft: Plan, before: Plan | None
) -> tuple[Checked, Plan]:
    """Decide whether outputs are scored by batch; count what of them a job holds as its memory.

    Raises
    ------
    InputError
        Outputs do not fit in memory, or what scores them cannot be sent to workers.
    """
    folds, samples = checked.folds, checked.facts.output_samples
    objective = draft.objective_of(draft.jobs[0].model)
    why = why_not_by_batch(settings.scoring, objective, _measured(checked.facts))
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
    memory = {name: size + held.get(name, 0) for name, size in checked.facts.memory.items()}
    return replace(checked, facts=replace(checked.facts, memory=memory)), draft


def _measured(facts: Facts) -> set[str]:
    """Return what a validation step measures of every model."""
    every = [set(names) for names in facts.measured.values()]
    return set.intersection(*every) if every else set()


def _without_gpus(nodes: Sequence[NodeSize]) -> tuple[NodeSize, ...]:
    return tuple(replace(node, gpus=0) for node in nodes)


def _gpus(session: Session, cluster: RayCluster | None) -> Sequence[Gpu]:
    """Return the GPUs of this machine, or of all nodes where a job is on several of them."""
    if cluster is None or session.call.params.nodes == 1:
        return session.machine.gpus().gpus
    return [gpu for node in [*cluster.nodes.values()] for gpu in node.load.gpus]


def _of_nodes(cluster: RayCluster | None) -> dict[str, str]:
    return {} if cluster is None else cluster.software


def _check(session: Session, make: Engines, bundle: Any) -> Facts:
    everywhere = make.everything("preflight", 1)
    # The run may have been begun with keep_going and hold candidates that are refused without.
    plan = bundle.plan if session.settings.keep_going else session.stored
    spared = {job.candidate for job in plan.jobs} if plan else set()
    return DryRun(make, everywhere, make.allotted, make.max_wait, make.signals, spared)(bundle)


def _asked_to_fuse(settings: Settings, plan: Plan, stored: Plan | None) -> Fuse:
    """Return what is asked for the jobs that are not in the plan yet; False where all are."""
    known = set() if stored is None else set(stored.jobs)
    taken_over = stored is None and settings.plan_from is not None
    return False if taken_over or known.issuperset(plan.jobs) else settings.fuse


def _fusible_on_gpu(
    session: Session,
    checked: Checked,
    work: Workload,
    probe: Probe | None,
    check: Callable[[str], Fusibility],
) -> dict[str, Fusibility]:
    """Compare fused with separate jobs on a GPU, for models where that may decide.

    Raises
    ------
    InputError
        A model must be fused and cannot be.
    """
    part, fuse = work.on("cuda"), checked.bundle.fuse
    known = set() if session.stored is None else set(session.stored.jobs)
    found: dict[str, Fusibility] = {}
    problems = []
    for model in part.models():
        jobs = [job for job in part.plan.jobs if job.model == model.name]
        flops = work.facts.flops.get(model.name)
        if known.issuperset(jobs) or flops is None:
            continue
        refusal = fusion_groups.why_not_paying(fuse, part.plan, work.folds, model.name, flops)
        if fuse == "auto":
            refusal = refusal or gpu_sharing.why_not_timed_fused(
                part, model.name, session.before, probe
            )
        if not refusal:
            session.display.doing(f"comparing fused jobs of {model.name} on a GPU")
        found[model.name] = Fusibility(refusal) if refusal else check(model.name)
        if found[model.name].refusal and len(jobs) > 1 and fuse not in ("auto", False):
            reason = f"on a GPU, {found[model.name].refusal}"
            problems.append(Problem(*fusion_groups.unfit(fuse, model.name, reason)))
    refuse(problems)
    return found


def identity(machine: Machine) -> dict[str, Any]:
    """What seconds depend on besides the sweep."""
    found = machine.describe()
    gpus = {"gpus": sorted({gpu["name"] for gpu in found["gpus"]})} if found["gpus"] else {}
    return {"cpu": found["cpu"]["model"], "versions": found["versions"], **gpus}


def _plan_of(folder: Path) -> Plan:
    with RunStore.read(folder) as store:
        return store.plan
