"""The speedup, decided once for every table, page and file: a number, or why there is none.

Speedup = the serial loop's wall time / the packed run's, for equal work. It needs both times
measured in full on an otherwise idle machine. An estimate is labelled as one everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from asynckfold.jobs.result import DONE, Baseline, Result

MEASURED, ESTIMATED = "measured", "estimated"


@dataclass(frozen=True)
class Speedup:
    """Serial against packed wall time: a number, or why there is none."""

    kind: str  # "measured" in full, "estimated" from some batches of each model, or "" for neither
    ratio: float | None  # serial / packed seconds for equal work, both measured on an idle machine
    estimate: float | None  # the same with estimated serial seconds
    why_not: str  # why there is neither; else empty
    serial_seconds: float | None  # of the jobs that are done
    packed_seconds: float  # of the packed run, failed jobs included
    serial_threads: int

    @property
    def text(self) -> str:
        """One or two sentences for tables and the terminal."""
        if self.why_not:
            return f"speedup not reported: {self.why_not}"
        threads = f"{self.serial_threads} thread{'s' if self.serial_threads != 1 else ''}"
        serial = f"serial loop {self.serial_seconds:.1f} s"
        packed = f"packed {self.packed_seconds:.1f} s"
        if self.ratio is not None:
            return f"speedup: {self.ratio:.2f}x, {serial} (measured, {threads}) / {packed}"
        return (
            f"estimated speedup: about {self.estimate:.1f}x, {serial} (estimated from some "
            f"batches, {threads}) / {packed}; baseline='measure' (--baseline measure) runs the "
            "serial loop whole"
        )


def speedup_of(
    planned: Collection[str],
    results: Mapping[str, Result],
    packed_seconds: float,
    baseline: Baseline | None,
) -> Speedup:
    """Decide what to report as the speedup of the `planned` job ids."""
    if baseline is None:
        why = "no serial baseline was taken"
        return Speedup("", None, None, why, None, packed_seconds, 0)
    done = [name for name in planned if name in results and results[name].status == DONE]
    serial, why = _equal_work(planned, done, results, baseline)
    why = why or _bad_timing(serial, packed_seconds, baseline)
    ratio = None if why or serial is None else serial / packed_seconds
    measured = baseline.kind == MEASURED
    return Speedup(
        kind=baseline.kind,
        ratio=ratio if measured else None,
        estimate=None if measured else ratio,
        why_not=why,
        serial_seconds=serial,
        packed_seconds=packed_seconds,
        serial_threads=baseline.threads,
    )


def _equal_work(
    planned: Collection[str],
    done: Collection[str],
    results: Mapping[str, Result],
    baseline: Baseline,
) -> tuple[float | None, str]:
    """Return the serial seconds of the jobs that are done, or why they are not known."""
    if any(name not in results for name in planned):
        return None, "the run is not complete"
    if not done:
        return None, "no job succeeded"
    if not baseline.seconds_by_job:
        # Runs of earlier versions recorded only the sum.
        if len(done) == len(planned):
            return baseline.seconds, ""
        lost = len(planned) - len(done)
        return None, f"{lost} of {len(planned)} jobs did not succeed, the serial loop ran them all"
    missing = [name for name in done if name not in baseline.seconds_by_job]
    if missing:
        return None, (
            f"the serial loop did not time {len(missing)} of the {len(done)} finished jobs, first "
            f"{missing[0]}"
        )
    return math.fsum(baseline.seconds_by_job[name] for name in done), ""


def _bad_timing(serial: float | None, packed: float, baseline: Baseline) -> str:
    if baseline.disturbance:
        return f"{baseline.disturbance}. Measure again on an idle machine, in a new folder"
    if baseline.kind not in (MEASURED, ESTIMATED):
        return f"the serial time is of an unknown kind, {baseline.kind!r}"
    times = (("serial loop", serial), ("packed run", packed))
    unknown = [name for name, value in times if value is None or not 0 < value < math.inf]
    return f"the time of the {' and of the '.join(unknown)} is not known" if unknown else ""
