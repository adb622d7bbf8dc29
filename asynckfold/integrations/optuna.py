"""An Optuna study that drives runs by ask and tell: a trial is a candidate, its folds are steps.

::

    study.ask ── params ──► run in a folder named by the params ── all folds ──► study.tell
                              │ after each fold: trial.report(mean so far, or its score)
                              └─ trial.should_prune ──► the run ends; its other folds stay pending

A run in a folder continues, so a study that was killed does. Trials with the same parameters share
a run: nothing is trained twice.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from asynckfold.errors import (
    OUT_OF_TIME,
    AllJobsFailedError,
    InputError,
    InterruptedRunError,
    JobFailedError,
    Problem,
    RunHeldError,
    refuse,
)
from asynckfold.jobs.candidate_names import text_of
from asynckfold.jobs.grid import Exact
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import CANCELLED, DONE, Result
from asynckfold.results.cv_results import CVResults
from asynckfold.system.files import slug
from asynckfold.system.machine import resolve_n_jobs

RUN = "asynckfold_run"
"""Attribute of a trial: the folder of its run, below the root of the study."""


def optimize(
    kfold: Any,
    study: Any,
    models: Any,
    schedulers: Any,
    opt_fn: Callable[..., Any],
    trainer_params: Mapping[str, Any] | None = None,
    *,
    params: Mapping[str, Any],
    n_trials: int,
    n_parallel: int | None = None,
) -> CVResults | None:
    """Let a study choose parameters of one model and LR schedule, fold by fold.

    Parameters
    ----------
    kfold : AsyncKFold
        Its `root_dir` gets a folder for each trial. Its `time_budget_s` is that of all trials, and
        only the best candidate is refitted, reported and compared with its `baseline`.
    study : optuna.Study
        Of one objective: the score that ranks where it is maximised, else the negative of it, such
        as the mean squared error for ``neg_mean_squared_error``.
    models, schedulers, opt_fn, trainer_params
        As for a call of `kfold`; one model and one LR schedule.
    params : dict of str to distribution or list
        Distributions of ``optuna.distributions``, or lists of values, by name of the parameters of
        the model, `opt_fn` or LR schedule.
    n_trials : int
        Finished trials that the study is to have in the end: the same call continues it.
    n_parallel : int, optional
        Trials that are asked for together and trained as candidates of one run, whose jobs share
        one queue. They end in the order of their numbers. Default: as many as keep the cores busy.

    Returns
    -------
    CVResults or None
        Of the best trial so far; None if none is complete.

    Raises
    ------
    InputError
        Nothing was started.
    """
    if kfold.settings.resume != "auto":
        rule, received = "a study continues its runs", f"resume={kfold.settings.resume!r}"
        raise InputError.one(rule, received, "Leave resume out, or use another root_dir.")
    call = (models, schedulers, opt_fn, trainer_params)
    distributions = {name: _distribution(value) for name, value in params.items()}
    first = {name: [_example(item)] for name, item in distributions.items()}
    plan, _ = kfold.plan(*call, params=first)
    refuse(_candidate_problems(plan))
    most = _busy(kfold, len(plan.jobs)) if n_parallel is None else n_parallel
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        rule = "n_parallel must be a whole number of at least 1"
        raise InputError.one(rule, repr(most), "Leave it out, or pass 1.")
    return _Runs(kfold, study, call, distributions).until(n_trials, most)


def _busy(kfold: Any, folds: int) -> int:
    """Return how many trials have half as many jobs again as there are cores."""
    settings = kfold.settings
    if settings.engine == "serial" or not settings.parallelize:
        return 1
    cores = resolve_n_jobs(settings.n_jobs, settings.cores) or settings.cores
    return math.ceil(1.5 * cores / folds)


class _Runs:
    """The runs of a study's trials."""

    def __init__(
        self, kfold: Any, study: Any, call: tuple[Any, ...], distributions: Mapping[str, Any]
    ) -> None:
        self._kfold, self._study, self._call = kfold, study, call
        self._distributions = dict(distributions)
        seconds = kfold.settings.time_budget_s
        self._ends = math.inf if seconds is None else time.monotonic() + seconds

    def until(self, n_trials: int, n_parallel: int) -> CVResults | None:
        """Run trials, so many at once, until so many are finished, or the time is over."""
        begun = [item for item in self._trials() if not item.state.is_finished()]
        # Of a killed process, or of one that still runs them.
        for folder in dict.fromkeys(item.user_attrs.get(RUN, "") for item in begun):
            if folder and not self._run(folder):
                return self._best()
        while time.monotonic() < self._ends:
            left = n_trials - sum(item.state.is_finished() for item in self._trials())
            if left <= 0 or not self._run(self._asked(min(left, n_parallel))):
                break
        return self._best()

    def _trials(self, folder: str = "") -> list[Any]:
        trials = self._study.get_trials(deepcopy=False)
        return [item for item in trials if not folder or item.user_attrs.get(RUN) == folder]

    def _asked(self, count: int) -> str:
        """Ask for trials, and return the folder of their run."""
        first = self._study.ask(self._distributions)
        folder = _folder(first.params) if count == 1 else f"trials-{first.number}"
        first.set_user_attr(RUN, folder)
        for _ in range(count - 1):
            self._study.ask(self._distributions).set_user_attr(RUN, folder)
        return folder

    def _run(self, folder: str) -> bool:
        """Run the trials of a folder to their end; False if the time is over."""
        from optuna.trial import Trial

        running = [item for item in self._trials(folder) if not item.state.is_finished()]
        steps = [_Steps(Trial(self._study, item._trial_id)) for item in running]
        if not steps:
            return True
        watched = copy.copy(self._kfold)
        if len(self._values(folder)) == 1:
            watched._stop_reason = steps[0]
        else:
            watched._make_race = functools.partial(_Pruning, steps)
        watched.settings = replace(self._settings(folder), verbose=0, report=False)
        watched.settings = replace(watched.settings, refit=False, baseline=None)
        try:
            results = self._called(watched, folder)
        except RunHeldError:
            # Another process runs it, and tells the study of it.
            return True
        except InterruptedRunError as interrupt:
            if interrupt.exit_code == OUT_OF_TIME:
                return False
            raise
        except (AllJobsFailedError, JobFailedError):
            self._tell(steps, math.nan)
            return True
        except InputError:
            self._tell(steps, math.nan)
            raise
        if results.counts["pending"] and not (watched._stop_reason and steps[0].pruned):
            return False
        for step in steps:
            row = next(
                row for row in results.candidates if step.params.items() <= row.params.items()
            )
            step(_of_candidate(results.plan, row.name), results.results)
            score = row.mean(results.plan.scoring[0])
            self._tell([step], None if step.pruned else _sign(self._study) * score)
        return True

    def _tell(self, steps: Sequence[_Steps], score: float | None) -> None:
        """Tell the study of trials: their score, NaN where they failed, None for pruned ones."""
        from optuna.trial import TrialState

        state = None if score is not None else TrialState.PRUNED
        if score is not None and math.isnan(score):
            score, state = None, TrialState.FAIL
        for step in steps:
            # A process that took over the trial may have finished it.
            self._study.tell(step.number, score, state=state, skip_if_finished=True)

    def _best(self) -> CVResults | None:
        import optuna

        complete = (optuna.trial.TrialState.COMPLETE,)
        if not self._study.get_trials(deepcopy=False, states=complete):
            return None
        kfold, best = copy.copy(self._kfold), self._study.best_trial
        folder = best.user_attrs.get(RUN, _folder(best.params))
        kfold.settings = self._settings(folder)
        return self._called(kfold, folder)

    def _called(self, kfold: Any, folder: str) -> CVResults:
        first, *others = values = self._values(folder)
        one = {name: [value] for name, value in first.items()}
        results: CVResults = kfold(*self._call, params=Exact(values) if others else one)
        return results

    def _values(self, folder: str) -> list[dict[str, Any]]:
        """Return the distinct parameters of the trials of a folder."""
        return list({_folder(item.params): item.params for item in self._trials(folder)}.values())

    def _settings(self, folder: str) -> Any:
        settings = self._kfold.settings
        left = None if math.isinf(self._ends) else max(0.001, self._ends - time.monotonic())
        return replace(settings, root_dir=settings.root / folder, time_budget_s=left)


