"""What the numbers say, in sentences: pure functions from a `Summary` to text.

The titles of the figures and the first screen of the page use the same sentences, so that they
cannot contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from asynckfold.results.candidates import folds_note as _folds_note
from asynckfold.results.report.summary import Bar, CandidateRow, Summary
from asynckfold.results.statistics import Difference
from asynckfold.results.utilization import Packing
from asynckfold.scheduling.wait_reasons import named_cores
from asynckfold.system import units

MINDED = 0.01
"""Accuracy that one would mind to lose for speed."""

_VERDICTS = {
    "tie": "A tie",
    "untestable": "Cannot be tested",
    "real": "Probably real",
    "chance": "May be chance",
}
_PLACES = {
    "untestable": "is ahead",
    "real": "is best",
    "chance": "is ahead, perhaps by chance",
}


def number(value: float | None) -> str:
    """Return a score or loss with a fitting number of digits; ``"n/a"`` where there is none.

    >>> number(0.94), number(1234.5678), number(float("nan")), number(1e-7)
    ('0.9400', '1234.6', 'n/a', '1e-07')
    """
    if value is None or not math.isfinite(value):
        return "n/a"
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.4f}"
    return f"{value:.5g}"


def signed(value: float) -> str:
    """Return a difference with its sign: ``"+0.0233"``, ``"-0.0100"``."""
    return number(value) if value < 0 or not math.isfinite(value) else f"+{number(value)}"


def duration(wall_seconds: float) -> str:
    """Return a time for reading.

    >>> duration(0.034), duration(38.81), duration(72.4), duration(7322)
    ('0.03 s', '38.8 s', '1 min 12 s', '2 h 02 min')
    """
    if not math.isfinite(wall_seconds):
        return "n/a"
    if wall_seconds < 59.95:
        return f"{wall_seconds:.1f} s" if wall_seconds >= 1 else f"{wall_seconds:.2f} s"
    minutes, rest = divmod(round(wall_seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def seconds(value: float) -> str:
    """Return seconds for a table: ``"12.3"``."""
    return f"{value:.1f}" if math.isfinite(value) else "n/a"


def percent(share: float) -> str:
    """Return a share as percent: ``"93.3 %"``."""
    return "n/a" if not math.isfinite(share) else f"{100 * share:.1f} %"


def plural(count: int, noun: str) -> str:
    """Return ``"1 job"`` or ``"3 jobs"``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def mean_std(row: CandidateRow, metric: str) -> str:
    """Return ``"0.9400 ± 0.0133"``."""
    mean, std = number(row.mean[metric]), row.std[metric]
    # A spread has no more digits than the mean that it belongs to.
    plain = std is not None and std < 100 and len(mean.partition(".")[2]) == 4
    return f"{mean} ± {f'{std:.4f}' if plain else number(std)}"


def interval(low: float, high: float) -> str:
    """Return ``"0.8591 to 0.9640"``."""
    return "n/a" if math.isnan(low) else f"{number(low)} to {number(high)}"


def folds_note(row: CandidateRow) -> str:
    """Return ``"5 of 5 folds"``, marked where a fold is missing."""
    return _folds_note(row.folds_done, row.folds)


def packing(found: Packing) -> str:
    """Say how long the jobs took, how long they should have, and what they held of the cores."""
    text = f"the jobs took {duration(found.makespan)} from the first start to the last end"
    if found.predicted is not None:
        text += f", predicted were {duration(found.predicted.makespan)}"
    if found.lower_bound is not None and found.held is not None:
        text += (
            f"; no order of them takes less than {duration(found.lower_bound)}. Meanwhile they "
            f"held {percent(found.held)} of {plural(found.cores or 0, 'core')}, the tail included"
        )
    return text


def gibibytes(count: int | None) -> str:
    """Return bytes as GiB or MiB; ``"n/a"`` where there are none."""
    return units.gibibytes(count) if count else "n/a"


