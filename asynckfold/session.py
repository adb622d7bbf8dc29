"""One call on one held run: read the data, check the candidates, sweep, time the baseline."""

from __future__ import annotations

import io
import queue
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asynckfold import cache, choice
from asynckfold.choice import Choice
from asynckfold.elastic import steps_of
from asynckfold.engines import pool as pools
from asynckfold.engines.engine import Engine
from asynckfold.engines.machine import Machine, resolve_n_jobs
from asynckfold.engines.process import ProcessEngine, preloads
from asynckfold.engines.serial import SerialEngine
from asynckfold.errors import (
    InterruptedRunError,
    NoRoomError,
    Problem,
    StorageError,
    WorkerDiedError,
    refuse,
)
from asynckfold.files import make_folders, slug, write_whole
from asynckfold.folds import Fold
from asynckfold.forecast import Forecast, forecast, foreseen
from asynckfold.fusing import Fuse, Grouping, grouped
from asynckfold.identity import ELASTIC, THREADS, differences
from asynckfold.interruption import Interruption
from asynckfold.messages import Facts
from asynckfold.packing import choice_of, packing_of
from asynckfold.placement import Load, Placement
from asynckfold.plan import Plan, TrainerParams, folds_fingerprint, make_jobs
from asynckfold.probing import Prober
from asynckfold.progress import Display
from asynckfold.recipe import Recipe, sending_problems
from asynckfold.report.findings import packing as packing_text
from asynckfold.result import DIVERGED, DONE, FAILED, CVResults, Result, job_by_id
from asynckfold.scoring import Score, resolve
from asynckfold.settings import Settings, one_line
from asynckfold.sharing import room_problems
from asynckfold.store import RunStore, refuse_other
from asynckfold.store.layout import DATABASE
from asynckfold.sweep import Inbox, Sampler, Sweep, ask, is_stray

if TYPE_CHECKING:
    from asynckfold.data import Prepared

DRY_RUNS = 3
"""How often a model is checked whose process dies, before it is the model's fault."""