def _folder(params: Mapping[str, Any]) -> str:
    return slug(",".join(f"{name}={text_of(params[name])}" for name in sorted(params)))


def _of_candidate(plan: Plan, name: str) -> Plan:
    return replace(plan, jobs=tuple(job for job in plan.jobs if job.candidate == name))


class _Pruning:
    """Leaves out the jobs of trials that are pruned, while others of their run go on."""

    def __init__(self, steps: Sequence[_Steps], plan: Plan) -> None:
        self._ended: dict[str, Result] = {}
        self._out: set[str] = set()
        names = {job.candidate: job.params for job in plan.jobs}
        self._steps = [
            (step, _of_candidate(plan, name))
            for step in steps
            for name, params in names.items()
            if params == step.params
        ]

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._out

    def take(self, job_id: str, status: str, scores: Mapping[str, float]) -> None:
        """Note the result of a job."""
        self._ended[job_id] = Result(job_id, 0, status, scores)

    def losers(self) -> Iterator[tuple[str, str]]:
        """Yield each job that is left out from now on, with the reason."""
        for step, plan in self._steps:
            reason = step(plan, self._ended)
            for job in plan.jobs if reason else ():
                if job.id not in self._ended and job.id not in self._out:
                    self._out.add(job.id)
                    yield job.id, reason


