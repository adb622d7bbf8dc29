"""One call on one held run: read the data, check the candidates, sweep, time the baseline."""

from __future__ import annotations

import io
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asynckfold.api.arguments import Settings
from asynckfold.api.display import Display
from asynckfold.api.planner import Engines, Planned, Planner
from asynckfold.errors import (
    InterruptedRunError,
    NoRoomError,
    Problem,
    StorageError,
    WorkerDiedError,
    refuse,
)
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.recipe import Recipe, sending_problems
from asynckfold.jobs.reproducibility import CPU, THREADS, differences
from asynckfold.jobs.result import DIVERGED, DONE, FAILED, Baseline, Result, job_by_id
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.planning import workload
from asynckfold.planning.workload import Choice, decided_of
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report.sentences import packing as packing_text
from asynckfold.results.scoring import Score, resolve
from asynckfold.results.utilization import packing_of
from asynckfold.store import RunStore, Sample
from asynckfold.sweep.loop import Sweep, is_stray
from asynckfold.sweep.single_task import Sampler, ask
from asynckfold.system import terminal
from asynckfold.system.files import make_folders, slug, write_whole
from asynckfold.system.machine import Machine
from asynckfold.system.signals import Interruption

if TYPE_CHECKING:
    from asynckfold.data import Prepared, Seen


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
    seen: list[Seen] = field(default_factory=list)

    def run(self) -> None:
        """Prepare, check, sweep, compare."""
        from asynckfold.training.initial_weights import keep_initial_weights

        planner = Planner(
            self.settings, self.recipe, self.params, self.machine, self.signals, self.display
        )
        stored = self.store.plan if self._continues else None
        with planner.planned(self._software, self._before(), stored) as found:
            draft, threads = found.work.plan, found.choice
            self.seen.append(found.data.seen)
            given = self.settings.about
            # As late as can be: what is refused until here leaves the earlier run where it is.
            earlier = self.store.start_over() if self._is_anew else None
            self.store.begin(
                found.plan,
                found.work.folds,
                found.data.targets,
                {
                    **_about(self.machine, given.get("cli", ())),
                    **given,
                    "decision": threads.to_dict(),
                },
                free=("threads_per_job", "threads", "last_threads")
                if self.settings.allow_different_software
                else (),
            )
            if stored is None or "code" in stored.recipe:
                # Where they are not recorded, these may be others than the run was begun with.
                keep_initial_weights(self.store.root, self.recipe)
            if earlier is not None:
                told = f"the earlier run in {self.store.root} is kept as {earlier}"
                self.store.event("plan", told)
                self.display.note(told)
            self._log(found)
            if stored is not None and len(draft.jobs) > len(stored.jobs):
                text = f"{len(draft.jobs) - len(stored.jobs)} jobs were added to the plan"
                self.store.event("plan", text)
            bundle = replace(found.bundle, plan=self.store.plan)
            software = {THREADS: self.store.plan.threads_text, **found.software}
            self._sweep(found, bundle, software)
            self._compare(found.make, bundle, found.data)
            self.signals.check()

    @property
    def _is_anew(self) -> bool:
        """Whether the run in the folder makes room for another one."""
        return self.settings.resume == "never" and self.store.has_plan

    @property
    def _continues(self) -> bool:
        return self.store.has_plan and not self._is_anew

    def _before(self) -> Choice | None:
        """What the run chose in an earlier session."""
        return decided_of(self.store) if self._continues else None

    def _software(self, draft: Plan) -> dict[str, str]:
        """Return with what this session trains, unless it has to train on with something else."""
        from asynckfold.training.software import software

        gpus = self.machine.gpus().names if draft.device == "cuda" else ()
        workers = self.settings.parallelize
        found = software(draft.threads_per_job, gpus, in_workers=workers)
        if self.settings.threads is None:
            # The threads that were decided are the run's own; of a new run they are told later.
            del found[THREADS]
            begun = next(iter(self.store.software() if self._continues else ()), {})
            found |= {THREADS: begun[THREADS]} if THREADS in begun else {}
        free = self.settings.allow_different_software or not self._continues
        if not free and self._pending(draft):
            refuse(_software_problems(self.store, found))
        return found

    def _pending(self, draft: Plan) -> bool:
        """Whether anything is to be trained; failed jobs are tried again."""
        ended = self.store.finished()
        return any(ended.get(job.id) not in (DONE, DIVERGED) for job in draft.jobs)

    def _log(self, found: Planned) -> None:
        threads = found.choice
        work = found.work
        slow = slow_notes(work.plan, found.software)
        replaced = replaced_notes() if self.settings.parallelize else ()
        told_of = (
            *(*self.store.notes, *found.data.notes, *self.notes, *found.notes),
            *(*work.facts.notes, *slow, *replaced),
        )
        for note in told_of:
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

    def _sweep(self, found: Planned, bundle: Any, software: Mapping[str, str]) -> None:
        make, data, plan = found.make, found.data, bundle.plan
        requests = workload.requests(found.choice, found.work, found.groups.groups)
        finish = _Finish(job_by_id(plan), bundle, data, self.settings, self.store.event)
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
                ).run()
            achieved = packing_of(self.store)
            if achieved is not None:
                self.display.note(packing_text(achieved))
        except KeyboardInterrupt as interrupt:
            with suppress(StorageError):
                self.store.event("interrupted", str(interrupt) or "interrupted")
            how = "the same call"
            if self.settings.resume == "never":
                how = "the same call with resume='auto'"
            raise _interrupted(
                interrupt, f"what was finished is in {self.store.root}, {how} continues"
            ) from interrupt
        finally:
            self.store.packing(None)

    def _compare(self, make: Engines, bundle: Any, data: Prepared) -> None:
        """Time the ordinary serial loop, unless it is known from an earlier session."""
        wanted, known = self.settings.baseline, self.store.baseline
        # What failed, diverged or never ended is no work that the packed run did.
        finished = self.store.finished()
        done = tuple(job for job in bundle.plan.jobs if finished.get(job.id) == DONE)
        if wanted is None or not done or (known and _suffices(known, wanted, done)):
            return
        if bundle.plan.params.deals_parts:
            # A speedup is told of equal samples only.
            why = "parts of averaging overlap or repeat, so that it would train other samples"
            self.store.event("baseline", f"there is no serial baseline: {why}")
            return
        import torch

        self.display.doing(f"{wanted[:-1]}ing the serial baseline")
        sampler, begun = Sampler(self.store, "serial"), self.store.now()
        work = replace(bundle.plan, jobs=done)
        ordinary = replace(bundle, plan=work, ordinary=data.ordinary())
        unfit = sending_problems({"dataset": ordinary.ordinary}) if make.pool else []
        if unfit:
            self.store.event("baseline", f"there is no serial baseline: {unfit[0]}")
            self.display.note(f"there is no serial baseline: {unfit[0]}")
            return
        with make(ordinary) as engine:
            usual = torch.get_num_threads()
            placement = make.undisturbed(wanted, usual, engine)
            if placement.threads < min(usual, len(make.machine.unreserved())):
                self.store.event("baseline", _told_fewer(placement.threads, usual))
            try:
                baseline = ask(engine, placement, make.max_wait, self.signals, sampler)
            except (WorkerDiedError, NoRoomError) as error:
                self.store.event("baseline", f"the serial baseline could not run: {error}")
                return
            except KeyboardInterrupt as interrupt:
                raise _interrupted(
                    interrupt, "the serial baseline was being timed; all jobs have their results"
                ) from interrupt
        if baseline is None:
            return
        samples = self.store.samples()
        baseline = replace(
            baseline,
            others=_others([item for item in samples if item.at >= begun], "serial"),
            packed_others=_others(samples, "packed"),
            cores=max((len(item.cores) for item in samples), default=0),
        )
        self.store.set_baseline(baseline)
        if baseline.disturbance:
            self.store.event("baseline", baseline.disturbance)