@dataclass(frozen=True, eq=False)
class Session:
    """One call on one held run: the stages, in order."""

    settings: Settings
    recipe: Recipe
    params: TrainerParams
    store: RunStore
    display: Display
    machine: Machine
    signals: Interruption
    started: float
    notes: tuple[str, ...]

    def run(self) -> None:
        """Prepare, check, sweep, compare."""
        rehearsal = Rehearsal(
            self.settings, self.recipe, self.params, self.machine, self.signals, self.display
        )
        stored = self.store.plan if self.store.has_plan else None
        with rehearsal.hall(self._software, self._before(), stored) as found:
            draft, threads = found.work.plan, found.choice
            given = self.settings.about
            self.store.begin(
                found.plan,
                found.work.folds,
                found.data.targets,
                {
                    **_about(self.machine, given.get("cli", ())),
                    **given,
                    "decision": threads.to_dict(),
                },
                free=("threads_per_job", "threads")
                if self.settings.allow_different_software
                else (),
            )
            self._log(found)
            if stored is not None and len(draft.jobs) > len(stored.jobs):
                text = f"{len(draft.jobs) - len(stored.jobs)} jobs were added to the plan"
                self.store.event("plan", text)
            bundle = replace(found.bundle, plan=self.store.plan)
            software = {THREADS: self.store.plan.threads_text, **found.software}
            self._sweep(found, bundle, software)
            self._compare(found.make, bundle, found.data)
            self.signals.check()

    def _before(self) -> Choice | None:
        """What the run chose in an earlier session."""
        return choice_of(self.store.about) if self.store.has_plan else None

    def _software(self, draft: Plan) -> dict[str, str]:
        """Return with what this session trains, unless it has to train on with something else."""
        from asynckfold.training.software import software

        gpus = self.machine.gpus().names if draft.device == "cuda" else ()
        found = software(draft.threads_per_job, gpus)
        if self.settings.threads is None:
            # The threads that were decided are the run's own; of a new run they are told later.
            del found[THREADS]
            begun = next(iter(self.store.software()), {})
            found |= {THREADS: begun[THREADS]} if THREADS in begun else {}
        if self.settings.elastic:
            found[ELASTIC] = "yes"
        if not self.settings.allow_different_software and self._pending(draft):
            refuse(_software_problems(self.store, found))
        return found

    def _pending(self, draft: Plan) -> bool:
        """Whether anything is to be trained; failed jobs are tried again."""
        ended = self.store.finished()
        return any(ended.get(job.id) not in (DONE, DIVERGED) for job in draft.jobs)

    def _log(self, found: _Rehearsed) -> None:
        threads = found.choice
        for note in (*self.store.notes, *found.data.notes, *self.notes):
            self.store.event("note", note)
            self.display.note(note)
        for candidate, trace in found.work.facts.failures.items():
            self.store.event("dry-run", trace.strip().splitlines()[-1], candidate)
        told = {event.text for event in self.store.events()}
        failed = {
            model: trace.strip().splitlines()[-1] for model, trace in threads.failures.items()
        }
        fusing = found.groups.why
        for kind, texts in (("probe", failed), ("decision", threads.why), ("fusing", fusing)):
            for text in (f"{model}: {sentence}" for model, sentence in texts.items()):
                if text not in told:
                    self.store.event(kind, text)
                if kind != "decision" or threads.overturned:
                    self.display.note(text)

    def _sweep(self, rehearsed: _Rehearsed, bundle: Any, software: Mapping[str, str]) -> None:
        make, data, plan = rehearsed.make, rehearsed.data, bundle.plan
        requests = choice.requests(rehearsed.choice, rehearsed.work)
        finish = _Finish(plan, bundle, data, resolve(self.settings.scoring, data.classification))
        finished = self.store.results()
        self.display.doing("")
        self.display.begin(plan, requests, list(finished.values()))
        if len(finished) == len(plan.jobs):
            return  # what a look at a finished run costs is no part of its packed time
        self.store.note_software(software)
        self.store.packing(time.monotonic() - self.started)
        try:
            with make(bundle) as engine:
                Sweep(
                    self.store,
                    engine,
                    make.inbox,
                    requests,
                    finish,
                    self.display,
                    signals=self.signals,
                    max_wait=make.max_wait,
                    yields=self.settings.sharing.yield_to_others,
                    steps=rehearsed.steps if self.settings.elastic else None,
                ).run()
            achieved = packing_of(self.store)
            if achieved is not None:
                self.display.note(packing_text(achieved))
        except KeyboardInterrupt as interrupt:
            with suppress(StorageError):
                self.store.event("interrupted", str(interrupt) or "interrupted")
            raise _interrupted(
                interrupt, f"what was finished is in {self.store.root}, the same call continues"
            ) from interrupt
        finally:
            self.store.packing(None)

    def _compare(self, make: _Engines, bundle: Any, data: Prepared) -> None:
        """Time the ordinary serial loop, unless it is known from an earlier session."""
        wanted, known = self.settings.baseline, self.store.baseline
        if wanted is None or (known and (known.kind == "measured" or wanted == "estimate")):
            return
        import torch

        self.display.doing(f"{wanted[:-1]}ing the serial baseline")
        sampler, begun = Sampler(self.store, "serial"), self.store.now()
        ordinary = replace(bundle, ordinary=data.ordinary())
        unfit = sending_problems({"dataset": ordinary.ordinary}) if make.pool else []
        if unfit:
            self.store.event("baseline", f"there is no serial baseline: {unfit[0]}")
            self.display.note(f"there is no serial baseline: {unfit[0]}")
            return
        with make(ordinary) as engine:
            placement = make.everything(wanted, torch.get_num_threads())
            try:
                baseline = ask(engine, placement, make.max_wait, sampler, self.signals)
            except (WorkerDiedError, NoRoomError) as error:
                self.store.event("baseline", f"the serial baseline could not run: {error}")
                return
            except KeyboardInterrupt as interrupt:
                raise _interrupted(
                    interrupt, "the serial baseline was being timed; all jobs have their results"
                ) from interrupt
        if baseline is None:
            return
        samples = [item for item in self.store.samples() if item.at >= begun]
        used = [item.used - item.own for item in samples if item.phase == "serial"]
        baseline = replace(baseline, others=float(np.mean(used)) if used else 0.0)
        self.store.set_baseline(baseline)
        if baseline.disturbance:
            self.store.event("baseline", baseline.disturbance)
            self.display.note(baseline.disturbance)


