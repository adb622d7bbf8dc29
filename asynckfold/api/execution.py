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
from typing import TYPE_CHECKING

import numpy as np

from asynckfold.api.call import accumulators
from asynckfold.api.context import Call, interrupted
from asynckfold.api.progress import SweepProgress
from asynckfold.errors import StorageError
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.reproducibility import CPU, THREADS
from asynckfold.jobs.result import DONE, FAILED, Result, job_by_id
from asynckfold.planning import workload
from asynckfold.planning.feasibility import why_not_kept
from asynckfold.results.candidates import candidates
from asynckfold.results.scoring import Score, resolve
from asynckfold.results.utilization import packing_of
from asynckfold.results.verdict import make_verdict
from asynckfold.store import Interim, RunStore
from asynckfold.sweep.attempts import Finish
from asynckfold.sweep.loop import Sweep

if TYPE_CHECKING:
    pass

PUBLISH_SECONDS = 2.0
"""Between two interim results for other programs."""


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
    }
    store.begin(call.plan, call.folds, call.data.targets, about, free=settings.free)
    save_initial_weights(store.root, call.recipe)
    if earlier is not None:
        note = f"the earlier run in {store.root} is kept as {earlier}"
        store.event("plan", note)
        call.display.note(note)
    _log(call)
    _fail_refused(call)
    plan = store.reader.plan
    call.bundle = replace(call.bundle, plan=plan, accumulators=accumulators(call, plan))
    requests = workload.requests(call.choice, call.work, call.groups.groups)
    call.requests, results = requests, list(store.reader.results().values())
    call.display.doing("")
    # A few samples may be left out.
    batches = {
        job.id: math.ceil(len(call.bundle.fold_of(job).train) / plan.batch_size)
        for job in plan.jobs
    }
    call.display.begin(plan, requests, results, batches, _Publisher(store, call.folds))
    call.is_complete = len(results) == len(plan.jobs)


def _log(call: Call) -> None:
    """Record the notes on the call, and the decisions."""
    store, threads, plan, facts = call.run, call.choice, call.work.plan, call.facts
    notes = (
        *filter(None, [call.machine.gpu_note, threads.devices]),
        *(*call.data.notes, *call.notes, *facts.notes),
        *slow_notes(plan, call.software),
        *_kept_notes(call),
    )
    for note in notes:
        store.event("note", note)
        call.display.note(note)
    for candidate, trace in facts.failures.items():
        store.event("dry-run", trace.strip().splitlines()[-1], candidate)
    logged = {event.text for event in store.reader.events()}
    fusing = call.groups.why
    for kind, texts in (("decision", threads.why), ("fusing", fusing)):
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
def training(call: Call, stop_reason: StopReason | None = None) -> Iterator[Sweep]:
    """Yield what trains the jobs that have no result yet, with its engine started."""
    settings, store, make = call.settings, call.run, call.make
    finish: Finish = _Scorer(call)
    if stop_reason is not None:
        finish = _stopping(call, finish, stop_reason)
    store.set_software({THREADS: call.bundle.plan.threads_text, **call.software})
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
    """Records the interim results of a sweep every few seconds, for ``asynckfold status``."""

    store: RunStore
    folds: Sequence[Fold]
    due: float = 0.0
    results: int = 0
    verdict: tuple[str, ...] = field(default=())

    def __call__(self, progress: SweepProgress) -> None:
        begun = time.monotonic()
        if begun < self.due and not progress.is_over:
            return
        if len(progress.results) != self.results or progress.is_over:
            self.results, plan = len(progress.results), progress.plan
            # Hours of training must not be lost for a sentence.
            with suppress(Exception):
                rows = candidates(plan, progress.results)
                self.verdict = make_verdict(rows, plan.scoring[0], self.folds).sentences
        left = progress.seconds_left()
        self.store.set_interim(Interim(progress.steps_done, progress.steps, left, self.verdict))
        # At most a share of 5 % of the time, however many candidates there are.
        ended = time.monotonic()
        self.due = ended + max(PUBLISH_SECONDS, 20 * (ended - begun))


