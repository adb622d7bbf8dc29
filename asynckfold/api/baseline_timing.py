"""Times the ordinary serial loop, which the speedup compares with."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from asynckfold.api.context import Call, interrupted
from asynckfold.api.execution import batches_of
from asynckfold.errors import NoRoomError, WorkerDiedError
from asynckfold.jobs.placement import Command, Placement, Request
from asynckfold.jobs.plan import Job
from asynckfold.jobs.recipe import sending_problems
from asynckfold.jobs.result import DONE, Baseline
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.results.utilization import mean_use
from asynckfold.store import Sample
from asynckfold.sweep.single_task import Sampler, ask


def time_serial_loop(call: Call) -> None:
    """Time the ordinary serial loop, unless it is known from an earlier call."""
    store, make, bundle = call.run, call.make, call.bundle
    wanted, known = call.settings.baseline, store.reader.baseline
    # Only finished jobs count as work of the packed run.
    finished = store.reader.finished()
    done = tuple(job for job in bundle.plan.jobs if finished.get(job.id) == DONE)
    if wanted is None or not done or (known and _suffices(known, wanted, done)):
        return
    if why := _other_samples(bundle.plan.params):
        # A speedup compares equal samples only.
        store.event("baseline", f"there is no serial baseline: {why}")
        return
    import torch

    call.display.doing(f"{wanted[:-1]}ing the serial baseline")
    sampler, begun = Sampler(store, "serial"), store.now()
    work = replace(bundle.plan, jobs=done)
    ordinary = replace(bundle, plan=work, ordinary=call.data.ordinary())
    unfit = sending_problems({"dataset": ordinary.ordinary}) if make.pool else []
    if unfit:
        store.event("baseline", f"there is no serial baseline: {unfit[0]}")
        call.display.note(f"there is no serial baseline: {unfit[0]}")
        return
    with make(ordinary) as engine:
        usual = torch.get_num_threads()
        on_gpu = bundle.plan.device == "cuda"
        placement = make.undisturbed(Command(wanted), usual, engine, on_gpu=on_gpu)
        if on_gpu and placement.gpu is None:
            store.event("baseline", "there is no serial baseline: no GPU is there")
            return
        if placement.threads < min(usual, len(make.machine.unreserved())):
            store.event("baseline", _fewer_threads_text(placement.threads, usual))
        try:
            hear = _shown(call, ordinary, placement) if wanted == "measure" else None
            baseline = ask(engine, placement, make.max_wait, call.signals, sampler, hear)
        except (WorkerDiedError, NoRoomError) as error:
            store.event("baseline", f"the serial baseline could not run: {error}")
            return
        except KeyboardInterrupt as interrupt:
            raise interrupted(
                interrupt, "the serial baseline was being timed; all jobs have their results"
            ) from interrupt
    if baseline is None:
        return
    if not baseline.seconds_by_job:
        store.event("baseline", "there is no serial baseline: none of its jobs could be timed")
        return
    samples = store.reader.samples()
    baseline = replace(
        baseline,
        others=_others([item for item in samples if item.at >= begun], "serial"),
        packed_others=_others(samples, "packed"),
        cores=max((len(item.cores) for item in samples), default=0),
    )
    store.set_baseline(baseline)
    if baseline.disturbance:
        store.event("baseline", baseline.disturbance)


def _shown(call: Call, bundle: Any, placement: Placement) -> Callable[[], None]:
    """Show a bar for the serial loop; return what takes its events."""
    display, inbox, jobs = call.display, call.make.inbox, bundle.plan.jobs
    before = display.progress.results if display.progress else {}
    # The packed jobs tell how long a job takes, compared with others.
    seconds = {job.id: before[job.id].fit_seconds if job.id in before else 0.0 for job in jobs}
    requests = {name: Request(name, expected) for name, expected in seconds.items()}
    with suppress(queue.Empty):
        while True:
            inbox.get_nowait()  # nobody waits for what the sweep left
    display.doing("")
    display.begin(bundle.plan, requests, [], batches_of(bundle), title="serial baseline")
    display.placed(replace(placement, jobs=tuple(requests), command=Command.TRAIN))

    def hear() -> None:
        with suppress(queue.Empty):
            while True:
                item = inbox.get_nowait()
                if not isinstance(item, Future):
                    display.heard(item)
        display.ticked()

    return hear


def _other_samples(params: TrainerParams) -> str:
    """Return why the serial loop would train on other samples than the sweep; empty if not."""
    if params.has_partitions:
        return "the parts of averaging overlap or repeat, so it would train on other samples"
    if params.target_loss is not None:
        return "target_loss ends jobs early, and it would end them after other epochs"
    return ""


def _suffices(known: Baseline, wanted: str, done: Sequence[Job]) -> bool:
    """Whether an earlier session timed what is wanted, for all finished jobs.

    What others disturbed is timed again, unless they disturbed the packed run as well.
    """
    if known.kind == wanted + "d" and known.is_disturbed and not known.is_run_disturbed:
        return False
    is_whole = all(job.id in known.seconds_by_job for job in done)
    return is_whole and (known.kind == "measured" or wanted == "estimate")


def _others(samples: Sequence[Sample], phase: str) -> float:
    """Mean number of cores that other programs used during a phase; NaN if that is not known."""
    used, ours = mean_use(samples, phase)
    return max(used - ours, 0.0)


def _fewer_threads_text(threads: int, usual: int) -> str:
    return (
        f"the serial loop uses {threads} in place of {usual} threads: other programs use the other "
        "cores, where threads would wait for each other"
    )
