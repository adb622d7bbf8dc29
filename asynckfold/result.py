"""What comes out: the result of one job, and `CVResults`, what the user gets back."""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynckfold.folds import Fold
from asynckfold.identity import Claim
from asynckfold.paired import (
    Lead,
    bounds_of,
    confidence_interval,
    paired_difference,
    train_valid_ratio,
)
from asynckfold.plan import Job, Plan

if TYPE_CHECKING:
    import pandas as pd

DONE, FAILED, DIVERGED, CANCELLED = "done", "failed", "diverged", "cancelled"
ENDED = (DONE, FAILED, DIVERGED, CANCELLED)


@dataclass(frozen=True)
class Epoch:
    """One epoch of one job.

    Parameters
    ----------
    number : int
        From 1.
    train_loss, valid_loss : float
        Mean over the samples of the training fold, while training; and over the held-out fold.
    accuracy : float or None
        Share of held-out samples whose class is right; None for regression.
    lr : float
        Learning rate of the first parameter group at the start of the epoch.
    seconds : float
        Wall time, evaluation included.
    """

    number: int
    train_loss: float
    valid_loss: float
    accuracy: float | None
    lr: float
    seconds: float


@dataclass(frozen=True)
class StageEpoch:
    """One epoch of a stage before the training, such as the pretraining of a layer.

    Parameters
    ----------
    stage : str
        ``"layer 1"``: what the model calls this part of it.
    number : int
        From 1.
    measures : Mapping of str to float
        What was measured after it, by name.
    seconds : float
        Wall time since the one before, or since the stage began.
    """

    stage: str
    number: int
    measures: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class Averaged:
    """What parameter averaging did in one job.

    Parameters
    ----------
    rounds : int
        How often the clones of its processes were averaged.
    samples : tuple of int
        Samples × epochs of each process: how many it trained on, those of later epochs counted
        again.
    """

    rounds: int
    samples: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Result:
    """The end of one job.

    Parameters
    ----------
    job_id : str
        ``"LeNet/cosine/fold-0"``.
    attempt : int
        The attempt that ended, from 1.
    status : {"done", "failed", "diverged", "cancelled"}
        How it ended.
    scores : Mapping of str to float
        By metric, on the held-out fold, by the model of the last epoch; greater is better.
    epochs : tuple of Epoch
        What was recorded on the way.
    outputs : ndarray of float32, shape (n_valid, n_outputs), or None
        What the model says of the held-out samples, in the fold's order.
    weights : str
        SHA-256 of the trained parameters and buffers.
    fit_seconds, score_seconds : float
        Wall time of training with its evaluations, and of the last evaluation. Jobs that are
        trained as one have equal parts of their training's.
    peak_memory : int
        Largest resident set of the worker during the job, bytes.
    pid, cores, threads, device : int, tuple of int, int, str
        Where it ran.
    started, ended : float
        Run seconds: wall time of the run's sessions up to then.
    error, traceback : str
        One line, and the whole story; empty when done.
    pretraining : tuple of StageEpoch
        What a stage before the first epoch reported; empty for a model that has none.
    averaged : Averaged or None
        What parameter averaging did, also before a continuation; None for any other trainer, and
        where the job failed.
    """

    job_id: str
    attempt: int
    status: str
    scores: Mapping[str, float] = field(default_factory=dict)
    epochs: tuple[Epoch, ...] = ()
    outputs: npt.NDArray[np.float32] | None = None
    weights: str = ""
    fit_seconds: float = 0.0
    score_seconds: float = 0.0
    peak_memory: int = 0
    pid: int = 0
    cores: tuple[int, ...] = ()
    threads: int = 1
    device: str = "cpu"
    started: float = 0.0
    ended: float = 0.0
    error: str = ""
    traceback: str = ""
    pretraining: tuple[StageEpoch, ...] = ()
    averaged: Averaged | None = None

    @property
    def digest(self) -> str:
        """SHA-256 over what must never change: weights, outputs, metrics; no time, no place."""
        canonical: dict[str, Any] = {
            "job": self.job_id,
            "status": self.status,
            "weights": self.weights,
            "outputs": "" if self.outputs is None else _array_digest(self.outputs),
            "scores": _hexadecimal(self.scores),
            "epochs": [
                [
                    item.number,
                    *(
                        None if value is None else float(value).hex()
                        for value in (item.train_loss, item.valid_loss, item.accuracy, item.lr)
                    ),
                ]
                for item in self.epochs
            ],
        }
        if self.pretraining:
            # Results without such a stage keep the digest that they had before there was one.
            canonical["pretraining"] = [
                [item.stage, item.number, _hexadecimal(item.measures)] for item in self.pretraining
            ]
        return hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()


