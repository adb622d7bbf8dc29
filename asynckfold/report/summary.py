"""The numbers of a report: plain frozen data, read from the store alone.

Everything that the figures, the page and ``results.json`` show is gathered here, once; the
statistics are those of `paired` and `confusion`. Text that a user or a user's code may have written
is cleaned on its way in.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold import identity
from asynckfold.confusion import class_accuracy, count_classes
from asynckfold.packing import Packing, packing_of
from asynckfold.paired import Lead, bounds_of, confidence_interval, train_valid_ratio
from asynckfold.plan import Job, Plan
from asynckfold.report.race import Race, races
from asynckfold.report.text import TEXT_LIMIT, clean, flat, plain_data
from asynckfold.result import (
    DONE,
    Baseline,
    Candidate,
    CVResults,
    Epoch,
    Result,
    cause,
    job_by_id,
    rank,
)
from asynckfold.store import Attempt, Placed, RunStore, Sample

USE_POINTS = 400
PHASES = ("serial", "packed")


@dataclass(frozen=True)
class Curve:
    """One measure over the epochs of a candidate.

    Parameters
    ----------
    measure : {"train_loss", "valid_loss", "accuracy"}
        What is measured.
    mean : tuple of float, length n_epochs
        Mean over `folds`; NaN from the epoch on that one of them does not have.
    folds : tuple of tuple of float
        One line per job that got that far, in the plan's order; epoch 1 first.
    """

    measure: str
    mean: tuple[float, ...]
    folds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class CandidateRow:
    """One model × LR schedule in the ranking.

    Parameters
    ----------
    rank : int or None
        1 is best; None where a fold is missing or the mean is not a number.
    scores : Mapping of str to tuple of float
        By metric, one score per fold.
    mean, std : Mapping of str to float
        Over the folds that have a score; `std` divides by their number, as scikit-learn does.
    ci_low, ci_high : float
        Corrected 95 % interval of the first metric's mean; NaN for incomplete candidates.
    fit_seconds : float
        Seconds of training all folds; for an incomplete candidate the mean fold times the folds.
    confusion : tuple of tuple of int, or None
        Out-of-fold counts, a row per true class, a column per class that the model says.
    class_accuracy : tuple of float, or None
        Share of each class that is recognised; NaN for a class without held-out samples.
    """

    name: str
    model: str
    lr_schedule: str
    rank: int | None
    status: str
    folds_done: int
    folds: int
    scores: Mapping[str, tuple[float, ...]]
    mean: Mapping[str, float]
    std: Mapping[str, float]
    ci_low: float
    ci_high: float
    fit_seconds: float
    curves: tuple[Curve, ...]
    confusion: tuple[tuple[int, ...], ...] | None
    class_accuracy: tuple[float, ...] | None

    @property
    def complete(self) -> bool:
        """Whether every fold has a score."""
        return self.folds_done == self.folds


@dataclass(frozen=True)
class AccuracyPair:
    """Accuracy of one candidate in the packed run and in the serial baseline.

    Parameters
    ----------
    candidate : str
        Model / LR schedule.
    packed, serial : float
        Means over the folds.
    folds : tuple of FoldPair
        Each fold that both have.
    """

    candidate: str
    packed: float
    serial: float
    folds: tuple[FoldPair, ...] = ()


@dataclass(frozen=True)
class FoldPair:
    """Accuracy of one job in the packed run and in the serial baseline.

    Parameters
    ----------
    fold : str
        Its number, behind that of the repeat where there are several.
    together : int
        How many jobs were trained as one with it, itself included: 1 for a job by itself.
    packed, serial : float
        Of all samples of the fold.
    """

    fold: str
    together: int
    packed: float
    serial: float


@dataclass(frozen=True)
class Speedup:
    """Serial against packed wall time.

    Parameters
    ----------
    kind : {"measured", "estimated"}
        Whether the serial loop was run whole.
    serial_seconds, packed_seconds : float
        Wall time of all jobs.
    serial_threads : int
        Threads of the serial loop.
    ratio : float or None
        Serial / packed; None while jobs are pending, and where not one succeeded.
    accuracy : tuple of AccuracyPair
        Empty for an estimate, and where accuracy is not among the run's scores.
    disturbance : str
        Why the serial seconds are too high; empty where they are not.
    """

    kind: str
    serial_seconds: float
    serial_threads: int
    packed_seconds: float
    ratio: float | None
    accuracy: tuple[AccuracyPair, ...]
    disturbance: str


@dataclass(frozen=True)
class Use:
    """CPU use over one phase, thinned to at most `USE_POINTS` moments.

    Parameters
    ----------
    phase : {"packed", "serial"}
        What was running.
    seconds : tuple of float
        Since the first sample of the phase.
    used, own : tuple of float
        Cores' worth of use: by everyone, and by this run.
    cores : int
        Allowed cores.
    mean_used, mean_own : float
        Over all samples of the phase, cores' worth.
    """

    phase: str
    seconds: tuple[float, ...]
    used: tuple[float, ...]
    own: tuple[float, ...]
    cores: int
    mean_used: float
    mean_own: float


@dataclass(frozen=True)
class Bar:
    """One attempt: a bar in the Gantt chart; times in run seconds.

    Parameters
    ----------
    expected : float
        Seconds that the whole job was expected to take.
    memory, peak_memory : int or None
        Bytes that were reserved for it, and the most that its process held, torch included; None
        where that is not known.
    waits : tuple of str
        What its job waited for before, and how long.
    changes : tuple of (float, tuple of int)
        Since when it held which other cores than `cores`, with which it was placed.
    """

    job: str
    candidate: str
    attempt: int
    cores: tuple[int, ...]
    device: str
    start: float
    end: float
    outcome: str
    error: str
    expected: float
    memory: int | None
    peak_memory: int | None
    waits: tuple[str, ...]
    changes: tuple[tuple[float, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class FailureGroup:
    """Jobs that ended with the same status and error text."""

    status: str
    error: str
    jobs: tuple[str, ...]
    traceback: str


@dataclass(frozen=True)
class LogLine:
    """An event of the run; `at` in run seconds."""

    at: float
    kind: str
    job: str
    text: str


@dataclass(frozen=True)
class AveragedJob:
    """What parameter averaging did in one job.

    Parameters
    ----------
    job : str
        Its id.
    rounds : int
        How often the clones of its processes were averaged.
    seconds : float
        Of its epochs, also of those before a continuation.
    samples : tuple of int
        Samples × epochs of each process.
    """

    job: str
    rounds: int
    seconds: float
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Facts:
    """What the plan says."""

    models: tuple[str, ...]
    lr_schedules: tuple[str, ...]
    folds: int
    repeats: int
    samples: int
    classes: tuple[str, ...]
    batch_size: int
    epochs: int
    random_state: int
    threads_per_job: str
    device: str
    params: Mapping[str, Any]
    recipe: Mapping[str, str]
    dataset: str
    folds_fingerprint: str
    plan_fingerprint: str


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
    speedup: Speedup | None
    packing: Packing | None
    use: tuple[Use, ...]
    bars: tuple[Bar, ...]
    failures: tuple[FailureGroup, ...]
    events: tuple[LogLine, ...]
    facts: Facts
    command: str
    about: Mapping[str, str]
    fingerprint: str
    bit_identity: identity.Claim
    races: tuple[Race, ...]
    averaged: tuple[AveragedJob, ...]

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


def read_results(store: RunStore) -> CVResults:
    """Return the results of a run on disk, complete or not."""
    folds, targets = store.splits()
    return CVResults(
        plan=store.plan,
        folds=folds,
        n_samples=len(targets),
        results=store.results(),
        seconds=store.packed_seconds(),
        baseline=store.baseline,
        root_dir=store.root,
        bit_identity=identity.claim(store.plan, store.software()),
    )


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
    rows = _rows(found, confusions, len(plan.classes))
    jobs = job_by_id(plan)
    return Summary(
        root=clean(store.root.absolute().name),
        metric=clean(plan.scoring[0]),
        metrics=tuple(clean(name) for name in plan.scoring),
        counts=store.counts(),
        candidates=rows,
        fold_names=_fold_names(plan),
        best=rows[0].name if rows and rows[0].rank == 1 else None,
        lead=_lead(found),
        class_names=_class_names(plan, confusions),
        packed_seconds=found.seconds,
        speedup=_speedup(found, rows),
        packing=_packing(store),
        use=_uses(store.samples()),
        bars=_bars(store, found.results, jobs),
        failures=_failures(plan, found.results),
        events=tuple(
            LogLine(
                item.at,
                clean(item.kind),
                _shown(jobs[item.job_id]).id if item.job_id in jobs else clean(item.job_id or ""),
                clean(item.text, 4096),
            )
            for item in store.events()
        ),
        facts=_facts(plan, found),
        command=_command(store.about),
        about=flat({key: store.about[key] for key in store.about if key not in _UNSHOWN}),
        fingerprint=store.fingerprint(),
        bit_identity=identity.Claim(
            tuple(clean(text, 4096) for text in found.bit_identity.reasons)
        ),
        races=races(found),
        averaged=_averaged(found),
    )


# Candidates


def _rows(
    found: CVResults, confusions: Mapping[str, npt.NDArray[np.int64]], n_classes: int
) -> tuple[CandidateRow, ...]:
    metric = found.plan.scoring[0]
    listed = found.candidates
    ratio = train_valid_ratio(found.folds)
    jobs = _jobs_by_candidate(found.plan)
    rows = [
        _row(
            candidate,
            position,
            metric,
            ratio,
            [found.results[job.id] for job in jobs[candidate.name] if job.id in found.results],
            confusions.get(candidate.name),
            n_classes,
        )
        for candidate, position in zip(listed, rank(listed, metric), strict=True)
    ]
    worst = len(rows) + 1
    return tuple(sorted(rows, key=lambda row: (row.rank or worst, -row.folds_done)))


def _jobs_by_candidate(plan: Plan) -> dict[str, list[Job]]:
    jobs: dict[str, list[Job]] = {}
    for job in plan.jobs:
        jobs.setdefault(job.candidate, []).append(job)
    return jobs


def _row(
    candidate: Candidate,
    position: int,
    metric: str,
    ratio: float,
    results: Sequence[Result],
    confusion: npt.NDArray[np.int64] | None,
    n_classes: int,
) -> CandidateRow:
    scores = candidate.scores
    low, high = confidence_interval(scores[metric], ratio, bounds=bounds_of(metric))
    mean = {clean(name): _over_known(values, np.mean) for name, values in scores.items()}
    return CandidateRow(
        name=f"{clean(candidate.model)}/{clean(candidate.lr_schedule)}",
        model=clean(candidate.model),
        lr_schedule=clean(candidate.lr_schedule),
        rank=position if candidate.ranks_by(metric) else None,
        status=candidate.status,
        folds_done=candidate.done,
        folds=candidate.planned,
        scores={clean(name): tuple(values.tolist()) for name, values in scores.items()},
        mean=mean,
        std={clean(name): _over_known(values, np.std) for name, values in scores.items()},
        ci_low=low,
        ci_high=high,
        fit_seconds=_over_known(candidate.fit_seconds, np.mean) * candidate.planned,
        curves=_curves(results),
        confusion=None if confusion is None else tuple(map(tuple, confusion.tolist())),
        class_accuracy=None if confusion is None else class_accuracy(confusion, n_classes),
    )


def _over_known(values: npt.NDArray[np.float64], measure: Any) -> float:
    known = values[~np.isnan(values)]
    return float(measure(known)) if known.size else float("nan")


def _curves(results: Sequence[Result]) -> tuple[Curve, ...]:
    histories = [result.epochs for result in results if result.epochs]
    measures = ("train_loss", "valid_loss", "accuracy")
    curves = (_curve(measure, histories) for measure in measures)
    return tuple(curve for curve in curves if curve is not None)


def _curve(measure: str, histories: Sequence[Sequence[Epoch]]) -> Curve | None:
    lines = [[getattr(item, measure) for item in history] for history in histories]
    known = [[math.nan if value is None else float(value) for value in line] for line in lines]
    if not any(value is not None for line in lines for value in line):
        return None
    length = max(map(len, known))
    padded = np.array([line + [math.nan] * (length - len(line)) for line in known])
    return Curve(measure, tuple(padded.mean(axis=0).tolist()), tuple(map(tuple, known)))


def _fold_names(plan: Plan) -> tuple[str, ...]:
    keys = dict.fromkeys((job.repeat, job.fold) for job in plan.jobs)
    repeated = any(repeat for repeat, _ in keys)
    return tuple(
        f"repeat {repeat} fold {fold}" if repeated else f"fold {fold}" for repeat, fold in keys
    )


def _lead(found: CVResults) -> Lead | None:
    lead = found.lead
    names = {row.name: f"{clean(row.model)}/{clean(row.lr_schedule)}" for row in found.candidates}
    return lead and replace(lead, best=names[lead.best], runner_up=names[lead.runner_up])


def _class_names(plan: Plan, confusions: Mapping[str, npt.NDArray[np.int64]]) -> tuple[str, ...]:
    """The classes, and the outputs beyond them that models say."""
    names = tuple(clean(name) for name in plan.classes)
    size = max(map(len, confusions.values()), default=len(names))
    return names + tuple(f"output {index}" for index in range(len(names), size))


# Time and machine


def _speedup(found: CVResults, rows: Sequence[CandidateRow]) -> Speedup | None:
    baseline = found.baseline
    if baseline is None:
        return None
    serial = {
        f"{clean(model)}/{clean(lr_schedule)}": baseline.accuracy[f"{model}/{lr_schedule}"]
        for model, lr_schedule in found.plan.candidates
        if f"{model}/{lr_schedule}" in baseline.accuracy
    }
    pairs = _fold_pairs(found, baseline)
    return Speedup(
        kind=clean(baseline.kind),
        serial_seconds=baseline.seconds,
        serial_threads=baseline.threads,
        packed_seconds=found.seconds,
        ratio=found.speedup if found.counts[DONE] else None,
        accuracy=tuple(
            AccuracyPair(row.name, row.mean["accuracy"], serial[row.name], pairs.get(row.name, ()))
            for row in rows
            if row.name in serial and "accuracy" in row.mean
        ),
        disturbance=baseline.disturbance,
    )


def _fold_pairs(found: CVResults, baseline: Baseline) -> dict[str, tuple[FoldPair, ...]]:
    """Return the scores of each fold that both have, by candidate."""
    repeats = len({job.repeat for job in found.plan.jobs})
    pairs: dict[str, tuple[FoldPair, ...]] = {}
    for job in found.plan.jobs:
        result = found.results.get(job.id)
        if result is None or job.id not in baseline.by_job or "accuracy" not in result.scores:
            continue
        fold = f"{job.repeat}.{job.fold}" if repeats > 1 else str(job.fold)
        together = len(found.plan.group_of(job.id))
        pair = FoldPair(fold, together, result.scores["accuracy"], baseline.by_job[job.id])
        name = f"{clean(job.model)}/{clean(job.lr_schedule)}"
        pairs[name] = (*pairs.get(name, ()), pair)
    return pairs


def _uses(samples: Sequence[Sample]) -> tuple[Use, ...]:
    phases = {phase: [item for item in samples if item.phase == phase] for phase in PHASES}
    return tuple(_use(phase, found) for phase, found in phases.items() if found)


def _use(phase: str, samples: Sequence[Sample]) -> Use:
    table = np.array([(item.at, item.used, item.own) for item in samples])
    groups = np.array_split(table, min(USE_POINTS, len(table)))
    thinned = np.array([group.mean(axis=0) for group in groups])
    seconds = thinned[:, 0] - table[0, 0]
    return Use(
        phase=phase,
        seconds=tuple(seconds.tolist()),
        used=tuple(thinned[:, 1].tolist()),
        own=tuple(thinned[:, 2].tolist()),
        cores=max(len(item.cores) for item in samples),
        mean_used=float(table[:, 1].mean()),
        mean_own=float(table[:, 2].mean()),
    )


def _packing(store: RunStore) -> Packing | None:
    found = packing_of(store)
    return found and replace(
        found,
        models=tuple(
            replace(item, model=clean(item.model), why=clean(item.why, 4096))
            for item in found.models
        ),
    )


def _bars(
    store: RunStore, results: Mapping[str, Result], jobs: Mapping[str, Job]
) -> tuple[Bar, ...]:
    attempts, placed = store.attempts(), store.placed()
    moments = [moment for item in attempts for moment in (item.started, item.ended) if moment]
    latest = max(moments, default=0.0)
    open_outcome = "lost" if store.holder() is None else "running"
    return tuple(
        Bar(
            job=_shown(jobs[item.job_id]).id,
            candidate=_shown(jobs[item.job_id]).candidate,
            attempt=item.attempt,
            cores=item.cores,
            device=clean(item.device),
            start=item.started,
            end=latest if item.ended is None else item.ended,
            outcome=item.outcome or open_outcome,
            error=clean(item.error, 4096),
            expected=item.expected,
            changes=item.changes,
            **_placing(placed.get((item.job_id, item.attempt)), results.get(item.job_id), item),
        )
        for item in attempts
        if item.job_id in jobs
    )


def _placing(placed: Placed | None, result: Result | None, attempt: Attempt) -> dict[str, Any]:
    ended = result is not None and result.attempt == attempt.attempt
    return {
        "memory": None if placed is None else placed.memory,
        "peak_memory": result.peak_memory if result is not None and ended else None,
        "waits": tuple(clean(str(wait), 4096) for wait in placed.waits) if placed else (),
    }


def _averaged(found: CVResults) -> tuple[AveragedJob, ...]:
    results = ((job, found.results.get(job.id)) for job in found.plan.jobs)
    return tuple(
        AveragedJob(
            _shown(job).id,
            result.averaged.rounds,
            math.fsum(item.seconds for item in result.epochs),
            result.averaged.samples,
        )
        for job, result in results
        if result is not None and result.averaged is not None
    )


# Failures and setup


def _failures(plan: Plan, results: Mapping[str, Result]) -> tuple[FailureGroup, ...]:
    """Group equal errors, the most frequent first."""
    groups: dict[tuple[str, str], list[tuple[Job, Result]]] = {}
    for job in plan.jobs:
        result = results.get(job.id)
        if result is not None and result.status != DONE:
            groups.setdefault((result.status, cause(result.error)), []).append((job, result))
    found = [
        FailureGroup(
            status,
            clean(error, 4096) or "no error text was recorded",
            tuple(_shown(job).id for job, _ in members),
            clean(next((item.traceback for _, item in members if item.traceback), ""), TEXT_LIMIT),
        )
        for (status, error), members in groups.items()
    ]
    return tuple(sorted(found, key=lambda group: -len(group.jobs)))


def _facts(plan: Plan, found: CVResults) -> Facts:
    keys = {fold.key for fold in found.folds}
    return Facts(
        models=tuple(dict.fromkeys(clean(job.model) for job in plan.jobs)),
        lr_schedules=tuple(dict.fromkeys(clean(job.lr_schedule) for job in plan.jobs)),
        folds=len({index for _, index in keys}),
        repeats=len({repeat for repeat, _ in keys}),
        samples=found.n_samples,
        classes=tuple(clean(name) for name in plan.classes),
        batch_size=plan.batch_size,
        epochs=plan.params.epochs,
        random_state=plan.random_state,
        threads_per_job=plan.threads_text,
        device=clean(plan.device),
        params={
            **{item.name: getattr(plan.params, item.name) for item in fields(plan.params)},
            "channels_last": ", ".join(map(clean, plan.channels_last)) or "no model",
        },
        recipe=flat(plan.recipe),
        dataset=clean(plan.dataset),
        folds_fingerprint=clean(plan.folds),
        plan_fingerprint=plan.fingerprint,
    )


def _command(about: Mapping[str, Any]) -> str:
    given = about.get("command") or ""
    text = given if isinstance(given, str) else shlex.join(map(str, given))
    return clean(text, 4096)


def _shown(job: Job) -> Job:
    """Return the job under names that are safe to show; different jobs keep different ids."""
    return replace(job, model=clean(job.model), lr_schedule=clean(job.lr_schedule))