def _suffices(known: Baseline, wanted: str, done: Sequence[Job]) -> bool:
    """Whether an earlier session timed what is wanted, over all jobs that are done."""
    timed = known.seconds_by_job
    is_whole = not timed or all(job.id in timed for job in done)
    return is_whole and (known.kind == "measured" or wanted == "estimate")


def _others(samples: Sequence[Sample], phase: str) -> float:
    """Mean use by other programs during a phase, cores' worth; 0 where nothing was sampled."""
    used = [item.used - item.own for item in samples if item.phase == phase]
    return max(0.0, float(np.mean(used))) if used else 0.0


def _told_fewer(threads: int, usual: int) -> str:
    return (
        f"the serial loop is timed with {threads} in place of {usual} threads, since others use "
        "the other cores: threads there would keep each other waiting"
    )


def _interrupted(interrupt: KeyboardInterrupt, state: str) -> InterruptedRunError:
    """Return the error that tells by what the call was interrupted, and what stays."""
    code = interrupt.exit_code if isinstance(interrupt, InterruptedRunError) else 130
    return InterruptedRunError(f"{str(interrupt) or 'interrupted'}; {state}", code)


@dataclass(frozen=True, eq=False)
class _Finish:
    """Scores a result on its held-out fold."""

    jobs: Mapping[str, Job]
    bundle: Any
    data: Prepared
    settings: Settings
    say: Callable[[str, str, str], None]

    def __call__(self, result: Result) -> Result:
        if result.status != DONE or result.outputs is None:
            return result
        job = self.jobs[result.job_id]
        targets = self.data.targets[self.bundle.fold_of(job).valid]
        found = {}
        try:
            for name, score in self.scores[job.model].items():
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    found[name] = float(score(targets, result.outputs))
                for text in _told_of(name, found[name], told):
                    self.say("score", text, result.job_id)
        except Exception as error:  # noqa: BLE001
            # A score may be the user's own function: its failure is the job's.
            line = f"scoring raised {type(error).__name__}: {error}"
            return replace(result, status=FAILED, error=line, traceback=line)
        return replace(result, scores=found)

    @cached_property
    def scores(self) -> dict[str, dict[str, Score]]:
        """Scores by model, whose outputs may be of another scale than those of others."""
        plan, settings = self.bundle.plan, self.settings
        return {
            model: resolve(settings.scoring, plan.objective_of(model), settings.transform)
            for model in dict.fromkeys(job.model for job in plan.jobs)
        }