@dataclass(frozen=True, eq=False)
class _Rehearsed:
    """What is known, and what stands ready, when a plan can be written."""

    data: Prepared
    software: dict[str, str]
    bundle: Any
    make: _Engines
    work: choice.Sweep
    choice: Choice
    groups: Grouping

    @property
    def plan(self) -> Plan:
        """What is to be written."""
        plan = replace(self.work.plan, recipe=self.work.facts.recipe, groups=self.groups.groups)
        return plan.with_threads(self.choice.threads)

    @property
    def steps(self) -> dict[str, tuple[float, ...]]:
        """By model, seconds of a step with 1, 2, … threads."""
        cores = self.work.cores
        return {name: steps_of(cost, cores) for name, cost in self.choice.costs.items()}


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """What comes before a plan is written: a run goes on from it, and a look ahead ends with it."""

    settings: Settings
    recipe: Recipe
    params: TrainerParams
    machine: Machine
    signals: Interruption
    display: Display

    @contextmanager
    def hall(
        self, software: Callable[[Plan], dict[str, str]], before: Choice | None, stored: Plan | None
    ) -> Iterator[_Rehearsed]:
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
        with self._pool() as pool:
            self.display.doing("reading the data")
            settings, machine = self.settings, self.machine
            with prepared(settings, machine) as data, self.signals.noted():
                folds = folds_of(settings, data)
                inbox: Inbox = queue.SimpleQueue()
                draft = make_draft(settings, self.recipe, self.params, data, folds, machine)
                used = software(draft)
                bundle = self._bundle(draft, folds, data, self._asked_to_fuse(draft, stored))
                make = _Engines(
                    pool,
                    data,
                    machine,
                    inbox,
                    self.signals,
                    settings.n_jobs,
                    settings.threads or 1,
                    settings.stall_timeout,
                    settings.sharing.max_wait,
                )
                if pool is not None and not data.held:
                    refuse(sending_problems({"dataset": bundle.data}))
                self.display.doing("checking the candidates")
                facts = self._preflight(make, bundle)
                gpus = len(machine.gpus().gpus)
                work = choice.Sweep(draft, folds, facts, make.allotted, _identity(machine), gpus)
                other = None if settings.plan_from is None else _plan_of(settings.plan_from)
                threads = self._choose(make, bundle, work, before, other)
                groups = self._group(work, threads, stored or other)
                threads = foreseen(work, threads, groups)
                expected = {name: cost.memory for name, cost in threads.costs.items()}
                refuse(room_problems(expected, machine.max_memory, groups.widths))
                yield _Rehearsed(data, used, bundle, make, work, threads, groups)

    @contextmanager
    def _pool(self) -> Iterator[pools.WorkerPool | None]:
        if not self.settings.parallelize:
            yield None
            return
        pool = pools.take(preloads(), self.settings.sharing.nice)
        try:
            yield pool
        except BaseException:
            pool.close()
            raise
        pools.give_back(pool)

    def _asked_to_fuse(self, plan: Plan, stored: Plan | None) -> Fuse:
        """What is asked for the jobs that are not in the plan yet, and False where all are."""
        known = set() if stored is None else set(stored.jobs)
        taken_over = stored is None and self.settings.plan_from is not None
        return False if taken_over or known.issuperset(plan.jobs) else self.settings.fuse

    def _group(self, work: choice.Sweep, threads: Choice, before: Plan | None) -> Grouping:
        """Decide which jobs are trained as one; a run that has a plan keeps its groups."""
        fuse, plan = self.settings.fuse, work.plan.with_threads(threads.threads)
        found = grouped(plan, fuse, work.facts.fusible, work.cores, before)
        return found if found.groups or fuse is not False else Grouping()

    def _bundle(self, plan: Plan, folds: tuple[Fold, ...], data: Prepared, fuse: Fuse) -> Any:
        import torch

        from asynckfold.training.bundle import Bundle

        root, dtype = self.settings.root_dir.absolute(), str(torch.get_default_dtype())
        return Bundle(
            plan,
            folds,
            self.recipe,
            data.handle(),
            root,
            default_dtype=dtype.removeprefix("torch."),
            deterministic=torch.get_deterministic_debug_mode(),
            fuse=fuse,
        )

    def _preflight(self, make: _Engines, bundle: Any) -> Facts:
        """Check all candidates at once, or one by one where one of them kills its process."""
        try:
            facts = self._checked(make, bundle)
        except WorkerDiedError:
            parts = {}
            for name, model in self.recipe.models.items():
                alone = replace(bundle, recipe=replace(self.recipe, models={name: model}))
                parts[name] = self._checked_alone(make, alone, name)
            facts = _joined(list(parts.values()))
        refuse(Problem(*problem) for problem in facts.problems)
        return facts

    def _checked_alone(self, make: _Engines, bundle: Any, name: str) -> Facts:
        """Check one model; what the plan says of it must not depend on who was killed meanwhile."""
        for _ in range(DRY_RUNS):
            try:
                return self._checked(make, bundle)
            except WorkerDiedError as death:
                error = death
            if error.outcome != "died":
                break
        return Facts({"architecture": {name: None}}, {}, {}, (), {name: str(error)})

    def _checked(self, make: _Engines, bundle: Any) -> Facts:
        with make(bundle) as engine:
            placement = make.everything("preflight", 1)
            facts: Facts = ask(engine, placement, make.max_wait, signals=self.signals)
        return facts

    def _choose(
        self,
        make: _Engines,
        bundle: Any,
        work: choice.Sweep,
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
            return choice.chosen(work, self.settings.threads, before, other, prober, cache.folder())


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
    if (settings.root_dir / DATABASE).is_file():
        with RunStore.read(settings.root_dir) as store:
            before, stored = choice_of(store.about), store.plan
    rehearsal = Rehearsal(settings, recipe, params, machine, signals, display)
    with rehearsal.hall(lambda draft: {}, before, stored) as found:
        made = forecast(found.work, found.choice, found.groups)
        if stored is not None:
            free = ("threads_per_job", "threads") if settings.allow_different_software else ()
            refuse_other(settings.root_dir, stored, found.plan, free)
        return made


def _interrupted(interrupt: KeyboardInterrupt, state: str) -> InterruptedRunError:
    """Return the error that tells by what the call was interrupted, and what stays."""
    code = interrupt.exit_code if isinstance(interrupt, InterruptedRunError) else 130
    return InterruptedRunError(f"{str(interrupt) or 'interrupted'}; {state}", code)


@dataclass(frozen=True, eq=False)
class _Engines:
    """Makes the engine for a bundle: worker processes, or this process."""

    pool: pools.WorkerPool | None
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
        cores = self.machine.unreserved()
        return Placement((), cores, min(threads, len(cores)), trainer=trainer)


@dataclass(frozen=True, eq=False)
class _Finish:
    """Scores a result on its held-out fold."""

    plan: Plan
    bundle: Any
    data: Prepared
    scores: Mapping[str, Score]

    def __call__(self, result: Result) -> Result:
        if result.status != DONE or result.outputs is None:
            return result
        job = job_by_id(self.plan)[result.job_id]
        targets = self.data.targets[self.bundle.fold_of(job).valid]
        try:
            found = {
                name: float(score(targets, result.outputs)) for name, score in self.scores.items()
            }
        except Exception as error:  # noqa: BLE001
            # A score may be the user's own function: its failure is the job's.
            line = f"scoring raised {type(error).__name__}: {error}"
            return replace(result, status=FAILED, error=line, traceback=line)
        return replace(result, scores=found)


@contextmanager
def held(root: Path, resume: str) -> Iterator[RunStore]:
    """Hold the run; leave no trace of one that never got a plan."""
    fresh = not root.exists()
    store = RunStore.hold(root)
    try:
        refuse(_resume_problems(store, resume))
        yield store
    except KeyboardInterrupt as interrupt:
        if is_stray(interrupt):
            store.forget()
        raise
    finally:
        empty = not store.has_plan
        store.close()
        if empty:
            for name in ("run.db", "run.lock"):
                (root / name).unlink(missing_ok=True)
            if fresh and not any(root.iterdir()):
                root.rmdir()


def _resume_problems(store: RunStore, resume: str) -> Iterator[Problem]:
    if resume == "never" and store.has_plan:
        yield Problem(
            "resume='never' needs a folder without a run",
            str(store.root),
            "Use another folder, or resume='auto' to continue.",
        )
    if resume == "must" and not store.has_plan:
        yield Problem(
            "resume='must' needs a folder that holds a run",
            str(store.root),
            "Check the path, or use resume='auto'.",
        )


def _software_problems(store: RunStore, here: Mapping[str, str]) -> Iterator[Problem]:
    found = differences(next(iter(store.software()), {}), here)
    if found:
        yield Problem(
            f"{store.root} is continued with what it was begun with, or with other bits",
            "; ".join(found),
            "Use the same again, or another folder, or pass allow_different_software=True: then "
            "bit-identity is no longer claimed.",
        )


@contextmanager
def prepared(settings: Settings, machine: Machine) -> Iterator[Prepared]:
    """Read the dataset into shared arrays, for as long as the context lasts."""
    from asynckfold.data import prepare

    data = prepare(
        settings.dataset,
        train_transform=settings.train_transform,
        eval_transform=settings.eval_transform,
        targets=settings.targets,
        criterion_wants_classes=settings.wants_classes,
        memory_budget=machine.free_memory({}) // 2,
        folder=settings.root_dir if settings.root_dir.is_dir() else None,
    )
    try:
        yield data
    finally:
        data.close()


def make_machine(settings: Settings) -> Machine:
    """Return the machine with the devices that were asked for; refuse those that are not there."""
    machine = settings.sharing.machine(settings.devices)
    asked = settings.devices == "cuda" or not isinstance(settings.devices, str)
    found = machine.gpus()
    if asked and (found.reason or not found.gpus):
        refuse(
            [
                Problem(
                    "devices must name GPUs that are there",
                    f"{settings.devices!r}: {found.reason}",
                    "See `asynckfold doctor`, or pass devices='auto'.",
                )
            ]
        )
    return machine


def folds_of(settings: Settings, data: Prepared) -> tuple[Fold, ...]:
    """Divide the samples, and see whether the scores can be computed on such a fold."""
    folds = settings.divided(data.n_samples, data)
    scores = resolve(settings.scoring, data.classification)
    refuse(_score_problems(scores, settings.scoring, data, folds[0].valid))
    return folds


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
        tuple(resolve(settings.scoring, data.classification)),
        data.fingerprint,
        folds_fingerprint(folds),
        data.classes,
    )