def _hexadecimal(values: Mapping[str, float]) -> dict[str, str]:
    return {name: float(value).hex() for name, value in sorted(values.items())}


def _array_digest(array: npt.NDArray[Any]) -> str:
    head = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def fingerprint(digests: Mapping[str, str]) -> str:
    """Return one hash for all jobs' canonical results; `digests` maps job id to `Result.digest`."""
    return hashlib.sha256(json.dumps(dict(sorted(digests.items()))).encode()).hexdigest()


_PLACE = re.compile(r" \(epoch \d+, (batch \d+ of \d+|end of the epoch)\)")


def cause(error: str) -> str:
    """Return an error without the epoch and batch in which it was raised: equal ones are one.

    >>> cause("ValueError: bad (epoch 2, batch 1 of 4)")
    'ValueError: bad'
    """
    return _PLACE.sub("", error)


NEIGHBOUR_CORES = 0.2
"""Mean use by others above which a timing is called disturbed."""


@dataclass(frozen=True)
class Baseline:
    """The ordinary serial loop over the same jobs, to compare with.

    Parameters
    ----------
    kind : {"measured", "estimated"}
        Whether the whole loop was run, or some batches of each candidate timed and multiplied.
    seconds : float
        All jobs, one after another.
    threads : int
        Threads of the loop: torch's default.
    by_candidate : Mapping of str to float
        Seconds of each candidate's jobs.
    accuracy : Mapping of str to float
        Mean score of each candidate in the baseline's own training; empty for an estimate.
    others : float
        Cores' worth of use by other programs while it was timed.
    by_job : Mapping of str to float
        Accuracy of each job in the baseline's own training, by its id; empty for an estimate.
    epochs : Mapping of str to tuple of (float, float)
        Where jobs have several processes, by job: the seconds that had passed at the end of each
        epoch, evaluation included, and its mean training loss.
    class_counts : Mapping of str to tuple of (int, int)
        There, by job: of each class, how many held-out samples were recognised, of how many.
    """

    kind: str
    seconds: float
    threads: int
    by_candidate: Mapping[str, float] = field(default_factory=dict)
    accuracy: Mapping[str, float] = field(default_factory=dict)
    others: float = 0.0
    by_job: Mapping[str, float] = field(default_factory=dict)
    epochs: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    class_counts: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)

    @property
    def disturbance(self) -> str:
        """Why its seconds, and a speedup from them, are too high; empty where they are not."""
        if self.others <= NEIGHBOUR_CORES:
            return ""
        return (
            f"disturbed: other programs used {self.others:.1f} cores while the serial loop was "
            "timed, so its seconds and the speedup are too high"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Candidate:
    """One row of the ranking: a model × LR schedule over all its folds.

    Parameters
    ----------
    model, lr_schedule : str
        Names.
    scores : Mapping of str to ndarray of shape (n_folds,)
        By metric; NaN where a fold has no score.
    fit_seconds, score_seconds : ndarray of shape (n_folds,)
        NaN where a fold did not end.
    done, planned : int
        Folds.
    status : str
        ``"done"`` when complete, else the worst that happened: ``"failed"``, ``"diverged"``,
        ``"cancelled"`` or ``"pending"``.
    """

    model: str
    lr_schedule: str
    scores: Mapping[str, npt.NDArray[np.float64]]
    fit_seconds: npt.NDArray[np.float64]
    score_seconds: npt.NDArray[np.float64]
    done: int
    planned: int
    status: str

    @property
    def name(self) -> str:
        """``"LeNet/cosine"``."""
        return f"{self.model}/{self.lr_schedule}"

    @property
    def complete(self) -> bool:
        """Whether every fold has a score; only then is the candidate ranked."""
        return self.done == self.planned

    def ranks_by(self, metric: str) -> bool:
        """Whether it can be ranked: complete, and its mean a number."""
        return self.complete and not np.isnan(self.scores[metric]).any()


def candidates(
    plan: Plan, results: Mapping[str, Result], error_score: float = float("nan")
) -> list[Candidate]:
    """Gather results by candidate, in the caller's order."""
    rows = []
    for model, lr_schedule in plan.candidates:
        jobs = [job for job in plan.jobs if (job.model, job.lr_schedule) == (model, lr_schedule)]
        found = [results.get(job.id) for job in jobs]
        rows.append(
            Candidate(
                model,
                lr_schedule,
                {
                    metric: np.array([_score(item, metric, error_score) for item in found])
                    for metric in plan.scoring
                },
                np.array([item.fit_seconds if item else np.nan for item in found]),
                np.array([item.score_seconds if item else np.nan for item in found]),
                sum(item is not None and item.status == DONE for item in found),
                len(jobs),
                _worst(found),
            )
        )
    return rows


def _score(result: Result | None, metric: str, error_score: float) -> float:
    if result is None:
        return float("nan")
    if result.status != DONE:
        return error_score
    return float(result.scores.get(metric, float("nan")))


def _worst(found: Sequence[Result | None]) -> str:
    statuses = {item.status if item else "pending" for item in found}
    for status in (FAILED, DIVERGED, CANCELLED, "pending"):
        if status in statuses:
            return status
    return DONE


def rank(rows: Sequence[Candidate], metric: str) -> list[int]:
    """Rank candidates by mean score, 1 is best; ties share a rank; incomplete ones come last.

    Independent of the order of the rows, NaN or not.

    Examples
    --------
    >>> from types import SimpleNamespace as Row
    >>> rows = [Row(complete=True, scores={"a": np.array([value])}) for value in (0.5, 0.9, 0.5)]
    >>> rank(rows, "a")
    [2, 1, 2]
    """
    means = [float(np.mean(row.scores[metric])) if row.complete else float("nan") for row in rows]
    finite = [value for value in means if not np.isnan(value)]
    return [
        1 + (len(finite) if np.isnan(value) else sum(other > value for other in finite))
        for value in means
    ]


@dataclass(frozen=True, eq=False)
class CVResults:
    """The results of a sweep, complete or not.

    Parameters
    ----------
    plan : Plan
        What was asked.
    folds : tuple of Fold
        Who was held out when.
    n_samples : int
        Samples of the dataset.
    results : Mapping of str to Result
        By job id; jobs without a result are pending.
    seconds : float
        Wall time of the packed run: data, worker start-up, checks and jobs, over all sessions.
    baseline : Baseline or None
        The serial loop to compare with.
    root_dir : Path
        The run on disk.
    error_score : float
        What stands for the score of a job that failed.
    bit_identity : Claim
        Whether these bits are claimed to be those that the plan gives anywhere, and why not.
    """

    plan: Plan
    folds: tuple[Fold, ...]
    n_samples: int
    results: Mapping[str, Result]
    seconds: float
    baseline: Baseline | None
    root_dir: Path
    error_score: float = float("nan")
    bit_identity: Claim = field(default_factory=lambda: Claim(()))
    _build_report: Callable[[], Path] | None = None

    @property
    def candidates(self) -> list[Candidate]:
        """One `Candidate` per model × LR schedule, in the caller's order."""
        return candidates(self.plan, self.results, self.error_score)

    @property
    def cv_results_(self) -> dict[str, Any]:
        """Scores and times with scikit-learn's keys, one entry per candidate.

        ``params``, ``param_model``, ``param_scheduler``, ``split0_test_accuracy``, …,
        ``mean_test_accuracy``, ``std_test_accuracy``, ``rank_test_accuracy``, ``mean_fit_time``,
        ``std_fit_time``, ``mean_score_time``, ``std_score_time``.
        """
        rows = self.candidates
        table: dict[str, Any] = {}
        for name, column in (("fit", "fit_seconds"), ("score", "score_seconds")):
            seconds = np.array([getattr(row, column) for row in rows])
            table[f"mean_{name}_time"] = seconds.mean(axis=1)
            table[f"std_{name}_time"] = seconds.std(axis=1)
        for name, values in (
            ("model", [row.model for row in rows]),
            ("scheduler", [row.lr_schedule for row in rows]),
        ):
            table[f"param_{name}"] = np.ma.MaskedArray(np.array(values, dtype=object), mask=False)
        table["params"] = [{"model": row.model, "scheduler": row.lr_schedule} for row in rows]
        for metric in self.plan.scoring:
            scores = np.array([row.scores[metric] for row in rows])
            for split in range(scores.shape[1]):
                table[f"split{split}_test_{metric}"] = scores[:, split]
            table[f"mean_test_{metric}"] = scores.mean(axis=1)
            table[f"std_test_{metric}"] = scores.std(axis=1)
            table[f"rank_test_{metric}"] = np.array(rank(rows, metric), dtype=np.int32)
        return table

    @property
    def best_index_(self) -> int:
        """Position of the best complete candidate.

        Raises
        ------
        ValueError
            No candidate is complete.
        """
        rows, metric = self.candidates, self.plan.scoring[0]
        if not any(row.ranks_by(metric) for row in rows):
            raise ValueError(
                f"no candidate has a score on every fold, so none is best; {self._account()}"
            )
        return int(np.argmin(rank(rows, metric)))

    @property
    def best_params_(self) -> dict[str, str]:
        """``{"model": …, "scheduler": …}`` of the best complete candidate."""
        row = self.candidates[self.best_index_]
        return {"model": row.model, "scheduler": row.lr_schedule}

    @property
    def best_score_(self) -> float:
        """Mean of the first metric over the folds of the best complete candidate."""
        return float(np.mean(self.candidates[self.best_index_].scores[self.plan.scoring[0]]))

    @property
    def lead(self) -> Lead | None:
        """How far the best candidate is ahead of the next; None with fewer than two to rank."""
        metric = self.plan.scoring[0]
        rows = [row for row in self.candidates if row.ranks_by(metric)]
        rows = [row for _, row in sorted(zip(rank(rows, metric), rows, strict=True), key=_first)]
        if len(rows) < 2:
            return None
        found = paired_difference(
            rows[0].scores[metric], rows[1].scores[metric], train_valid_ratio(self.folds)
        )
        return Lead(rows[0].name, rows[1].name, found)

    @property
    def counts(self) -> dict[str, int]:
        """Jobs by state: planned = done + failed + diverged + cancelled + pending."""
        found = [result.status for result in self.results.values()]
        ended = {status: found.count(status) for status in ENDED}
        planned = len(self.plan.jobs)
        return {"planned": planned, **ended, "pending": planned - sum(ended.values())}

    @property
    def speedup(self) -> float | None:
        """Serial seconds / packed seconds; None without a baseline, or while jobs are pending.

        None as well when not one job succeeded: then no work was done faster.
        """
        counts = self.counts
        if self.baseline is None or counts["pending"] or not counts["done"] or not self.seconds:
            return None
        return self.baseline.seconds / self.seconds

    @property
    def fingerprint(self) -> str:
        """One hash over all jobs' canonical results: equal hashes, equal bits."""
        return fingerprint({name: item.digest for name, item in self.results.items()})

    @property
    def oof(self) -> dict[str, npt.NDArray[np.float32]]:
        """Out-of-fold outputs by candidate, one row per sample of the dataset, in its order.

        Rows of samples that no finished fold held out are NaN; with repeats, their mean.
        """
        return {
            f"{model}/{lr_schedule}": outputs
            for model, lr_schedule in self.plan.candidates
            if (outputs := self._out_of_fold(model, lr_schedule)) is not None
        }

    def _out_of_fold(self, model: str, lr_schedule: str) -> npt.NDArray[np.float32] | None:
        by_key = {fold.key: fold for fold in self.folds}
        total: npt.NDArray[np.float64] | None = None
        count = np.zeros(self.n_samples)
        for job in self.plan.jobs:
            if (job.model, job.lr_schedule) != (model, lr_schedule):
                continue
            result = self.results.get(job.id)
            if result is None or result.outputs is None or result.status != DONE:
                continue
            if total is None:
                total = np.zeros((self.n_samples, *result.outputs.shape[1:]))
            rows = by_key[(job.repeat, job.fold)].valid
            total[rows] += result.outputs
            count[rows] += 1
        if total is None:
            return None
        count[count == 0] = np.nan
        return (total / count.reshape(-1, *[1] * (total.ndim - 1))).astype(np.float32)

    def to_frame(self, level: str = "candidate") -> pd.DataFrame:
        """Return a pandas table: one row per candidate, per fold, or per epoch.

        Parameters
        ----------
        level : {"candidate", "fold", "epoch"}
            What a row is. Candidates are sorted by rank.

        Returns
        -------
        pandas.DataFrame
            Seconds in ``*_seconds``, bytes in ``peak_memory``. Where models were pretrained, the
            epochs of that stage come before those of the training, with its name in ``stage`` and
            a column for each of its measures. Where jobs were trained by averaging, their folds
            have ``rounds``, and in ``samples_epochs`` the samples × epochs of each process.
        """
        import pandas as pd

        makers: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
            "candidate": self._candidate_rows,
            "fold": self._fold_rows,
            "epoch": self._epoch_rows,
        }
        if level not in makers:
            raise ValueError(
                f"level must be 'candidate', 'fold' or 'epoch': received {level!r}. "
                "The default is 'candidate'."
            )
        frame: pd.DataFrame = pd.DataFrame(list(makers[level]()))
        return frame

    def _candidate_rows(self) -> list[dict[str, Any]]:
        rows = self.candidates
        first = self.plan.scoring[0]
        ratio = train_valid_ratio(self.folds)
        table = []
        for position, row in zip(rank(rows, first), rows, strict=True):
            low, high = confidence_interval(row.scores[first], ratio, bounds=bounds_of(first))
            entry: dict[str, Any] = {
                "rank": position if row.ranks_by(first) else float("nan"),
                "model": row.model,
                "scheduler": row.lr_schedule,
            }
            for metric in self.plan.scoring:
                entry[f"mean_{metric}"] = _nan_mean(row.scores[metric])
                entry[f"std_{metric}"] = _nan_std(row.scores[metric])
            entry |= {
                "ci_low": low,
                "ci_high": high,
                "fit_seconds": _nan_mean(row.fit_seconds) * row.planned,
                "folds_done": row.done,
                "folds": row.planned,
                "status": row.status,
            }
            table.append((position, entry))
        return [entry for _, entry in sorted(table, key=lambda pair: pair[0])]

    def _fold_rows(self) -> Iterable[dict[str, Any]]:
        averaging = any(result.averaged for result in self.results.values())
        serial = self.baseline.by_job if self.baseline else {}
        for job in self.plan.jobs:
            result = self.results.get(job.id)
            yield {
                "model": job.model,
                "scheduler": job.lr_schedule,
                "repeat": job.repeat,
                "fold": job.fold,
                "status": result.status if result else "pending",
                **{
                    metric: _score(result, metric, self.error_score) for metric in self.plan.scoring
                },
                "fit_seconds": result.fit_seconds if result else float("nan"),
                "score_seconds": result.score_seconds if result else float("nan"),
                "peak_memory": result.peak_memory if result else 0,
                "device": result.device if result else "",
                "cores": ",".join(map(str, result.cores)) if result else "",
                "threads": result.threads if result else 0,
                "attempt": result.attempt if result else 0,
                "fused": len(self.plan.group_of(job.id)),
                **(_averaging_columns(result) if averaging else {}),
                "serial_accuracy": serial.get(job.id, float("nan")),
                "error": result.error if result else "",
            }

    def _epoch_rows(self) -> Iterable[dict[str, Any]]:
        staged = any(result.pretraining for result in self.results.values())
        unmeasured: dict[str, Any] = {item.name: float("nan") for item in fields(Epoch)[1:]}
        for job in self.plan.jobs:
            result = self.results.get(job.id)
            if result is None:
                continue
            place: dict[str, Any] = {
                "model": job.model,
                "scheduler": job.lr_schedule,
                "repeat": job.repeat,
                "fold": job.fold,
            }
            for stage in result.pretraining:
                where = {**place, "stage": stage.stage, "epoch": stage.number}
                # Where it is stands above what a user's model may call its measures.
                row = {**where, **unmeasured, **stage.measures, **where}
                yield {**row, "seconds": stage.seconds}
            for item in result.epochs:
                values = dict(vars(item))
                where = {
                    **place,
                    **({"stage": ""} if staged else {}),
                    "epoch": values.pop("number"),
                }
                yield {**where, **values}

    def report(self) -> Path:
        """Write the HTML report, its figures and tables; return the path of the page."""
        if self._build_report is None:
            raise ValueError("these results have no run on disk; use `asynckfold report DIR`")
        return self._build_report()

    def _account(self) -> str:
        counts = self.counts
        return ", ".join(
            f"{number} {state}" for state, number in counts.items() if number or state == "done"
        )

    def _lines(self) -> list[tuple[str, ...]]:
        first = self.plan.scoring[0]
        lines: list[tuple[str, ...]] = [("", "model", "scheduler", first, "folds", "seconds")]
        for entry in self._candidate_rows():
            mark = "" if np.isnan(entry["rank"]) else str(entry["rank"])
            mean, std = entry[f"mean_{first}"], entry[f"std_{first}"]
            lines.append(
                (
                    mark or "-",
                    entry["model"],
                    entry["scheduler"],
                    "n/a" if np.isnan(mean) else f"{mean:.4f} ± {std:.4f}",
                    folds_note(entry["folds_done"], entry["folds"]),
                    f"{entry['fit_seconds']:.1f}",
                )
            )
        return lines

    def _summary(self) -> str:
        text = f"{self._account()}; {self.seconds:.1f} s"
        if self.baseline is not None and self.speedup is not None:
            text += (
                f", serial {self.baseline.seconds:.1f} s ({self.baseline.kind}): "
                f"{self.speedup:.2f}x"
            )
            if self.baseline.disturbance:
                text += f" ({self.baseline.disturbance})"
        return f"{text}; fingerprint {self.fingerprint[:12]}, {self.bit_identity}"

    def __repr__(self) -> str:
        lines = self._lines()
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([f"CVResults: {self._summary()}", *table])

    def _repr_html_(self) -> str:
        head, *body = [[html.escape(cell) for cell in line] for line in self._lines()]
        rows = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in body]
        return (
            f"<p><b>CVResults</b>: {html.escape(self._summary())}</p><table><thead><tr>"
            f"{''.join(f'<th>{cell}</th>' for cell in head)}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table>"
        )


def _averaging_columns(result: Result | None) -> dict[str, Any]:
    found = result.averaged if result else None
    return {
        "rounds": found.rounds if found else float("nan"),
        # No spreadsheet takes it for one number, as it would without the blank.
        "samples_epochs": ", ".join(map(str, found.samples)) if found else "",
    }


def folds_note(done: int, planned: int) -> str:
    """Return ``"5 of 5 folds"``, marked where a fold is missing.

    >>> folds_note(4, 5)
    '4 of 5 folds, incomplete'
    """
    return f"{done} of {planned} folds{'' if done == planned else ', incomplete'}"


def _first(pair: tuple[int, Candidate]) -> int:
    return pair[0]


def _nan_mean(values: npt.NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _nan_std(values: npt.NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.std()) if known.size else float("nan")


def job_by_id(plan: Plan) -> dict[str, Job]:
    """Return the plan's jobs by id."""
    return {job.id: job for job in plan.jobs}
