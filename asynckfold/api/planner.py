"""What comes before a plan is written: data, a dry run of the candidates, threads and groups."""

from __future__ import annotations

import functools
import queue
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from asynckfold.api import score_checks
from asynckfold.api.arguments import Settings
from asynckfold.api.display import Display
from asynckfold.api.resources import room_problems
from asynckfold.engines import warm_pool
from asynckfold.engines.engine import Engine
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import ProcessEngine, preloads
from asynckfold.engines.serial import SerialEngine
from asynckfold.errors import Problem, refuse
from asynckfold.jobs.digests import changes
from asynckfold.jobs.digests.parts import Digest, of_run
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import Load, Placement
from asynckfold.jobs.plan import Plan, folds_fingerprint, make_jobs
from asynckfold.jobs.recipe import Recipe, sending_problems
from asynckfold.jobs.trainer_params import KINDS, TrainerParams
from asynckfold.planning import cost_cache, fusion_groups, memory_format, thread_choice, workload
from asynckfold.planning.forecast import Forecast, forecast, foreseen
from asynckfold.planning.fusion_groups import Fuse, Grouping, grouped
from asynckfold.planning.workload import Choice, decided_of
from asynckfold.results.scoring import resolve
from asynckfold.store import RunStore, refuse_other
from asynckfold.store.layout import DATABASE
from asynckfold.sweep.dry_run import DryRun
from asynckfold.sweep.loop import Inbox
from asynckfold.sweep.probe import Prober
from asynckfold.sweep.reading import WorkerReaders
from asynckfold.system.machine import Machine, resolve_n_jobs, total_memory, watched
from asynckfold.system.signals import Interruption, listening

if TYPE_CHECKING:
    from asynckfold.data import Prepared


