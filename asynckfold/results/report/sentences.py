"""Sentences about a `Summary`, shared by the figures, the page and the terminal.

One sentence in one place, so that a figure and the page cannot contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from asynckfold.jobs.result import CANCELLED
from asynckfold.jobs.result import own_frames as own_frames  # for the page
from asynckfold.results.report.attempts import Bar
from asynckfold.results.report.candidate_rows import CandidateRow
from asynckfold.results.report.summary import Summary
from asynckfold.results.speedup import NOT_TAKEN
from asynckfold.results.utilization import Packing
from asynckfold.results.verdict import listed, p_value
from asynckfold.store import Interim
from asynckfold.system import units
from asynckfold.system.plain_text import shorten
from asynckfold.system.units import duration as duration  # for the page

ACCURACY_LOSS = 0.01
"""Loss of accuracy against the serial loop that the page warns of."""


def number(value: float | None) -> str:
    """Return a score or loss for reading; ``"n/a"`` if there is none.

    >>> number(0.94), number(1234.5678), number(float("nan")), number(1e-7)
    ('0.9400', '1234.6', 'n/a', '1e-07')
    """
    if value is None or not math.isfinite(value):
        return "n/a"
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.4f}"
    return f"{value:.5g}" if abs(value) >= 1 else f"{value:.2g}"


def signed(value: float) -> str:
    """Return a difference with its sign: ``"+0.0233"``, ``"-0.0100"``, ``"+0.0000"``."""
    value += 0.0  # -0.0 becomes 0.0
    return number(value) if value < 0 or not math.isfinite(value) else f"+{number(value)}"


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
    if not math.isfinite(std) or row.folds_done < 2:
        return mean
    # No more digits than the mean.
    plain = std < 100 and len(mean.partition(".")[2]) == 4
    return f"{mean} ± {f'{std:.4f}' if plain else number(std)}"


def interval(low: float, high: float) -> str:
    """Return ``"0.8591 to 0.9640"``."""
    return "n/a" if math.isnan(low) else f"{number(low)} to {number(high)}"


def packing(packing: Packing) -> str:
    """Say how long the jobs took against the prediction, and their share of the cores."""
    text = f"the jobs took {duration(packing.makespan)} from first start to last end"
    if packing.predicted is not None:
        text += f", {duration(packing.predicted.makespan)} predicted"
    if packing.lower_bound is not None and packing.held is not None:
        text += (
            f" and at least {duration(packing.lower_bound)} needed in any order; they held "
            f"{percent(packing.held)} of {plural(packing.cores or 0, 'core')}, the tail included"
        )
    return text


def gibibytes(count: int | None) -> str:
    """Return bytes as GiB or MiB; ``"n/a"`` for none."""
    return units.gibibytes(count) if count else "n/a"


def ran_on(bar: Bar) -> str:
    """Return where an attempt ran: ``"cores 0, 1"``, ``"GPU 0, core 3 of x"``."""
    cores = units.named_cores(bar.cores) if bar.cores else "any core"
    cores += f" of {units.named_node(bar.node)}" if bar.node else ""
    return cores if bar.device == "cpu" else f"GPU {bar.device.partition(':')[2]}, {cores}"


def highest(summary: Summary) -> str:
    """Return the complete candidate with the highest mean and those tied with it."""
    return listed([row.name for row in summary.ranked if row.rank == 1])


def headline(summary: Summary) -> str:
    """Return the first sentence of the verdict, without its full stop; of a grid, its best."""
    if summary.grid is not None and summary.best_row is not None:
        mean = mean_std(summary.best_row, summary.metric)
        return f"{highest(summary)}: highest {summary.metric}, {mean}"
    return summary.verdict.sentences[0].removesuffix(".")


def against(summary: Summary) -> list[str]:
    """Say in at most two sentences how the best candidate of a grid compares with the others."""
    pairs = [row.to_first for row in summary.ranked if row.to_first is not None]
    if not pairs:
        return []
    beaten = sum(pair.conclusion == "beats" for pair in pairs)
    lines = [
        f"It beats {beaten or 'none'} of the other {plural(len(pairs), 'candidate')}"
        + (", after the correction for all pairs." if len(pairs) > 1 else ".")
    ]
    if beaten < len(pairs):
        close = min(
            (pair for pair in pairs if pair.conclusion != "beats"), key=lambda pair: abs(pair.mean)
        )
        lines.append(
            f"Closest: {close.second if close.first == summary.ranked[0].name else close.first}, "
            f"{number(abs(close.mean))} less (p = {p_value(close.p)})."
        )
    return lines


def matters(summary: Summary) -> str:
    """Say which parameter matters, and how far that can be trusted; ``""`` if it is not known."""
    effects = summary.effects
    if effects is None or not effects.importance:
        return ""
    first, *others = effects.importance.items()
    then = ", ".join(f"{name} {loss:.2f}" for name, loss in others)
    return (
        f"{first[0]} matters most: shuffling its values costs {first[1]:.2f} of R²"
        + (f", of others {then}" if then else "")
        + ". By a random forest on the candidates' means, with an out-of-bag R² of "
        f"{effects.explained:.2f}"
    )


def grid_size(summary: Summary) -> str:
    """Return the numbers of values: ``"lr: 5 values, width: 2 values"``."""
    parameters = summary.grid.parameters if summary.grid is not None else ()
    return ", ".join(f"{each.title}: {plural(len(each.values), 'value')}" for each in parameters)


def decision(summary: Summary) -> str:
    """Say which candidate is best, or else which model or LR schedule, if the folds decide that."""
    verdict = summary.verdict
    if verdict.best:
        return f"{verdict.best} is best"
    if not (verdict.models or verdict.lr_schedules):
        return "Nothing to compare"
    if verdict.models and len(verdict.best_models) == 1:
        return f"{verdict.best_models[0]} is the best model"
    if verdict.lr_schedules and len(verdict.best_lr_schedules) == 1:
        return f"{verdict.best_lr_schedules[0]} is the best LR schedule"
    return "Undecided"


def cpu_use(by_run: float, used: float, cores: int) -> str:
    """Return the CPU use of this run and of other programs; of all if `by_run` is not known."""
    if math.isnan(by_run):
        return f"{used:.2f} of {plural(cores, 'core')}"
    others = max(0.0, used - by_run)
    return f"this run {by_run:.2f} of {plural(cores, 'core')}, other programs {others:.2f}"


def speed(summary: Summary) -> str:
    """Say how long the run took, with the speedup, an estimate of it, or why there is none."""
    packed = f"{duration(summary.packed_seconds)} packed"
    speedup = summary.speedup
    if speedup is None or speedup.why_not:
        return f"{packed}. Speedup not reported: {no_speedup(summary)}"
    if speedup.ratio is not None and speedup.serial_seconds is not None:
        serial = f"{duration(speedup.serial_seconds)} serial (measured)"
        return f"{speedup.ratio:.2f}× as fast: {packed} against {serial}"
    return no_speedup(summary)


def no_speedup(summary: Summary) -> str:
    """Say why there is no measured speedup, or what the estimate is."""
    speedup = summary.speedup
    if speedup is None or speedup.why_not:
        return speedup.why_not if speedup else NOT_TAKEN
    serial = f"{duration(speedup.estimated_serial_seconds or math.nan)} serial (estimated)"
    packed = f"{duration(summary.packed_seconds)} packed"
    return f"{packed} against {serial}, an estimated speedup of {speedup.estimate:.1f}"


def ideal(summary: Summary) -> int | None:
    """Return the speedup of one job on each allotted core; None if the cores are not known."""
    cores = summary.packing.cores if summary.packing else None
    cores = cores or max((use.cores for use in summary.use), default=0)
    return min(cores, summary.counts["planned"]) if cores else None


def times(row: CandidateRow, disturbance: str = "") -> tuple[str, str, str]:
    """Return serial seconds (marked if estimated or disturbed), packed seconds, speedup."""
    estimated = math.isfinite(row.estimated_serial_seconds)
    serial = seconds(row.estimated_serial_seconds if estimated else row.serial_seconds)
    marks = ["estimated"] * estimated + ["disturbed"] * bool(disturbance)
    if marks and serial != "n/a":
        serial = f"{serial} ({', '.join(marks)})"
    ratio = f"{row.speedup:.2f}×" if math.isfinite(row.speedup) else "n/a"
    return serial, seconds(row.packed_seconds), ratio


def accuracies(summary: Summary) -> tuple[str, bool]:
    """Return the mean accuracy, packed and serial, and whether packed jobs are clearly worse."""
    pairs = [(row.packed_accuracy, row.serial_accuracy) for row in summary.candidates]
    known = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if not known:
        return "", False
    packed, serial = map(fmean, zip(*known, strict=True))
    # As jobs of several processes may be.
    text, is_worse = f"accuracy {number(packed)} against {number(serial)} serial", False
    if packed - serial < -ACCURACY_LOSS:
        text, is_worse = f"{text}: less accurate than the serial loop", True
    return text, is_worse


def jobs(summary: Summary) -> str:
    """Account for every job: ``"18 of 20 jobs finished, 2 failed"``."""
    counts = summary.counts
    finished = f"{counts['done']} of {plural(counts['planned'], 'job')} finished"
    return ", ".join([finished, *unfinished(summary)])


def cause(summary: Summary) -> str:
    """Return the error of most failed jobs on one line; ``""`` without one."""
    lines = summary.failures[0].error.strip().splitlines() if summary.failures else []
    return shorten(lines[0], 160) if lines else ""


def state(summary: Summary) -> str:
    """Say whether a run with pending jobs goes on; ``""`` without any."""
    if not summary.counts["pending"]:
        return ""
    return "the run is still going" if summary.going else "stopped: the same call continues the run"


def progress(interim: Interim) -> str:
    """Return ``"37 % of the steps, 2 min left"``."""
    text = f"{100 * interim.steps_done // max(1, interim.steps)} % of the steps"
    left = interim.seconds_left
    return text if left is None else f"{text}, {duration(left)} left"


def unfinished(summary: Summary) -> list[str]:
    """Return the jobs without a score by state: ``["2 failed", "1 pending"]``."""
    states = {"failed": "failed", "diverged": "diverged", CANCELLED: "left out"}
    states["pending"] = "pending"
    counts = summary.counts
    return [f"{counts[state]} {text}" for state, text in states.items() if counts[state]]


def status(row: CandidateRow) -> str:
    """Return why a candidate is incomplete."""
    return "left out" if row.status == CANCELLED else row.status


def next_steps(summary: Summary) -> list[str]:
    """Say what the numbers of a run suggest to try next, each with its evidence.

    How many more folds would decide is the outlook of the verdict.
    """
    rows = summary.ranked
    if not rows:
        return []
    first, steps = rows[0], []
    curve = next((curve for curve in first.curves if curve.measure == "valid_loss"), None)
    losses = curve.mean if curve else ()
    if len(losses) > 2 and losses[-1] < min(losses[:-1]) and not summary.facts["stopped_early"]:
        steps.append(
            f"Train longer: the valid loss of {first.name} is lowest at the last of "
            f"{len(losses)} epochs, {number(losses[-1])} after {number(losses[-2])}."
        )
    if len(rows) < 2 or summary.verdict.best is not None:
        return steps
    gap = first.mean[summary.metric] - rows[1].mean[summary.metric]
    scores, repeats = first.scores[summary.metric], summary.facts["repeats"]
    if repeats > 1 and len(scores) % repeats == 0:
        size = len(scores) // repeats
        means = [fmean(scores[at : at + size]) for at in range(0, len(scores), size)]
        if max(means) - min(means) > gap:
            steps.append(
                f"Average over seeds: the repeats of {first.name} have means from "
                f"{number(min(means))} to {number(max(means))}, and the first two candidates are "
                f"{number(gap)} apart."
            )
    return steps


def forest_marks(summary: Summary) -> str:
    """Say what marks the means and folds of candidates in a chart."""
    if len(summary.fold_names) == 1:
        return "Diamond: the score on the only fold."
    has_interval = any(math.isfinite(row.ci_low) for row in summary.candidates)
    bar = " bar: its 95 % interval;" if has_interval else ""
    return f"Diamond: mean over the folds;{bar} dots: folds."


def mistakes(confusion: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Return (true class, predicted class, count) of all mistakes, the most frequent first."""
    counts = [
        (true, predicted, count)
        for true, row in enumerate(confusion)
        for predicted, count in enumerate(row)
        if count and true != predicted
    ]
    return sorted(counts, key=lambda mistake: -mistake[2])


