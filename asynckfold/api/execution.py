"""Carries out a plan: writes it, trains its jobs and scores them."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from asynckfold.api.context import Call, interrupted
from asynckfold.api.progress import SweepProgress
from asynckfold.api.report import draw_meanwhile
from asynckfold.api.score_checks import accumulators
from asynckfold.errors import InputError, StorageError
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.folds import Fold, outer_folds
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.reproducibility import THREADS
from asynckfold.jobs.result import DONE, FAILED, Result, job_by_id
from asynckfold.jobs.trainer_params import SEVERAL
from asynckfold.planning import workload
from asynckfold.planning.feasibility import why_not_kept
from asynckfold.results.candidates import candidates
from asynckfold.results.scoring import Score, resolve
from asynckfold.results.utilization import packing_of
from asynckfold.results.verdict import make_verdict
from asynckfold.store import Interim, RunStore, refuse_other
from asynckfold.sweep.attempts import Finish
from asynckfold.sweep.loop import Sweep

PUBLISH_SECONDS = 2.0
"""Between two interim results for other programs, and two pages."""

SHORT_SECONDS = 5.0
"""A shorter run has no page before its end."""

MOST_EPOCHS, MOST_JOBS = 2000, 200
"""Above these, curves of running jobs are not recorded, and pages only drawn by who looks at them:
a longer pause would let cores idle."""


StopReason = Callable[[Plan, Mapping[str, Result]], str]
"""(plan, results so far by job) → why the run is to end before its other jobs; "" to go on."""


def begin(call: Call) -> None:
    """Write the plan; keep an earlier run that makes room for it."""
    from asynckfold.training.checkpoint import save_initial_weights

    settings, store = call.settings, call.run
    # Last, so that a refusal leaves the earlier run where it is.
    is_anew = settings.resume == "never" and store.reader.has_plan
    earlier = store.file.start_over() if is_anew else None
    words = settings.about.get("cli")
    # A script's arguments may be secrets.
    script = [Path(name).name for name in sys.argv[:1]] + ["..."] * bool(sys.argv[1:])
    about = {
        "machine": call.machine.describe(),
        "command": ["asynckfold", *words] if words else script,
        **settings.about,
        "decision": call.choice,
        "leak checks": call.data.leak_checks,
    }
    longer = store.begin(
        call.plan,
        call.folds,
        call.data.targets,
        about,
        free=settings.free,
        steady=_steady(call),
        rescored=_rescored(call),
    )
    save_initial_weights(store.root, call.recipe)
    if earlier is not None:
        note = f"the earlier run in {store.root} is kept as {earlier}"
        store.event("plan", note)
        call.display.note(note)
    if longer:
        store.event("plan", longer)
        call.display.note(longer)
    _log(call)
    _fail_refused(call)
    plan = store.reader.plan
    call.bundle = replace(
        call.bundle,
        plan=plan,
        accumulators=accumulators(call, plan),
        earlier=store.reader.earlier_plans,
    )
    requests = workload.requests(call.choice, call.work, call.groups.groups)
    call.requests, known, plan = requests, store.reader.results(), store.plan
    results = [known[job.id] for job in plan.jobs if job.id in known]
    call.display.doing("")
    # A few samples may be left out.
    batches = {
        job.id: math.ceil(len(call.bundle.fold_of(job).train) / plan.batch_size)
        for job in plan.jobs
    }
    outside = plan.jobs_outside(settings.part)
    shown = replace(plan, jobs=tuple(job for job in plan.jobs if job.id not in outside))
    results = [item for item in results if item.job_id not in outside]
    draws = settings.report and len(plan.jobs) <= MOST_JOBS
    publish = _Publisher(store, outer_folds(call.folds), draws)
    call.display.begin(shown, requests, results, batches, publish)
    call.is_complete = len(results) == len(shown.jobs)


def _rescored(call: Call) -> list[Result]:
    """Return the results of a run with the scores that the call adds.

    Raises
    ------
    InputError
        They cannot be computed, or the call lacks scores of the run that jobs are to have.
    """
    stored, here, store = call.stored, call.work.plan, call.run
    if stored is None or {*stored.scoring} == {*here.scoring}:
        return []
    refuse_other(store.root, stored, call.plan, call.settings.free, call.folds)
    added = [name for name in here.scoring if name not in stored.scoring]
    lacking = ", ".join(name for name in stored.scoring if name not in here.scoring)
    ended = store.reader.finished()
    is_longer = here.params.epochs > stored.params.epochs
    if lacking and (is_longer or any(ended.get(job.id, FAILED) == FAILED for job in here.jobs)):
        rule = "jobs that are trained must have the scores that the run has"
        remedy = f"Pass these in scoring, too: {', '.join(stored.scoring)}."
        raise InputError.one(rule, f"scoring without {lacking}", remedy)
    score, rescored = _Scorer(call), list[Result]()
    for result in store.reader.results().values() if added else ():
        if result.status != DONE:
            continue
        scored = score(result)
        if scored.status == FAILED:
            is_kept = result.outputs is not None
            rule = "scores that are added to a run are computed from its out-of-fold outputs"
            received = f"{', '.join(added)}, and of {result.job_id} " + (
                scored.error if is_kept else "no outputs were kept"
            )
            remedy = "Use another folder or resume='never', which train again" + (
                "." if is_kept else ", with a greater keep_outputs_gib."
            )
            raise InputError.one(rule, received, remedy)
        rescored.append(replace(result, scores={**result.scores, **scored.scores}))
    return rescored


def _steady(call: Call) -> set[str]:
    """Return the candidates whose training does not depend on how many epochs are planned."""
    if call.stored is None:
        return set()
    from asynckfold.training.callbacks import BestWeights, EarlyStopping, GradientNorm

    settings, recipe = call.settings, call.recipe
    known = (BestWeights, EarlyStopping, GradientNorm)
    is_ours = all(isinstance(item, known) for item in settings.called_back)
    codes = (recipe.fit_fn, recipe.training_step, recipe.validation_step)
    if not is_ours or any(codes) or call.params.trainer in SEVERAL:
        return set()
    there, here = (plan.recipe.get("settings", {}) for plan in (call.stored, call.plan))
    # Of steps by batch these settings do not tell.
    by_batch = call.params.lr_step == "batch"
    schedules = recipe.lr_schedules.items()
    fitted = {name for name, made in schedules if isinstance(made, str) and made != "constant"}
    names = {
        candidate_name(model, schedule)
        for model, schedule in recipe.candidates
        if not (by_batch and schedule in fitted)
    }
    return {name for name in names if name in there and here.get(name) == there[name]}


def _log(call: Call) -> None:
    """Record the notes on the call, and the decisions."""
    store, threads, plan, facts = call.run, call.choice, call.work.plan, call.facts
    notes = [call.machine.gpu_note, threads.devices, *call.data.notes]
    notes += [*call.notes, *facts.notes]
    if why := _why_not_kept(call):
        how = "batch by batch" if plan.by_batch else "all the same"
        notes.append(
            f"outputs of held-out samples are not kept: {why}; each fold is scored {how}, but "
            "there are no results.oof and no figures of predictions"
        )
    for note in filter(None, notes):
        store.event("note", note)
        call.display.note(note)
    for candidate, trace in facts.failures.items():
        store.event("dry-run", trace.strip().splitlines()[-1], candidate)
    logged = {event.text for event in store.reader.events()}
    for kind, texts in (("decision", threads.why), ("fusing", call.groups.why)):
        for model, sentence in texts.items():
            text = f"{model}: {sentence}"
            if text not in logged:
                store.event(kind, text)
            is_slower = kind == "decision" and 0 < threads.costs[model].processes_gain < 1
            if kind == "fusing" or is_slower:
                call.display.note(text, verbose=2 if kind == "fusing" else 1)
    added = 0 if call.stored is None else len(plan.jobs) - len(call.stored.jobs)
    if added > 0:
        store.event("plan", f"{added} jobs were added to the plan")


@contextmanager
def training(
    call: Call,
    stop_reason: StopReason | None = None,
    make_race: Callable[[Plan], Any] | None = None,
) -> Iterator[Sweep]:
    """Yield what trains the jobs that have no result yet, with its engine started."""
    settings, store, make = call.settings, call.run, call.make
    finish: Finish = _Scorer(call)
    if stop_reason is not None:
        finish = _stopping(call, finish, stop_reason)
    plan = call.bundle.plan
    race = None if make_race is None else make_race(plan)
    if plan.race is not None:
        from asynckfold.sweep.race import Race

        race = Race(plan, call.folds)
    store.set_software({THREADS: plan.threads_text, **call.software})
    store.packing(time.monotonic() - call.started)
    try:
        with make(call.bundle) as engine:
            yield Sweep(
                store,
                engine,
                make.inbox,
                call.requests,
                finish,
                call.display,
                signals=call.signals,
                max_wait=make.max_wait,
                yields=settings.yield_to_others,
                race=race,
                outside=store.plan.jobs_outside(settings.part),
            )
        achieved = packing_of(store.reader)
        if achieved is not None:
            from asynckfold.results.report.sentences import packing as packing_text

            call.display.note(packing_text(achieved), verbose=2)
    except KeyboardInterrupt as interrupt:
        with suppress(StorageError):
            store.event("interrupted", str(interrupt) or "interrupted")
        how = "the same call"
        if settings.resume == "never":
            how = "the same call with resume='auto'"
        raise interrupted(
            interrupt, f"finished jobs are stored in {store.root}; {how} continues"
        ) from interrupt
    finally:
        store.packing(None)


def _fail_refused(call: Call) -> None:
    """Record the jobs of candidates that break a rule as failed: they never start."""
    store, refused = call.run, call.facts.refused
    ended, now = store.reader.finished(), store.now()
    with store.together():
        for job in store.reader.plan.jobs:
            if job.candidate in refused and job.id not in ended:
                error = refused[job.candidate]
                number = store.start_attempt(job.id, (), 0, "cpu", 0.0)
                result = Result(job.id, number, FAILED, error=error, traceback=error, threads=0)
                store.record(replace(result, started=now, ended=now))


@dataclass(eq=False)
class _Publisher:
    """Records the interim results of a sweep every few seconds, and draws its page anew."""

    store: RunStore
    folds: Sequence[Fold]
    draws: bool  # the page, too
    began: float = field(default_factory=time.monotonic)
    due: float = 0.0
    results: int = 0
    verdict: tuple[str, ...] = field(default=())

    def __call__(self, progress: SweepProgress) -> None:
        begun = time.monotonic()
        if begun < self.due and not progress.is_over:
            return
        if len(progress.results) != self.results or progress.is_over:
            self.results, plan = len(progress.results), progress.plan.outer
            # Hours of training must not be lost for a sentence.
            with suppress(Exception):
                rows = candidates(plan, progress.results)
                self.verdict = make_verdict(rows, plan.scoring[0], self.folds).sentences
        epochs = {name: tuple(each) for name, each in progress.epochs.items()}
        if sum(map(len, epochs.values())) > MOST_EPOCHS:
            epochs = {}
        self.store.set_interim(
            Interim(
                progress.steps_done,
                progress.steps,
                progress.seconds_left(),
                self.verdict,
                progress.best(),
                tuple(progress.lines()),
                epochs,
            )
        )
        if self.draws and not progress.is_over and begun - self.began > SHORT_SECONDS:
            draw_meanwhile(self.store.reader)
        # At most a share of 5 % of the time, however many candidates there are.
        ended = time.monotonic()
        self.due = ended + max(PUBLISH_SECONDS, 20 * (ended - begun))


@dataclass(frozen=True, eq=False)
class _Scorer:
    """Scores a result on its held-out fold, and drops outputs that are too large to keep.

    Where the plan scores by batch, the job's worker has scored it; a loop of the user may have
    reported some of the scores.
    """

    call: Call

    def __call__(self, result: Result) -> Result:
        if result.status != DONE:
            return result
        job, outputs, scores = self._jobs[result.job_id], result.outputs, dict[str, float]()
        data, valid = self.call.data, self.call.bundle.fold_of(job).valid
        targets = data.targets[valid]
        weights = () if data.sample_weight is None else (data.sample_weight[valid],)
        try:
            for name, score in self._scores[job.model].items():
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    if name in result.scores:
                        scores[name] = result.scores[name]
                    elif outputs is None:
                        raise ValueError(f"{name} not measured in the last epoch")
                    else:
                        scores[name] = float(score(targets, outputs, *weights))
                for text in _score_notes(name, scores[name], caught):
                    self.call.run.event("score", text, result.job_id)
        except Exception as error:  # noqa: BLE001
            # A score may be a function of the user: its failure is the job's.
            line = f"scoring raised {type(error).__name__}: {error}"
            return replace(result, status=FAILED, error=line, traceback=line)
        keeps = self._keeps and job.inner is None
        return replace(result, scores=scores, outputs=outputs if keeps else None)

    @cached_property
    def _jobs(self) -> dict[str, Job]:
        return job_by_id(self.call.bundle.plan)

    @cached_property
    def _keeps(self) -> bool:
        return not _why_not_kept(self.call)

    @cached_property
    def _scores(self) -> dict[str, dict[str, Score]]:
        """Scores by model: their outputs may have different scales."""
        plan, settings = self.call.bundle.plan, self.call.settings
        return {
            model: resolve(settings.scoring, plan.objective_of(model), settings.transform)
            for model in dict.fromkeys(job.model for job in plan.jobs)
        }


def _stopping(call: Call, finish: Finish, stop_reason: StopReason) -> Callable[[Result], Result]:
    """Let a caller end the run, given the scores so far."""
    plan, results = call.bundle.plan, dict(call.run.reader.results())

    def look() -> None:
        if reason := stop_reason(plan, results):
            call.signals.end(reason)

    def finish_and_look(result: Result) -> Result:
        results[result.job_id] = finished = finish(result)
        look()
        return finished

    look()
    return finish_and_look


def _score_notes(
    name: str, value: float, caught: Sequence[warnings.WarningMessage]
) -> Iterator[str]:
    """Yield what the log says about a score: undefined values, and warnings."""
    texts = dict.fromkeys(" ".join(str(item.message).split()) for item in caught)
    if np.isnan(value):
        yield f"{name} is undefined: {'; '.join(texts) or 'no reason was given'}"
    else:
        yield from (f"{name}: {text}" for text in texts)


def _why_not_kept(call: Call) -> str:
    """Return why outputs of held-out samples are not kept, ``""`` where they are."""
    samples, most_gib = call.facts.output_samples, call.settings.keep_outputs_gib
    return why_not_kept(call.work.plan, call.folds, samples, most_gib)
