"""The context of one call: what it trains, and what each of its steps adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.api.argument_checks import race_problems
from asynckfold.api.arguments import Settings
from asynckfold.api.display import Display
from asynckfold.api.score_checks import ranked
from asynckfold.errors import OUT_OF_TIME, InterruptedRunError, Problem, refuse
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.criteria import is_factory
from asynckfold.jobs.digests import changes
from asynckfold.jobs.digests.run import Digest
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.grid import Grid
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import Request
from asynckfold.jobs.plan import Plan, folds_fingerprint, jobs_of
from asynckfold.jobs.recipe import Recipe
from asynckfold.jobs.reproducibility import THREADS, differences
from asynckfold.jobs.result import FAILED
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.planning.fusion_groups import Grouping
from asynckfold.planning.workload import Choice, Workload
from asynckfold.results.scoring import resolve
from asynckfold.results.utilization import decided_of
from asynckfold.store import RunReader, RunStore
from asynckfold.store.layout import DATABASE
from asynckfold.store.upkeep import aside_problems
from asynckfold.sweep.loop import is_stray
from asynckfold.system import terminal
from asynckfold.system.gpus import GpuReading
from asynckfold.system.machine import Machine
from asynckfold.system.signals import Interruption, listening, unbroken

if TYPE_CHECKING:
    from asynckfold.data.prepare import PreparedData
    from asynckfold.data.reading import CheckedDataset
    from asynckfold.engines.pool import WorkerPool
    from asynckfold.engines.ray_cluster import RayCluster
    from asynckfold.sweep.engine_factory import Engines


@dataclass(eq=False)
class Call:
    """The context of one call. Each step of `api.call` reads it and adds its results."""

    settings: Settings
    params: TrainerParams  # checked
    trainer_params: Mapping[str, Any] | None  # as passed
    recipe: Recipe  # the live objects
    grid: Grid  # the candidates
    notes: list[str]  # what the log of the run says about the call
    started: float  # by `time.monotonic`
    # The machine as far as the run may use it, and what the person sees and sends.
    machine: Machine = field(init=False)
    signals: Interruption = field(init=False)
    display: Display = field(init=False)
    store: RunStore | None = None  # the folder that is held, unless nothing is written
    stored: Plan | None = None  # of the run that is continued, as is the decision
    before: Choice | None = None
    stack: ExitStack = field(default_factory=ExitStack)  # closes pool, cluster and data
    data: PreparedData = field(init=False)
    samples: CheckedDataset | None = None  # facts about the data set
    folds: tuple[Fold, ...] = ()
    pool: WorkerPool | None = None  # workers of this machine
    is_fresh: bool = False  # whether none of them had started
    may_be_here: bool = False  # whether they may be left idle, and this process trains
    cluster: RayCluster | None = None
    digest: Digest = field(init=False)  # of the user's code
    bundle: Any = None  # what workers need
    # Results of the dry run; what makes an engine; the software that trains.
    facts: Facts = field(init=False)
    make: Engines = field(init=False)
    software: dict[str, str] = field(default_factory=dict)
    # The sweep, the decisions about it, and what each job asks for.
    work: Workload = field(init=False)
    choice: Choice = field(init=False)
    groups: Grouping = field(init=False)
    requests: Mapping[str, Request] = field(default_factory=dict)
    is_complete: bool = False  # whether each job had a result when the call began

    @property
    def run(self) -> RunStore:
        """The folder that is held."""
        assert self.store is not None
        return self.store

    @property
    def plan(self) -> Plan:
        """The plan to write, with all decisions."""
        before = {} if self.stored is None else self.stored.recipe.get("code", {})
        code, scoring = changes.kept(before, self.digest.parts), self.work.plan.scoring
        if self.stored is not None:
            # The scores of a run stay.
            code = {name: before[name] for name in changes.scores(before, but=scoring)} | code
            scoring = tuple(dict.fromkeys([*scoring, *self.stored.scoring]))
        plan = replace(
            self.work.plan,
            scoring=scoring,
            recipe=self.facts.recipe | {"code": code},
            groups=self.groups.groups,
        )
        return plan.with_threads(self.choice.threads, self.choice.last_threads)

    @contextmanager
    def until_out_of_time(self) -> Iterator[None]:
        """Show the progress and close what was opened; a time budget ends it without an error."""
        with self.display:
            try:
                with self.stack:
                    yield
            except InterruptedRunError as interrupt:
                if interrupt.exit_code != OUT_OF_TIME or not self.run.reader.has_plan:
                    raise
                self.display.note(str(interrupt))


def make_recipe(settings: Settings, grid: Grid, opt_fn: Any) -> Recipe:
    """Return the live objects of a call."""
    criterion = settings.criterion
    if criterion is None:
        from asynckfold.training.losses import NoLoss

        criterion = NoLoss()
    return Recipe(
        grid.models,
        grid.lr_schedules,
        opt_fn,
        criterion,
        settings.preprocess,
        settings.target_transform,
        training_step=settings.training_step,
        validation_step=settings.validation_step,
        fit_fn=settings.fit_fn,
        callbacks=settings.called_back,
        sampler=settings.sampler,
        make_criterion=settings.criterion if is_factory(settings.criterion) else None,
        optimizers=grid.optimizers,
        pairs=grid.pairs,
    )


def make_draft(call: Call) -> Plan:
    """Return the plan without what only a dry run tells of the live objects."""
    settings, recipe, data, folds = call.settings, call.recipe, call.data, call.folds
    # Smaller folds, and parts of them, make smaller steps.
    largest = max(len(fold.train) for fold in folds)
    refuse(race_problems(settings, len(recipe.candidates), len(folds)))
    return Plan(
        jobs_of(
            recipe.candidates,
            folds,
            settings.random_state,
            () if call.stored is None else call.stored.jobs,
        ),
        call.params,
        largest if settings.batch_size == "full" else settings.batch_size,
        settings.threads or 1,
        settings.random_state,
        # Kept open until the models are known: then on cores, as in the dry run.
        "cuda" if settings.kinds(call.machine, call.params) == ("cuda",) else "cpu",
        ranked(settings, resolve(settings.scoring, data.labels.objective)),
        data.fingerprint,
        folds_fingerprint(folds),
        data.classes,
        race=settings.race_alpha if settings.race else None,
    ).with_objective(data.labels.objective)


def make_bundle(call: Call) -> Any:
    """Return what workers need, with a plan that knows nothing yet of the live objects."""
    import torch

    from asynckfold.training import torch_settings
    from asynckfold.training.bundle import Bundle

    settings, labels, draft = call.settings, call.data.labels, make_draft(call)
    names, refit, known = draft.candidate_names, settings.refit, call.stored
    is_new = settings.plan_from is None if known is None else not {*known.jobs} >= {*draft.jobs}
    return Bundle(
        draft,
        call.folds,
        call.recipe,
        call.data.handle(),
        settings.root.absolute(),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        deterministic=torch.get_deterministic_debug_mode(),
        numerics=torch_settings.current(),
        # Jobs that are in a plan already keep their groups.
        fuse=is_new and settings.fuse,
        kinds=settings.kinds(call.machine, draft.params),
        job_timeout_s=settings.job_timeout_s,
        highest=labels.highest,
        may_be_numbered=labels.may_be_numbered,
        code=call.digest.parts if call.digest.modules else {},
        refits=() if not refit else (refit,) if refit in names else tuple(names),
    )


def dry_run_notes(call: Call) -> Iterator[str]:
    """Yield notes on LR schedules, and on objects that cannot be compared between sessions."""
    reacting, settings = call.bundle.plan.reacting, call.settings
    if reacting and settings.groups is not None and settings.inner_valid is None:
        yield (
            f"{', '.join(reacting)}: the LR schedule reacts to a loss on single samples of the "
            "training fold, whose groups are divided; inner_valid=0.1 sets whole groups aside"
        )
    if call.digest.skipped:
        skipped = "; ".join(call.digest.skipped)
        yield f"a later call will compare only the type of these, or nothing: {skipped}"
    if call.stored is not None:
        why = changes.incomparable(call.stored.recipe.get("code", {}), call.digest.parts)
        if why:
            yield f"functions cannot be compared with those of the run: {why}"


@contextmanager
def hold_run(call: Call) -> Iterator[Call]:
    """Hold the folder of the run, to begin it or to continue it."""
    settings = call.settings
    with listening() as call.signals, _held(settings.root, settings.resume) as call.store:
        call.signals.limit(settings.time_budget_s)
        call.display, call.machine = Display(settings.verbose), settings.present_machine()
        if call.run.reader.has_plan and settings.resume != "never":
            _continue(call, call.run.reader)
        yield call


@contextmanager
def look_into(call: Call) -> Iterator[Call]:
    """Look at the folder of the run, if there is one; nothing is written."""
    settings = call.settings
    with Display(settings.verbose) as call.display, listening() as call.signals:
        call.machine = settings.present_machine()
        if settings.resume != "never" and (settings.root / DATABASE).is_file():
            with RunStore.read(settings.root) as store:
                _continue(call, store)
        with call.stack:
            yield call


def _continue(call: Call, reader: RunReader) -> None:
    """Take up a run: its plan, and its names of the same parts."""
    call.stored, call.before, pairs_here = reader.plan, decided_of(reader), call.grid.pairs
    call.grid = call.grid.continuing(
        {name for job in reader.plan.jobs for name in (job.model, job.lr_schedule)}
    )
    if call.grid.renamed:
        for here, there in zip(pairs_here, call.grid.pairs, strict=True):
            if call.settings.refit == candidate_name(*here):
                call.settings = replace(call.settings, refit=candidate_name(*there))
        call.recipe = make_recipe(call.settings, call.grid, call.recipe.opt_fn)
        pairs = ", ".join(f"{name} is {known}" for name, known in call.grid.renamed.items())
        call.notes.append(f"of this run, since further values are defaults: {pairs}")


def software_of(call: Call, draft: Plan) -> dict[str, str]:
    """Return the software that trains; refuse other software than the run was begun with."""
    if call.store is None:
        return {}
    from asynckfold.training.software import software

    settings, store = call.settings, call.store
    plan = call.stored or draft
    reading = call.machine.gpus() if plan.device == "cuda" else GpuReading()
    here = software(draft.threads_per_job, reading.names, in_workers=settings.engine != "serial")
    if settings.threads is None:
        # The threads that were decided belong to the run; those of a new run are set later.
        del here[THREADS]
        begun = next(iter(store.reader.software() if call.stored is not None else ()), {})
        here |= {THREADS: begun[THREADS]} if THREADS in begun else {}
    if call.stored is not None and not settings.allow_different_software:
        ended = store.reader.finished()
        # Failed jobs are tried again.
        if any(ended.get(job.id, FAILED) == FAILED for job in draft.jobs):
            refuse(_software_problems(store, here))
    return here | ({} if call.cluster is None else call.cluster.software)


@contextmanager
def _held(root: Path, resume: str) -> Iterator[RunStore]:
    """Hold the run; leave no trace of one that never got a plan."""
    terminal.open_standard()
    fresh = not root.exists()
    store = RunStore.hold(root)
    try:
        refuse(_resume_problems(store, resume))
        yield store
    except KeyboardInterrupt as interrupt:
        if is_stray(interrupt):
            store.file.roll_back()
        raise
    finally:
        _release(root, store, fresh=fresh)


@unbroken
def _release(root: Path, store: RunStore, *, fresh: bool) -> None:
    empty = not store.reader.has_plan
    store.close()
    if empty:
        for name in ("run.db", "run.lock"):
            (root / name).unlink(missing_ok=True)
        if fresh and not any(root.iterdir()):
            root.rmdir()


def _resume_problems(store: RunStore, resume: str) -> Iterator[Problem]:
    if resume == "must" and not store.reader.has_plan:
        yield Problem(
            "resume='must' needs a folder that holds a run",
            str(store.root),
            "Check the path, or use resume='auto'.",
        )
    if resume == "never" and store.reader.has_plan:
        yield from aside_problems(store.root, store.reader.plan.jobs)


def _software_problems(store: RunStore, here: Mapping[str, str]) -> Iterator[Problem]:
    changed = differences(next(iter(store.reader.software()), {}), here)
    if changed:
        yield Problem(
            f"{store.root} must be continued with the software that it was begun with",
            "; ".join(changed),
            "Use the same software again or another folder, or pass allow_different_software=True: "
            "then the run is no longer reproducible.",
        )


def interrupted(interrupt: KeyboardInterrupt, state: str) -> InterruptedRunError:
    """Return the error that tells by what the call was interrupted, and what stays."""
    code = interrupt.exit_code if isinstance(interrupt, InterruptedRunError) else 130
    return InterruptedRunError(f"{str(interrupt) or 'interrupted'}; {state}", code)
