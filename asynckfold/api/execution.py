"""Carries out a plan: writes it, trains its jobs, scores them, times the serial loop."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asynckfold.api.arguments import Settings
from asynckfold.api.baseline_timing import batches_of, time_serial_loop
from asynckfold.api.planner import Planned
from asynckfold.api.progress import SweepProgress
from asynckfold.api.session import Session, interrupted
from asynckfold.errors import StorageError
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.reproducibility import CPU, THREADS
from asynckfold.jobs.result import DONE, FAILED, Result, job_by_id
from asynckfold.planning import workload
from asynckfold.results.candidates import candidates
from asynckfold.results.report.sentences import packing as packing_text
from asynckfold.results.scoring import Score, resolve
from asynckfold.results.utilization import packing_of
from asynckfold.results.verdict import make_verdict
from asynckfold.store import Interim, RunStore
from asynckfold.store.layout import network_notes
from asynckfold.sweep.attempts import Finish
from asynckfold.sweep.loop import Sweep
from asynckfold.system.machine import Machine
from asynckfold.system.signals import Interruption

if TYPE_CHECKING:
    from asynckfold.data.prepare import Prepared

PUBLISH_SECONDS = 2.0
"""Between two interim results for other programs."""


StopReason = Callable[[Plan, Mapping[str, Result]], str]
"""(plan, results so far by job) → why the run is to end before its other jobs; "" to go on."""


def train(session: Session, planned: Planned, stop_reason: StopReason | None = None) -> None:
    """Write the plan, train and score its jobs, and time the serial loop."""
    session.checked.append(planned.data.checked)
    _begin(session, planned)
    _log(session, planned)
    bundle = replace(
        planned.checked.bundle,
        plan=session.run.reader.plan,
        accumulators=planned.accumulators(session.settings),
    )
    _sweep(session, planned, bundle, stop_reason)
    time_serial_loop(session, planned, bundle)
    session.signals.check()


def _begin(session: Session, planned: Planned) -> None:
    """Write the plan; keep an earlier run that makes room for it."""
    from asynckfold.training.checkpoint import save_initial_weights

    settings, store, stored = session.settings, session.run, session.stored
    # Last, so that a refusal leaves the earlier run where it is.
    is_anew = settings.resume == "never" and store.reader.has_plan
    earlier = store.file.start_over() if is_anew else None
    given = settings.about
    store.begin(
        planned.plan,
        planned.work.folds,
        planned.data.targets,
        {
            **_about(session.machine, given.get("cli", ())),
            **given,
            "decision": planned.choice.to_dict(),
        },
        free=settings.free,
    )
    if stored is None or "code" in stored.recipe:
        # Without recorded code, these may differ from the weights that the run began with.
        save_initial_weights(store.root, session.call.recipe)
    if earlier is not None:
        note = f"the earlier run in {store.root} is kept as {earlier}"
        store.event("plan", note)
        session.display.note(note)


def _log(session: Session, planned: Planned) -> None:
    settings, store, threads = session.settings, session.run, planned.choice
    plan, facts = planned.work.plan, planned.work.facts
    software = planned.checked.software
    slow = tuple(slow_notes(plan, software))
    replaced = replaced_notes() if settings.engine != "serial" else ()
    notes = (
        *filter(None, [session.machine.gpu_note, threads.devices]),
        *(*network_notes(store.root), *planned.data.notes, *session.call.notes, *planned.notes),
        *(*facts.notes, *slow, *replaced, *_kept_notes(planned, settings)),
    )
    for note in notes:
        store.event("note", note)
        session.display.note(note)
    for candidate, trace in facts.failures.items():
        store.event("dry-run", trace.strip().splitlines()[-1], candidate)
    logged = {event.text for event in store.reader.events()}
    failed = {model: trace.strip().splitlines()[-1] for model, trace in threads.failures.items()}
    fusing = planned.groups.why
    for kind, texts in (("probe", failed), ("decision", threads.why), ("fusing", fusing)):
        for model, sentence in texts.items():
            text = f"{model}: {sentence}"
            if text not in logged:
                store.event(kind, text)
            is_slower = kind == "decision" and 0 < threads.costs[model].processes_gain < 1
            if kind != "decision" or threads.overturned or is_slower:
                session.display.note(text, verbose=2 if kind == "fusing" else 1)
    added = 0 if session.stored is None else len(plan.jobs) - len(session.stored.jobs)
    if added > 0:
        store.event("plan", f"{added} jobs were added to the plan")


def _sweep(session: Session, planned: Planned, bundle: Any, stop_reason: StopReason | None) -> None:
    """Train the jobs that have no result yet."""
    settings, store, display = session.settings, session.run, session.display
    make, plan = planned.make, bundle.plan
    requests = workload.requests(planned.choice, planned.work, planned.groups.groups)
    keeps = not planned.why_not_kept(settings.keep_outputs_gib)
    finish: Finish = _Finish(job_by_id(plan), bundle, planned.data, settings, store.event, keeps)
    _fail_refused(store, planned)
    finished = store.reader.results()
    if stop_reason is not None:
        finish = _Watched(finish, plan, dict(finished), stop_reason, session.signals)
        finish.look()
    display.doing("")
    publish = _Publisher(store, planned.work.folds)
    display.begin(plan, requests, list(finished.values()), batches_of(bundle), publish=publish)
    if len(finished) == len(plan.jobs):
        return  # a look at a finished run must not lengthen its time
    store.set_software({THREADS: plan.threads_text, **planned.checked.software})
    store.packing(time.monotonic() - session.call.started)
    try:
        with make(bundle) as engine:
            Sweep(
                store,
                engine,
                make.inbox,
                requests,
                finish,
                display,
                signals=session.signals,
                max_wait=make.max_wait,
                yields=settings.yield_to_others,
            ).run()
        achieved = packing_of(store.reader)
        if achieved is not None:
            display.note(packing_text(achieved), verbose=2)
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


def _fail_refused(store: RunStore, planned: Planned) -> None:
    """Record the jobs of candidates that break a rule as failed: they never start."""
    plan, refused = store.reader.plan, planned.checked.facts.refused
    ended, now = store.reader.finished(), store.now()
    with store.together():
        for job in plan.jobs:
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
class _Finish:
    """Scores a result on its held-out fold, and drops outputs that are too large to keep.

    Where the plan scores by batch, the job's worker has scored it.
    """

    jobs: Mapping[str, Job]
    bundle: Any
    data: Prepared
    settings: Settings
    say: Callable[[str, str, str], None]
    keeps: bool

    def __call__(self, result: Result) -> Result:
        if result.status != DONE:
            return result
        job = self.jobs[result.job_id]
        if result.outputs is None:
            return self._scored_by_batch(job, result)
        targets = self.data.targets[self.bundle.fold_of(job).valid]
        found = {}
        try:
            for name, score in self.scores[job.model].items():
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    # What the user's own loop reported under this name, if anything.
                    own = result.scores.get(name)
                    found[name] = float(score(targets, result.outputs)) if own is None else own
                for text in _score_notes(name, found[name], caught):
                    self.say("score", text, result.job_id)
        except Exception as error:  # noqa: BLE001
            # A score may be the user's own function: its failure is the job's.
            line = f"scoring raised {type(error).__name__}: {error}"
            return replace(result, status=FAILED, error=line, traceback=line)
        return replace(result, scores=found, outputs=result.outputs if self.keeps else None)

    def _scored_by_batch(self, job: Job, result: Result) -> Result:
        """Keep of what its worker accumulated and measured what was asked for."""
        names = list(self.scores[job.model])
        if missing := [name for name in names if name not in result.scores]:
            # A validation step may measure in the dry run what it does not in the last epoch.
            line = f"scoring raised ValueError: {', '.join(missing)} not measured in the last epoch"
            return replace(result, status=FAILED, error=line, traceback=line)
        found = {name: result.scores[name] for name in names}
        for name, value in found.items():
            for text in _score_notes(name, value, ()):
                self.say("score", text, result.job_id)
        return replace(result, scores=found)

    @cached_property
    def scores(self) -> dict[str, dict[str, Score]]:
        """Scores by model: their outputs may have different scales."""
        plan, settings = self.bundle.plan, self.settings
        return {
            model: resolve(settings.scoring, plan.objective_of(model), settings.transform)
            for model in dict.fromkeys(job.model for job in plan.jobs)
        }


@dataclass(frozen=True, eq=False)
class _Watched:
    """Lets a caller end the run, given the scores so far."""

    finish: Finish
    plan: Plan
    results: dict[str, Result]
    stop_reason: StopReason
    signals: Interruption

    def __call__(self, result: Result) -> Result:
        self.results[result.job_id] = found = self.finish(result)
        self.look()
        return found

    def look(self) -> None:
        """Ask whether to go on."""
        if reason := self.stop_reason(self.plan, self.results):
            self.signals.end(reason)


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


def _kept_notes(planned: Planned, settings: Settings) -> Iterator[str]:
    """Yield that outputs of held-out samples are not kept, and what there is not without them."""
    if why := planned.why_not_kept(settings.keep_outputs_gib):
        how = "batch by batch" if planned.work.plan.by_batch else "all the same"
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


def replaced_notes() -> Iterator[str]:
    """Yield a note if functions of torch are replaced here: workers may have the original ones."""
    from asynckfold.training.isolation.patches import foreign

    if found := foreign():
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        yield (
            f"functions of torch are replaced in this process: {', '.join(found[:3])}{more}. "
            "Workers have torch's own, unless a module that the models import replaces them; "
            "engine='serial' trains with those of this process"
        )


def _about(machine: Machine, words: Sequence[str]) -> dict[str, Any]:
    """Return what is recorded of machine and command. A script's arguments may be secrets."""
    script = [Path(name).name for name in sys.argv[:1]] + ["..."] * bool(sys.argv[1:])
    return {
        "machine": machine.describe(),
        "command": ["asynckfold", *words] if words else script,
    }
