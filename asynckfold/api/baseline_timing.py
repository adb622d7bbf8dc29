"""Times the ordinary serial loop, which the speedup compares with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asynckfold.api.context import Call, interrupted
from asynckfold.errors import NoRoomError, WorkerDiedError
from asynckfold.jobs.placement import Command
from asynckfold.jobs.plan import Job
from asynckfold.jobs.recipe import sending_problems
from asynckfold.jobs.result import DONE, Baseline
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.results.utilization import mean_use
from asynckfold.store import Sample
from asynckfold.sweep.tasks import Sampler, ask


def time_serial_loop(call: Call) -> None:
    """Time the ordinary serial loop, unless it is known from an earlier call."""
    store, make, bundle = call.run, call.make, call.bundle
    wanted, known = call.settings.baseline, store.reader.baseline
    # Only finished jobs count as work of the packed run.
    finished = store.reader.finished()
    done = tuple(job for job in bundle.plan.jobs if finished.get(job.id) == DONE)
    is_part = len(store.plan.jobs) < len(bundle.plan.jobs)
    if wanted is None or is_part or not done or (known and _suffices(known, wanted, done)):
        return
    work = replace(bundle.plan, jobs=done)
    ordinary = replace(bundle, plan=work, ordinary=call.data.ordinary())
    unfit = _other_samples(bundle.plan.params) or next(
        map(str, sending_problems({"dataset": ordinary.ordinary}) if make.pool else ()), ""
    )
    if unfit:
        store.event("baseline", f"there is no serial baseline: {unfit}")
        call.display.note(f"there is no serial baseline: {unfit}")
        return
    import torch

    call.display.doing(f"{wanted[:-1]}ing the serial baseline")
    sampler, begun = Sampler(store, "serial"), store.now()
    with make(ordinary) as engine:
        usual = torch.get_num_threads()
        on_gpu = bundle.plan.device == "cuda"
        placement = make.undisturbed(Command(wanted), usual, engine, on_gpu=on_gpu)
        if on_gpu and placement.gpu is None:
            store.event("baseline", "there is no serial baseline: no GPU is there")
            return
        if placement.threads < min(usual, len(make.machine.unreserved())):
            text = (
                f"the serial loop uses {placement.threads} in place of {usual} threads: other "
                "programs use the other cores, where threads would wait for each other"
            )
            store.event("baseline", text)
        try:
            baseline = ask(engine, placement, make.max_wait, call.signals, sampler)
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


def _other_samples(params: TrainerParams) -> str:
    """Return why the serial loop would train on other samples; a speedup compares equal ones."""
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
