"""`RunScores`, the part of `CVResults` without trained models: scores, ranking, times, tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import AbsentError, refuse
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.reproducibility import Reproducibility
from asynckfold.jobs.result import CANCELLED, ENDED, Baseline, Result, counts_line, fingerprint
from asynckfold.results import tables
from asynckfold.results.candidates import Candidate, candidates, rank
from asynckfold.results.out_of_fold import (
    kept_problems,
    layers_of,
    mean_of_layers,
    out_of_fold,
    ragged_problems,
)
from asynckfold.results.speedup import AgainstSerial, Speedup, against_serial, speedup_of
from asynckfold.results.statistics import (
    Pairs,
    largest_difference,
    paired_differences,
    train_valid_ratio,
)
from asynckfold.results.verdict import Verdict, make_verdict
from asynckfold.system.plain_text import one_line
from asynckfold.system.units import duration

if TYPE_CHECKING:
    import pandas as pd

    from asynckfold.results.nested import NestedScores


@dataclass(frozen=True, eq=False, repr=False)
class RunScores:
    """Scores, ranking, times and tables of a sweep; see `CVResults` for the parameters."""

    plan: Plan
    folds: tuple[Fold, ...]
    n_samples: int
    results: Mapping[str, Result]
    seconds: float
    baseline: Baseline | None
    root_dir: Path
    error_score: float = float("nan")
    bit_identity: Reproducibility = field(default_factory=lambda: Reproducibility(()))
    _whole: tuple[Plan, Mapping[str, Result]] | None = None

    @property
    def whole(self) -> tuple[Plan, Mapping[str, Result]]:
        """Plan and results of all jobs; the others are without those of inner folds."""
        return self._whole or (self.plan, self.results)

    @cached_property
    def nested(self) -> NestedScores | None:
        """How well choosing a candidate does, by its inner folds; None without ``nested``.

        Print it for a table. ``mean`` and ``std`` are of the outer scores, ``bias`` is the highest
        mean score minus that mean; ``folds`` have the choices, ``inner_scores`` is a table of the
        inner jobs.
        """
        if self._whole is None:
            return None
        from asynckfold.results.nested import nested_scores

        rows, metric = self.candidates, self.plan.scoring[0]
        best = rows[self._highest].mean(metric) if self.has_best else math.nan
        return nested_scores(*self._whole, self.error_score, best)

    @cached_property
    def candidates(self) -> list[Candidate]:
        """One `Candidate` per model × LR schedule, in the caller's order."""
        if math.isnan(self.error_score):
            return self._samples
        return candidates(self.plan, self.results, self.error_score)

    @cached_property
    def _samples(self) -> list[Candidate]:
        # Without `error_score`, which is not a sample.
        return candidates(self.plan, self.results)

    @cached_property
    def _times(self) -> dict[str, AgainstSerial]:
        return against_serial(*self.whole, self.seconds, self.baseline)

    @property
    def cv_results_(self) -> dict[str, Any]:
        """Scores and times under scikit-learn's keys (``mean_test_accuracy``), by candidate.

        Also ``mean_train_accuracy`` and the like with ``return_train_score``, see `AsyncKFold`.
        """
        return tables.score_table(self.candidates, self.plan.scoring, self._trained)

    @cached_property
    def _trained(self) -> list[Candidate] | None:
        """Candidates with the scores of training parts, if the call asked for them."""
        return None

    @property
    def has_best(self) -> bool:
        """Whether any candidate has a score on every fold."""
        return any(row.ranks_by(self.plan.scoring[0]) for row in self.candidates)

    @property
    def best_index_(self) -> int:
        """Position of the best complete candidate; `AbsentError` if there is none."""
        return self._highest

    @property
    def _highest(self) -> int:
        if not self.has_best:
            raise AbsentError.one(
                "no candidate has a score on every fold, so none is best",
                counts_line(self.counts),
                "Continue the run, or read in results.to_frame('fold') why jobs failed.",
            )
        return int(np.argmin(rank(self.candidates, self.plan.scoring[0])))

    @property
    def best_params_(self) -> dict[str, Any]:
        """``{"model": …, "scheduler": …}`` of the best complete candidate, and its parameters."""
        return self.candidates[self.best_index_].params

    @property
    def best_score_(self) -> float:
        """Mean score of the best complete candidate, by the first metric."""
        return self.candidates[self.best_index_].mean(self.plan.scoring[0])

    @property
    def verdict(self) -> Verdict:
        """Which model is better, which LR schedule, by how much, and whether it may be chance.

        ``print(results.verdict)`` prints it in words.
        """
        verdict = make_verdict(self._samples, self.plan.scoring[0], self.folds)
        more = [] if self.nested is None else [self.nested.sentence]
        if self.plan.race is not None:
            more.insert(0, _race_sentence(self.plan, self.results))
        return replace(verdict, sentences=(*verdict.sentences, *filter(None, more)))

    def compare(self) -> pd.DataFrame:
        """Return a pandas table of all pairs of candidates, compared fold by fold.

        Returns
        -------
        pandas.DataFrame
            ``mean`` is the difference of the first metric, the higher mean ``first``; ``ci_low``
            and ``ci_high`` are its 95 % interval, ``p`` is corrected by Holm's method over all
            rows, ``won`` counts the folds where the first is better, of ``folds`` that both have.
            Interval and p are of the corrected resampled t test (Nadeau and Bengio 2003), a
            heuristic for k-fold; NaN where no test is possible.
        """
        import pandas as pd

        frame: pd.DataFrame = pd.DataFrame(pairs_of(self).columns)
        return frame

    @property
    def counts(self) -> dict[str, int]:
        """Jobs by state: planned = done + failed + diverged + cancelled + pending."""
        plan, results = self.whole
        statuses = [result.status for result in results.values()]
        ended = {status: statuses.count(status) for status in ENDED}
        planned = len(plan.jobs)
        return {"planned": planned, **ended, "pending": planned - sum(ended.values())}

    @property
    def speedup(self) -> float | None:
        """Serial seconds / packed seconds for equal work, both measured on an idle machine.

        None if there is no such number; `speedup_note` says why.
        """
        return self.timing.ratio

    @property
    def speedup_note(self) -> str:
        """Speedup with both times, its estimate, or the reason for having neither."""
        return self.timing.text

    @property
    def timing(self) -> Speedup:
        """Serial against packed wall time: what `speedup`, the tables and the report show."""
        plan, results = self.whole
        jobs = [job.id for job in plan.jobs]
        return speedup_of(jobs, results, self.seconds, self.baseline)

    @property
    def fingerprint(self) -> str:
        """One hash over all jobs' canonical results: equal hashes, equal bits."""
        return fingerprint({name: item.digest for name, item in self.whole[1].items()})

    @property
    def classes_(self) -> npt.NDArray[Any] | None:
        """Class labels of the data, in the order of the outputs' columns.

        With one output for two classes, the labels of 0 and of 1. None for regression and for
        several labels per sample.
        """
        objective = self.plan.objective_of("")
        if not objective.is_classes:
            return None
        planned = self.plan.objective
        # Their columns are no classes.
        several = {model for model, _ in (planned.outputs if planned is not None else ())}
        kept = [self.results.get(job.id) for job in self.plan.jobs if job.model not in several]
        outputs = [item.outputs for item in kept if item is not None and item.outputs is not None]
        columns = max((each.shape[1] for each in outputs if each.ndim == 2), default=0)
        return objective.all_labels(max(columns, len(self.plan.classes)))

    @property
    def oof(self) -> dict[str, Any]:
        """Out-of-fold outputs by candidate: the outputs that the scores are computed from.

        Shape (n_samples, ...), in the order of the dataset; columns are those of `classes_`. If
        samples are held out more than once, as by repeats, (n_repeats, n_samples, ...), since each
        score is that of a single model. Samples that no finished fold held out are NaN. Of a model
        of several outputs, a dict or tuple of such arrays.

        Raises
        ------
        InputError
            The run kept no outputs; see ``keep_outputs_gib`` of `AsyncKFold`.
        """
        return self._as_given(self._kept())

    @property
    def oof_mean(self) -> dict[str, Any]:
        """Mean of `oof` over the repeats, by candidate, of shape (n_samples, ...).

        With repeats these are the outputs of an ensemble of ``n_repeats`` models, which mostly
        scores higher than this cross-validation says. Without repeats, the same as `oof`.
        """
        outputs = self._kept()
        if max(layers_of(self.folds), default=0) > 0:
            objective = self.plan.objective
            if objective is not None and any(one.ragged for _, one in objective.outputs):
                refuse(ragged_problems(max(layers_of(self.folds)) + 1))
            outputs = {name: mean_of_layers(item) for name, item in outputs.items()}
        return self._as_given(outputs)

    def _kept(self) -> dict[str, npt.NDArray[np.float32]]:
        refuse(kept_problems(self.results))
        return out_of_fold(self.plan, self.folds, self.results, self.n_samples)

    def _as_given(self, outputs: dict[str, npt.NDArray[np.float32]]) -> dict[str, Any]:
        models = {candidate_name(*pair): pair[0] for pair in self.plan.candidates}
        return {
            name: self.plan.objective_of(models[name]).as_returned(each)
            for name, each in outputs.items()
        }

    def to_frame(self, level: str = "candidate") -> pd.DataFrame:
        """Return a pandas table: one row per candidate, per fold, or per epoch.

        Parameters
        ----------
        level : {"candidate", "fold", "epoch"}
            What a row is. Candidates are sorted by rank.

        Returns
        -------
        pandas.DataFrame
            Seconds in ``*_seconds``, bytes in ``peak_memory`` and, of jobs on GPUs,
            ``peak_gpu_memory``. With a serial baseline, candidates have its seconds, of the kind in
            ``baseline``, and their share of the packed run's wall time (``packed_seconds``), in
            proportion to the cores and GPUs that their jobs held; ``speedup`` only from an
            undisturbed, measured baseline. Pretraining epochs precede those of the training;
            ``stage`` names their phase, and each of their measures is a column. If jobs were
            trained by averaging, folds have ``rounds`` and ``samples_epochs``, the samples × epochs
            of each process.
        """
        import pandas as pd

        rows: Iterable[tables.Row]
        if level == "candidate":
            rows = self._candidate_rows()
        elif level == "fold":
            rows = tables.fold_rows(self.plan, self.results, self.baseline, self.error_score)
        elif level == "epoch":
            rows = tables.epoch_rows(self.plan, self.results)
        else:
            rule = "level must be 'candidate', 'fold' or 'epoch'"
            raise ValueError(f"{rule}: received {level!r}. The default is 'candidate'.")
        frame: pd.DataFrame = pd.DataFrame(list(rows))
        return frame

    def _candidate_rows(self) -> list[tables.Row]:
        ratio = train_valid_ratio(self.folds)
        return tables.candidate_rows(self.candidates, self.plan.scoring, ratio, times_of(self))

    def _text(self) -> tuple[str, list[list[str]], str]:
        """Return title, cells and verdict of the table that is printed."""
        title = f"{counts_line(self.counts)} in {self.seconds:.1f} s"
        if self.baseline is not None:
            title += f"; {self.speedup_note}"
        title = one_line(f"{title}; fingerprint {self.fingerprint[:12]}, {self.bit_identity}")
        cells = tables.ranking(self._candidate_rows(), self.plan.scoring[0])
        return title, cells, str(self.verdict)

    def __repr__(self) -> str:
        return tables.as_text(*self._text())


