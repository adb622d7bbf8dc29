"""`AsyncKFold`: plan → run → report, for the caller. Owns no state between calls."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from asynckfold.api.arguments import Settings
from asynckfold.api.call import check, dry_run, look_ahead, make_plan, open_data
from asynckfold.api.context import Call, hold_run, look_into, make_draft
from asynckfold.api.display import Display
from asynckfold.api.execution import StopReason, begin, training
from asynckfold.api.reading import folds_of, prepared
from asynckfold.api.report import keep_pictures, leave_report
from asynckfold.api.stored_results import load_results, with_models
from asynckfold.engines.warm_pool import lent
from asynckfold.errors import (
    OUT_OF_TIME,
    AllJobsFailedError,
    InterruptedRunError,
    JobFailedError,
    PlanMismatchError,
    RefitFailedError,
    SignatureError,
    nearest,
    refuse,
)
from asynckfold.jobs.argument import arguments, with_parameters
from asynckfold.jobs.candidate_names import base_of, values_of
from asynckfold.jobs.digests.run import of_run
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import cause, own_frames
from asynckfold.jobs.schema import leaves_of
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.planning.forecast import Forecast
from asynckfold.results.audit import unlearned
from asynckfold.results.cv_results import CVResults
from asynckfold.results.out_of_fold import without_outputs
from asynckfold.system import background
from asynckfold.system.files import make_folder, slug, write_whole
from asynckfold.system.signals import listening


class JobsFailedWarning(UserWarning):
    """Some jobs failed; the others are in the results."""


P = ParamSpec("P")
Returned = TypeVar("Returned")

OTHER_NAMES = {
    **dict.fromkeys(("root", "out", "output_dir", "default_root_dir", "path"), "root_dir"),
    **dict.fromkeys(("seed", "random_seed"), "random_state"),
    **dict.fromkeys(("k", "folds", "num_folds"), "kfolds"),
    **dict.fromkeys(("data", "X", "train_data", "train_dataset"), "dataset"),
    **dict.fromkeys(("loss", "loss_fn", "criterion_fn"), "criterion"),
    **dict.fromkeys(("metric", "metrics", "scorer"), "scoring"),
    **dict.fromkeys(("device", "gpus", "accelerator"), "devices"),
    **dict.fromkeys(("workers", "max_workers", "num_workers", "jobs"), "n_jobs"),
    **dict.fromkeys(("timeout", "time_limit"), "time_budget_s"),
    **dict.fromkeys(("max_epochs", "num_epochs", "n_epochs"), "epochs"),
    **dict.fromkeys(("amp", "dtype"), "precision"),
}
"""What other libraries call our arguments."""

OF_OPTIMIZER = ("optimizer", "optim", "lr", "learning_rate", "momentum", "weight_decay")
"""Arguments of other libraries that `opt_fn` stands for."""

ANCESTOR_NAMES = {"train_dataset": "dataset", "get_optimizer": "opt_fn"}
"""What the project that this one grew out of calls two arguments; its scripts may pass them."""


def _renamed(kwargs: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return keyword arguments under our names, where the call has not used these itself."""
    ours = {
        name: ANCESTOR_NAMES[name]
        for name in kwargs
        if ANCESTOR_NAMES.get(name) in {*known} - {*kwargs}
    }
    return {ours.get(name, name): value for name, value in kwargs.items()}


def _hint(name: str, known: Iterable[str]) -> str:
    """Say where an argument belongs, or what it is called here.

    >>> _hint("seed", ["random_state"]), _hint("n_job", ["n_jobs"])
    (" It is called 'random_state' here.", " Did you mean 'n_jobs'?")
    """
    right = OTHER_NAMES.get(name, name)
    if right in known:
        return f" It is called {right!r} here."
    if right in arguments(TrainerParams):
        return f" It is a key of trainer_params: {{{right!r}: ...}}."
    if name in OF_OPTIMIZER:
        return " opt_fn, an argument of the call, makes the optimizer of a model."
    return nearest(name, known)


