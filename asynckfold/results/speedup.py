"""The speedup, decided once for every table, page and file: a number, or why there is none.

Speedup = the serial loop's wall time / the packed run's, for equal work. It needs both times
measured in full on an otherwise idle machine. An estimate is labelled as one everywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean

from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.result import CANCELLED, DONE, Baseline, Result

MEASURED = "measured"
NOT_TAKEN = "no serial loop was run; baseline='measure' (--baseline measure) runs it, too"


@dataclass(frozen=True)
class Speedup:
    """Serial against packed wall time: a number, or why there is none."""

    kind: str  # "measured" in full, "estimated" from some batches of each model, or "" for neither
    ratio: float | None  # serial / packed seconds for equal work, both measured on an idle machine
    estimate: float | None  # the same with estimated serial seconds
    why_not: str  # why there is neither; else empty
    serial_seconds: float | None  # measured, of the jobs that are done
    estimated_serial_seconds: float | None  # the same where it was estimated
    packed_seconds: float  # of the packed run, failed jobs included
    serial_threads: int
    disturbance: str = ""  # use by other programs during the timing; empty if there was none

    @property
    def text(self) -> str:
        """One or two sentences for tables and the terminal."""
        if self.why_not:
            return f"speedup not reported: {self.why_not}"
        threads = f"{self.serial_threads} thread{'s' if self.serial_threads != 1 else ''}"
        packed = f"packed {self.packed_seconds:.1f} s"
        if self.ratio is not None:
            serial = f"serial loop {self.serial_seconds:.1f} s (measured, {threads})"
            return f"speedup: {self.ratio:.2f}x, {serial} / {packed}"
        return (
            f"estimated speedup: about {self.estimate:.1f}x, serial loop "
            f"{self.estimated_serial_seconds:.1f} s (estimated from some batches, {threads}) / "
            f"{packed}; baseline='measure' (--baseline measure) runs the serial loop whole"
        )


@dataclass(frozen=True)
class AgainstSerial:
    """One candidate in the packed run and in the serial loop; NaN for what is not known.

    Jobs of several candidates run at once, so no clock shows the packed seconds of one. They are
    its share of the run's wall time, in proportion to the core-seconds of its jobs (seconds of
    training × cores). GPUs count as equal parts of the cores that jobs ran on, jobs that run on
    one at once share it, and a job counts by the larger of its cores and its GPU. The shares of all
    candidates add up to the wall time, start-up and idle cores included, as their serial seconds
    add up to those of the serial loop.
    """

    baseline: str  # kind of the serial seconds: "measured", "estimated", or "" for none
    serial_seconds: float  # measured, of the jobs that are done
    estimated_serial_seconds: float  # the same where it was estimated
    packed_seconds: float
    speedup: float  # only where the whole run has a measured one, see `Speedup.ratio`
    packed_accuracy: float  # mean over the jobs that the serial loop trained too, if it did
    serial_accuracy: float


def against_serial(
    plan: Plan, results: Mapping[str, Result], packed_seconds: float, baseline: Baseline | None
) -> dict[str, AgainstSerial]:
    """Compare each candidate with the serial loop, by its name."""
    by_candidate: dict[str, list[Job]] = {}
    for job in plan.jobs:
        by_candidate.setdefault(job.candidate, []).append(job)
    whole = speedup_of([job.id for job in plan.jobs], results, packed_seconds, baseline)
    by_job = _core_seconds(plan, results)
    held = {
        name: math.fsum(by_job.get(job.id, 0.0) for job in jobs)
        for name, jobs in by_candidate.items()
    }
    total = math.fsum(held.values())
    by_name = {}
    for name, jobs in by_candidate.items():
        packed = packed_seconds * (held[name] / total) if held[name] else math.nan
        done = [job for job in jobs if _is_done(results, job.id)]
        by_serial = baseline.seconds_by_job if baseline else {}
        seconds = math.fsum(by_serial.get(job.id, math.nan) for job in done) if done else math.nan
        measured = baseline is not None and baseline.kind == MEASURED
        serial = seconds if measured else math.nan
        by_name[name] = AgainstSerial(
            baseline.kind if baseline else "",
            serial,
            math.nan if measured else seconds,
            packed,
            math.nan if whole.ratio is None else serial / packed,
            *_accuracies(name, done, results, baseline),
        )
    return by_name


def _core_seconds(plan: Plan, results: Mapping[str, Result]) -> dict[str, float]:
    """Return what each job held, by its id."""
    # A job that is not pinned holds as many cores as it has threads.
    cores = {
        name: len(item.cores) or item.threads * plan.params.processes
        for name, item in results.items()
    }
    shares = _gpu_shares(results)
    gpus = len({_gpu_of(results[name]) for name in shares})
    seen = len({(item.node, core) for item in results.values() for core in item.cores})
    most = max(seen, *cores.values()) / gpus if gpus else 0.0
    return {
        name: (item.fit_seconds + item.score_seconds)
        * max(cores[name], most * shares.get(name, 0.0))
        for name, item in results.items()
    }


def _gpu_shares(results: Mapping[str, Result]) -> dict[str, float]:
    """Return the share of its GPU that each job on one had, in the mean over its last attempt.

    Workers that use a GPU at the same time share it equally. Jobs of one worker do not share: a
    fusion group's divide its seconds among themselves.
    """
    shares = {}
    by_gpu: dict[tuple[str, str], list[Result]] = {}
    for item in results.values():
        if item.device != "cpu":
            by_gpu.setdefault(_gpu_of(item), []).append(item)
    for jobs in by_gpu.values():
        edges = [(item.started, 1, item.pid or item.job_id) for item in jobs]
        edges += [(item.ended, -1, item.pid or item.job_id) for item in jobs]
        passed, until, workers = 0.0, dict[float, float](), Counter[int | str]()
        last = 0.0
        for at, change, worker in sorted(edges, key=itemgetter(0, 1)):
            passed += (at - last) / len(workers) if workers else 0.0
            until[at], last = passed, at
            workers[worker] += change
            if not workers[worker]:
                del workers[worker]
        for item in jobs:
            seconds = item.ended - item.started
            share = until[item.ended] - until[item.started]
            shares[item.job_id] = share / seconds if seconds > 0 else 1.0
    return shares


def _gpu_of(result: Result) -> tuple[str, str]:
    """Return the GPU of a job: each node of a cluster counts from 0."""
    return result.node, result.device


def _accuracies(
    name: str, jobs: Sequence[Job], results: Mapping[str, Result], baseline: Baseline | None
) -> tuple[float, float]:
    """Return the mean accuracy of jobs that are done, packed and serial, over the same ones."""
    packed = {job.id: it for job in jobs if (it := accuracy_of(results[job.id])) is not None}
    serial = baseline.by_job if baseline else {}
    both = [job for job in packed if job in serial]
    if both:
        return fmean(packed[job] for job in both), fmean(serial[job] for job in both)
    known = baseline.accuracy.get(name, math.nan) if baseline and not serial else math.nan
    return fmean(packed.values()) if packed else math.nan, known


def accuracy_of(result: Result) -> float | None:
    """Return the share of held-out samples whose class is right; None for numbers."""
    last = result.epochs[-1].accuracy if result.epochs else None
    return result.scores.get("accuracy", last)


def _is_done(results: Mapping[str, Result], name: str) -> bool:
    return name in results and results[name].status == DONE


def speedup_of(
    planned: Collection[str],
    results: Mapping[str, Result],
    packed_seconds: float,
    baseline: Baseline | None,
) -> Speedup:
    """Decide what to report as the speedup of the `planned` job ids."""
    if baseline is None:
        return Speedup("", None, None, NOT_TAKEN, None, None, packed_seconds, 0)
    left_out = {name for name, item in results.items() if item.status == CANCELLED}
    planned = [name for name in planned if name not in left_out]
    done = [name for name in planned if _is_done(results, name)]
    seconds = [baseline.seconds_by_job.get(name, math.nan) for name in done]
    serial = math.fsum(seconds) if done and not any(map(math.isnan, seconds)) else None
    why, ratio = "", None
    if any(name not in results for name in planned):
        why, serial = "the run is not complete", None
    elif not done:
        why = "no job succeeded"
    elif serial is None:
        why = "the serial loop did not time all finished jobs"
    elif len(done) < len(planned):
        why = (
            f"{len(planned) - len(done)} of {len(planned)} jobs did not succeed: the packed time "
            "includes what was spent on them, the serial time does not"
        )
    elif baseline.disturbance:
        where = ", in a new folder" if baseline.is_run_disturbed else ""
        why = f"{baseline.disturbance}. Measure again on an idle machine{where}"
    elif not (0 < serial < math.inf and 0 < packed_seconds < math.inf):
        why = "the time of the serial loop or of the packed run is not known"
    else:
        ratio = serial / packed_seconds
    measured = baseline.kind == MEASURED
    return Speedup(
        kind=baseline.kind,
        ratio=ratio if measured else None,
        estimate=None if measured else ratio,
        why_not=why,
        serial_seconds=serial if measured else None,
        estimated_serial_seconds=None if measured else serial,
        packed_seconds=packed_seconds,
        serial_threads=baseline.threads,
        disturbance=baseline.disturbance,
    )