@dataclass(frozen=True, eq=False)
class Planned:
    """What is known, and what stands ready, when a plan can be written."""

    data: Prepared
    software: dict[str, str]
    bundle: Any
    make: Engines
    work: workload.Workload
    choice: Choice
    groups: Grouping
    digest: Digest
    stored: Plan | None
    told: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """What is to be written."""
        recipe = self.work.facts.recipe | self._code()
        plan = replace(self.work.plan, recipe=recipe, groups=self.groups.groups)
        return plan.with_threads(self.choice.threads, self.choice.last_threads)

    def _code(self) -> dict[str, Any]:
        """What a plan holds of the live objects by value; one that held nothing stays so."""
        if self.stored is None:
            return {"code": self.digest.parts}
        before = self.stored.recipe.get("code")
        return {} if before is None else {"code": changes.kept(before, self.digest.parts)}

    @property
    def notes(self) -> Iterator[str]:
        """What outputs mean, and what cannot be compared with other sessions."""
        yield from self.told
        if self.digest.skipped:
            told = "; ".join(self.digest.skipped)
            yield f"by its type only, or not at all, a later call will compare: {told}"
        before = None if self.stored is None else self.stored.recipe.get("code")
        if self.stored is not None and before is None:
            yield (
                "this run was begun before the code of models, transforms and scores was recorded: "
                "whether it has changed since cannot be told"
            )
        elif before is not None:
            why = changes.incomparable(before, self.digest.parts)
            if why:
                yield f"functions cannot be compared with those of the run: {why}"


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans: a run goes on from what is planned, and a look ahead ends with it."""

    settings: Settings
    recipe: Recipe
    params: TrainerParams
    machine: Machine
    signals: Interruption
    display: Display

    @contextmanager
    def planned(
        self, software: Callable[[Plan], dict[str, str]], before: Choice | None, stored: Plan | None
    ) -> Iterator[Planned]:
        """Read the data, check the candidates, choose threads and groups; all stands as long.

        Parameters
        ----------
        software : callable
            With what the jobs of a draft would be trained; may refuse it.
        before : Choice or None
            What the run chose in an earlier session.
        stored : Plan or None
            Of the run so far, whose groups stay.
        """
        from asynckfold.training.isolation.guard import open_autocast

        refuse(open_autocast())
        # Before any of the user's code runs, which may change what it refers to.
        digest = of_run(self.recipe, self.settings)
        with self._pool(digest.modules) as pool:
            fresh = pool is not None and not pool.workers
            self.display.doing("reading the data")
            settings, machine = self.settings, self.machine
            given = cast("WorkerPool", pool)
            readers = readers_of(settings, machine, lambda: given, self.signals, self.display)
            with prepared(settings, machine, readers) as data, self.signals.noted():
                folds = folds_of(settings, data)
                data = with_leaks_noted(settings, data, folds)
                inbox: Inbox = queue.SimpleQueue()
                draft, bundle = self._drafted(data, folds, digest, stored)
                used = software(draft)
                make = Engines(
                    pool,
                    data,
                    machine,
                    inbox,
                    self.signals,
                    settings.n_jobs,
                    (settings.threads or 1) * self.params.processes,
                    settings.stall_timeout,
                    settings.sharing.max_wait,
                )
                if pool is not None:
                    if not data.held:
                        refuse(sending_problems({"dataset": bundle.data}))
                    # Workers that are there already import what they lack by themselves.
                    if fresh:
                        pool.preload(preloads(bundle, streams=not data.held))
                why_no_gpu = machine.gpus().reason
                refuse(
                    [
                        *_process_problems(draft, folds, data, settings.devices, why_no_gpu),
                        *_part_problems(draft, folds),
                    ]
                )
                self.display.doing("checking the candidates")
                facts = self._check(make, bundle)
                if score_checks.must_be_numbered(data, settings.asked, facts.looks):
                    data = data.numbered()
                    make = replace(make, data=data)
                    draft, bundle = self._drafted(data, folds, digest, stored)
                    facts = self._check(make, bundle)
                draft, notes = score_checks.meant(settings, draft, data, facts.looks, folds)
                bundle = replace(bundle, plan=draft)
                other = None if settings.plan_from is None else _plan_of(settings.plan_from)
                last = memory_format.chosen(draft, facts.formats, stored or other)
                draft = replace(draft, channels_last=last)
                bundle = replace(bundle, plan=draft)
                gpus = len(machine.gpus().gpus)
                work = workload.Workload(
                    draft, folds, facts, make.allotted, _identity(machine), gpus
                )
                threads = self._choose(make, bundle, work, before, other)
                groups = self._group(work, threads, stored or other)
                threads = foreseen(work, threads, groups)
                expected = {name: cost.memory for name, cost in threads.costs.items()}
                refuse(room_problems(expected, machine.max_memory, groups.widths))
                yield Planned(
                    data, used, bundle, make, work, threads, groups, digest, stored, notes
                )

    def _drafted(
        self, data: Prepared, folds: tuple[Fold, ...], digest: Digest, stored: Plan | None
    ) -> tuple[Plan, Any]:
        """Return a plan that knows nothing yet of the live objects, and what workers need."""
        draft = make_draft(self.settings, self.recipe, self.params, data, folds, self.machine)
        if stored is not None and "code" not in stored.recipe:
            draft = replace(draft, dataset=data.fingerprint_before)
        bundle = self._bundle(draft, folds, data, self._asked_to_fuse(draft, stored))
        return draft, replace(bundle, code=digest.parts if digest.modules else {})

    def _check(self, make: Engines, bundle: Any) -> Facts:
        everywhere = make.everything("preflight", 1)
        return DryRun(make, everywhere, make.allotted, make.max_wait, self.signals)(bundle)

    @contextmanager
    def _pool(self, modules: Sequence[str]) -> Iterator[WorkerPool | None]:
        if not self.settings.parallelize:
            yield None
            return
        with warm_pool.lent(self.settings.sharing.nice, modules) as pool:
            yield pool

    def _asked_to_fuse(self, plan: Plan, stored: Plan | None) -> Fuse:
        """What is asked for the jobs that are not in the plan yet, and False where all are."""
        known = set() if stored is None else set(stored.jobs)
        taken_over = stored is None and self.settings.plan_from is not None
        return False if taken_over or known.issuperset(plan.jobs) else self.settings.fuse

    def _group(self, work: workload.Workload, threads: Choice, before: Plan | None) -> Grouping:
        """Decide which jobs are trained as one; a run that has a plan keeps its groups."""
        fuse, plan = self.settings.fuse, work.plan.with_threads(threads.threads)
        facts = work.facts
        # By a rule over shapes: what a probe measures differs a little from time to time, and has a
        # say only where it is far from the rule.
        gains = {name: cost.fused_gain for name, cost in threads.costs.items() if cost.fused_gain}
        here = {
            name: fusion_groups.why_not_here(gain) for name, gain in gains.items() if fuse == "auto"
        }
        why_not = {name: text or here.get(name, "") for name, text in facts.fusible.items()}
        told = {
            name: f"{text}; {fusion_groups.measured_here(gains[name])}" if name in gains else text
            for name, text in facts.fused.items()
        }
        room = self.machine.max_memory or total_memory()
        most = {name: room // size for name, size in facts.memory.items() if room and size}
        found = grouped(
            plan,
            fuse,
            why_not,
            work.cores,
            before,
            facts.failures.keys(),
            told,
            most,
        )
        return found if found.groups or fuse is not False else Grouping()

    def _bundle(self, plan: Plan, folds: tuple[Fold, ...], data: Prepared, fuse: Fuse) -> Any:
        import torch

        from asynckfold.training.bundle import Bundle
        from asynckfold.training.isolation import torch_settings

        root, dtype = self.settings.root_dir.absolute(), str(torch.get_default_dtype())
        return Bundle(
            plan,
            folds,
            self.recipe,
            data.handle(),
            root,
            default_dtype=dtype.removeprefix("torch."),
            deterministic=torch.get_deterministic_debug_mode(),
            numerics=torch_settings.current(),
            fuse=fuse,
            job_timeout_s=self.settings.job_timeout_s,
            highest=data.highest,
            may_be_numbered=data.may_be_numbered,
        )

    def _choose(
        self,
        make: Engines,
        bundle: Any,
        work: workload.Workload,
        before: Choice | None,
        other: Plan | None,
    ) -> Choice:
        """Choose the threads of each model; a run that has a plan keeps its own."""
        with make(bundle) as engine:
            prober = (
                Prober(
                    engine,
                    bundle.plan,
                    work.facts.memory,
                    self.signals,
                    make.max_wait,
                    make.inbox,
                )
                if make.pool
                else None
            )
            self.display.doing("deciding the threads of each model")
            return thread_choice.chosen(
                work, self.settings.threads, before, other, prober, cost_cache.folder()
            )


def look_ahead(
    settings: Settings,
    recipe: Recipe,
    params: TrainerParams,
    machine: Machine,
    signals: Interruption,
    display: Display,
) -> Forecast:
    """Return what a run with these arguments would do; writes nothing into its folder."""
    before = stored = None
    if settings.resume != "never" and (settings.root_dir / DATABASE).is_file():
        with RunStore.read(settings.root_dir) as store:
            before, stored = decided_of(store), store.plan
    planner = Planner(settings, recipe, params, machine, signals, display)
    with planner.planned(lambda draft: {}, before, stored) as found:
        made = forecast(found.work, found.choice, found.groups)
        if stored is not None:
            free = ("threads_per_job", "threads", "last_threads")
            allowed = free if settings.allow_different_software else ()
            refuse_other(settings.root_dir, stored, found.plan, allowed)
        return made


@dataclass(frozen=True, eq=False)
class Engines:
    """Makes the engine for a bundle: worker processes, or this process."""

    pool: WorkerPool | None
    data: Prepared
    machine: Machine
    inbox: Inbox
    signals: Interruption
    n_jobs: int | str
    threads: int
    stall_timeout: float | str | None
    max_wait: float | None

    @contextmanager
    def __call__(self, bundle: Any) -> Iterator[Engine]:
        """Start an engine for a bundle; it is closed with the context."""
        handle = self.data.handle()
        engine: Engine
        if self.pool is None:
            batches = handle.open(handle.fds)
            engine = SerialEngine(bundle, batches, self.look, self.inbox.put, self.signals)
        else:
            engine = ProcessEngine(
                bundle,
                handle.fds,
                self.look,
                self.inbox.put,
                self.pool,
                self.stall_timeout,
                self.signals,
            )
        try:
            yield engine
        finally:
            engine.close()

    def look(self, running: Sequence[Placement], own: Mapping[int, tuple[int, ...]]) -> Load:
        """Read the load for as many jobs as the caller wants."""
        count = resolve_n_jobs(self.n_jobs, self.machine.max_cores)
        return self.machine.load(count, running, own, threads=self.threads)

    @property
    def allotted(self) -> int:
        """How many cores the sweep has at most, whoever else uses them now."""
        most = self.machine.max_cores
        count = resolve_n_jobs(self.n_jobs, most)
        return most if count is None else min(most, count * self.threads)

    def everything(self, trainer: str, threads: int) -> Placement:
        """A placement on all cores that are not reserved."""
        return _on(self.machine.unreserved(), trainer, threads)

    def undisturbed(self, trainer: str, threads: int, engine: Engine) -> Placement:
        """A placement on those of them that others leave alone, and on one in any case.

        A thread on a core that somebody else uses keeps all others of its job waiting: up to 80
        times as long was measured.
        """
        load = engine.load([])
        if not self.machine.known:
            watched(self.machine)
            load = engine.load([])
        cores = self.machine.unreserved()
        others = load.others if self.machine.known else ()
        return _on([core for core in cores if core not in others] or cores[:1], trainer, threads)


def _on(cores: Sequence[int], trainer: str, threads: int) -> Placement:
    return Placement((), tuple(cores), min(threads, len(cores)), trainer=trainer)


def readers_of(
    settings: Settings,
    machine: Machine,
    take_pool: Callable[[], WorkerPool],
    signals: Interruption,
    display: Display,
) -> WorkerReaders | None:
    """Return who reads the dataset; None without workers: this process."""
    if not settings.parallelize:
        return None
    most = len(machine.unreserved())
    root, stall = settings.root_dir.absolute(), settings.stall_timeout
    count = resolve_n_jobs(settings.n_jobs, machine.max_cores)
    return WorkerReaders(
        take_pool, machine, min(most, count or most), stall, root, signals, display.doing
    )


@contextmanager
def prepared(
    settings: Settings, machine: Machine, readers: WorkerReaders | None
) -> Iterator[Prepared]:
    """Read the dataset into shared arrays, for as long as the context lasts."""
    from asynckfold.data import NOT_FINITE, as_given, by_position, prepare

    given = as_given(
        settings.dataset,
        settings.train_transform,
        settings.eval_transform,
        preprocessed=settings.preprocess is not None,
    )
    data = prepare(
        given.dataset,
        train_transform=given.train_transform,
        eval_transform=given.eval_transform,
        targets=by_position(settings.targets, "targets"),
        criterion=settings.asked,
        memory_budget=machine.free_memory({}) // 2,
        folder=settings.root_dir if settings.root_dir.is_dir() else None,
        random_samples=settings.random_samples,
        readers=readers,
    )
    try:
        # What is missing there, a transformer may fill in.
        at = "" if settings.preprocess is None else " before preprocess"
        notes = [note + at if note.endswith(NOT_FINITE) else note for note in data.notes]
        yield replace(data, notes=(*given.notes, *notes))
    finally:
        data.close()


@contextmanager
def read_alone(settings: Settings, machine: Machine) -> Iterator[Prepared]:
    """Read the dataset for a plan that is not carried out."""
    with ExitStack() as stack:
        signals = stack.enter_context(listening(signal.SIGINT))
        pool = functools.cache(lambda: stack.enter_context(warm_pool.lent(settings.sharing.nice)))
        readers = readers_of(settings, machine, pool, signals, Display(0))
        yield stack.enter_context(prepared(settings, machine, readers))


def folds_of(settings: Settings, data: Prepared) -> tuple[Fold, ...]:
    """Divide the samples; refuse scores that there are not."""
    folds = settings.divided(data.n_samples, data)
    score_checks.refuse_early(settings, data, folds)
    return folds


def with_leaks_noted(settings: Settings, data: Prepared, folds: tuple[Fold, ...]) -> Prepared:
    """Return the data with notes of validation samples that are copies, or random variants."""
    from asynckfold.data import copies_note, random_note

    notes = [random_note(data.notes)]
    # Samples that are trained on are validated on by intent, and the report says so.
    if not settings.about.get("scored"):
        handle = data.handle()
        notes.append(copies_note(handle.open(handle.fds).stored, folds))
    return replace(data, notes=(*data.notes, *filter(None, notes)))


def make_draft(
    settings: Settings,
    recipe: Recipe,
    params: TrainerParams,
    data: Prepared,
    folds: tuple[Fold, ...],
    machine: Machine,
) -> Plan:
    """Return the plan without what only a dry run tells of the live objects."""
    return Plan(
        make_jobs(list(recipe.models), list(recipe.lr_schedules), folds, settings.random_state),
        params,
        settings.batch_size,
        settings.threads or 1,
        settings.random_state,
        "cuda" if machine.gpus().gpus else "cpu",
        tuple(resolve(settings.scoring, data.objective)),
        data.fingerprint,
        folds_fingerprint(folds),
        data.classes,
    ).with_objective(data.objective)


def _process_problems(
    draft: Plan, folds: Sequence[Fold], data: Prepared, devices: Any, why_no_gpu: str
) -> Iterator[Problem]:
    """Yield why several processes cannot train one model here."""
    if draft.params.processes == 1:
        return
    if draft.params.on_gpu and draft.device == "cpu":
        remedy = "see `asynckfold doctor`"
        if devices == "cpu":
            remedy = "pass devices='auto' (`asynckfold doctor` tells of GPUs)"
        yield Problem(
            "a process of the kind 'gpu' needs a GPU",
            f"{draft.params.by_kind}, and none: {why_no_gpu}",
            f"Leave the kind 'gpu' out, or {remedy}.",
        )
    elif draft.device != "cpu" and not draft.params.on_gpu:
        yield Problem(
            "several processes train one model on CPUs only, but for the last one of averaging",
            f"processes={draft.params.processes}, and a GPU",
            "Pass devices='cpu', or, for a process on the GPU, trainer='averaging' with a "
            "partition_size or epochs_per_round of the kinds 'cpu' and 'gpu'.",
        )
    if not data.held:
        yield Problem(
            "several processes of a job need samples that are held in memory",
            "a dataset that is read sample by sample",
            "Pass processes=1, or arrays.",
        )
    count, size, parts = draft.params.processes, draft.batch_size, draft.params.partition_size
    least = min(len(fold.train) for fold in folds)
    if draft.params.trainer == "allreduce" and min(size, least) < count:
        yield Problem(
            "each process must have a sample of each batch",
            f"batch_size={size} of {least} samples for processes={count}",
            "Pass a greater batch_size, or fewer processes.",
        )
    elif draft.params.trainer != "allreduce" and not parts and least < count * size:
        yield Problem(
            "the samples of a process must make a batch",
            f"{least} samples for processes={count} and batch_size={size}",
            f"Pass batch_size={max(1, least // count)} or less, or fewer processes.",
        )


def _part_problems(draft: Plan, folds: Sequence[Fold]) -> Iterator[Problem]:
    """Yield why parts of these sizes cannot be dealt out."""
    size, least = draft.batch_size, min(len(fold.train) for fold in folds)
    params = draft.params
    given = dict(zip(KINDS, (params.partition_size, params.gpu_partition_size), strict=True))
    asked = {kind: value for kind, value in given.items() if value is not None}
    by_kind = len(asked) == len(KINDS)
    # All that is wrong with the sizes of both kinds is put right at once.
    fitting = {kind: min(max(value, size), least) for kind, value in asked.items()}
    for kind, value in asked.items():
        received = f"partition_size={value}" + (f" of the kind {kind!r}" if by_kind else "")
        if value < size:
            yield Problem(
                "the part of a process must make a batch",
                f"{received} and batch_size={size}",
                f"Pass partition_size={fitting if by_kind else f'{size} or more'}, or "
                f"batch_size={value} or less.",
            )
        if value > least:
            yield Problem(
                "the part of a process must not exceed the training fold",
                f"{received} of {least} samples",
                f"Pass partition_size={fitting if by_kind else f'{least} or less'}, and "
                "epochs_per_round for several passes.",
            )


def _identity(machine: Machine) -> dict[str, Any]:
    """What seconds depend on besides the sweep."""
    found = machine.describe()
    gpus = {"gpus": sorted({gpu["name"] for gpu in found["gpus"]})} if found["gpus"] else {}
    return {"cpu": found["cpu"]["model"], "versions": found["versions"], **gpus}


def _plan_of(folder: Path) -> Plan:
    with RunStore.read(folder) as store:
        return store.plan