def checked(
    called: str, settings: Callable[..., Any] | None = None
) -> Callable[[Callable[P, Returned]], Callable[P, Returned]]:
    """Check each call of a function; its ``**kwargs`` are arguments of `settings`.

    >>> @checked("half")
    ... def half(number):
    ...     return number / 2
    >>> half()
    Traceback (most recent call last):
    asynckfold.errors.SignatureError: half: missing a required argument: 'number'
    """

    def decorated(function: Callable[P, Returned]) -> Callable[P, Returned]:
        signature = inspect.signature(function)
        more = () if settings is None else inspect.signature(settings).parameters
        known = {*signature.parameters, *more}

        @functools.wraps(function, updated=())
        def call(*args: P.args, **kwargs: P.kwargs) -> Returned:
            names: Any = _renamed(kwargs, signature.parameters)
            for name in names:
                if name not in known:
                    text = f"{called} got an unexpected keyword argument {name!r}."
                    raise SignatureError(text + _hint(name, known))
            try:
                signature.bind(*args, **names)
            except TypeError as error:
                raise SignatureError(f"{called}: {error}") from None
            return function(*args, **names)

        return call

    return decorated


def _takes(
    declared: Callable[P, Settings],
) -> Callable[[Callable[[Any, Settings], None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the typed signature of a declaration."""

    def decorated(init: Callable[[Any, Settings], None]) -> Callable[Concatenate[Any, P], None]:
        make = checked("AsyncKFold")(declared)

        @functools.wraps(init)
        def constructor(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, make(*args, **kwargs))

        signature = inspect.signature(declared)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [itself, *signature.parameters.values()]
        constructor.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return constructor

    return decorated


class AsyncKFold:
    """Cross-validate many PyTorch models at once.

    Raises
    ------
    InputError
        All problems of the arguments, each with the rule, the value and the remedy.

    Examples
    --------
    >>> import tempfile, torch
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> kfold = AsyncKFold(3, (X[:300].astype("float32"), y[:300]), tempfile.mkdtemp(),
    ...                    torch.nn.CrossEntropyLoss(), 32, verbose=0, report=False)
    >>> results = kfold({"linear": lambda: torch.nn.Linear(64, 10)}, ["cosine"],
    ...                 lambda model: torch.optim.Adam(model.parameters(), 1e-2), {"epochs": 2})
    >>> results.best_params_
    {'model': 'linear', 'scheduler': 'cosine'}
    """

    _stop_reason: StopReason | None = None
    """Of an Optuna study, which may end the run of a trial."""
    _make_race: Callable[[Plan], Any] | None = None
    """Likewise of several trials: what leaves out their jobs, as `asynckfold.sweep.race.Race`."""

    @_takes(Settings)
    def __init__(self, settings: Settings) -> None:
        refuse(settings.problems())
        if settings.part is not None:
            settings = replace(settings, refit=False, baseline=None, report=False)
        self.settings = settings

    @checked("the call of an AsyncKFold")
    def __call__(
        self,
        models: Any,
        schedulers: Any = None,
        opt_fn: Callable[[Any], Any] | None = None,
        trainer_params: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        n_iter: int | None = None,
    ) -> CVResults:
        """Train every model with every LR schedule on every fold.

        Parameters
        ----------
        models : list of classes or zero-argument callables, or dict of name to callable
            Each call returns a new module. An instance is copied for each job.
        schedulers : list of names or callables, or dict of name to these
            LR schedules: ``constant`` (the default), ``cosine``, ``exponential``, ``multistep``,
            ``onecycle``, ``reduce``, ``step``, ``warm``, or optimizer → LR schedule.
            LightningModules bring theirs, where this and `opt_fn` are left out.
        opt_fn : callable
            Model → optimizer. It gets the job's criterion, too, if it has a parameter of the name
            ``criterion``.
        trainer_params : dict, optional
            ``epochs`` and the other fields of `TrainerParams`.
        params : dict of str to list, dict or distribution, optional
            Values by name of the parameters of `models`, `opt_fn` and functions in `schedulers`;
            each combination is a candidate. A dict gives names to values that are no numbers,
            strings, bools or None. Distributions are those of ``scipy.stats``, drawn `n_iter`
            times. See the how-to guide "Search a grid of parameters".
        n_iter : int, optional
            Combinations to draw where `params` has a distribution, seeded by `random_state`.

        Returns
        -------
        CVResults
            Scores, out-of-fold outputs, times. Jobs are pending only after `time_budget_s`; then
            no candidate was refitted.

        Raises
        ------
        InputError
            Nothing was started.
        RunHeldError
            Another process works in the folder.
        AllJobsFailedError
            Not one job succeeded.
        RefitFailedError
            The folds have results, but the best candidate failed on all samples.
        NoRoomError
            Nothing could start for `max_wait` seconds; the same call continues.
        InterruptedRunError
            Ctrl-C, SIGTERM or SIGHUP, or the time budget is over before there is a plan; the same
            call continues. A second signal does not wait for jobs to save themselves. No handler is
            installed outside the main thread, or for a signal that the host handles or ignores.
        """
        call = check(self.settings, models, schedulers, opt_fn, trainer_params, params, n_iter)
        with background.held(), leave_report(self.settings), hold_run(call):
            with call.until_out_of_time():
                open_data(call)
                dry_run(call)
                make_plan(call)
                begin(call)
                if not call.is_complete:
                    with training(call, self._stop_reason, self._make_race) as sweep:
                        sweep.run()
                elif self._stop_reason is not None:
                    # A study hears of the folds of a run that was complete before.
                    self._stop_reason(call.bundle.plan, call.run.reader.results())
                if self.settings.baseline not in (None, "none"):
                    from asynckfold.api.baseline_timing import time_serial_loop

                    time_serial_loop(call)
                call.signals.check()
                keep_pictures(call.run, call.data)
            return self._results(call)

    def _results(self, call: Call) -> CVResults:
        """Read what was recorded, judge failures, and refit the best candidate if asked for."""
        settings = self.settings
        stored = load_results(call.run.reader, settings.error_value)
        stored = _view(stored, call.recipe.candidates)
        results = with_models(stored, settings, call.recipe, call.samples)
        write_out_of_fold(results)
        self._judge(results, call.display)
        if text := unlearned(stored, call.run.reader.splits()[1]):
            call.display.note(text)
        if settings.refit and not call.signals.stop_requested():
            self._refit(call, results)
        return results

    def _refit(self, call: Call, results: CVResults) -> None:
        """Train the best candidate, or the one that is named, on all samples."""
        from asynckfold.api.refit import chosen, chosen_epochs, names_one, on_all_samples

        run, refit, budget = call.run, self.settings.refit, self.settings.time_budget_s
        best = chosen(results, refit)
        if best is None:
            who = f"{refit} does not have" if names_one(refit) else "no candidate has"
            run.event("refit", f"nothing was refitted: {who} a score on every fold")
            return
        if budget is not None:
            budget = max(0.001, budget - (time.monotonic() - call.started))
        call.display.note(f"now {best.name} on all {results.n_samples:,} samples")
        alone, parts = copy.copy(self), call.grid.given
        model, schedule = base_of(best.model), base_of(best.lr_schedule)
        epochs = chosen_epochs(self.settings, results, best)
        alone.settings = on_all_samples(self.settings, best, budget, epochs)
        train = functools.partial(
            alone,
            {model: parts.models[model]},
            {schedule: parts.lr_schedules[schedule]},
            parts.opt_fn,
            call.trainer_params,
            params=call.grid.params_for(values_of(best.model, best.lr_schedule)),
        )
        try:
            try:
                refitted = train()
            except PlanMismatchError:
                # Of folds that grew, callbacks may choose other epochs.
                alone.settings = replace(alone.settings, resume="never")
                refitted = train()
        except InterruptedRunError as interrupt:
            # Out of time before there was a plan: the results of the folds stay.
            if interrupt.exit_code != OUT_OF_TIME:
                raise
            return
        except (AllJobsFailedError, JobFailedError) as error:
            text = f"{best.name} failed on all samples; the results of the folds stay"
            run.event("refit", text)
            raise RefitFailedError(f"{text}: {error}") from error
        if not refitted.counts["pending"]:
            place = refitted.root_dir.relative_to(run.root).as_posix()
            size, seconds = f"{results.n_samples:,}", f"{refitted.seconds:.1f}"
            why = ", selected by refit," if results._select is not None else ""
            text = f"{best.name}{why} was trained on all {size} samples in {seconds} s: {place}"
            if text not in {event.text for event in run.reader.events()}:
                run.event("refit", text)

    @checked("AsyncKFold.plan")
    def plan(
        self,
        models: Any,
        schedulers: Any = None,
        opt_fn: Callable[[Any], Any] | None = None,
        trainer_params: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        n_iter: int | None = None,
    ) -> tuple[Plan, tuple[Fold, ...]]:
        """Return the jobs and folds of a call with these arguments, without starting anything.

        Returns
        -------
        plan : Plan
            Its jobs, without what only a dry run finds.
        folds : tuple of Fold
            The samples that would be held out.
        """
        call = check(self.settings, models, schedulers, opt_fn, trainer_params, params, n_iter)
        call.machine, call.display = self.settings.present_machine(), Display(0)
        code = of_run(call.recipe, self.settings).parts
        # No worker starts unless one must read.
        pool = functools.cache(lambda: call.stack.enter_context(lent(self.settings.nice)))
        with listening() as call.signals, call.stack, prepared(call, pool) as call.data:
            call.folds = folds_of(self.settings, call.data)
            return replace(make_draft(call), recipe={"code": code}), call.folds

    @checked("AsyncKFold.forecast")
    def forecast(
        self,
        models: Any,
        schedulers: Any = None,
        opt_fn: Callable[[Any], Any] | None = None,
        trainer_params: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        n_iter: int | None = None,
    ) -> Forecast:
        """Predict a call: do its dry run and probes, and decide as it would.

        Trains nothing and writes nothing. A run in the folder keeps its decisions.

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
        call = check(self.settings, models, schedulers, opt_fn, trainer_params, params, n_iter)
        with look_into(call):
            open_data(call)
            dry_run(call)
            make_plan(call)
            return look_ahead(call)

    def _judge(self, results: CVResults, display: Display) -> None:
        """Warn of failed jobs, or raise."""
        plan, by_job = results.whole
        ended = by_job.values()
        failed = [item for item in ended if item.is_failure]
        if not failed:
            return
        lines = "\n".join(failure_lines(results))
        text = f"{len(failed)} of {len(plan.jobs)} jobs failed:\n{lines}"
        first = f"{text}\n{own_frames(failed[0].traceback)}".rstrip()
        if self.settings.error_score == "raise":
            raise JobFailedError(first)
        if not results.counts["done"] and len(ended) == len(plan.jobs):
            raise AllJobsFailedError(first)
        display.warn(text, JobsFailedWarning)


AsyncKFold.__doc__ = with_parameters(AsyncKFold.__doc__, Settings)


def _view(results: CVResults, candidates: Sequence[tuple[str, str]]) -> CVResults:
    """Return the results of these candidates, of a run that may have more."""
    whole, ended = results.whole
    jobs = [job for job in whole.jobs if (job.model, job.lr_schedule) in {*candidates}]
    if len(jobs) == len(whole.jobs):
        return results
    plan = whole.view(replace(whole, jobs=tuple(jobs)))
    known = {job.id: ended[job.id] for job in jobs if job.id in ended}
    outer = replace(plan.outer, folds=results.plan.folds)
    return replace(
        results,
        plan=outer,
        results={job.id: known[job.id] for job in outer.jobs if job.id in known},
        baseline=None,  # that of the whole run
        _whole=(plan, known) if plan.nested else None,
    )


def failure_lines(results: CVResults) -> Iterator[str]:
    """Yield one line for each way in which jobs failed, with the first of these jobs."""
    grouped: dict[str, list[str]] = {}
    for item in results.whole[1].values():
        if item.is_failure:
            grouped.setdefault(cause(item.error), []).append(item.job_id)
    for error, names in grouped.items():
        more = ", …" if len(names) > 3 else ""
        yield f"  {len(names)} × {error} ({', '.join(names[:3])}{more})"


def write_out_of_fold(results: CVResults) -> None:
    """Write ``oof/<candidate>.npz`` for each complete candidate, if outputs are kept.

    Each holds ``outputs``, aligned with the dataset, in the shape of `CVResults.oof`; or, of a
    model of several outputs, each of them: ``outputs.mass``, or ``outputs.0`` in a tuple. None for
    outputs whose number differs between samples.
    """
    if without_outputs(results.results):
        return
    folder = results.root_dir / "oof"
    outputs = results.oof
    for row in results.candidates:
        path = folder / f"{slug(row.model)}-{slug(row.lr_schedule)}.npz"
        # A list is one of trees of any shape.
        if isinstance(outputs.get(row.name), list):
            continue
        if row.complete and (path.is_symlink() or not path.is_file()):
            make_folder(folder)
            buffer = io.BytesIO()
            parts = leaves_of(outputs[row.name])
            arrays = {".".join(["outputs", *map(str, path)]): array for path, array in parts}
            np.savez_compressed(buffer, **arrays)
            write_whole(path, buffer.getvalue())
