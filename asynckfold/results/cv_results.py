"""`CVResults`, what the user gets back: tables, the best, speedup, fingerprint, report."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import InputError, Problem, nearest, refuse
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.reproducibility import Claim
from asynckfold.jobs.result import DONE, ENDED, Baseline, Epoch, Result, fingerprint
from asynckfold.results.candidates import (
    Candidate,
    candidates,
    folds_note,
    rank,
    score_of,
)
from asynckfold.results.ensemble import FoldEnsemble, FoldModels
from asynckfold.results.out_of_fold import layers_of, mean_of_layers, out_of_fold
from asynckfold.results.speedup import Speedup, speedup_of
from asynckfold.results.statistics import Lead, paired_difference, train_valid_ratio
from asynckfold.system.plain_text import one_line

if TYPE_CHECKING:
    import pandas as pd


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
    _load_weights: Callable[[Result], dict[str, Any]] | None = None
    _load_refit: Callable[[Candidate], CVResults | None] | None = None
    _models: FoldModels | None = None

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
    def has_best(self) -> bool:
        """Whether a candidate has a score on every fold, so that one is best."""
        return any(row.ranks_by(self.plan.scoring[0]) for row in self.candidates)

    @property
    def best_index_(self) -> int:
        """Position of the best complete candidate.

        Raises
        ------
        ValueError
            No candidate is complete.
        """
        rows, metric = self.candidates, self.plan.scoring[0]
        if not self.has_best:
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
        """Serial seconds / packed seconds for equal work, both measured on an idle machine.

        None where there is no such number; `speedup_note` says why.
        """
        return self.timing.ratio

    @property
    def speedup_note(self) -> str:
        """What may be said of the speedup: the number with both times, an estimate, or why not."""
        return self.timing.text

    @property
    def timing(self) -> Speedup:
        """Serial against packed wall time: what every table, page and file tells of it."""
        jobs = [job.id for job in self.plan.jobs]
        return speedup_of(jobs, self.results, self.seconds, self.baseline)

    @property
    def fingerprint(self) -> str:
        """One hash over all jobs' canonical results: equal hashes, equal bits."""
        return fingerprint({name: item.digest for name, item in self.results.items()})

    @property
    def classes_(self) -> npt.NDArray[Any] | None:
        """Labels of the classes, as the data have them, in the order of outputs' columns.

        Of one output for two classes, the label at 0 and the label at 1. None where targets are
        numbers, or a sample may have several labels.
        """
        asked = self.plan.objective_of("")
        if not asked.is_classes:
            return None
        outputs = (item.outputs for item in self.results.values() if item.outputs is not None)
        columns = max((found.shape[1] for found in outputs if found.ndim == 2), default=0)
        return asked.all_labels(max(columns, len(self.plan.classes)))

    @property
    def oof(self) -> dict[str, npt.NDArray[np.float32]]:
        """Out-of-fold outputs by candidate, those that the scores are of.

        Each of shape (n_samples, ...), in the order of the dataset; columns are those of
        `classes_`. With repeats, or with any folds that hold samples out more than once, of shape
        (n_repeats, n_samples, ...): what each model said alone, since the scores are those of
        single models. Rows of samples that no finished fold held out are NaN. See `oof_mean`.
        """
        return out_of_fold(self.plan, self.folds, self.results, self.n_samples)

    @property
    def oof_mean(self) -> dict[str, npt.NDArray[np.float32]]:
        """Mean of `oof` over the repeats by candidate, of shape (n_samples, ...).

        With repeats these are the outputs of an ensemble of ``n_repeats`` models: the scores of
        this cross-validation are not theirs, and most often lower. Without, they are `oof`.
        """
        found = self.oof
        several = max(layers_of(self.folds), default=0) > 0
        return {name: mean_of_layers(item) for name, item in found.items()} if several else found

    @property
    def refitted(self) -> CVResults | None:
        """Results of the run that trained the best candidate on all samples, see ``refit``.

        Its scores are those of samples that it was trained on. None where there is no such run, or
        it is not done.
        """
        return self._refitted(self.candidates[self.best_index_]) if self.has_best else None

    @property
    def best_estimator_(self) -> Any:
        """The module of the best candidate that was trained on all samples, as in scikit-learn.

        Raises
        ------
        InputError
            There is none: it needs ``refit``.
        """
        return self.model(fold="all")

    def _refitted(self, candidate: Candidate) -> CVResults | None:
        found = None if self._load_refit is None else self._load_refit(candidate)
        return found if found is not None and found.counts["done"] else None

    def state_dict(
        self, candidate: str | None = None, fold: int | str = 0, repeat: int = 0
    ) -> dict[str, Any]:
        """Return the weights that a job trained, for `torch.nn.Module.load_state_dict`.

        What `preprocess` fitted for the fold is no part of them.

        Parameters
        ----------
        candidate : str, optional
            ``"LeNet5/cosine"``; by default the best.
        fold : int or "all"
            From 0: which held-out samples the model has not seen, those of ``folds``; or all
            samples were trained on, by ``refit``.
        repeat : int
            From 0, of repeated folds.

        Returns
        -------
        dict of str to Tensor
            Parameters and buffers after the last epoch, on the CPU.

        Raises
        ------
        InputError
            There is no such job, or it has no trained weights.
        ValueError
            No candidate is complete, so that none is best.
        StoreCorruptError
            They are gone from the run's folder, or damaged.
        """
        if self._load_weights is None:
            raise ValueError("these results have no run on disk, where weights are")
        if fold == "all":
            return self.on_all_samples(candidate).state_dict()
        job = self._done_job(self._named(candidate), fold, repeat)
        return self._load_weights(self.results[job.id])

    def model(self, candidate: str | None = None, fold: int | str = 0, repeat: int = 0) -> Any:
        """Return the model that a job trained: built as the job did, with its trained weights.

        What `preprocess` fitted for the fold is no part of it; see `ensemble`.

        Parameters
        ----------
        candidate : str, optional
            ``"LeNet5/cosine"``; by default the best.
        fold : int or "all"
            From 0: which held-out samples the model has not seen, those of ``folds``; or all
            samples were trained on, by ``refit``.
        repeat : int
            From 0, of repeated folds.

        Returns
        -------
        torch.nn.Module
            A new one at each call, in evaluation mode, on the CPU.

        Raises
        ------
        InputError
            There is no such job, or it has no trained weights; or these results were read from the
            run's folder, which holds no models.
        ValueError
            No candidate is complete, so that none is best.
        StoreCorruptError
            The weights are gone from the run's folder, or damaged.
        """
        models = self._live_models()
        if fold == "all":
            return self.on_all_samples(candidate).model()
        return models.model(self._done_job(self._named(candidate), fold, repeat))

    def ensemble(self, candidate: str | None = None) -> FoldEnsemble:
        """Return the models of all folds, and repeats, of a candidate, which answer together.

        Parameters
        ----------
        candidate : str, optional
            ``"LeNet5/cosine"``; by default the best.

        Returns
        -------
        FoldEnsemble
            Its models are made when it is asked first.

        Raises
        ------
        InputError
            There is no such candidate, or not all of its folds are done; or these results were read
            from the run's folder, which holds no models.
        ValueError
            No candidate is complete, so that none is best.
        """
        models, name = self._live_models(), self._named(candidate)
        self._job_of(name, 0, 0)
        jobs = [job for job in self.plan.jobs if job.candidate == name]
        missing = [f"{self._place(job)} {state}" for job in jobs if (state := self._undone(job))]
        if missing:
            rule = f"an ensemble of {name} needs all of its {len(jobs)} folds"
            remedy = "The same call continues the run; or take another candidate."
            refuse([Problem(rule, "; ".join(missing), remedy)])
        asked = self.plan.objective_of(jobs[0].model)
        ask = models.asked(jobs)
        return FoldEnsemble(name, self.plan.classes, len(jobs), asked, ask, models.transform)

    def _named(self, candidate: str | None) -> str:
        return self.candidates[self.best_index_].name if candidate is None else candidate

    def _live_models(self) -> FoldModels:
        if self._models is None:
            rule = "models come from results of a call, since a run's folder holds none"
            remedy = (
                "Make the call again, which trains nothing twice; or load state_dict into a model."
            )
            raise InputError([Problem(rule, f"results read from {self.root_dir}", remedy)])
        return self._models

    def _done_job(self, name: str, fold: int | str, repeat: int) -> Job:
        job = self._job_of(name, fold, repeat)
        state = self._undone(job)
        if state:
            done = ", ".join(row.name for row in self.candidates if row.done) or "none yet"
            raise InputError(
                [
                    Problem(
                        "only a job that is done has trained weights",
                        f"{name}, {self._place(job)}, which {state}",
                        f"Take another; candidates with folds that are done: {done}.",
                    )
                ]
            )
        return job

    def _undone(self, job: Job) -> str:
        """What became of a job that is not done; empty where it is."""
        result = self.results.get(job.id)
        if result is None:
            return "is pending"
        return "" if result.status == DONE else f"is {result.status}: {result.error}"

    @staticmethod
    def _place(job: Job) -> str:
        return f"repeat {job.repeat}, fold {job.fold}" if job.repeated else f"fold {job.fold}"

    def on_all_samples(self, candidate: str | None = None) -> CVResults:
        """Return the results of the run that trained a candidate on all samples, by ``refit``.

        Parameters
        ----------
        candidate : str, optional
            ``"LeNet5/cosine"``; by default the best.

        Raises
        ------
        InputError
            There is no such run, or it is not done.
        """
        name = self._named(candidate)
        self._job_of(name, 0, 0)
        found = self._refitted(next(row for row in self.candidates if row.name == name))
        if found is None:
            rule = "fold='all' needs a candidate that was trained on all samples"
            remedy = "Make the call with refit=True (--refit), which trains the best so."
            raise InputError([Problem(rule, name, remedy)])
        return found

    def _job_of(self, candidate: str, fold: int | str, repeat: int) -> Job:
        jobs = [job for job in self.plan.jobs if job.candidate == candidate]
        for job in jobs:
            if (job.repeat, job.fold) == (repeat, fold):
                return job
        names = [row.name for row in self.candidates]
        last = max(((job.repeat, job.fold) for job in jobs), default=(0, 0))
        raise InputError(
            [
                Problem(
                    f"the run has folds 0 to {last[1]} and repeats 0 to {last[0]}",
                    f"fold={fold}, repeat={repeat}",
                    "Pass one of these.",
                )
                if jobs
                else Problem(
                    f"candidate must be one of {', '.join(names)}",
                    repr(candidate),
                    f"Pass a model/LR schedule of the run.{nearest(candidate, names)}",
                )
            ]
        )

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
            low, high = row.interval(first, ratio)
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
                    metric: score_of(result, metric, self.error_score)
                    for metric in self.plan.scoring
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
        lines: list[tuple[str, ...]] = [
            ("", "model", "scheduler", one_line(first), "folds", "seconds")
        ]
        for entry in self._candidate_rows():
            mark = "" if np.isnan(entry["rank"]) else str(entry["rank"])
            mean, std = entry[f"mean_{first}"], entry[f"std_{first}"]
            lines.append(
                (
                    mark or "-",
                    one_line(entry["model"]),
                    one_line(entry["scheduler"]),
                    "n/a" if np.isnan(mean) else f"{mean:.4f} ± {std:.4f}",
                    folds_note(entry["folds_done"], entry["folds"]),
                    f"{entry['fit_seconds']:.1f}",
                )
            )
        return lines

    def _summary(self) -> str:
        text = f"{self._account()}; {self.seconds:.1f} s"
        if self.baseline is not None:
            text += f"; {self.speedup_note}"
        return one_line(f"{text}; fingerprint {self.fingerprint[:12]}, {self.bit_identity}")

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


def _first(pair: tuple[int, Candidate]) -> int:
    return pair[0]


def _nan_mean(values: npt.NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _nan_std(values: npt.NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.std()) if known.size else float("nan")
