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
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import DONE, Result
from asynckfold.results.cv_results import CVResults
from asynckfold.system.files import slug

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
    return _Runs(kfold, study, call, distributions).until(n_trials)


class _Runs:
    """The runs of a study's trials."""

    def __init__(
        self, kfold: Any, study: Any, call: tuple[Any, ...], distributions: Mapping[str, Any]
    ) -> None:
        self._kfold, self._study, self._call = kfold, study, call
        self._distributions = dict(distributions)
        seconds = kfold.settings.time_budget_s
        self._ends = math.inf if seconds is None else time.monotonic() + seconds

    def until(self, n_trials: int) -> CVResults | None:
        """Run trials until so many are finished, or the time is over."""
        for trial in self._unfinished():
            if not self._run(trial):
                return self._best()
        while self._finished() < n_trials and time.monotonic() < self._ends:
            trial = self._study.ask(self._distributions)
            trial.set_user_attr(RUN, self._folder(trial.params))
            if not self._run(trial):
                break
        return self._best()

    def _finished(self) -> int:
        return sum(item.state.is_finished() for item in self._study.get_trials(deepcopy=False))

    def _unfinished(self) -> Iterator[Any]:
        """Yield the trials of a killed process, or of one that still runs them."""
        import optuna

        running = (optuna.trial.TrialState.RUNNING,)
        for item in self._study.get_trials(deepcopy=False, states=running):
            if item.user_attrs.get(RUN) == self._folder(item.params):
                yield optuna.trial.Trial(self._study, item._trial_id)

    def _run(self, trial: Any) -> bool:
        """Run a trial to its end; False if the time is over."""
        watched, steps = copy.copy(self._kfold), _Steps(trial)
        watched._stop_reason = steps
        watched.settings = replace(self._settings(trial.params), verbose=0, report=False)
        watched.settings = replace(watched.settings, refit=False, baseline=None)
        try:
            results = self._called(watched, trial.params)
        except RunHeldError:
            # Another process runs it, and tells the study of it.
            return True
        except InterruptedRunError as interrupt:
            if interrupt.exit_code == OUT_OF_TIME:
                return False
            raise
        except (AllJobsFailedError, JobFailedError):
            self._tell(trial, math.nan)
            return True
        except InputError:
            self._tell(trial, math.nan)
            raise
        if steps.pruned:
            self._tell(trial, None)
        elif results.counts["pending"]:
            return False
        else:
            score = results.candidates[0].mean(results.plan.scoring[0])
            self._tell(trial, _sign(self._study) * score)
        return True

    def _tell(self, trial: Any, score: float | None) -> None:
        """Tell the study of a trial: its score, NaN where it failed, None where it was pruned."""
        from optuna.trial import TrialState

        state = None if score is not None else TrialState.PRUNED
        if score is not None and math.isnan(score):
            score, state = None, TrialState.FAIL
        # A process that took over the trial may have finished it.
        self._study.tell(trial, score, state=state, skip_if_finished=True)

    def _best(self) -> CVResults | None:
        import optuna

        complete = (optuna.trial.TrialState.COMPLETE,)
        if not self._study.get_trials(deepcopy=False, states=complete):
            return None
        kfold, params = copy.copy(self._kfold), self._study.best_trial.params
        kfold.settings = self._settings(params)
        return self._called(kfold, params)

    def _called(self, kfold: Any, params: Mapping[str, Any]) -> CVResults:
        given = {name: [value] for name, value in params.items()}
        results: CVResults = kfold(*self._call, params=given)
        return results

    def _settings(self, params: Mapping[str, Any]) -> Any:
        settings = self._kfold.settings
        left = None if math.isinf(self._ends) else max(0.001, self._ends - time.monotonic())
        root = settings.root / self._folder(params)
        return replace(settings, root_dir=root, time_budget_s=left)

    def _folder(self, params: Mapping[str, Any]) -> str:
        return slug(",".join(f"{name}={text_of(params[name])}" for name in sorted(params)))


class _Steps:
    """Reports the folds of a trial in their order, whichever ends first, and asks to prune."""

    def __init__(self, trial: Any) -> None:
        self._trial, self.pruned = trial, ""
        self._sign, self._by_fold = _sign(trial.study), _compares_folds(trial.study.pruner)
        known = trial.study.get_trials(deepcopy=False)[trial.number]
        self._reported = len(known.intermediate_values)

    def __call__(self, plan: Plan, results: Mapping[str, Result]) -> str:
        scores: list[float] = []
        for job in plan.jobs:
            result = results.get(job.id)
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
