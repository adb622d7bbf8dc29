"""`Summary`: all numbers of a run, computed from the store."""

from __future__ import annotations

import base64
import functools
import io
import shlex
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from asynckfold.errors import AsyncKFoldError
from asynckfold.jobs.candidate_names import values_of
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.reproducibility import Reproducibility
from asynckfold.jobs.result import DONE
from asynckfold.results.audit import Audit, make_audit
from asynckfold.results.cv_results import CVResults, read_results, refit_note
from asynckfold.results.report.attempts import (
    Bar,
    CpuUse,
    FailureGroup,
    GpuUse,
    LogLine,
    bars,
    event_log,
    failures,
    gpu_uses,
    uses,
)
from asynckfold.results.report.candidate_rows import (
    CandidateRow,
    LossOverTime,
    by_rank,
    candidate_rows,
    class_names,
    fold_names,
    loss_over_time,
)
from asynckfold.results.report.predictions import (
    Calibration,
    HardSamples,
    Predictions,
    TwoClasses,
    calibration,
    count_classes,
    hard_samples,
    held_out,
    predictions,
    two_classes,
)
from asynckfold.results.report.sanitize import clean, flat, plain_data
from asynckfold.results.run_scores import times_of
from asynckfold.results.speedup import Speedup
from asynckfold.results.statistics import Pairs, train_valid_ratio
from asynckfold.results.utilization import Packing, packing_of
from asynckfold.results.verdict import Verdict
from asynckfold.store import Interim, RunReader
from asynckfold.system.files import read_plain

