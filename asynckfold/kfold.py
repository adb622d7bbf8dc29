"""`AsyncKFold`: plan → run → report, for the caller. Owns no state between calls."""

from __future__ import annotations

import io
import operator
import os
import queue
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asynckfold.engines import pool as pools
from asynckfold.engines.engine import Engine
from asynckfold.engines.limits import allowed_cores
from asynckfold.engines.machine import Machine, resolve_n_jobs
from asynckfold.engines.process import ProcessEngine, preloads
from asynckfold.engines.serial import SerialEngine
from asynckfold.errors import (
    AllJobsFailedError,
    InputError,
    InterruptedRunError,
    JobFailedError,
    Problem,
    WorkerDiedError,
    nearest,
    refuse,
)
from asynckfold.files import slug, write_whole
from asynckfold.folds import Fold, make_folds
from asynckfold.messages import Facts
from asynckfold.placement import Load, Placement
from asynckfold.plan import Plan, TrainerParams, folds_fingerprint, make_jobs
from asynckfold.progress import Display
from asynckfold.recipe import Recipe, named_lr_schedules, named_models, sending_problems
from asynckfold.report.summary import read_results
from asynckfold.result import DONE, FAILED, CVResults, Result, job_by_id
from asynckfold.scoring import Score, resolve
from asynckfold.store import RunStore
from asynckfold.sweep import Inbox, Sampler, Sweep, ask, requests_for

if TYPE_CHECKING:
    from asynckfold.data import Labels, Prepared

CLASS_CRITERIA = ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss", "cross_entropy", "nll_loss")
NUMBER_CRITERIA = (
    "MSELoss",
    "L1Loss",
    "SmoothL1Loss",
    "HuberLoss",
    "PoissonNLLLoss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
)
NEIGHBOUR_CORES = 0.2
"""Mean use by others above which a timing is called unfair."""

BASELINES = ("measure", "estimate", None)
RESUMES = ("auto", "never", "must")
DEVICES = ("auto", "cpu", "cuda")


class JobsFailedWarning(UserWarning):
    """Some jobs failed; the others are in the results."""