def _score_problems(
    scores: Mapping[str, Score], scoring: Any, data: Prepared, valid: Any
) -> Iterator[Problem]:
    """Try scikit-learn's scores on perfect outputs: one that cannot be computed fails all jobs."""
    targets = data.targets[valid]
    perfect = np.eye(len(data.classes))[targets] if data.classification else targets
    for name, spec in _scorer_names(scoring):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scores[name](targets, perfect.astype(np.float32))
        except ValueError as error:
            yield Problem(
                "scoring must fit the labels",
                f"{spec!r}, which says: {one_line(error).rstrip('.')}",
                "Choose another, such as 'accuracy', 'f1_macro' or 'neg_log_loss' for classes, "
                "'r2' for numbers.",
            )


def _scorer_names(scoring: Any) -> list[tuple[str, str]]:
    """The scores that scikit-learn has a name for; a user's own function may count its calls."""
    if isinstance(scoring, Mapping):
        pairs = list(scoring.items())
    else:
        items = scoring if isinstance(scoring, Sequence) else [scoring]
        pairs = [(item, item) for item in ([scoring] if isinstance(scoring, str) else items)]
    return [(name, spec) for name, spec in pairs if isinstance(spec, str)]


def _joined(parts: list[Facts]) -> Facts:
    recipe: dict[str, Any] = {}
    for part in parts:
        for key, value in part.recipe.items():
            if isinstance(value, dict):
                recipe[key] = {**recipe.get(key, {}), **value}
            else:
                recipe[key] = value
    return Facts(
        recipe,
        {name: value for part in parts for name, value in part.step_seconds.items()},
        {name: value for part in parts for name, value in part.memory.items()},
        tuple(problem for part in parts for problem in part.problems),
        {name: value for part in parts for name, value in part.failures.items()},
        {name: value for part in parts for name, value in part.flops.items()},
        {name: value for part in parts for name, value in part.fusible.items()},
    )


