"""The tables of the page: what stands in their cells, as text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.results.report import sentences as say
from asynckfold.results.report.candidate_rows import CandidateRow
from asynckfold.results.report.sanitize import clean, flat
from asynckfold.results.report.summary import Summary
from asynckfold.results.statistics import Difference
from asynckfold.results.verdict import p_value
from asynckfold.system.plain_text import shorten

if TYPE_CHECKING:
    from asynckfold.results.compare import ScoreComparison

FOLDS = 10
"""Most folds that get a column each."""
CLASSES, CONFUSED = 25, 10
"""Most classes that get a column each, and pairs of classes in the table of mistakes."""
ROWS, TOP = 200, 10
"""Rows of a table other than the ranking, and of a grid before its others fold open."""

Column = tuple[str, str]
"""Title, and "name", "number", "text", "short" or "" for a word."""


@dataclass(frozen=True)
class PageTable:
    """A table of the page; `marks` are the classes of its rows, if it has any."""

    label: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[object]]
    marks: Sequence[str] = ()
    total: int = 0  # rows in results.json; more than these if the page leaves some out
    narrow: bool = False  # whether its few short columns fit a phone, where others become cards

    @property
    def left_out(self) -> int:
        """Rows that only results.json has."""
        return max(0, self.total - len(self.rows))


def _numbers(*titles: str) -> list[Column]:
    return [(title, "number") for title in titles]


def ranking(run: Summary) -> PageTable:
    """Rank the candidates, each compared with the first."""
    # Without a best there is nothing to compare with.
    several = len(run.candidates) > 1 and run.best_row is not None
    on_both = len({row.device for row in run.candidates}) > 1
    columns = [*_numbers("rank"), *_named(run), *[("device", "")] * on_both]
    columns += _numbers(_broken(run.metric), "95 % interval")
    columns += _numbers("difference to the first", "its 95 % interval", "p") if several else []
    columns += [*_numbers(*map(_broken, run.metrics[1:]), "fit seconds"), ("folds", "short")]
    rows = [
        (
            row.rank or "–",
            *(run.grid.values(row) if run.grid else [row.name]),
            *([row.device] if on_both else []),
            say.mean_std(row, run.metric),
            say.interval(row.ci_low, row.ci_high),
            *(_to_first(row) if several else ()),
            *(say.mean_std(row, name) for name in run.metrics[1:]),
            say.seconds(row.fit_seconds),
            f"{row.folds_done} of {row.folds}" + ("" if row.complete else f", {say.status(row)}"),
        )
        for row in run.candidates
    ]
    marks = ["best" if row.rank == 1 else "" if row.complete else "faint" for row in run.candidates]
    return PageTable("Ranking", columns, rows, marks)


def _named(run: Summary) -> list[Column]:
    """Return the columns that say which candidate a row is: of a grid, what varies."""
    if run.grid is None:
        return [("candidate", "name")]
    return [(_broken(item.title), "number" * item.is_numeric) for item in run.grid.parameters]


def _to_first(row: CandidateRow) -> tuple[str, str, str]:
    pair = row.to_first
    if pair is None:
        return "–", "–", "–"
    sign = 1 if pair.first == row.name else -1
    low, high = sorted((sign * pair.ci_low, sign * pair.ci_high))
    return say.signed(sign * pair.mean), say.interval(low, high), p_value(pair.p)


def folds(run: Summary) -> PageTable:
    """Return the score of each fold; many folds share a cell."""
    scores = {
        row.name: [say.number(value) for value in row.scores[run.metric]]
        for row in run.candidates[:ROWS]
    }
    return _by_fold("Scores of each fold", run.fold_names, scores, len(run.candidates))


def _by_fold(
    label: str, names: Sequence[str], cells_of: Mapping[str, list[str]], total: int
) -> PageTable:
    scores = [*cells_of.values()]
    if len(names) > FOLDS:
        title = f"{names[0]} to {names[-1]}, in order"
        columns, cells = [(title, "text")], [[" ".join(line)] for line in scores]
    else:
        columns, cells = _numbers(*names), scores
    lines = [(name, *line) for name, line in zip(cells_of, cells, strict=True)]
    return PageTable(label, [("candidate", "name"), *columns], lines, total=total)


def differences(run: Summary) -> PageTable:
    """Return the pairs of models and of LR schedules."""
    models, lr_schedules = run.verdict.models, run.verdict.lr_schedules
    columns = [("higher mean", "name"), ("lower mean", "name")]
    columns += _numbers("difference", "95 % interval", "p", "folds won")
    labels = run.grid.labels(run.candidates) if run.grid else {}
    rows = [
        (
            labels.get(pair.first, pair.first),
            labels.get(pair.second, pair.second),
            say.number(pair.mean),
            say.interval(pair.ci_low, pair.ci_high),
            p_value(pair.p),
            f"{pair.won} of {pair.folds}",
        )
        for pair in [*models[:ROWS], *lr_schedules[:ROWS]][:ROWS]
    ]
    return PageTable("Differences", columns, rows, total=len(models) + len(lr_schedules))


def folded(run: Summary, table: PageTable) -> tuple[PageTable, PageTable | None]:
    """Return the first rows of a long table of a grid, and the others; else all of it."""
    if run.grid is None or len(table.rows) <= TOP + 2:
        return table, None
    rest = replace(table, rows=table.rows[TOP:], marks=table.marks[TOP:])
    label = f"{table.label}: {say.plural(len(rest.rows), 'more row')}"
    return replace(table, rows=table.rows[:TOP], total=0), replace(rest, label=label, total=0)


@dataclass(frozen=True)
class HeatTable:
    """A table whose cells are shaded; a cell is its text and its shade in percent."""

    label: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, int]]]]


def class_accuracy(run: Summary) -> HeatTable | None:
    """Return the recall of each class in percent, shaded by what it lacks."""
    listed = [row for row in run.candidates if row.class_accuracy is not None]
    if not listed:
        return None
    first = listed[0].class_accuracy or ()
    hardest = sorted(range(len(first)), key=lambda place: (math.isnan(first[place]), first[place]))
    places = sorted(hardest[:CLASSES])
    rows = []
    for row in listed[: TOP if run.grid else ROWS]:
        for name, shares in (
            (row.name, row.class_accuracy),
            (f"{row.name}, serial loop", row.serial_class_accuracy),
        ):
            if shares:
                rows.append((name, [_recall(shares[place]) for place in places]))
    columns = [run.facts["classes"][place] for place in places]
    return HeatTable("Recall of each class", "recall in percent", columns, rows)


def heat_map(run: Summary) -> HeatTable | None:
    """Return the mean score of each pair of values, shaded by its place between the extremes."""
    effects = run.effects
    if effects is None or effects.pair is None:
        return None
    down, across = effects.pair
    known = [value for row in effects.means for value in row if math.isfinite(value)]
    least, room = min(known), (max(known) - min(known)) or 1.0

    def cell(value: float) -> tuple[str, int]:
        if not math.isfinite(value):
            return "–", 0
        return say.number(value), round(48 * (value - least) / room)

    names = [[effect.name for effect in effects.effects[title]] for title in (down, across)]
    rows = [
        (name, [cell(value) for value in row])
        for name, row in zip(names[0], effects.means, strict=True)
    ]
    return HeatTable(f"Mean by {down} and {across}", f"{down} \\ {across}", names[1], rows)


def _recall(share: float) -> tuple[str, int]:
    known = math.isfinite(share)
    return (f"{100 * share:.0f}", round(50 * math.sqrt(1 - share))) if known else ("n/a", 0)


def confusion(run: Summary) -> HeatTable | None:
    """Return what the first candidate takes each class for, shaded by the share of mistakes."""
    row = next((row for row in run.candidates if row.confusion is not None), None)
    names = run.class_names
    if row is None or row.confusion is None or len(names) > CLASSES:
        return None
    rows = []
    for true, counts in enumerate(row.confusion):
        total = max(1, sum(counts))
        cells = [
            (
                str(count) if count else "·",
                0 if place == true else round(50 * math.sqrt(count / total)),
            )
            for place, count in enumerate(counts)
        ]
        rows.append((names[true], cells))
    return HeatTable(f"Confusion matrix of {row.name}", "true \\ predicted", names, rows)


def confused(run: Summary) -> PageTable:
    """Return the most frequent mistakes of the first candidate."""
    row = next((row for row in run.candidates if row.confusion is not None), None)
    counts = row.confusion if row and row.confusion else ()
    names = run.class_names
    rows = [
        (names[true], names[guess], count, say.percent(count / sum(counts[true])))
        for true, guess, count in say.mistakes(counts)[:CONFUSED]
    ]
    columns: list[Column] = [("true class", "name"), ("taken for", "text")]
    label = f"Most frequent mistakes of {row.name if row else 'no candidate'}"
    columns += _numbers("times", "share of the class")
    return PageTable(label, columns, rows, narrow=True)


def hard_samples(run: Summary, pictures: Mapping[int, str]) -> PageTable:
    """Return the samples that most candidates got wrong, or whose numbers they missed by most."""
    hard, names = run.hard_samples, run.class_names
    titles, rows = ["true", "mean prediction", "mean absolute error"], []
    for item in hard.samples if hard else ():
        cells = [say.number(value) for value in (item.true, item.predicted, item.error)]
        if hard and hard.of_classes:
            titles = ["true class", "mostly taken for", "wrong"]
            cells = [names[int(item.true)], names[int(item.predicted)]]
            cells.append(f"{item.wrong} of {item.predictions}")
        rows.append((_with_picture(item.index, pictures), *cells))
    columns = [*_numbers("sample"), *((title, "text") for title in titles)]
    return PageTable("Hard samples", columns, rows, narrow=True)


def _with_picture(index: int, pictures: Mapping[int, str]) -> str:
    if index not in pictures:
        return str(index)
    tag = Markup('{0} <img class="picture" src="{1}" alt="picture of sample {0}">')
    return tag.format(index, pictures[index])


def attempts(run: Summary) -> PageTable:
    """Return where each attempt ran, and what it waited for."""
    columns: list[Column] = [("job", "name"), *_numbers("attempt", "start, s"), ("ran on", "")]
    columns += [*_numbers("seconds (predicted)", "peak (reserved)"), ("outcome", "")]
    rows = [
        (
            bar.job,
            bar.attempt,
            say.seconds(bar.start),
            say.ran_on(bar),
            f"{say.seconds(bar.end - bar.start)} ({say.seconds(bar.expected)})",
            f"{say.gibibytes(bar.peak_memory)} ({say.gibibytes(bar.memory)})",
            f"{bar.outcome}: {shorten(bar.error, 160)}" if bar.error else bar.outcome,
            "; ".join(map(str, bar.waits)),
        )
        for bar in run.bars[:ROWS]
    ]
    return PageTable("Attempts", [*columns, ("waited before", "text")], rows, total=len(run.bars))


def baseline(run: Summary) -> PageTable:
    """Compare each candidate with the serial loop."""
    titles = ["serial, s", "packed, s", "speedup"]
    accuracies = has_serial_accuracy(run)
    titles += ["accuracy, serial", "accuracy, packed", "difference"] * accuracies
    disturbance = run.speedup.disturbance if run.speedup else ""
    rows = [
        (row.name, *say.times(row, disturbance), *(_accuracies(row) if accuracies else ()))
        for row in run.candidates[:ROWS]
    ]
    columns = [("candidate", "name"), *_numbers(*titles)]
    return PageTable("Serial loop and packed run", columns, rows, total=len(run.candidates))


def has_serial_accuracy(run: Summary) -> bool:
    """Whether the serial loop has an accuracy to compare with: it was run, and on classes."""
    return any(math.isfinite(row.serial_accuracy) for row in run.candidates)


def _accuracies(row: CandidateRow) -> tuple[str, str, str]:
    serial, packed = row.serial_accuracy, row.packed_accuracy
    return say.number(serial), say.number(packed), say.signed(packed - serial)


def log(run: Summary) -> PageTable:
    """Return the last events."""
    columns = [*_numbers("at, s"), ("kind", ""), ("job", "short"), ("what happened", "text")]
    rows = [(f"{event.at:.1f}", event.kind, event.job, event.text) for event in run.events[-ROWS:]]
    return PageTable("Log", columns, rows, total=len(run.events))


def settings(label: str, values: Mapping[str, Any]) -> PageTable:
    """Return names and values."""
    rows = [(_broken(name), value) for name, value in values.items() if value != ""]
    return PageTable(label, [("setting", "name"), ("value", "text")], rows)


def _broken(name: str) -> Markup:
    """Let a long name break after its dots and underscores."""
    return Markup(re.sub(r"([._])(?=.)", r"\1<wbr>", str(escape(clean(name)))))


def plan(run: Summary) -> tuple[PageTable, PageTable]:
    """Return what the plan says, and apart from it the arguments of training at their defaults."""
    values = _plan_of(run, ("recipe", "stopped_early"))
    usual = flat({"params": vars(TrainerParams())})
    kept = {name: text for name, text in values.items() if usual.get(name) == text}
    rest = {name: text for name, text in values.items() if name not in kept}
    return settings("Plan", rest), settings("At their defaults", kept)


def _plan_of(run: Summary, hidden: Sequence[str] = ()) -> dict[str, str]:
    facts = {name: value for name, value in run.facts.items() if name not in hidden}
    return flat({**facts, "scoring": run.metrics})


# Of two runs

_HIDDEN = ("stopped_early", "folds_fingerprint", "plan_fingerprint", "params.epochs")
"""What differs as soon as anything does, or is there twice."""


def compared(scores: ScoreComparison) -> PageTable:
    """Return the score of each candidate in both runs, and what the folds say of the difference."""
    columns: list[Column] = [("candidate", "name"), *_numbers(*scores.runs)]
    columns += _numbers("difference", "its 95 % interval", "p")
    rows = []
    for row in scores.candidates[:ROWS]:
        change, low, high, p = row.change(scores.runs[1])
        means = [
            say.number(mean) + (f" ± {say.number(std)}" if math.isfinite(std) else "")
            for mean, std in zip(row.means, row.stds, strict=True)
        ]
        cells = say.signed(change), say.interval(low, high), p_value(p) if row.difference else "–"
        rows.append((row.name, *means, *cells, outcome(row.difference)))
    label, total = f"{scores.metric} in both runs", len(scores.candidates)
    return PageTable(label, [*columns, ("verdict", "short")], rows, total=total)


def outcome(pair: Difference | None) -> str:
    """Say in a few words which of two runs is better."""
    if pair is None:
        return "not compared"
    words = {"beats": f"{pair.first} is better", "equal": "equal scores", "untestable": "no test"}
    return words.get(pair.conclusion, "undecided")


def changes(scores: ScoreComparison, fold_names: Sequence[str]) -> PageTable:
    """Return second - first of each candidate of both in each fold."""
    known = {row.name: row.by_fold for row in scores.candidates if row.by_fold}
    cells = {name: [*map(say.signed, values)] for name, values in [*known.items()][:ROWS]}
    label = f"{scores.runs[1]} - {scores.runs[0]} in each fold"
    return _by_fold(label, fold_names, cells, len(known))


def plans(runs: tuple[Summary, Summary], names: tuple[str, str]) -> PageTable:
    """Return the settings that differ, of the plans and of the environments."""
    first, second = (
        {f"{part}{name}": value for part, values in parts for name, value in values.items()}
        for parts in ((("", _plan_of(run)), ("environment: ", run.about)) for run in runs)
    )
    rows = []
    for name in dict.fromkeys([*first, *second]):
        pair = [each.get(name, "") for each in (first, second)]
        if pair[0] != pair[1] and name not in _HIDDEN:
            rows.append((_broken(name), *(shorten(text, 400) or "–" for text in pair)))
    columns = [("setting", "name"), *((name, "text") for name in names)]
    return PageTable("What differs in the plans", columns, rows)