class AsyncKFold:
    """Cross-validate many PyTorch models at once.

    Parameters
    ----------
    kfolds : int, scikit-learn splitter, or list of (train, valid) index pairs
        Number of folds, or the folds. ``cv`` and ``n_splits`` are aliases by keyword; pass None
        here to use them.
    dataset : Dataset or (X, y)
        Map-style torch data set of (input, target) pairs, or two arrays.
    root_dir : str or Path
        Folder of the run. The same call on the same folder continues it.
    criterion : callable
        (outputs, targets) → scalar loss; greater is worse.
    batch_size : int
        Samples per step.
    parallelize : bool
        False trains one job after another in this process: the debugger.
    cv, n_splits : optional
        Other names of `kfolds`, as in scikit-learn.
    n_repeats : int
        Repeat an integer number of folds with other shuffles.
    groups : array-like of shape (n_samples,), optional
        Samples of one group are never on both sides of a fold.
    stratify : bool
        Keep class proportions in each fold.
    targets : array-like of shape (n_samples,), optional
        Labels, where reading them from the data set is slow or wrong.
    random_state : int
        Root of all seeds.
    n_jobs : int or "auto"
        Jobs at a time: joblib's meaning (-1 all cores), or what is idle right now.
    threads_per_job : int
        Threads inside a job; part of the plan, since it changes bits.
    devices : {"auto", "cpu", "cuda"} or list of int
        GPUs to use; "auto" takes those that are visible.
    scoring : str, callable, list or dict of these, optional
        scikit-learn scorer names or (targets, outputs) → float; the first ranks. Accuracy for
        classes, R² for numbers by default.
    error_score : float or "raise"
        Score of a job that failed.
    train_transform, eval_transform : callable, optional
        Per-sample transforms of the two views. From a single random ``transform`` of the data set
        the eval view is derived by leaving the random parts out.
    preprocess : scikit-learn transformer, optional
        A clone is fitted on the training part of each fold and applied to both parts.
    resume : {"auto", "never", "must"}
        What to do with a folder that holds the same run: continue, refuse, or insist on it.
    baseline : {"estimate", "measure", None}
        The ordinary serial loop to compare with: timed for some batches, run whole, or left out.
    verbose : int
        0 silent, 1 live table, 2 a line for each job, 3 a line for each epoch.
    about : Mapping, optional
        Further facts to keep with the run and to show in its report.

    Raises
    ------
    InputError
        All problems found in the arguments, each with the rule, the value and the remedy.

    Examples
    --------
    >>> import tempfile, torch
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> kfold = AsyncKFold(3, (X[:300].astype("float32"), y[:300]), tempfile.mkdtemp(),
    ...                    torch.nn.CrossEntropyLoss(), 32, verbose=0, baseline=None)
    >>> results = kfold({"linear": lambda: torch.nn.Linear(64, 10)}, ["cosine"],
    ...                 lambda model: torch.optim.Adam(model.parameters(), 1e-2), {"epochs": 2})
    >>> results.best_params_
    {'model': 'linear', 'scheduler': 'cosine'}
    """

    def __init__(
        self,
        kfolds: Any,
        dataset: Any,
        root_dir: str | Path,
        criterion: Callable[..., Any],
        batch_size: int,
        parallelize: bool = True,
        *,
        cv: Any = None,
        n_splits: int | None = None,
        n_repeats: int = 1,
        groups: Any = None,
        stratify: bool = True,
        targets: Any = None,
        random_state: int = 0,
        n_jobs: int | str = "auto",
        threads_per_job: int = 1,
        devices: Any = "auto",
        scoring: Any = None,
        error_score: float | str = float("nan"),
        train_transform: Callable[[Any], Any] | None = None,
        eval_transform: Callable[[Any], Any] | None = None,
        preprocess: Any = None,
        resume: str = "auto",
        baseline: str | None = "estimate",
        verbose: int = 1,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.kfolds = next((value for value in (kfolds, cv, n_splits) if value is not None), 5)
        self.dataset = dataset
        self.root_dir = Path(root_dir)
        self.criterion = criterion
        self.batch_size = _plain(batch_size)
        self.parallelize = parallelize
        self.n_repeats = _plain(n_repeats)
        self.groups = groups
        self.stratify = stratify
        self.targets = targets
        self.random_state = _plain(random_state)
        self.n_jobs = _plain(n_jobs)
        self.threads_per_job = _plain(threads_per_job)
        self.devices = devices
        self.scoring = scoring
        self.error_score = error_score
        self.train_transform = train_transform
        self.eval_transform = eval_transform
        self.preprocess = preprocess
        self.resume = resume
        self.baseline = baseline
        self.verbose = verbose
        self.about = dict(about or {})
        given = {"kfolds": kfolds, "cv": cv, "n_splits": n_splits}
        refuse([*_alias_problems(given), *self._setting_problems()])

    def __call__(
        self,
        models: Any,
        schedulers: Any,
        opt_fn: Callable[[Any], Any],
        trainer_params: Mapping[str, Any] | None = None,
    ) -> CVResults:
        """Train every model with every LR schedule on every fold.

        Parameters
        ----------
        models : list of classes or zero-argument callables, or dict of name to callable
            Each call returns a new module. An instance is copied for each job.
        schedulers : list of names or callables, or dict of name to these
            LR schedules: ``constant``, ``cosine``, ``exponential``, ``multistep``, ``onecycle``,
            ``reduce``, ``step``, ``warm``, or optimizer → LR schedule.
        opt_fn : callable
            Model → optimizer.
        trainer_params : dict, optional
            ``epochs`` and the other fields of `TrainerParams`.

        Returns
        -------
        CVResults
            Scores, out-of-fold outputs, times.

        Raises
        ------
        InputError
            Nothing was started.
        RunHeldError
            Another process works in the folder.
        AllJobsFailedError
            Not one job succeeded.
        InterruptedRunError
            Ctrl-C; the same call continues.
        """
        started = time.monotonic()
        recipe, params, notes = self._recipe(models, schedulers, opt_fn, trainer_params)
        with Display(self.verbose) as display, _held(self.root_dir, self.resume) as store:
            for note in notes:
                display.note(note)
            machine = self._machine()
            call = _Call(self, recipe, params, store, display, machine, started, tuple(notes))
            call.run()
            results = load_results(store, self._error_value())
            write_out_of_fold(results)
        self._judge(results)
        return results

    def plan(
        self,
        models: Any,
        schedulers: Any,
        opt_fn: Callable[[Any], Any],
        trainer_params: Mapping[str, Any] | None = None,
    ) -> tuple[Plan, tuple[Fold, ...]]:
        """Return what a call with these arguments would do, without starting anything.

        Returns
        -------
        plan : Plan
            Its jobs; nothing is known yet of the live objects.
        folds : tuple of Fold
            Who would be held out when.
        """
        recipe, params, _ = self._recipe(models, schedulers, opt_fn, trainer_params)
        machine = self._machine()
        with self._prepared(machine) as data:
            folds = self._folds(data)
            return self._draft(recipe, params, data, folds, machine), folds

    def _setting_problems(self) -> Iterator[Problem]:
        for name in ("batch_size", "threads_per_job", "n_repeats"):
            value = getattr(self, name)
            if not _is_whole(value) or value < 1:
                yield Problem(
                    f"{name} must be a whole number of at least 1",
                    repr(value),
                    f"Pass {name}=1 or more.",
                )
        seed = self.random_state
        if not _is_whole(seed) or not 0 <= seed < 2**32:
            yield Problem(
                "random_state must be a whole number from 0 to 2**32 - 1",
                repr(seed),
                "Pass random_state=0.",
            )
        if not _is_whole(self.verbose):
            yield Problem(
                "verbose must be a number from 0 to 3", repr(self.verbose), "Pass verbose=1."
            )
        yield from self._word_problems()
        yield from _criterion_problems(self.criterion)
        yield from _root_problems(self.root_dir)
        yield from self._core_problems()

    def _word_problems(self) -> Iterator[Problem]:
        choices = {"baseline": BASELINES, "resume": RESUMES}
        if isinstance(self.devices, str):
            choices["devices"] = DEVICES
        for name, valid in choices.items():
            value = getattr(self, name)
            if value not in valid:
                shown = ", ".join(map(repr, valid))
                guess = nearest(str(value), filter(None, valid)).strip()
                yield Problem(
                    f"{name} must be one of {shown}",
                    repr(value),
                    guess or f"Leave {name} out for its default.",
                )
        numbers = self.devices
        if not isinstance(numbers, str) and not (
            isinstance(numbers, Sequence) and all(map(_is_whole, numbers))
        ):
            yield Problem(
                "devices must be 'auto', 'cpu', 'cuda', or a list of GPU numbers",
                repr(numbers)[:80],
                "Pass devices='auto'.",
            )
        if self.error_score != "raise" and not isinstance(self.error_score, (int, float)):
            yield Problem(
                "error_score must be a number or 'raise'",
                repr(self.error_score),
                "Leave error_score out for nan.",
            )

    def _core_problems(self) -> Iterator[Problem]:
        cores = len(allowed_cores())
        try:
            resolve_n_jobs(self.n_jobs, cores)
        except InputError as error:
            yield from error.problems
        threads = self.threads_per_job
        if _is_whole(threads) and threads > cores:
            yield Problem(
                "threads_per_job must not exceed the cores that this process may use",
                f"{threads} threads on {cores} cores",
                f"Pass threads_per_job={cores} or less: more threads than cores were measured up "
                "to 80 times slower.",
            )

    def _recipe(
        self, models: Any, schedulers: Any, opt_fn: Any, trainer_params: Any
    ) -> tuple[Recipe, TrainerParams, list[str]]:
        named, problems, notes = named_models(models)
        lr_schedules, more = named_lr_schedules(schedulers)
        problems += more
        params = TrainerParams()
        if trainer_params is not None and not isinstance(trainer_params, Mapping):
            problems.append(
                Problem(
                    "trainer_params must be a dict",
                    repr(trainer_params)[:80],
                    "Pass for instance {'epochs': 2}.",
                )
            )
        else:
            try:
                params = TrainerParams.from_mapping(trainer_params)
            except InputError as error:
                problems += error.problems
        problems += _opt_fn_problems(opt_fn)
        parts = {
            **{f"model {name}": model for name, model in named.items()},
            **{f"scheduler {name}": schedule for name, schedule in lr_schedules.items()},
            "opt_fn": opt_fn,
            "criterion": self.criterion,
            "preprocess": self.preprocess,
            "train_transform": self.train_transform,
            "eval_transform": self.eval_transform,
        }
        if self.parallelize:
            problems += sending_problems(parts)
        if problems:
            refuse([*problems, *self._data_problems()])
        return Recipe(named, lr_schedules, opt_fn, self.criterion, self.preprocess), params, notes

    def _data_problems(self) -> Sequence[Problem]:
        """What is wrong with labels and folds, as far as a look at a few samples tells."""
        from asynckfold.data import open_source, resolve_labels

        try:
            source = open_source(self.dataset)
            given = source.labels if self.targets is None else self.targets
            if given is None or (self.targets is None and source.rows is not None):
                return ()
            labels = resolve_labels(given, _wants_classes(self.criterion), source.names)
            self._divided(len(source), labels)
        except InputError as error:
            return error.problems
        return ()

    @contextmanager
    def _prepared(self, machine: Machine) -> Iterator[Prepared]:
        from asynckfold.data import prepare

        data = prepare(
            self.dataset,
            train_transform=self.train_transform,
            eval_transform=self.eval_transform,
            targets=self.targets,
            criterion_wants_classes=_wants_classes(self.criterion),
            memory_budget=machine.free_memory({}) // 2,
            folder=self.root_dir if self.root_dir.is_dir() else None,
        )
        try:
            yield data
        finally:
            data.close()

    def _machine(self) -> Machine:
        machine = Machine(self.devices)
        asked = self.devices == "cuda" or not isinstance(self.devices, str)
        found = machine.gpus()
        if asked and (found.reason or not found.gpus):
            refuse(
                [
                    Problem(
                        "devices must name GPUs that are there",
                        f"{self.devices!r}: {found.reason}",
                        "See `asynckfold doctor`, or pass devices='auto'.",
                    )
                ]
            )
        return machine

    def _divided(self, n_samples: int, labels: Labels | Prepared) -> tuple[Fold, ...]:
        return make_folds(
            n_samples,
            labels.targets,
            self.kfolds,
            classification=labels.classification,
            stratify=self.stratify,
            n_repeats=self.n_repeats,
            groups=self.groups,
            random_state=self.random_state,
            classes=labels.classes,
        )

    def _folds(self, data: Prepared) -> tuple[Fold, ...]:
        """Divide the samples, and see whether the scores can be computed on such a fold."""
        folds = self._divided(data.n_samples, data)
        scores = resolve(self.scoring, data.classification)
        refuse(_score_problems(scores, self.scoring, data, folds[0].valid))
        return folds

    def _draft(
        self,
        recipe: Recipe,
        params: TrainerParams,
        data: Prepared,
        folds: tuple[Fold, ...],
        machine: Machine,
    ) -> Plan:
        return Plan(
            make_jobs(list(recipe.models), list(recipe.lr_schedules), folds, self.random_state),
            params,
            self.batch_size,
            self.threads_per_job,
            self.random_state,
            "cuda" if machine.gpus().gpus else "cpu",
            tuple(resolve(self.scoring, data.classification)),
            data.fingerprint,
            folds_fingerprint(folds),
            data.classes,
        )

    def _error_value(self) -> float:
        return float("nan") if self.error_score == "raise" else float(self.error_score)

    def _judge(self, results: CVResults) -> None:
        """Failures are collected while the sweep runs and judged once, here."""
        failed = [item for item in results.results.values() if item.status != DONE]
        if not failed:
            return
        lines = "\n".join(failure_lines(results))
        text = f"{len(failed)} of {len(results.plan.jobs)} jobs failed:\n{lines}"
        if self.error_score == "raise":
            raise JobFailedError(f"{text}\n{failed[0].traceback}")
        if len(failed) == len(results.plan.jobs):
            raise AllJobsFailedError(f"{text}\n{failed[0].traceback}")
        warnings.warn(text, JobsFailedWarning, stacklevel=3)


@dataclass(frozen=True, eq=False)
class _Call:
    """One call on one held run: the stages, in order."""

    kfold: AsyncKFold
    recipe: Recipe
    params: TrainerParams
    store: RunStore
    display: Display
    machine: Machine
    started: float
    notes: tuple[str, ...]

    def run(self) -> None:
        """Prepare, check, sweep, compare."""
        with self._pool() as pool:
            self.display.doing("reading the data")
            kfold, machine = self.kfold, self.machine
            with kfold._prepared(machine) as data:
                folds = kfold._folds(data)
                inbox: Inbox = queue.SimpleQueue()
                draft = kfold._draft(self.recipe, self.params, data, folds, machine)
                bundle = self._bundle(draft, folds, data)
                make = _Engines(pool, data, machine, inbox, kfold.n_jobs, kfold.threads_per_job)
                self.display.doing("checking the candidates")
                facts = self._preflight(make, bundle)
                self.store.begin(
                    replace(draft, recipe=facts.recipe),
                    folds,
                    data.targets,
                    {**_about(machine), **kfold.about},
                )
                self._log(data, facts)
                bundle = replace(bundle, plan=self.store.plan)
                self._sweep(make, bundle, data, facts)
                self._compare(make, bundle, data)

    @contextmanager
    def _pool(self) -> Iterator[pools.WorkerPool | None]:
        if not self.kfold.parallelize:
            yield None
            return
        pool = pools.take(preloads())
        try:
            yield pool
        except BaseException:
            pool.close()
            raise
        pools.give_back(pool)

    def _bundle(self, plan: Plan, folds: tuple[Fold, ...], data: Prepared) -> Any:
        from asynckfold.training.bundle import Bundle

        return Bundle(plan, folds, self.recipe, data.handle(), self.store.root.absolute())

    def _preflight(self, make: _Engines, bundle: Any) -> Facts:
        """Check all candidates at once, or one by one where one of them kills its process."""
        try:
            facts = self._checked(make, bundle)
        except WorkerDiedError:
            parts = {}
            for name, model in self.recipe.models.items():
                alone = replace(bundle, recipe=replace(self.recipe, models={name: model}))
                try:
                    parts[name] = self._checked(make, alone)
                except WorkerDiedError as death:
                    error = death
                    parts[name] = Facts(
                        {"architecture": {name: None}}, {}, {}, (), {name: str(error)}
                    )
            facts = _joined(list(parts.values()))
        refuse(Problem(*problem) for problem in facts.problems)
        return facts

    def _checked(self, make: _Engines, bundle: Any) -> Facts:
        with make(bundle) as engine:
            facts: Facts = ask(engine, make.everything("preflight", 1))
        return facts

    def _log(self, data: Prepared, facts: Facts) -> None:
        for note in (*data.notes, *self.notes):
            self.store.event("note", note)
        for note in data.notes:
            self.display.note(note)
        for candidate, trace in facts.failures.items():
            self.store.event("dry-run", trace.strip().splitlines()[-1], candidate)

    def _sweep(self, make: _Engines, bundle: Any, data: Prepared, facts: Facts) -> None:
        plan: Plan = bundle.plan
        kfold = self.kfold
        requests = requests_for(
            [job.id for job in plan.jobs],
            _expected_seconds(plan, bundle, facts),
            plan.threads_per_job,
            {job.id: facts.memory.get(job.model, 0) for job in plan.jobs},
            plan.device == "cuda",
        )
        finish = _Finish(plan, bundle, data, resolve(kfold.scoring, data.classification))
        self.store.packing(time.monotonic() - self.started)
        self.display.doing("")
        self.display.begin(plan, requests, list(self.store.results().values()))
        try:
            with make(bundle) as engine:
                Sweep(self.store, engine, make.inbox, requests, finish, self.display).run()
        except KeyboardInterrupt as interrupt:
            raise InterruptedRunError(
                f"interrupted; what was finished is in {self.store.root}, the same call continues"
            ) from interrupt
        finally:
            self.store.packing(None)

    def _compare(self, make: _Engines, bundle: Any, data: Prepared) -> None:
        """Time the ordinary serial loop, unless it is known from an earlier session."""
        wanted, known = self.kfold.baseline, self.store.baseline
        if wanted is None or (known and (known.kind == "measured" or wanted == "estimate")):
            return
        import torch

        self.display.doing(f"{wanted[:-1]}ing the serial baseline")
        sampler = Sampler(self.store, "serial")
        ordinary = replace(bundle, ordinary=data.ordinary())
        refuse(sending_problems({"dataset": ordinary.ordinary}) if make.pool else [])
        with make(ordinary) as engine:
            placement = make.everything(wanted, torch.get_num_threads())
            try:
                baseline = ask(engine, placement, sampler)
            except WorkerDiedError as error:
                self.store.event("baseline", f"the serial baseline could not run: {error}")
                return
            except KeyboardInterrupt as interrupt:
                raise InterruptedRunError(
                    "interrupted while the serial baseline was timed; all jobs have their results"
                ) from interrupt
        if baseline is not None:
            self.store.set_baseline(baseline)
            self._note_neighbours()

    def _note_neighbours(self) -> None:
        """A baseline that shared its cores is too slow to be compared with; say so."""
        used = [item.used - item.own for item in self.store.samples() if item.phase == "serial"]
        if used and np.mean(used) > NEIGHBOUR_CORES:
            text = (
                f"other programs used {np.mean(used):.1f} cores while the serial baseline was "
                "timed: its seconds, and the speedup, are too high"
            )
            self.store.event("baseline", text)
            self.display.note(text)


@dataclass(frozen=True, eq=False)
class _Engines:
    """Makes the engine for a bundle: worker processes, or this process."""

    pool: pools.WorkerPool | None
    data: Prepared
    machine: Machine
    inbox: Inbox
    n_jobs: int | str
    threads: int

    @contextmanager
    def __call__(self, bundle: Any) -> Iterator[Engine]:
        handle = self.data.handle()
        engine: Engine
        if self.pool is None:
            batches = handle.open(handle.fds)
            engine = SerialEngine(bundle, batches, self.look, self.inbox.put)
        else:
            engine = ProcessEngine(bundle, handle.fds, self.look, self.inbox.put, self.pool)
        try:
            yield engine
        finally:
            engine.close()

    def look(self, running: Sequence[Placement], own: Mapping[int, tuple[int, ...]]) -> Load:
        """Read the load for as many jobs as the caller wants."""
        count = resolve_n_jobs(self.n_jobs, self.machine.max_cores)
        return self.machine.load(count, running, own, threads=self.threads)

    def everything(self, trainer: str, threads: int) -> Placement:
        """A placement on all cores."""
        return Placement((), self.machine.cores, threads, trainer=trainer)


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


def load_results(store: RunStore, error_score: float = float("nan")) -> CVResults:
    """Return the results of a run, complete or not."""
    root = store.root

    def build_report() -> Path:
        from asynckfold.report.page import write_report

        with RunStore.read(root) as reader:
            return write_report(reader)

    return replace(read_results(store), error_score=error_score, _build_report=build_report)


def failure_lines(results: CVResults) -> Iterator[str]:
    """Yield one line for each way in which jobs failed, with the first of these jobs."""
    grouped: dict[str, list[str]] = {}
    for item in results.results.values():
        if item.status != DONE:
            grouped.setdefault(item.error, []).append(item.job_id)
    for error, names in grouped.items():
        more = ", …" if len(names) > 3 else ""
        yield f"  {len(names)} × {error} ({', '.join(names[:3])}{more})"


def write_out_of_fold(results: CVResults) -> None:
    """Write ``oof/<candidate>.npz`` for each complete candidate.

    Each holds ``outputs`` of shape (n_samples, n_outputs), aligned with the dataset.
    """
    folder = results.root_dir / "oof"
    outputs = results.oof
    for row in results.candidates:
        path = folder / f"{slug(row.model)}-{slug(row.lr_schedule)}.npz"
        if row.complete and not path.exists():
            folder.mkdir(exist_ok=True)
            buffer = io.BytesIO()
            np.savez_compressed(buffer, outputs=outputs[row.name])
            write_whole(path, buffer.getvalue())


@contextmanager
def _held(root: Path, resume: str) -> Iterator[RunStore]:
    """Hold the run; leave no trace of one that never got a plan."""
    fresh = not root.exists()
    store = RunStore.hold(root)
    try:
        refuse(_resume_problems(store, resume))
        yield store
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


def _alias_problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    used = [name for name, value in given.items() if value is not None]
    if len(used) > 1:
        yield Problem(
            "kfolds, cv and n_splits are names of one setting",
            " and ".join(used),
            "Pass one of them, and None for kfolds when it is not that one.",
        )
    for name in used:
        value = given[name]
        small = isinstance(value, (int, np.integer)) and value < 2
        if isinstance(value, (bool, float, str)) or small:
            yield Problem(
                f"{name} must be a whole number of at least 2, a splitter, or index pairs",
                repr(value),
                f"Pass {name}=5.",
            )


def _plain(value: Any) -> Any:
    """NumPy's whole numbers as Python's; everything else as it is."""
    return operator.index(value) if isinstance(value, np.integer) else value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _criterion_problems(criterion: Any) -> Iterator[Problem]:
    if not callable(criterion):
        yield Problem(
            "criterion must be callable",
            _one_line(criterion),
            "Pass for instance torch.nn.CrossEntropyLoss().",
        )
    elif isinstance(criterion, type):
        yield Problem(
            "criterion must be an object, not a class",
            criterion.__name__,
            f"Write {criterion.__name__}().",
        )


def _opt_fn_problems(opt_fn: Any) -> Iterator[Problem]:
    ready = isinstance(opt_fn, type) and opt_fn.__module__.startswith("torch.optim")
    if ready or not callable(opt_fn):
        name = opt_fn.__name__ if ready else "Adam"
        yield Problem(
            "opt_fn must be a function model → optimizer",
            f"the class {name}" if ready else _one_line(opt_fn),
            f"Write for instance: lambda model: {name}(model.parameters(), lr=1e-3)",
        )


def _root_problems(root: Path) -> Iterator[Problem]:
    """Refuse a folder that cannot become a run; what goes wrong later is the disk's fault."""
    if str(root) in ("", ".") or "\0" in str(root):
        yield Problem("root_dir must be a folder of its own", repr(str(root)), "Pass 'runs/first'.")
        return
    found = next(part for part in (root.absolute(), *root.absolute().parents) if _is_there(part))
    if not found.is_dir():
        yield Problem("root_dir must be a folder", _at(root, found, "a file"), "Choose another.")
    elif not os.access(found, os.W_OK | os.X_OK):
        yield Problem(
            "root_dir must be a folder that may be written",
            _at(root, found, "read-only"),
            "Choose another folder, or change who may write there.",
        )


def _at(root: Path, found: Path, what: str) -> str:
    return (
        f"{root}, which is {what}"
        if found == root.absolute()
        else f"{root}, where {found} is {what}"
    )


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)


