"""One call on one held run: read the data, check the candidates, sweep, time the baseline."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asynckfold import choice, processes
from asynckfold.asking import Sampler, ask
from asynckfold.choice import Choice
from asynckfold.cv_results import CVResults
from asynckfold.engines.machine import Machine
from asynckfold.errors import (
    InterruptedRunError,
    NoRoomError,
    Problem,
    StorageError,
    WorkerDiedError,
    refuse,
)
from asynckfold.files import make_folders, slug, write_whole
from asynckfold.identity import CPU, ELASTIC, THREADS, differences
from asynckfold.interruption import Interruption
from asynckfold.packing import choice_of, packing_of
from asynckfold.plan import Job, Plan
from asynckfold.planning import Engines, Planned, Planner
from asynckfold.progress import Display
from asynckfold.recipe import Recipe, sending_problems
from asynckfold.report.findings import packing as packing_text
from asynckfold.result import DIVERGED, DONE, FAILED, Result, job_by_id
from asynckfold.scoring import Score, resolve
from asynckfold.settings import Settings
from asynckfold.store import RunStore
from asynckfold.sweep import Sweep, is_stray
from asynckfold.trainer_params import TrainerParams

if TYPE_CHECKING:
    from asynckfold.data import Prepared


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
        planner = Planner(
            self.settings, self.recipe, self.params, self.machine, self.signals, self.display
        )
        stored = self.store.plan if self.store.has_plan else None
        with planner.planned(self._software, self._before(), stored) as found:
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
                free=("threads_per_job", "threads", "last_threads")
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
        workers = self.settings.parallelize
        found = software(draft.threads_per_job, gpus, in_workers=workers)
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

    def _log(self, found: Planned) -> None:
        threads = found.choice
        plan, folds = found.work.plan, found.work.folds
        slow = (*slow_notes(plan, found.software), *processes.notes(plan, folds, threads.costs))
        replaced = replaced_notes() if self.settings.parallelize else ()
        for note in (*self.store.notes, *found.data.notes, *self.notes, *slow, *replaced):
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
        requests = choice.requests(found.choice, found.work, found.groups.groups)
        finish = _Finish(
            job_by_id(plan), bundle, data, resolve(self.settings.scoring, data.classification)
        )
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
                    steps=found.steps if self.settings.elastic else None,
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

    def _compare(self, make: Engines, bundle: Any, data: Prepared) -> None:
        """Time the ordinary serial loop, unless it is known from an earlier session."""
        wanted, known = self.settings.baseline, self.store.baseline
        if wanted is None or (known and (known.kind == "measured" or wanted == "estimate")):
            return
        if bundle.plan.params.deals_parts:
            # A speedup is told of equal samples only.
            why = "parts of averaging overlap or repeat, so that it would train other samples"
            self.store.event("baseline", f"there is no serial baseline: {why}")
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
            usual = torch.get_num_threads()
            placement = make.undisturbed(wanted, usual, engine)
            if placement.threads < min(usual, len(make.machine.unreserved())):
                self.store.event("baseline", _told_fewer(placement.threads, usual))
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
    scores: Mapping[str, Score]

    def __call__(self, result: Result) -> Result:
        if result.status != DONE or result.outputs is None:
            return result
        fold = self.bundle.fold_of(self.jobs[result.job_id])
        targets = self.data.targets[fold.valid]
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
    from asynckfold.training.patches import foreign

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