def hard_samples(summary: Summary) -> str:
    """Say how many held-out samples most predictions got wrong."""
    hard = summary.hard_samples
    if hard is None:
        return ""
    if not hard.of_classes:
        return "The held-out samples with the largest mean absolute error over all candidates"
    by = "repeats of all candidates" if summary.facts["repeats"] > 1 else "candidates"
    total = plural(hard.total, "held-out sample")
    return f"Most {by} got {hard.wrong_by_most} of {total} wrong"


def calibrated(summary: Summary) -> str:
    """Say how sure the first candidate is against how often it is right; ``""`` if not known."""
    calibration = summary.calibration
    if calibration is None:
        return ""
    return (
        f"{calibration.candidate} is right in {percent(calibration.right)} of its predictions, "
        f"and on average {percent(calibration.sure)} sure; expected calibration error "
        f"{100 * calibration.error:.1f} points"
    )


def areas(summary: Summary) -> str:
    """Return the area under the ROC curve of the first candidates; ``""`` if there is none."""
    two = summary.two_classes
    if two is None:
        return ""
    first = two.curves[0]
    return (
        f"{first.candidate} has an area of {first.roc_area:.4f} under its ROC curve and an average "
        f"precision of {first.average_precision:.4f}"
    )


def time_unit(longest_seconds: float) -> tuple[float, str]:
    """Return the seconds of a fitting unit, and its name."""
    if longest_seconds < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if longest_seconds < 3 * 3600 else (3600.0, "hours")