def _score_problems(
    scores: Mapping[str, Score], scoring: Any, data: Prepared, valid: Any
) -> Iterator[Problem]:
    """Try scikit-learn's scores on perfect outputs: one that cannot be computed fails all jobs."""
    targets = data.targets[valid]
    perfect = np.eye(len(data.classes))[targets] if data.classification else targets
    for name, score in scores.items():
        spec = scoring.get(name) if isinstance(scoring, Mapping) else name
        if not isinstance(spec, str):
            continue  # the user's own function may count its calls
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                score(targets, perfect.astype(np.float32))
        except ValueError as error:
            yield Problem(
                "scoring must fit the labels",
                f"{spec!r}, which says: {_one_line(error).rstrip('.')}",
                "Choose another, such as 'accuracy', 'f1_macro' or 'neg_log_loss' for classes, "
                "'r2' for numbers.",
            )


def _one_line(value: Any, most: int = 200) -> str:
    text = " ".join((str(value) if isinstance(value, Exception) else repr(value)).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _wants_classes(criterion: Any) -> bool | None:
    name = getattr(criterion, "__name__", type(criterion).__name__)
    if name in CLASS_CRITERIA:
        return True
    return False if name in NUMBER_CRITERIA else None


def _expected_seconds(plan: Plan, bundle: Any, facts: Facts) -> dict[str, float]:
    return {
        job.id: facts.step_seconds.get(job.model, 0.0)
        * plan.params.epochs
        * (len(bundle.fold_of(job).train) / plan.batch_size)
        for job in plan.jobs
    }


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
    )


def _about(machine: Machine) -> dict[str, Any]:
    return {
        "machine": machine.describe(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [],
    }
