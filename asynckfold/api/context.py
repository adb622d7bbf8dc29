"""The context of one call: what it asks for, and what each of its steps adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.api.arguments import Settings
from asynckfold.api.display import Display
from asynckfold.errors import OUT_OF_TIME, InterruptedRunError, Problem, refuse
from asynckfold.jobs.digests import changes
from asynckfold.jobs.digests.run import Digest
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.grid import Grid
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import Request
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.recipe import Recipe
from asynckfold.jobs.reproducibility import THREADS, differences
from asynckfold.jobs.result import DIVERGED, DONE
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.planning.fusion_groups import Grouping
from asynckfold.planning.workload import Choice, Workload
from asynckfold.results.utilization import decided_of
from asynckfold.store import RunStore
from asynckfold.store.layout import DATABASE
from asynckfold.store.upkeep import aside_problems
from asynckfold.sweep.loop import is_stray
from asynckfold.system import terminal
from asynckfold.system.gpus import GpuReading
from asynckfold.system.machine import Machine
from asynckfold.system.signals import Interruption, listening

if TYPE_CHECKING:
    from asynckfold.data.materialize import CheckedDataset
    from asynckfold.data.prepare import PreparedData
    from asynckfold.engines.pool import WorkerPool
    from asynckfold.engines.ray_cluster import RayCluster
    from asynckfold.sweep.engine_factory import Engines


@dataclass(eq=False)
class Call:
    """The context of one call. Each step of `api.call` reads it and adds its results.

    Attributes
    ----------
    settings, params, trainer_params : Settings, TrainerParams, Mapping or None
        The arguments of `AsyncKFold`; those of the trainer, checked and as passed.
    recipe, grid : Recipe, Grid
        The live objects, and the candidates.
    notes : list of str
        What the log of the run says about the call.
    started : float
        When the call began, by `time.monotonic`.
    machine, signals, display : Machine, Interruption, Display
        The machine as far as the run may use it, and what the person sees and sends.
    store : RunStore or None
        The folder that is held; None where nothing is written.
    stored, before : Plan, Choice, or None
        Plan and decision of the run that is continued.
    stack : ExitStack
        Closes pool, cluster and data.
    data, samples, folds : Prepared, CheckedDataset, tuple of Fold
        The samples, the facts about the data set, and the folds.
    pool, is_fresh, cluster : WorkerPool or None, bool, RayCluster or None
        Workers of this machine, and whether none had started; nodes of the engine "ray".
    digest : Digest
        Of the user's code.
    bundle : Bundle
        What workers need.
    facts, make, software : Facts, Engines, dict
        Results of the dry run; what makes an engine; the software that trains.
    work, choice, groups, requests : Workload, Choice, Grouping, Mapping
        The sweep, the decisions about it, and what each job asks for.
    is_complete : bool
        Whether each job had a result when the call began.
    """

    settings: Settings
    params: TrainerParams
    trainer_params: Mapping[str, Any] | None
    recipe: Recipe
    grid: Grid
    notes: list[str]
    started: float
    machine: Machine = field(init=False)
    signals: Interruption = field(init=False)
    display: Display = field(init=False)
    store: RunStore | None = None
    stored: Plan | None = None
    before: Choice | None = None
    stack: ExitStack = field(default_factory=ExitStack)
    data: PreparedData = field(init=False)
    samples: CheckedDataset | None = None
    folds: tuple[Fold, ...] = ()
    pool: WorkerPool | None = None
    is_fresh: bool = False
    cluster: RayCluster | None = None
    digest: Digest = field(init=False)
    bundle: Any = None
    facts: Facts = field(init=False)
    make: Engines = field(init=False)
    software: dict[str, str] = field(default_factory=dict)
    work: Workload = field(init=False)
    choice: Choice = field(init=False)
    groups: Grouping = field(init=False)
    requests: Mapping[str, Request] = field(default_factory=dict)
    is_complete: bool = False

    @property
    def run(self) -> RunStore:
        """The folder that is held."""
        assert self.store is not None
        return self.store

    @property
    def plan(self) -> Plan:
        """The plan to write, with all decisions."""
        before = {} if self.stored is None else self.stored.recipe.get("code", {})
        recipe = self.facts.recipe | {"code": changes.kept(before, self.digest.parts)}
        plan = replace(self.work.plan, recipe=recipe, groups=self.groups.groups)
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


@contextmanager
def hold_run(call: Call) -> Iterator[Call]:
    """Hold the folder of the run, to begin it or to continue it."""
    settings = call.settings
    with (
        listening() as call.signals,
        _held(settings.root, settings.resume) as call.store,
    ):
        call.signals.limit(settings.time_budget_s)
        call.display, call.machine = Display(settings.verbose), settings.present_machine()
        if call.run.reader.has_plan and settings.resume != "never":
            call.stored, call.before = call.run.reader.plan, decided_of(call.run.reader)
        yield call


@contextmanager
def look_into(call: Call) -> Iterator[Call]:
    """Look at the folder of the run, if there is one; nothing is written."""
    settings = call.settings
    with Display(settings.verbose) as call.display, listening() as call.signals:
        call.machine = settings.present_machine()
        if settings.resume != "never" and (settings.root / DATABASE).is_file():
            with RunStore.read(settings.root) as store:
                call.stored, call.before = store.plan, decided_of(store)
        with call.stack:
            yield call


def software_of(call: Call, draft: Plan) -> dict[str, str]:
    """Return the software that trains; refuse other software than the run was begun with."""
    if call.store is None:
        return {}
    from asynckfold.training.software import software

    settings, store = call.settings, call.store
    plan = call.stored or draft
    reading = call.machine.gpus() if plan.device == "cuda" else GpuReading()
    here = software(
        draft.threads_per_job,
        reading.names,
        in_workers=settings.engine != "serial",
    )
    if settings.threads is None:
        # The threads that were decided belong to the run; those of a new run are set later.
        del here[THREADS]
        begun = next(iter(store.reader.software() if call.stored is not None else ()), {})
        here |= {THREADS: begun[THREADS]} if THREADS in begun else {}
    if call.stored is not None and not settings.allow_different_software:
        ended = store.reader.finished()
        # Failed jobs are tried again.
        if any(ended.get(job.id) not in (DONE, DIVERGED) for job in draft.jobs):
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