if TYPE_CHECKING:
    from asynckfold.results.report.grid import Effects, Grid


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
    audit: Audit
    class_names: tuple[str, ...]  # rows and columns of confusion matrices; empty for regression
    packed_seconds: float  # wall time over all sessions
    speedup: Speedup | None
    packing: Packing | None
    use: tuple[CpuUse, ...]
    gpu_use: tuple[GpuUse, ...]  # empty for a run that used no GPU
    bars: tuple[Bar, ...]
    failures: tuple[FailureGroup, ...]
    events: tuple[LogLine, ...]
    facts: Mapping[str, Any]  # what the plan says, see `facts_of`
    command: str  # empty if the run was started from Python
    about: Mapping[str, str]
    fingerprint: str
    bit_identity: Reproducibility
    loss_over_time: tuple[LossOverTime, ...]
    predictions: Predictions | None
    calibration: Calibration | None
    two_classes: TwoClasses | None
    hard_samples: HardSamples | None
    refit: str  # how the refit on all samples ended; empty without one
    grid: Grid | None = None
    effects: Effects | None = None  # of a grid at its end

    @property
    def ranked(self) -> tuple[CandidateRow, ...]:
        """Complete candidates, best first."""
        return tuple(row for row in self.candidates if row.rank is not None)

    @property
    def best_row(self) -> CandidateRow | None:
        """The best complete candidate."""
        return self.ranked[0] if self.ranked else None

    def labelled(self) -> Summary:
        """Return a grid with short names of its candidates, to be shown."""
        if self.grid is None:
            return self
        from asynckfold.results.report.grid import renamed

        labels = self.grid.labels(self.candidates)
        say = functools.partial(renamed, labels)

        def name(item: Any) -> Any:
            return item and replace(item, candidate=labels[item.candidate])

        def row(item: CandidateRow) -> CandidateRow:
            pair = item.to_first
            pair = pair and replace(pair, first=labels[pair.first], second=labels[pair.second])
            return replace(item, name=labels[item.name], to_first=pair)

        two, verdict, audit = self.two_classes, self.verdict, self.audit
        return replace(
            self,
            candidates=tuple(map(row, self.candidates)),
            verdict=replace(
                verdict,
                best=verdict.best and labels[verdict.best],
                best_models=tuple(map(say, verdict.best_models)),
                best_lr_schedules=tuple(map(say, verdict.best_lr_schedules)),
                sentences=tuple(map(say, verdict.sentences)),
                outlook=say(verdict.outlook),
                comparisons=tuple(map(say, verdict.comparisons)),
            ),
            audit=replace(
                audit, findings=tuple(replace(each, sentence=say(each.sentence)) for each in audit)
            ),
            highest=self.highest and labels[self.highest],
            bars=tuple(map(name, self.bars)),
            loss_over_time=tuple(map(name, self.loss_over_time)),
            predictions=name(self.predictions),
            calibration=name(self.calibration),
            two_classes=two and replace(two, curves=tuple(map(name, two.curves))),
            refit=say(self.refit),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON: NaN and infinities become None."""
        models, lr_schedules = self.verdict.models, self.verdict.lr_schedules
        numbers = dict(plain_data(self, clean))
        numbers["verdict"] |= {"models": _rows(models), "lr_schedules": _rows(lr_schedules)}
        return numbers


def _rows(pairs: Pairs) -> list[dict[str, Any]]:
    """Return plain data, column by column: a thousand models have half a million pairs."""
    columns = {name: column.astype(object) for name, column in pairs.columns.items()}
    for name, column in pairs.columns.items():
        if column.dtype == np.float64:
            columns[name][~np.isfinite(column)] = None
    for side in ("first", "second"):
        columns[side] = np.array([*map(functools.cache(clean), columns[side])], dtype=object)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


_UNSHOWN = ("cli", "command", "folder", "decision", "leak checks")
"""Recorded facts that the report shows elsewhere, or that are private."""


def summarize(store: RunReader, results: CVResults | None = None) -> Summary:
    """Compute all numbers of a run's report, from its store alone.

    The run may be incomplete or still running; `results` spares reading them again.
    """
    outcome = read_results(store) if results is None else results
    plan, by_job = outcome.whole
    _, targets = store.splits()
    held = held_out(outcome, targets)
    confusions = count_classes(outcome, targets, held)
    interim, ratio = interim_of(store), train_valid_ratio(outcome.folds)
    rows = candidate_rows(outcome, confusions, interim.epochs if interim else {})
    about, grid, effects = store.about, None, None
    if any(values_of(row.model, row.lr_schedule) for row in rows):
        from asynckfold.results.report.grid import effects_of, grid_of

        grid = grid_of(rows)
        if grid is not None and not interim:
            effects = effects_of(grid, rows, plan.scoring[0], ratio)
    ranked = [candidate for candidate, _ in by_rank(outcome)]
    attempts = bars(store, by_job)
    is_on_gpus = any(bar.device != "cpu" for bar in attempts)
    return Summary(
        root=store.root.absolute().name,
        metric=plan.scoring[0],
        metrics=plan.scoring,
        counts=store.counts(),
        going=store.holder() is not None,
        candidates=rows,
        fold_names=fold_names(outcome.plan),
        highest=rows[0].name if rows and rows[0].rank == 1 else None,
        verdict=outcome.verdict,
        audit=make_audit(outcome, targets, about),
        class_names=class_names(plan, confusions),
        packed_seconds=outcome.seconds,
        speedup=outcome.timing if outcome.baseline else None,
        packing=packing_of(store),
        use=uses(store.samples()),
        gpu_use=gpu_uses(store.gpu_samples()) if is_on_gpus else (),
        bars=attempts,
        failures=failures(plan, by_job),
        events=event_log(store),
        facts=facts_of(plan, outcome),
        command=command(about),
        about=flat({key: value for key, value in about.items() if key not in _UNSHOWN}),
        fingerprint=store.fingerprint(),
        bit_identity=outcome.bit_identity,
        loss_over_time=loss_over_time(outcome, times_of(outcome)),
        predictions=predictions(outcome, targets, held),
        calibration=calibration(outcome, targets, ranked, held),
        two_classes=two_classes(outcome, targets, ranked, held),
        hard_samples=hard_samples(outcome, targets, held),
        refit=refit_note(store),
        grid=grid,
        effects=effects,
    )


def interim_of(store: RunReader) -> Interim | None:
    """Return what a sweep that runs recorded of itself; None of others."""
    return store.interim if store.holder() and store.counts()["pending"] else None


def facts_of(plan: Plan, outcome: CVResults) -> dict[str, Any]:
    """Return what the plan says, in text that is safe to show."""
    keys = {(fold.repeat, fold.index) for fold in outcome.folds}
    params = {item.name: getattr(plan.params, item.name) for item in fields(plan.params)}
    return {
        "models": tuple(dict.fromkeys(job.model for job in plan.jobs)),
        "lr_schedules": tuple(dict.fromkeys(job.lr_schedule for job in plan.jobs)),
        "folds": len({index for _, index in keys}),
        "repeats": len({repeat for repeat, _ in keys}),
        **({"nested": plan.nested} if plan.nested else {}),
        "samples": outcome.n_samples,
        "classes": plan.classes,
        "targets": _targets(plan),
        "outputs": _outputs(plan),
        "batch_size": plan.batch_size,
        "epochs": plan.params.epochs,
        # Whether a job ended before its last epoch.
        "stopped_early": any(
            item.status == DONE and item.epochs and item.epochs[-1].number < plan.params.epochs
            for item in outcome.results.values()
        ),
        "random_state": plan.random_state,
        "threads_per_job": plan.threads_text,
        "device": plan.device_text,
        "params": {**params, "channels_last": ", ".join(plan.channels_last) or "no model"},
        "recipe": flat(plan.recipe),
        "dataset": plan.dataset,
        "folds_fingerprint": plan.folds,
        "plan_fingerprint": plan.fingerprint,
    }


def _targets(plan: Plan) -> str:
    objective = plan.objective_of("")
    if objective.targets is not None:
        return objective.targets.text
    positive = "" if objective.pos_label is None else f"; positive is {objective.pos_label}"
    return f"{objective.kind}{positive}"


def _outputs(plan: Plan) -> str:
    """Return the scales of the models' outputs."""
    objectives = [plan.objective_of(name) for name in dict.fromkeys(job.model for job in plan.jobs)]
    scales = [each.scale if each.columns is None else each.columns.text for each in objectives]
    return "; ".join(dict.fromkeys(scales))


def command(about: Mapping[str, Any]) -> str:
    """Return the shell command; empty if the run was started from Python."""
    parts = about.get("command") or ""
    return parts if isinstance(parts, str) else shlex.join(map(str, parts))


PICTURES, LARGEST = "oof/pictures.npz", 64
"""File of the pictures of hard samples; their most, and the most pixels of an edge."""


def pictures_of(store: RunReader) -> Mapping[int, str]:
    """Return PNG images as addresses by number of sample; nothing if the file is not sound."""
    try:
        data = read_plain(store.root / PICTURES)
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            samples, pictures = arrays["samples"], arrays["pictures"]
    except (AsyncKFoldError, OSError, ValueError, KeyError, zipfile.BadZipFile):
        return {}
    fits = pictures.ndim == 4 and pictures.shape[-1] in (1, 3) and max(pictures.shape) <= LARGEST
    if not fits or pictures.dtype != np.uint8 or samples.shape != pictures.shape[:1]:
        return {}
    return {int(index): _address(picture) for index, picture in zip(samples, pictures, strict=True)}


def _address(picture: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    pixels = picture.squeeze(-1) if picture.shape[-1] == 1 else picture
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