def _told_of(name: str, value: float, told: Sequence[warnings.WarningMessage]) -> Iterator[str]:
    """Yield what the log must say of a score: that it is undefined, and what was warned of."""
    texts = dict.fromkeys(" ".join(str(item.message).split()) for item in told)
    if np.isnan(value):
        texts = texts or {"no reason was given": None}
        yield f"{name} is undefined: {'; '.join(texts)}"
    else:
        yield from (f"{name}: {text}" for text in texts)


@contextmanager
def held(root: Path, resume: str) -> Iterator[RunStore]:
    """Hold the run; leave no trace of one that never got a plan."""
    terminal.open_standard()
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


def slow_notes(plan: Plan, software: Mapping[str, str]) -> Iterator[str]:
    """Yield what was asked for that is slow on this machine.

    A step in bfloat16 on an AMD EPYC without instructions for it (1 thread, torch 2.15) took 2
    times as long as in float32 for an MLP on MNIST, 3 times for LeNet5, and 18 times for a VGG11 of
    a quarter of the width.
    """
    if plan.params.precision != "bf16" or plan.device != "cpu":
        return
    if CPU in software and "bf16" not in software[CPU]:
        yield "precision='bf16' is slow here: this processor has no instructions for bfloat16"


def replaced_notes() -> Iterator[str]:
    """Yield that functions of torch are others here, which workers may not have."""
    from asynckfold.training.isolation.patches import foreign

    if found := foreign():
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        yield (
            f"functions of torch are replaced in this process: {', '.join(found[:3])}{more}. "
            "Workers have torch's own, unless a module that the models import replaces them; "
            "parallelize=False trains with those of this process"
        )


def _about(machine: Machine, words: Sequence[str]) -> dict[str, Any]:
    """What is recorded of machine and command; a script's own arguments may be secrets."""
    script = [Path(name).name for name in sys.argv[:1]] + ["..."] * bool(sys.argv[1:])
    return {
        "machine": machine.describe(),
        "command": ["asynckfold", *words] if words else script,
    }


def write_out_of_fold(results: CVResults) -> None:
    """Write ``oof/<candidate>.npz`` for each complete candidate.

    Each holds ``outputs``, aligned with the dataset, in the shape of `CVResults.oof`.
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