@dataclass(frozen=True, eq=False)
class _Scorer:
    """Scores a result on its held-out fold, and drops outputs that are too large to keep.

    Where the plan scores by batch, the job's worker has scored it.
    """

    call: Call

    def __call__(self, result: Result) -> Result:
        if result.status != DONE:
            return result
        job = self._jobs[result.job_id]
        if result.outputs is None:
            return self._scored_by_batch(job, result)
        targets = self.call.data.targets[self.call.bundle.fold_of(job).valid]
        scores = {}
        try:
            for name, score in self.scores[job.model].items():
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    # What a loop of the user reported under this name, if anything.
                    reported = result.scores.get(name)
                    value = score(targets, result.outputs) if reported is None else reported
                    scores[name] = float(value)
                for text in _score_notes(name, scores[name], caught):
                    self.call.run.event("score", text, result.job_id)
        except Exception as error:  # noqa: BLE001
            # A score may be a function of the user: its failure is the job's.
            line = f"scoring raised {type(error).__name__}: {error}"
            return replace(result, status=FAILED, error=line, traceback=line)
        return replace(result, scores=scores, outputs=result.outputs if self._keeps else None)

    def _scored_by_batch(self, job: Job, result: Result) -> Result:
        """Keep of what its worker accumulated and measured what was asked for."""
        names = list(self.scores[job.model])
        if missing := [name for name in names if name not in result.scores]:
            # A validation step may measure in the dry run what it does not in the last epoch.
            line = f"scoring raised ValueError: {', '.join(missing)} not measured in the last epoch"
            return replace(result, status=FAILED, error=line, traceback=line)
        scores = {name: result.scores[name] for name in names}
        for name, value in scores.items():
            for text in _score_notes(name, value, ()):
                self.call.run.event("score", text, result.job_id)
        return replace(result, scores=scores)

    @cached_property
    def _jobs(self) -> dict[str, Job]:
        return job_by_id(self.call.bundle.plan)

    @cached_property
    def _keeps(self) -> bool:
        return not _why_not_kept(self.call)

    @cached_property
    def scores(self) -> dict[str, dict[str, Score]]:
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
        texts = texts or {"no reason was given": None}
        yield f"{name} is undefined: {'; '.join(texts)}"
    else:
        yield from (f"{name}: {text}" for text in texts)


def _why_not_kept(call: Call) -> str:
    """Return why outputs of held-out samples are not kept, ``""`` where they are."""
    samples, most_gib = call.facts.output_samples, call.settings.keep_outputs_gib
    return why_not_kept(call.work.plan, call.folds, samples, most_gib)


def _kept_notes(call: Call) -> Iterator[str]:
    """Yield that outputs of held-out samples are not kept, and what there is not without them."""
    if why := _why_not_kept(call):
        how = "batch by batch" if call.work.plan.by_batch else "all the same"
        yield (
            f"outputs of held-out samples are not kept: {why}; each fold is scored {how}, but "
            "there are no results.oof and no figures of predictions"
        )


def slow_notes(plan: Plan, software: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each argument that makes training slow here, or has no effect.

    A step in bfloat16 on an AMD EPYC without instructions for it (1 thread, torch 2.15) took 2
    times as long as in float32 for an MLP on MNIST, 3 times for LeNet5, and 18 times for a VGG11 of
    a quarter of the width.
    """
    if plan.device != "cpu":
        return
    precision, processor = plan.params.precision, software.get(CPU, "bf16")
    if precision == "bf16" and "bf16" not in processor:
        yield "precision='bf16' is slow here: this processor has no instructions for bfloat16"
    if precision == "tf32":
        yield "precision='tf32' has no effect here: jobs on cores compute in float32"