def ran_on(bar: Bar) -> str:
    """Return where an attempt ran: ``"cores 0, 1"``, ``"GPU 0, core 3"``."""
    cores = named_cores(bar.cores) if bar.cores else "any core"
    return cores if bar.device == "cpu" else f"GPU {bar.device.partition(':')[2]}, {cores}"


def best_rows(summary: Summary) -> tuple[CandidateRow, ...]:
    """Return the best complete candidate, with those that tie with it."""
    verdict = "" if summary.lead is None else summary.lead.difference.verdict
    first = sum(row.rank == 1 for row in summary.ranked)
    return summary.ranked[: max(first, 2)] if verdict == "tie" else summary.ranked[:1]


def best_names(summary: Summary) -> str:
    """Return ``"A"``, ``"A and B"``, or ``"A and 2 more"``."""
    first, *rest = (row.name for row in best_rows(summary))
    return f"{first} and {rest[0] if len(rest) == 1 else f'{len(rest)} more'}" if rest else first


def winner(summary: Summary) -> str:
    """Say which candidate is best, and no more than the comparison of the first two allows."""
    row = summary.best_row
    if row is None:
        return f"No candidate has {article(summary.metric)} on every fold, so none is best"
    score = f"{summary.metric} {mean_std(row, summary.metric)}"
    if summary.lead is None:
        return f"{row.name} has {score}"
    verdict = summary.lead.difference.verdict
    place = "tie" if verdict == "tie" else _PLACES[verdict]
    return f"{best_names(summary)} {place}: {score}"


def article(metric: str) -> str:
    """Return the metric with its article: ``"an accuracy"``."""
    return f"{'an' if metric[:1].lower() in 'aeiou' else 'a'} {metric}"


def lead(summary: Summary) -> str:
    """Say by how much the best candidate leads."""
    if summary.lead is None:
        return "No second complete candidate to compare with"
    return f"{signed(summary.lead.difference.mean)} on {summary.lead.runner_up}"


def is_real(summary: Summary) -> bool:
    """Whether the lead is more than fold-to-fold noise explains."""
    return summary.lead is not None and summary.lead.difference.verdict == "real"


def verdict(summary: Summary) -> str:
    """Say whether the lead is real, in two or three words."""
    if summary.lead is None:
        return "Nothing to compare"
    return _VERDICTS[summary.lead.difference.verdict]


def reason(summary: Summary) -> str:
    """Give the numbers behind `verdict`."""
    if summary.lead is None:
        return "it takes two complete candidates"
    difference = summary.lead.difference
    if math.isnan(difference.p):
        return _untestable(difference)
    side = "excludes" if is_real(summary) else "contains"
    return (
        f"paired over {plural(difference.folds, 'fold')}: 95 % interval "
        f"{signed(difference.ci_low)} to {signed(difference.ci_high)} {side} 0, "
        f"p = {p_value(difference.p)}"
    )


def _untestable(difference: Difference) -> str:
    if difference.folds < 2:
        return "one fold says nothing about the spread between folds"
    return f"the difference is the same on all {difference.folds} folds: no spread to test with"


def cpu_use(own: float, used: float, cores: int) -> str:
    """Return whose use of the cores was how much: this run's own, and that of others."""
    others = max(0.0, used - own)
    return f"this run {own:.2f} of {plural(cores, 'core')}, other programs {others:.2f}"


def p_value(value: float) -> str:
    """Return a p-value with two digits, ``"< 0.001"`` where it is tiny."""
    return "n/a" if math.isnan(value) else "< 0.001" if value < 1e-3 else f"{value:.2g}"


