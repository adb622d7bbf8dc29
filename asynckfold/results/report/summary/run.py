"""`Summary`: all numbers of a run, computed from the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asynckfold.jobs.reproducibility import Reproducibility
from asynckfold.jobs.result import job_by_id
from asynckfold.results.confusion import count_classes
from asynckfold.results.outcome import Outcome, times_of, verdict_of
from asynckfold.results.read import read_results, refit_note
from asynckfold.results.report.baseline_curves import LossOverTime, loss_over_time
from asynckfold.results.report.sanitize import ERROR_LIMIT, clean, flat, plain_data
from asynckfold.results.report.summary.candidates import (
    CandidateRow,
    by_rank,
    candidate_rows,
    class_names,
    fold_names,
)
from asynckfold.results.report.summary.facts import RunFacts, command, facts
from asynckfold.results.report.summary.hard_samples import HardSamples, hard_samples
from asynckfold.results.report.summary.jobs import (
    AveragedJob,
    Bar,
    FailureGroup,
    LogLine,
    averaged,
    bars,
    event_log,
    failures,
    shown_packing,
)
from asynckfold.results.report.summary.machine import CpuUse, GpuUse, gpu_uses, uses
from asynckfold.results.report.summary.predictions import Predictions, predictions
from asynckfold.results.report.summary.probabilities import (
    Calibration,
    TwoClasses,
    calibration,
    two_classes,
)
from asynckfold.results.report.summary.speedup import TimedSpeedup, timing_of
from asynckfold.results.utilization import Packing
from asynckfold.results.verdict import Verdict
from asynckfold.store import RunReader


@dataclass(frozen=True)
class Summary:
    """All numbers of a run's report."""

    root: str
    metric: str  # ranks; greater is better
    metrics: tuple[str, ...]
    counts: Mapping[str, int]  # jobs by state; `running` is part of pending
    going: bool  # whether a process works in the run's folder
    candidates: tuple[CandidateRow, ...]  # by rank, unranked ones last
    fold_names: tuple[str, ...]
    highest: str | None  # name of the complete candidate with the highest mean, best or not
    verdict: Verdict
    class_names: tuple[str, ...]  # rows and columns of confusion matrices; empty for regression
    packed_seconds: float  # wall time over all sessions
    speedup: TimedSpeedup | None
    packing: Packing | None
    use: tuple[CpuUse, ...]
    gpu_use: tuple[GpuUse, ...]  # empty for a run that used no GPU
    bars: tuple[Bar, ...]
    failures: tuple[FailureGroup, ...]
    events: tuple[LogLine, ...]
    facts: RunFacts
    command: str  # empty if the run was started from Python
    about: Mapping[str, str]
    fingerprint: str
    bit_identity: Reproducibility
    loss_over_time: tuple[LossOverTime, ...]
    averaged: tuple[AveragedJob, ...]
    predictions: Predictions | None
    calibration: Calibration | None
    two_classes: TwoClasses | None
    hard_samples: HardSamples | None
    refit: str  # how the refit on all samples ended; empty without one

    @property
    def on_both(self) -> bool:
        """Whether candidates are on both kinds of device."""
        return len({row.device for row in self.candidates}) > 1

    @property
    def ranked(self) -> tuple[CandidateRow, ...]:
        """Complete candidates, best first."""
        return tuple(row for row in self.candidates if row.rank is not None)

    @property
    def best_row(self) -> CandidateRow | None:
        """The best complete candidate."""
        return self.ranked[0] if self.ranked else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON: NaN and infinities become None."""
        return dict(plain_data(self))


def _is_on_gpus(store: RunReader) -> bool:
    return any(item.device != "cpu" for item in store.attempts())


_UNSHOWN = ("cli", "command", "folder", "decision")
"""Recorded facts that the report shows elsewhere, or that are private."""


def summarize(store: RunReader, results: Outcome | None = None) -> Summary:
    """Compute all numbers of a run's report, from its store alone.

    The run may be incomplete or still running; `results` are its own, if they were read already.
    """
    found = read_results(store) if results is None else results
    plan = found.plan
    _, targets = store.splits()
    confusions = count_classes(found, targets)
    rows = candidate_rows(found, confusions, len(plan.classes))
    jobs, about = job_by_id(plan), store.about
    ranked = [candidate for candidate, _ in by_rank(found)]
    return Summary(
        root=clean(store.root.absolute().name),
        metric=clean(plan.scoring[0]),
        metrics=tuple(clean(name) for name in plan.scoring),
        counts=store.counts(),
        going=store.holder() is not None,
        candidates=rows,
        fold_names=fold_names(plan),
        highest=rows[0].name if rows and rows[0].rank == 1 else None,
        verdict=verdict_of(found, clean),
        class_names=class_names(plan, confusions),
        packed_seconds=found.seconds,
        speedup=timing_of(found, rows),
        packing=shown_packing(store),
        use=uses(store.samples()),
        gpu_use=gpu_uses(store.gpu_samples()) if _is_on_gpus(store) else (),
        bars=bars(store, found.results, jobs),
        failures=failures(plan, found.results),
        events=event_log(store, jobs),
        facts=facts(plan, found),
        command=command(about),
        about=flat({key: value for key, value in about.items() if key not in _UNSHOWN}),
        fingerprint=store.fingerprint(),
        bit_identity=Reproducibility(
            tuple(clean(why, ERROR_LIMIT) for why in found.bit_identity.reasons)
        ),
        loss_over_time=loss_over_time(found, times_of(found)),
        averaged=averaged(found),
        predictions=predictions(found, targets),
        calibration=calibration(found, targets, ranked),
        two_classes=two_classes(found, targets, ranked),
        hard_samples=hard_samples(found, targets),
        refit=clean(refit_note(store), ERROR_LIMIT),
    )
