"""`AsyncKFold`: plan → run → report, for the caller. Owns no state between calls."""

from __future__ import annotations

import copy
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from asynckfold.api.arguments import Settings, alias_problems, plain
from asynckfold.api.display import Display
from asynckfold.api.planner import folds_of, look_ahead, make_draft, read_alone
from asynckfold.api.refit import on_all_samples
from asynckfold.api.resources import Sharing
from asynckfold.api.session import Session, held, make_machine, write_out_of_fold
from asynckfold.errors import (
    OUT_OF_TIME,
    AllJobsFailedError,
    InterruptedRunError,
    JobFailedError,
    RefitFailedError,
    refuse,
)
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.recipe import Recipe
from asynckfold.jobs.result import DONE, Result, cause
from asynckfold.planning.forecast import Forecast
from asynckfold.results.candidates import Candidate
from asynckfold.results.cv_results import CVResults
from asynckfold.results.read import read_results
from asynckfold.store import RunStore
from asynckfold.store.layout import refit_folder
from asynckfold.system.signals import listening

if TYPE_CHECKING:
    from asynckfold.data import Seen


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
        Folder of the run. The same call on the same folder continues it; one with other arguments,
        data or code is refused, and told what changed.
    criterion : callable
        (outputs, targets) → scalar loss; greater is worse.
    batch_size : int
        Samples per step.
    parallelize : bool
        False trains one job after another in this process, which then reads the samples, too: the
        debugger.
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
    threads_per_job : int or "auto"
        Threads inside a job; part of the plan, since it changes bits. "auto" decides it for each
        model by a rule over its operations, the number of jobs and the allotted cores, the same
        whether these are idle or busy, and gives the last jobs those that would be idle; 1 gives
        the same bits on any number of cores.
    devices : {"auto", "cpu", "cuda"} or list of int
        GPUs to use; "auto" takes those that are visible.
    stall_timeout : float, "auto" or None
        Seconds without a finished batch after which a worker hangs: its stacks are written to the
        job's log, it is killed, and the job is tried again. A start, a first batch and a checkpoint
        may take ten times as long. "auto" waits 5 minutes at least, and 20 times as long as batches
        took so far; None waits for ever.
    scoring : str, callable, list or dict of these, optional
        scikit-learn scorer names, its scorers, or functions (labels, outputs) → float; greater is
        better, and the first ranks. By default accuracy for classes, with ROC AUC where one output
        is for two classes; accuracy (all labels right) and micro F1 for several labels of a sample;
        R² for numbers. Scorers see labels as the data have them, functions of one's own raw outputs
        beside them, in the order of ``results.classes_``.
    error_score : float or "raise"
        Score of a job that failed.
    train_transform, eval_transform : callable, optional
        Per-sample transforms of the two views. From a single random ``transform`` of the data set
        the eval view is derived by leaving the random parts out.
    preprocess : scikit-learn transformer, optional
        The last step before the model, after the transforms of either view. A clone is fitted on
        the training part of each fold, as the eval view shows it, without random copies; it is
        applied to both parts, and batch by batch where the train view has transforms of its own. It
        sees each sample as one row of features, in the type that they have; what comes out becomes
        float32.
    resume : {"auto", "never", "must"}
        What to do with a folder that holds a run. "auto" continues it, and refuses to where
        arguments, data or the user's own code have changed. "never" trains all anew: the earlier
        run is kept whole, as ``<root_dir>.earlier-1``, ``-2``, … beside it. "must" refuses a folder
        without a run.
    baseline : {"estimate", "measure", None}
        The ordinary serial loop to compare with: timed for some batches, run whole, or left out.
    plan_from : str or Path, optional
        Folder of another run, whose threads of each model, memory formats and groups of jobs are
        taken over.
    verbose : int
        0 silent, 1 live table, 2 a line for each job, 3 a line for each epoch.
    allow_different_software : bool
        Continue a run that was begun with another torch, on another kind of processor, or with
        other threads; its bits are then no longer claimed to be those of its plan.
    fuse : bool, int or "auto"
        Train jobs of one model as one, which is faster for small models on CPUs: each keeps its
        own samples, learning rates, checkpoints and results, close to those of a job by itself;
        their bits depend on how many are trained as one, which the plan holds and a continued run
        keeps. "auto" decides it by a rule over operations, jobs and allotted cores; a number says
        how many jobs are trained as one, True that every core trains a group. These two refuse a
        model that cannot be fused.
    trainer : {"plain", "hogwild", "allreduce", "averaging", "parameter_server"}
        One process a job, or several, which is faster where jobs are fewer than cores: they update
        one shared model without locks (Recht et al. 2011), with last digits that differ from run to
        run, or add up the gradients of their parts of each batch, or train clones that are averaged
        every `steps_per_round` steps, or replicas that push to a parameter server and fetch from it
        (Dean et al. 2012), with digits that differ, too. Also a key of `trainer_params`, like the
        two that follow; `partition_size` and `epochs_per_round` there give each clone a part of the
        samples, and by kind of process, such as ``{"cpu": 1000, "gpu": 8000}``, the last clone is
        trained on a GPU.
    processes : int
        Processes of a job, each on a core of its own; with more than one, `trainer` is not plain.
    shared_state : bool
        Whether the processes of a job share also what the optimizer keeps.
    reserve_cores : int
        Cores to leave free, whoever is there. They are not allotted, so that the threads of the
        models are decided without them.
    max_memory : float, str or None
        What all running jobs may take of the memory, as far as it is known beforehand: a share up
        to 1, bytes, or such as "8GiB".
    nice : int
        Level of the workers and of what they start, 0 to 19: the higher, the more others come
        first.
    min_free_memory : float or str
        While less memory is free, nothing starts; a running job is never killed for it. A share up
        to 1, bytes, or such as "2GiB". 256 MiB by default.
    max_wait : float or None
        Seconds, an hour by default. One job always runs, however busy the cores are; where not
        even one can start, as below `min_free_memory`, for so long, the call ends with
        `NoRoomError` and can be continued. None waits for ever.
    yield_to_others : bool
        Let running jobs make room where others come to their cores: a job moves to idle cores, or
        pauses between two batches while another job goes on. One job always runs.
    precision : {"fp32", "bf16"}
        What models compute in, also where they are evaluated: float32, or bfloat16 by
        `torch.autocast`, faster on processors with AMX and on GPUs, and with 2 to 3 digits only;
        the loss is taken in float32. Also a key of `trainer_params`.
    time_budget_s : float or None
        Seconds after which a call ends: running jobs save themselves at their next batch, ten
        seconds at most, and the results so far come back, with ``counts["pending"]`` jobs left. The
        same call continues, with another budget. None for no limit.
    job_timeout_s : float or None
        Seconds that a job may train. One that has trained longer saves itself at its next batch (at
        the end of a round, where clones are averaged) and has failed, with `error_score`; the
        others go on. It is not tried again in this call; the same call with more seconds, or None,
        continues it, and no bit depends on that. Counted is the wall time of its training since its
        model was made, with compilation, a stage before the training, evaluations and checkpoints:
        over all attempts and sessions, as its checkpoint tells it, so that what was lost with a
        worker that died is not counted. Pauses of `yield_to_others` and time spent waiting for a
        place are left out. Jobs that are trained as one count equal parts, so that n of them have n
        times the seconds together, and end together. One whose batch does not end at all is left
        to `stall_timeout`. None for no limit.
    refit : bool
        Whether the best candidate is then trained on all samples, in a run of its own below
        ``refit`` in the run's folder: `CVResults.refitted`, and
        ``results.state_dict(fold="all")``.
    random_samples : bool
        Whether each read of a sample may give another pair (x, y). That is found out where reading
        draws from the global generators of torch, NumPy or random; say it where it draws elsewhere.
        Input and target are then always of one read, seeded by job, epoch and sample in training,
        and by sample in evaluation; folds are made of the targets of evaluation.
    pos_label : int, bool or str, optional
        The label that scores such as ``"f1"`` and ``"average_precision"`` take for positive;
        scikit-learn's 1 by default.
    output_transform : callable, optional
        From outputs, a tensor of shape (n, ...), to what is scored and predicted: probabilities of
        classes, or numbers. Needed where the criterion is a function of one's own and does not
        tell, such as for one output for two classes: ``torch.sigmoid``.
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
        threads_per_job: int | str = "auto",
        devices: Any = "auto",
        stall_timeout: float | str | None = "auto",
        scoring: Any = None,
        error_score: float | str = float("nan"),
        train_transform: Callable[[Any], Any] | None = None,
        eval_transform: Callable[[Any], Any] | None = None,
        preprocess: Any = None,
        resume: str = "auto",
        baseline: str | None = "estimate",
        verbose: int = 1,
        allow_different_software: bool = False,
        plan_from: str | Path | None = None,
        reserve_cores: int = 0,
        max_memory: float | str | None = None,
        nice: int = 0,
        min_free_memory: float | str = Sharing.min_free_memory,
        max_wait: float | None = Sharing.max_wait,
        yield_to_others: bool = False,
        about: Mapping[str, Any] | None = None,
        fuse: bool | int | str = "auto",
        trainer: str = "plain",
        processes: int = 1,
        shared_state: bool = False,
        precision: str = "fp32",
        time_budget_s: float | None = None,
        job_timeout_s: float | None = None,
        refit: bool = False,
        random_samples: bool = False,
        pos_label: Any = None,
        output_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        folds = next((value for value in (kfolds, cv, n_splits) if value is not None), 5)
        self.settings = Settings(
            folds,
            dataset,
            Path(root_dir),
            criterion,
            plain(batch_size),
            parallelize,
            plain(n_repeats),
            groups,
            stratify,
            targets,
            plain(random_state),
            plain(n_jobs),
            plain(threads_per_job),
            devices,
            stall_timeout,
            scoring,
            error_score,
            train_transform,
            eval_transform,
            preprocess,
            resume,
            baseline,
            verbose,
            bool(allow_different_software),
            None if plan_from is None else Path(plan_from),
            dict(about or {}),
            Sharing(
                plain(reserve_cores),
                plain(max_memory),
                plain(nice),
                min_free_memory,
                max_wait,
                yield_to_others,
            ),
            plain(fuse),
            trainer,
            plain(processes),
            shared_state,
            precision,
            plain(time_budget_s),
            plain(job_timeout_s),
            refit,
            random_samples,
            pos_label,
            output_transform,
        )
        given = {"kfolds": kfolds, "cv": cv, "n_splits": n_splits}
        refuse([*alias_problems(given), *self.settings.problems()])

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
            Scores, out-of-fold outputs, times. Jobs are pending only after `time_budget_s`; then
            nothing was refitted, either.

        Raises
        ------
        InputError
            Nothing was started.
        RunHeldError
            Another process works in the folder.
        AllJobsFailedError
            Not one job succeeded.
        RefitFailedError
            The folds have their results, but on all samples the best candidate failed.
        NoRoomError
            Nothing could start for `max_wait` seconds; the same call continues.
        InterruptedRunError
            Ctrl-C, or the time budget is over before there is a plan; the same call continues. A
            second Ctrl-C does not wait for jobs to save themselves. Elsewhere than in the main
            thread, or where the host took SIGINT for itself, nothing is installed.
        """
        started, settings = time.monotonic(), self.settings
        recipe, params, notes = settings.recipe(models, schedulers, opt_fn, trainer_params)
        with (
            listening(signal.SIGINT) as signals,
            held(settings.root_dir, settings.resume) as run,
        ):
            signals.limit(settings.time_budget_s)
            with Display(settings.verbose) as display:
                machine = make_machine(settings)
                session = Session(
                    settings, recipe, params, run, display, machine, signals, started, tuple(notes)
                )
                try:
                    session.run()
                except InterruptedRunError as interrupt:
                    if interrupt.exit_code != OUT_OF_TIME or not run.has_plan:
                        raise
                    display.note(str(interrupt))
            found = load_results(run, settings.error_value)
            results = with_models(found, settings, recipe, session.seen)
            write_out_of_fold(results)
            self._judge(results)
            if settings.refit and not signals.asked():
                self._refit(run, results, recipe, trainer_params, started)
        return results

    def _refit(
        self,
        run: RunStore,
        results: CVResults,
        recipe: Recipe,
        trainer_params: Mapping[str, Any] | None,
        started: float,
    ) -> None:
        """Train the best candidate on all samples."""
        if not results.has_best:
            run.event("refit", "nothing was refitted: no candidate has a score on every fold")
            return
        best = results.candidates[results.best_index_]
        budget = self.settings.time_budget_s
        left = None if budget is None else max(0.001, budget - (time.monotonic() - started))
        Display(self.settings.verbose).note(f"now {best.name} on all {results.n_samples:,} samples")
        alone = copy.copy(self)
        alone.settings = on_all_samples(self.settings, best, left)
        try:
            found = alone(
                {best.model: recipe.models[best.model]},
                {best.lr_schedule: recipe.lr_schedules[best.lr_schedule]},
                recipe.opt_fn,
                trainer_params,
            )
        except (AllJobsFailedError, JobFailedError) as error:
            text = f"{best.name} failed on all samples; the results of the folds stay"
            run.event("refit", text)
            raise RefitFailedError(f"{text}: {error}") from error
        if not found.counts["pending"]:
            place = found.root_dir.relative_to(run.root)
            text = (
                f"{best.name} was trained on all {results.n_samples:,} samples in "
                f"{found.seconds:.1f} s: {place.as_posix()}"
            )
            if text not in {event.text for event in run.events()}:
                run.event("refit", text)

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
        settings = self.settings
        recipe, params, _ = settings.recipe(models, schedulers, opt_fn, trainer_params)
        machine = make_machine(settings)
        with read_alone(settings, machine) as data:
            folds = folds_of(settings, data)
            return make_draft(settings, recipe, params, data, folds, machine), folds

    def forecast(
        self,
        models: Any,
        schedulers: Any,
        opt_fn: Callable[[Any], Any],
        trainer_params: Mapping[str, Any] | None = None,
    ) -> Forecast:
        """Return what was decided, after a dry run and probes, as a call would decide it.

        Nothing is trained, and nothing is written into the run's folder; of a run that is there
        already, the decisions are taken.

        Returns
        -------
        Forecast
            The plan, the threads of each model and why, predicted seconds, memory of each job, and
            the sweep in virtual time.

        Raises
        ------
        InputError
            As a call would.
        """
        settings = self.settings
        recipe, params, _ = settings.recipe(models, schedulers, opt_fn, trainer_params)
        with Display(settings.verbose) as display, listening(signal.SIGINT) as signals:
            machine = make_machine(settings)
            return look_ahead(settings, recipe, params, machine, signals, display)

    def _judge(self, results: CVResults) -> None:
        """Failures are collected while the sweep runs and judged once, here."""
        failed = [item for item in results.results.values() if item.status != DONE]
        if not failed:
            return
        lines = "\n".join(failure_lines(results))
        text = f"{len(failed)} of {len(results.plan.jobs)} jobs failed:\n{lines}"
        if self.settings.error_score == "raise":
            raise JobFailedError(f"{text}\n{failed[0].traceback}")
        if len(failed) == len(results.plan.jobs):
            raise AllJobsFailedError(f"{text}\n{failed[0].traceback}")
        warnings.warn(text, JobsFailedWarning, stacklevel=3)


def load_results(store: RunStore, error_score: float = float("nan")) -> CVResults:
    """Return the results of a run, complete or not."""
    root = store.root

    def build_report() -> Path:
        from asynckfold.results.report.page import write_report

        with RunStore.read(root) as reader:
            return write_report(reader)

    def load_weights(result: Result) -> dict[str, Any]:
        from asynckfold.training.checkpoint import trained_weights

        with RunStore.read(root) as reader:
            refs = reader.checkpoints(result.job_id)
        return trained_weights(root, refs, result.weights)

    def load_refit(candidate: Candidate) -> CVResults | None:
        folder = refit_folder(root, candidate.model, candidate.lr_schedule)
        if not (folder / "run.db").is_file():
            return None
        with RunStore.read(folder) as reader:
            return load_results(reader, error_score)

    return replace(
        read_results(store),
        error_score=error_score,
        _build_report=build_report,
        _load_refit=load_refit,
        _load_weights=load_weights,
    )


def with_models(
    results: CVResults, settings: Settings, recipe: Recipe, seen: Sequence[Seen] = ()
) -> CVResults:
    """Return results that know the models and samples that they come from.

    Parameters
    ----------
    results : CVResults
        Of a run.
    settings : Settings
        Of the run.
    recipe : Recipe
        The live objects that it was started with.
    seen : sequence of Seen
        How the run took its dataset apart, if it did so just now.
    """
    from asynckfold.api.fold_models import RunModels

    def load_targets() -> npt.NDArray[Any]:
        with RunStore.read(results.root_dir) as reader:
            return reader.splits()[1]

    from_disk, known = results._load_refit, dict[str, CVResults]()

    def load_refit(candidate: Candidate) -> CVResults | None:
        found = from_disk(candidate) if from_disk else None
        if found is None or not found.counts["done"]:
            return None
        if candidate.name not in known:
            # Once only, since its samples may be a copy.
            alone = on_all_samples(settings, candidate, None)
            known[candidate.name] = with_models(found, alone, recipe, seen)
        return known[candidate.name]

    views = settings.train_transform, settings.eval_transform
    facts = next((item.looked for item in seen), None)
    models = RunModels(
        results, recipe, settings.dataset, *views, load_targets, facts, settings.transform
    )
    return replace(results, _models=models, _load_refit=load_refit)


def failure_lines(results: CVResults) -> Iterator[str]:
    """Yield one line for each way in which jobs failed, with the first of these jobs."""
    grouped: dict[str, list[str]] = {}
    for item in results.results.values():
        if item.status != DONE:
            grouped.setdefault(cause(item.error), []).append(item.job_id)
    for error, names in grouped.items():
        more = ", …" if len(names) > 3 else ""
        yield f"  {len(names)} × {error} ({', '.join(names[:3])}{more})"