def speed(summary: Summary) -> str:
    """Say how long the run took, and the speedup: a number, an estimate called one, or why not."""
    packed = f"{duration(summary.packed_seconds)} packed"
    found = summary.speedup
    if found is None:
        return f"{packed}; no serial baseline was taken, so no speedup is claimed"
    if found.why_not or found.serial_seconds is None:
        return f"{packed}. Speedup not reported: {found.why_not}"
    serial = f"{duration(found.serial_seconds)} serial ({found.kind})"
    if found.ratio is None:
        return f"{packed} against {serial}, an estimated speedup of {found.estimate:.1f}"
    return f"{times(found.ratio)}: {packed} against {serial}"


def times(ratio: float) -> str:
    """Return ``"1.87× as fast"``."""
    return f"{ratio:.2f}× as fast"


def unequal_work(summary: Summary) -> str:
    """Say what is left out of the serial seconds where jobs have no result; else ``""``."""
    lost = sum(summary.counts[state] for state in ("failed", "diverged", "cancelled"))
    found = summary.speedup
    if found is None or found.why_not or not lost:
        return ""
    return (
        f"{plural(lost, 'job')} of {summary.counts['planned']} did not succeed: the serial seconds "
        "are without them, the packed ones with what they took."
    )


def accuracies(summary: Summary) -> str:
    """Say how accurate both are, over all candidates; ``""`` where it is not known of both."""
    pairs = () if summary.speedup is None else summary.speedup.accuracy
    if not pairs:
        return ""
    packed, serial = (fmean(getattr(pair, way) for pair in pairs) for way in ("packed", "serial"))
    return f"accuracy {number(packed)} against {number(serial)}"


def costs_accuracy(summary: Summary) -> bool:
    """Whether the packed jobs are less accurate than the serial ones by what one would mind.

    As those of several processes may be, which take other steps than one process does.
    """
    pairs = () if summary.speedup is None else summary.speedup.accuracy
    return bool(pairs) and fmean(pair.packed - pair.serial for pair in pairs) < -MINDED


def jobs(summary: Summary) -> str:
    """Account for every job: ``"20 planned = 18 done + 2 failed"``."""
    states = ("done", "failed", "diverged", "cancelled", "pending")
    counts = summary.counts
    parts = [f"{counts[state]} {state}" for state in states if counts[state] or state == "done"]
    return f"{counts['planned']} planned = {' + '.join(parts)}"


def what_failed(summary: Summary) -> str:
    """Say in a few words what went wrong."""
    counts = summary.counts
    bad = [
        f"{counts[state]} {state}"
        for state in ("failed", "diverged", "cancelled", "pending")
        if counts[state]
    ]
    return ", ".join(bad) if bad else "Nothing failed"


def retried(summary: Summary) -> list[Bar]:
    """Return the attempts after which the same job was tried again."""
    newest = {bar.job: bar.attempt for bar in summary.bars}
    for bar in summary.bars:
        newest[bar.job] = max(newest[bar.job], bar.attempt)
    return [bar for bar in summary.bars if bar.attempt < newest[bar.job]]


def shorten(name: str, limit: int) -> str:
    """Keep both ends of a long name, where names differ.

    >>> shorten("a-very-long-model-name/cosine", 16)
    'a-very-…e/cosine'
    """
    if len(name) <= limit:
        return name
    head = (limit - 1) // 2
    return f"{name[:head]}…{name[len(name) - (limit - 1 - head) :]}"


def hardest(classes: Sequence[str], accuracy: Sequence[float]) -> tuple[str, float] | None:
    """Return the class with the lowest accuracy."""
    known = [pair for pair in zip(classes, accuracy, strict=False) if math.isfinite(pair[1])]
    return min(known, key=lambda pair: pair[1]) if known else None


def worst_confusion(confusion: Sequence[Sequence[int]]) -> tuple[int, int, int] | None:
    """Return (true class, said class, count) of the most frequent mistake."""
    mistakes = [
        (count, -true, -said)
        for true, row in enumerate(confusion)
        for said, count in enumerate(row)
        if count and true != said
    ]
    if not mistakes:
        return None
    count, true, said = max(mistakes)
    return -true, -said, count