class _Steps:
    """Reports the folds of a trial in their order, whichever ends first, and asks to prune."""

    def __init__(self, trial: Any) -> None:
        self._trial, self.pruned = trial, ""
        self.number, self.params = trial.number, trial.params
        self._sign, self._by_fold = _sign(trial.study), _compares_folds(trial.study.pruner)
        known = trial.study.get_trials(deepcopy=False)[trial.number]
        self._reported = len(known.intermediate_values)

    def __call__(self, plan: Plan, results: Mapping[str, Result]) -> str:
        scores: list[float] = []
        for job in plan.jobs:
            result = results.get(job.id)
            if result is not None and result.status == CANCELLED and not self.pruned:
                self.pruned = result.error or "pruned before"
            if self.pruned or result is None or result.status != DONE:
                break
            scores.append(self._sign * result.scores[plan.scoring[0]])
            # The last report of a trial that is continued may have been followed by no answer.
            if len(scores) >= self._reported:
                self._report(scores, len(plan.jobs))
        return self.pruned

    def _report(self, scores: Sequence[float], count: int) -> None:
        done = len(scores)
        if done > self._reported:
            self._trial.report(scores[-1] if self._by_fold else sum(scores) / done, done - 1)
            self._reported = done
        if done < count and self._trial.should_prune():
            self.pruned = f"pruned after {done} of {count} folds"


def _sign(study: Any) -> int:
    """Return what turns a score, of which greater is better, into what the study compares."""
    from optuna.study import StudyDirection

    return -1 if study.direction == StudyDirection.MINIMIZE else 1


def _compares_folds(pruner: Any) -> bool:
    """Whether a pruner pairs the steps of trials, and so needs the score of each fold alone."""
    from optuna.pruners import WilcoxonPruner

    # A PatientPruner holds the one that decides.
    return isinstance(getattr(pruner, "_wrapped_pruner", pruner), WilcoxonPruner)


def _distribution(value: Any) -> Any:
    from optuna.distributions import BaseDistribution, CategoricalDistribution

    return value if isinstance(value, BaseDistribution) else CategoricalDistribution(list(value))


def _example(distribution: Any) -> Any:
    choices: Sequence[Any] = getattr(distribution, "choices", ())
    return choices[0] if choices else distribution.low


def _candidate_problems(plan: Plan) -> Iterator[Problem]:
    names = sorted({job.candidate for job in plan.jobs})
    if len(names) > 1:
        rule = "a trial is one candidate, of one model and LR schedule"
        yield Problem(rule, ", ".join(names), "Make a study of each.")
