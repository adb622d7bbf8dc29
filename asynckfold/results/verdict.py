"""`Verdict`: which model is better, then which LR schedule, and whether that may be chance.

One factor at a time: models by their mean over the LR schedules, then LR schedules by their mean
over the models that no other beats, of these the complete ones if there are any; fold by fold, see
`statistics.paired_differences`. The values of a grid belong to the models or the LR schedules that
take them. Where these are not crossed, as of random draws, a mean would compare other things as
well: then candidates are compared, as if each were a model.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asynckfold.jobs.candidate_names import values_of
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.result import DONE
from asynckfold.results.candidates import Candidate, rank
from asynckfold.results.statistics import (
    SIGNIFICANT,
    Difference,
    Factor,
    Pairs,
    compare_levels,
    largest_difference,
    repeats_to_decide,
)
from asynckfold.system.plain_text import one_line


@dataclass(frozen=True)
class Verdict:
    """What a sweep says about its models and its LR schedules, by the first metric.

    ``str(verdict)`` gives the sentences. The p values are corrected by Holm's method over all pairs
    of both factors: the probability that any sentence wrongly says "beats" is at most 5 %, as far
    as the test holds. Nadeau and Bengio (2003) derived it for random divisions; for k-fold it is a
    heuristic.

    Parameters
    ----------
    metric : str
        Name of the score; greater is better.
    models : sequence of Difference
        Every pair of models, by their mean over the LR schedules.
    lr_schedules : sequence of Difference
        Every pair of LR schedules, by their mean over `best_models`, or those of them that have a
        score on every fold.
    best_models, best_lr_schedules : tuple of str
        Those that no other beats; several if the folds do not decide.
    best : str or None
        ``"LeNet5/cosine"`` if its model beats all others, and so does its LR schedule.
    sentences : tuple of str
        The verdict in words.
    outlook : str
        Of a complete sweep that does not decide: how many more folds would. ``""`` of others.
    comparisons : tuple of str
        Those of `sentences` that compare two models or LR schedules.
    """

    metric: str
    models: Pairs
    lr_schedules: Pairs
    best_models: tuple[str, ...]
    best_lr_schedules: tuple[str, ...]
    best: str | None
    sentences: tuple[str, ...]
    outlook: str = ""
    comparisons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(self.sentences)

    def _repr_html_(self) -> str:
        first, *others = map(html.escape, self.sentences)
        outlook = [f"<i>{html.escape(self.outlook)}</i>"] if self.outlook else []
        return "".join(f"<p>{text}</p>" for text in (f"<b>{first}</b>", *others, *outlook))


def make_verdict(rows: Sequence[Candidate], metric: str, folds: Sequence[Fold]) -> Verdict:
    """Compare models, then LR schedules; scores of `rows` are NaN where a fold has none."""
    planned, raced = len(rows), [row for row in rows if not row.is_left_out]
    rows = _crossed(raced, is_raced=len(raced) < len(rows)) if raced else rows
    scores = np.array([row.scores[metric] for row in rows])
    in_points = largest_difference(metric, scores) == 1
    models, lr_schedules = _factors(rows, metric, folds)
    best = models.unbeaten + lr_schedules.unbeaten
    is_compared = bool(models.pairs or lr_schedules.pairs)
    first = _sole_first(rows, metric)
    is_won = is_compared or (first is not None and len(rows) == 1 < planned)
    levels = (first.model, first.lr_schedule) if first else ()
    beaten = [
        level
        for level, factor in zip(levels, (models, lr_schedules), strict=False)
        if level in factor.beaten
    ]
    repeats = len({fold.repeat for fold in folds})
    text = VerdictText(metric, in_points, len(folds), repeats, len(rows) < planned)
    sentences, comparisons = text.of_sweep(
        models, lr_schedules, rows, first.name if first else "", beaten
    )
    return Verdict(
        text.metric,
        models.pairs,
        lr_schedules.pairs,
        models.unbeaten,
        tuple(filter(None, lr_schedules.unbeaten)),
        first.name if first and is_won and (best == levels or not is_compared) else None,
        tuple(map(one_line, sentences)),
        one_line(_outlook(models, lr_schedules, folds))
        if all(row.status != "pending" for row in rows)
        else "",
        tuple(map(one_line, comparisons)),
    )


def _outlook(models: Factor, lr_schedules: Factor, folds: Sequence[Fold]) -> str:
    """Say what would decide the closest comparison of the leader that the folds leave open."""
    duels = [*models.duels, *lr_schedules.duels]
    pair = next((duel for duel in duels if duel.conclusion == "undecided"), None)
    if pair is None or pair.folds < len(folds):
        return ""
    repeats, names = repeats_to_decide(pair, folds), f"{pair.first} against {pair.second}"
    if repeats is None:
        return (
            f"If the difference stays, more repeats do not decide {names}: it is too small against "
            "its spread over folds. More samples may."
        )
    more = repeats * len({fold.index for fold in folds}) - len(folds)
    folds_text = f"about {more} more folds decide {names}, {repeats} repeats in all"
    return f"If the difference stays, {folds_text}."


def _crossed(rows: Sequence[Candidate], *, is_raced: bool) -> Sequence[Candidate]:
    """Return candidates of a grid whose models all have the same LR schedules."""
    if not is_raced and not any(values_of(row.model, row.lr_schedule) for row in rows):
        return rows
    models, lr_schedules = {row.model for row in rows}, {row.lr_schedule for row in rows}
    if len(rows) == len(models) * len(lr_schedules):
        return rows
    return [replace(row, model=row.name, lr_schedule="") for row in rows]


def _factors(
    rows: Sequence[Candidate], metric: str, folds: Sequence[Fold]
) -> tuple[Factor, Factor]:
    models = list(dict.fromkeys(row.model for row in rows))
    lr_schedules = list(dict.fromkeys(row.lr_schedule for row in rows))
    scores = np.full((len(models), len(lr_schedules), len(folds)), np.nan)
    for row in rows:
        scores[models.index(row.model), lr_schedules.index(row.lr_schedule)] = row.scores[metric]
    largest = largest_difference(metric, scores)
    undecided = math.comb(len(lr_schedules), 2)
    first = compare_levels(models, lr_schedules, scores, folds, largest, undecided)
    # One without all folds would take them from the comparison of the others, too.
    complete = {
        name for name, table in zip(models, scores, strict=True) if not np.isnan(table).any()
    }
    best = [name for name in first.unbeaten if name in complete] or first.unbeaten
    kept = scores[[models.index(name) for name in best]].swapaxes(0, 1)
    undecided = int((first.pairs.conclusions == "undecided").sum())
    return first, compare_levels(lr_schedules, best, kept, folds, largest, undecided)


def _sole_first(rows: Sequence[Candidate], metric: str) -> Candidate | None:
    """Return the complete candidate with the highest mean; None without one, and of a tie."""
    first = [row for row, place in zip(rows, rank(rows, metric), strict=True) if place == 1]
    return first[0] if len(first) == 1 and first[0].ranks_by(metric) else None


SHOWN = 3
"""Most comparisons with a leader in one sentence each, and names in a list."""


@dataclass(frozen=True)
class VerdictText:
    """Makes sentences about scores of one metric.

    Parameters
    ----------
    metric : str
        The score.
    in_points : bool
        Whether scores are shares, so that differences are percentage points.
    folds, repeats : int
        Planned folds, over all repeats.
    is_raced : bool
        Whether racing left candidates out, which the sentences do not compare.
    """

    metric: str
    in_points: bool
    folds: int
    repeats: int
    is_raced: bool = False

    def of_sweep(
        self,
        models: Factor,
        lr_schedules: Factor,
        rows: Sequence[Candidate],
        first: str,
        beaten: Sequence[str],
    ) -> tuple[list[str], list[str]]:
        """Return all sentences, and those of them that compare.

        The `first` candidate may have a `beaten` model or LR schedule.
        """
        left = [row.status == "pending" for row in rows]
        if all(left) and not any(self._folds_of(row) for row in rows):
            return ["No fold has a score yet."], []
        both = models.pairs, lr_schedules.pairs
        some = lr_schedules.over
        is_told = set(some) != {*models.unbeaten} or 1 < len(some) < len(models.names)
        over = f"With {listed(some)}, " if is_told else ""
        sentences = [*self._of_factor(models), *self._of_factor(lr_schedules, over)]
        count = len(sentences)
        sentences += self._of_the_only_one(rows, is_compared=any(both))
        if sentences and any(left):
            sentences[0] = f"So far, {sentences[0]}"
        comparisons = sentences[:count]
        if beaten:
            are = "is" if len(beaten) == 1 else "are"
            sentences.insert(
                0,
                f"{first} has the highest mean, although {listed(beaten)} {are} beaten on average.",
            )
        if models.pairs and len(models.over) < len({row.lr_schedule for row in rows}):
            sentences.append(
                f"Models are compared with {listed(models.over)} alone, since not all have a score "
                "with the others."
            )
        is_tested = not all(np.isnan(pairs.columns["ci_low"]).all() for pairs in both)
        if self.folds == 2 and is_tested:
            sentences.append("Two folds make a weak test.")
        return [*sentences, *self._of_incomplete(rows)], comparisons

    def _of_factor(self, factor: Factor, over: str = "") -> Iterator[str]:
        """Compare the leader with each of the others, the closest first."""
        closest, rest = (duels := factor.duels)[:SHOWN], duels[SHOWN:]
        for pair in closest:
            yield f"{over}{self.of_pair(pair)}."
        beaten = [pair for pair in rest if pair.conclusion == "beats"]
        undecided = [pair for pair in rest if pair.conclusion != "beats"]
        if beaten:
            yield f"{over}{factor.leader} beats {_others(beaten, factor.leader)}."
        if undecided:
            yield f"{over}{factor.leader} against {_others(undecided, factor.leader)}: undecided."

    def of_pair(self, pair: Difference) -> str:
        """Say which of two is better, by how much, and how sure that is."""
        versus = f"{pair.first} against {pair.second}"
        if not pair.folds:
            return f"{versus}: not compared, as no fold has a score of both"
        where = self._where(pair.folds)
        if pair.conclusion == "equal":
            where = f"all {where}" if pair.folds == self.folds > 1 else where
            return f"{pair.first} and {pair.second} have equal scores on {where}"
        if pair.conclusion == "undecided":
            parts = [f"p = {p_value(pair.p)}"]
            parts += [f"on {where}"] if pair.folds < self.folds else []
            parts += [f"{self.repeats} repeats"] if self.repeats > 1 else []
            return f"{versus}: undecided ({'; '.join(parts)})"
        if not math.isfinite(pair.mean):
            return f"{versus}: not compared, as a score is infinite"
        difference, interval = self._amounts(pair)
        if pair.conclusion == "beats":
            repeats = f"{self.repeats} repeats; " if self.repeats > 1 else ""
            return (
                f"{pair.first} beats {pair.second} by {difference}, on {pair.won} of {where} "
                f"({repeats}95 % interval {interval})"
            )
        ahead = f"{pair.first} is ahead of {pair.second} by {difference} on "
        if pair.folds == 1:
            return f"{ahead}{where}; a test needs at least two folds"
        return f"{ahead}each of {where}; without a spread no test is possible"

    def _of_the_only_one(self, rows: Sequence[Candidate], *, is_compared: bool) -> Iterator[str]:
        """Name a candidate without a rival."""
        scored = [row for row in rows if self._folds_of(row)]
        if len(scored) == 1 and not is_compared:
            (row,) = scored
            mean = f"{self.metric} {row.mean(self.metric):.4g}"
            more = " left" if self.is_raced else " with a score" * (len(rows) > 1)
            folds = _count(self._folds_of(row))
            yield f"{row.name} is the only candidate{more}: {mean} over {folds}."

    def _of_incomplete(self, rows: Sequence[Candidate]) -> Iterator[str]:
        """Name the candidates that lack folds."""
        if not any(row.ranks_by(self.metric) for row in rows):
            article = "an" if self.metric[:1].lower() in "aeiou" else "a"
            yield f"No candidate has {article} {self.metric} on every fold, so none is best."
        missing = [
            f"{row.name} ({'' if row.status == DONE else f'{row.status}, '}"
            f"{self._folds_of(row)} of {_count(self.folds)})"
            for row in rows
            if self._folds_of(row) < self.folds
        ]
        if missing:
            yield f"Incomplete, and not ranked: {listed(missing)}."

    def _folds_of(self, row: Candidate) -> int:
        return int((~np.isnan(row.scores[self.metric])).sum())

    def _where(self, folds: int) -> str:
        if self.folds == 1:
            return "the only fold"
        if folds == self.folds:
            return _count(folds)
        return f"the {'only fold' if folds == 1 else _count(folds)} that both have"

    def _amounts(self, pair: Difference) -> tuple[str, str]:
        """Return a difference with its unit, and its interval."""
        scale = 100 if self.in_points else 1
        mean, low, high = (scale * value for value in (pair.mean, pair.ci_low, pair.ci_high))
        # Two digits of the difference, and one of what keeps it from 0.
        digits = max(int(self.in_points), 1 - _exponent(mean))
        digits = max(digits, -_exponent(low)) if low > 0 else digits
        form = f".{digits}f" if digits < 7 else ".2g"
        return f"{mean:{form}} {self._unit}", f"{low:{form}} to {high:{form}}"

    @property
    def _unit(self) -> str:
        if self.in_points:
            return "points" if self.metric == "accuracy" else f"points in {self.metric}"
        error = self.metric.removeprefix("neg_")
        return f"in {self.metric if error == self.metric else error.replace('_', ' ')}"


def _exponent(value: float) -> int:
    return math.floor(math.log10(value))


def _count(folds: int) -> str:
    return "1 fold" if folds == 1 else f"{folds} folds"


def _others(pairs: Sequence[Difference], leader: str) -> str:
    return listed([pair.first if pair.second == leader else pair.second for pair in pairs])


def listed(names: Sequence[str]) -> str:
    """Return names as a list of at most `SHOWN`.

    >>> listed(["A"]), listed(["A", "B"]), listed(["A", "B", "C", "D", "E"])
    ('A', 'A and B', 'A, B, C and 2 more')
    """
    *first, last = names if len(names) <= SHOWN else (*names[:SHOWN], f"{len(names) - SHOWN} more")
    return f"{', '.join(first)} and {last}" if first else last


def p_value(value: float) -> str:
    """Return a p-value with two digits, ``"< 0.001"``, or ``"n/a"``.

    A value near the level of the test keeps four, so that one can see on which side it is.

    >>> p_value(0.26), p_value(0.04962), p_value(0.0502), p_value(0.0002)
    ('0.26', '0.04962', '0.0502', '< 0.001')
    """
    if math.isnan(value):
        return "n/a"
    if value < 1e-3:
        return "< 0.001"
    text = f"{value:.2g}"
    return f"{value:.4g}" if text == f"{SIGNIFICANT:g}" else text