def _about(machine: Machine, words: Sequence[str]) -> dict[str, Any]:
    """What is recorded of machine and command; a script's own arguments may be secrets."""
    script = [Path(name).name for name in sys.argv[:1]] + ["..."] * bool(sys.argv[1:])
    return {
        "machine": machine.describe(),
        "command": ["asynckfold", *words] if words else script,
    }


def _identity(machine: Machine) -> dict[str, Any]:
    """What seconds depend on besides the sweep."""
    found = machine.describe()
    gpus = {"gpus": sorted({gpu["name"] for gpu in found["gpus"]})} if found["gpus"] else {}
    return {"cpu": found["cpu"]["model"], "versions": found["versions"], **gpus}


def _plan_of(folder: Path) -> Plan:
    with RunStore.read(folder) as store:
        return store.plan


def write_out_of_fold(results: CVResults) -> None:
    """Write ``oof/<candidate>.npz`` for each complete candidate.

    Each holds ``outputs`` of shape (n_samples, n_outputs), aligned with the dataset.
    """
    folder = results.root_dir / "oof"
    outputs = results.oof
    for row in results.candidates:
        path = folder / f"{slug(row.model)}-{slug(row.lr_schedule)}.npz"
        if row.complete and (path.is_symlink() or not path.is_file()):
            make_folders(results.root_dir, folder)
            buffer = io.BytesIO()
            np.savez_compressed(buffer, outputs=outputs[row.name])
            write_whole(path, buffer.getvalue(), results.root_dir)
