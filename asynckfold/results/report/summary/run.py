"""The whole run: its `Summary`, and what computes it from the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asynckfold.jobs import reproducibility
from asynckfold.jobs.result import job_by_id
from asynckfold.results.confusion import count_classes
from asynckfold.results.cv_results import CVResults
from asynckfold.results.read import read_results, refit_note
from asynckfold.results.report.baseline_curves import Race, races
from asynckfold.results.report.sanitize import clean, flat, plain_data, shown
from asynckfold.results.report.summary.candidates import (
    CandidateRow,
    candidate_rows,
    class_names,
    fold_names,
    shown_lead,
)
from asynckfold.results.report.summary.facts import Facts, command, facts
from asynckfold.results.report.summary.failures import FailureGroup, LogLine, failures
from asynckfold.results.report.summary.jobs import (
    AveragedJob,
    Bar,
    averaged,
    bars,
    shown_packing,
)
from asynckfold.results.report.summary.machine import Use, uses
from asynckfold.results.report.summary.speedup import Timing, timing_of
from asynckfold.results.statistics import Lead
from asynckfold.results.utilization import Packing
from asynckfold.store import RunStore


@dataclass(frozen=True)
class Summary:
    """All numbers of a run's report.

    Parameters
    ----------
    metric, metrics : str, tuple of str
        The score that ranks (greater is better), and all of them.
    counts : Mapping of str to int
        planned = done + failed + diverged + cancelled + pending; `running` is part of pending.
    candidates : tuple of CandidateRow
        By rank; unranked ones last.
    best : str or None
        Name of the best complete candidate.
    lead : Lead or None
        None with fewer than two ranked candidates.
    class_names : tuple of str
        Rows and columns of the confusion matrices; empty for regression.
    packed_seconds : float
        Wall time of the packed run over all sessions.
    command : str
        What reproduces the run; empty where it was not started from a shell.
    bit_identity : Claim
        Whether equal bits are claimed, and why not.
    races : tuple of Race
        Several processes of a job against one; empty where that was not measured.
    averaged : tuple of AveragedJob
        Jobs that were trained by averaging.
    refit : str
        Which candidate was trained on all samples, and where that run is; empty where none was.
    """

    root: str
    metric: str
    metrics: tuple[str, ...]
    counts: Mapping[str, int]
    candidates: tuple[CandidateRow, ...]
    fold_names: tuple[str, ...]
    best: str | None
    lead: Lead | None
    class_names: tuple[str, ...]
    packed_seconds: float
    speedup: Timing | None
    packing: Packing | None
    use: tuple[Use, ...]
    bars: tuple[Bar, ...]
    failures: tuple[FailureGroup, ...]
    events: tuple[LogLine, ...]
    facts: Facts
    command: str
    about: Mapping[str, str]
    fingerprint: str
    bit_identity: reproducibility.Claim
    races: tuple[Race, ...]
    averaged: tuple[AveragedJob, ...]
    refit: str

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


_UNSHOWN = ("cli", "command", "folder", "decision")
"""Of what a run knows about itself: shown elsewhere, or the reader's business on no machine."""


def summarize(store: RunStore, results: CVResults | None = None) -> Summary:
    """Compute all numbers of a run's report.

    Parameters
    ----------
    store : RunStore
        The run; it may be incomplete, and it may be running.
    results : CVResults, optional
        What `read_results` returned for this store, where it is at hand already.

    Returns
    -------
    Summary
        A function of the store's content alone.

    Raises
    ------
    StoreCorruptError
        The run has no plan, or its files are damaged.
    """
    found = read_results(store) if results is None else results
    plan = found.plan
    _, targets = store.splits()
    confusions = count_classes(found, targets)
    rows = candidate_rows(found, confusions, len(plan.classes))
    jobs, about = job_by_id(plan), store.about
    return Summary(
        root=clean(store.root.absolute().name),
        metric=clean(plan.scoring[0]),
        metrics=tuple(clean(name) for name in plan.scoring),
        counts=store.counts(),
        candidates=rows,
        fold_names=fold_names(plan),
        best=rows[0].name if rows and rows[0].rank == 1 else None,
        lead=shown_lead(found),
        class_names=class_names(plan, confusions),
        packed_seconds=found.seconds,
        speedup=timing_of(found, rows),
        packing=shown_packing(store),
        use=uses(store.samples()),
        bars=bars(store, found.results, jobs),
        failures=failures(plan, found.results),
        events=tuple(
            LogLine(
                item.at,
                clean(item.kind),
                shown(jobs[item.job_id]).id if item.job_id in jobs else clean(item.job_id or ""),
                clean(item.text, 4096),
            )
            for item in store.events()
        ),
        facts=facts(plan, found),
        command=command(about),
        about=flat({key: value for key, value in about.items() if key not in _UNSHOWN}),
        fingerprint=store.fingerprint(),
        bit_identity=reproducibility.Claim(
            tuple(clean(text, 4096) for text in found.bit_identity.reasons)
        ),
        races=races(found),
        averaged=averaged(found),
        refit=clean(refit_note(store), 4096),
    )