def pairs_of(results: RunScores) -> Pairs:
    """Compare all pairs of candidates, but those that racing left out."""
    metric = results.plan.scoring[0]
    rows = [row for row in results._samples if not row.is_left_out] or results._samples
    names, scores = [row.name for row in rows], np.array([row.scores[metric] for row in rows])
    largest = largest_difference(metric, scores)
    return Pairs(paired_differences(names, scores, results.folds, largest))


def times_of(results: RunScores) -> dict[str, AgainstSerial]:
    """Compare each candidate with the serial loop, by its name."""
    return results._times


def _race_sentence(plan: Plan, results: Mapping[str, Result]) -> str:
    """Say what a race saved."""
    spared, used, seconds = 0, 0, list[float]()
    left_out: dict[str, list[int]] = {}
    for job in plan.jobs:
        if (item := results.get(job.id)) is not None and item.status == CANCELLED:
            left_out.setdefault(job.candidate, []).append(item.attempt)
    for row in candidates(plan, results):
        attempts = left_out.get(row.name, [])
        spared += attempts.count(0)
        used += len(attempts) - attempts.count(0)
        known = row.fit_seconds[~np.isnan(row.fit_seconds)]
        seconds.append(attempts.count(0) * float(known.mean()) if known.size else 0.0)
    bound = f"The best candidate is lost with a probability of at most {plan.race:.3g}"
    ahead = f"; {used} more had started ahead and are not used" if used else ""
    return (
        f"Racing saved {spared} of {len(plan.jobs)} jobs, about {duration(math.fsum(seconds))} of "
        f"training{ahead}. {bound}, as far as the test holds."
    )
