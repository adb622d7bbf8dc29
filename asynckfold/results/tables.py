"""Tables of results: scikit-learn's ``cv_results_``, rows of data frames, and text for people."""

from __future__ import annotations

import base64
import contextlib
import html
import math
import urllib.parse
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from asynckfold.jobs.candidate_names import base_of, values_of
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.result import CANCELLED, Baseline, Epoch, Result
from asynckfold.results.candidates import Candidate, rank, score_of
from asynckfold.results.speedup import AgainstSerial
from asynckfold.system.plain_text import one_line

Row = dict[str, Any]

SHOWN = 20
"""Candidates in the table that results print, and in that of a notebook."""


def score_table(
    rows: Sequence[Candidate], metrics: Sequence[str], trained: Sequence[Candidate] | None = None
) -> dict[str, Any]:
    """Return scores and times under scikit-learn's keys, one entry per candidate.

    `trained` are the same candidates with scores on the training part of each fold.
    """
    table: dict[str, Any] = {}
    for name, column in (("fit", "fit_seconds"), ("score", "score_seconds")):
        seconds = np.array([getattr(row, column) for row in rows])
        table[f"mean_{name}_time"] = seconds.mean(axis=1)
        table[f"std_{name}_time"] = seconds.std(axis=1)
    params = [row.params for row in rows]
    for name in dict.fromkeys(name for item in params for name in item):
        values = np.array([item.get(name) for item in params], dtype=object)
        table[f"param_{name}"] = np.ma.MaskedArray(values, [name not in item for item in params])
    table["params"] = params
    for metric in metrics:
        table |= _split_columns(rows, metric, "test")
        table[f"rank_test_{metric}"] = np.array(rank(rows, metric), dtype=np.int32)
        if trained is not None:
            table |= _split_columns(trained, metric, "train")
    return table


def _split_columns(rows: Sequence[Candidate], metric: str, part: str) -> dict[str, Any]:
    scores = np.array([row.scores[metric] for row in rows])
    splits = {f"split{at}_{part}_{metric}": scores[:, at] for at in range(scores.shape[1])}
    means = {f"mean_{part}_{metric}": scores.mean(axis=1)}
    return {**splits, **means, f"std_{part}_{metric}": scores.std(axis=1)}


def candidate_rows(
    rows: Sequence[Candidate],
    metrics: Sequence[str],
    ratio: float,
    times: Mapping[str, AgainstSerial],
) -> list[Row]:
    """Return a row per candidate, best first; `ratio` is ``n_valid / n_train``."""
    first, kinds = metrics[0], {row.device for row in rows}
    is_timed = any(times[row.name].baseline for row in rows)
    parameters = parameters_of(rows)
    table = []
    for position, row in zip(rank(rows, first), rows, strict=True):
        entry: Row = {
            "rank": position if row.ranks_by(first) else math.nan,
            **names_of(row.model, row.lr_schedule, parameters),
            **({"device": row.device} if len(kinds) > 1 else {}),
        }
        entry |= {
            "fit_seconds": row.total_fit_seconds,
            "folds_done": row.done,
            "folds": row.planned,
            "status": row.status,
            **(vars(times[row.name]) if is_timed else {}),
        }
        # Last, the score that ranks: of a wide table pandas prints the first and last columns.
        for metric in reversed(metrics):
            if metric == first:
                entry["ci_low"], entry["ci_high"] = row.interval(first, ratio)
            entry |= {f"mean_{metric}": row.mean(metric), f"std_{metric}": row.std(metric)}
        table.append((position, entry))
    return [entry for _, entry in sorted(table, key=lambda pair: pair[0])]


def fold_rows(
    plan: Plan, results: Mapping[str, Result], baseline: Baseline | None, error_score: float
) -> Iterator[Row]:
    """Yield a row per job; pending jobs have no seconds and no place."""
    averaging = any(result.averaged for result in results.values())
    on_gpu = any(result.peak_gpu_memory for result in results.values())
    on_nodes = any(result.node for result in results.values())
    serial = baseline.by_job if baseline else {}
    pending = Result(
        "", 0, "pending", fit_seconds=math.nan, score_seconds=math.nan, threads=0, device=""
    )
    parameters = parameters_of(plan.jobs)
    for job in plan.jobs:
        known = results.get(job.id)
        result = known or pending
        rounds, samples = (it.rounds, it.samples) if (it := result.averaged) else (math.nan, ())
        # The blank keeps a spreadsheet from reading it as one number.
        averaged = {"rounds": rounds, "samples_epochs": ", ".join(map(str, samples))}
        yield {
            **_place(job, parameters),
            "status": result.status,
            **{metric: score_of(known, metric, error_score) for metric in plan.scoring},
            "fit_seconds": result.fit_seconds,
            "score_seconds": result.score_seconds,
            "peak_memory": result.peak_memory,
            **({"peak_gpu_memory": result.peak_gpu_memory} if on_gpu else {}),
            **({"node": result.node} if on_nodes else {}),
            "device": result.device,
            "cores": ",".join(map(str, result.cores)),
            "threads": result.threads,
            "attempt": result.attempt,
            "fused": len(plan.group_of(job.id)),
            **(averaged if averaging else {}),
            **({"serial_accuracy": serial.get(job.id, math.nan)} if serial else {}),
            "error": result.error,
        }


def parameters_of(rows: Iterable[Candidate | Job]) -> list[str]:
    """Return the parameters of a grid, sorted."""
    return sorted({name for row in rows for name in values_of(row.model, row.lr_schedule)})


def names_of(model: str, lr_schedule: str, parameters: Sequence[str]) -> Row:
    """Return the columns that name a candidate."""
    values = values_of(model, lr_schedule)
    return {
        "model": base_of(model),
        "scheduler": base_of(lr_schedule),
        **{f"param_{name}": values.get(name) for name in parameters},
    }


def _place(job: Job, parameters: Sequence[str]) -> Row:
    return {
        **names_of(job.model, job.lr_schedule, parameters),
        "repeat": job.repeat,
        "fold": job.fold,
    }


def epoch_rows(plan: Plan, results: Mapping[str, Result]) -> Iterator[Row]:
    """Yield a row per epoch; pretraining, if any job has it, comes first, named in ``stage``."""
    parameters = parameters_of(plan.jobs)
    staged = any(result.pretraining for result in results.values())
    unmeasured: Row = {item.name: math.nan for item in fields(Epoch)[1:-1]}
    for job in plan.jobs:
        result = results.get(job.id)
        if result is None:
            continue
        place = _place(job, parameters)
        for stage in result.pretraining:
            where = {**place, "stage": stage.stage, "epoch": stage.number}
            # A measure of the user's must not overwrite where the row belongs.
            row = {**where, **unmeasured, **stage.measures, **where}
            yield {**row, "seconds": stage.seconds}
        for item in result.epochs:
            values = {**vars(item), **item.logged}
            del values["logged"]
            stages = {"stage": ""} if staged else {}
            yield {**place, **stages, "epoch": values.pop("number"), **values}


def ranking(
    rows: Sequence[Row], metric: str, spare: Collection[str] = ("seconds",)
) -> list[list[str]]:
    """Return header and cells of the table that results and the command print.

    `spare` names the columns that it has room for, of the interval and the seconds.
    """
    parameters = [name for name in (rows[0] if rows else ()) if name.startswith("param_")]
    device = ["device"] * any("device" in row for row in rows)
    names = ["model", "scheduler", *parameters, *device]
    bounds, seconds = ([name] * (name in spare) for name in ("95 % interval", "seconds"))
    titles = [name.removeprefix("param_") for name in names]
    table = [["rank", *titles, one_line(metric), *bounds, "folds", *seconds]]
    for row in rows:
        mean, std = row[f"mean_{metric}"], row[f"std_{metric}"]
        low, high, fit_seconds = row["ci_low"], row["ci_high"], row["fit_seconds"]
        table.append(
            [
                "-" if math.isnan(row["rank"]) else str(int(row["rank"])),
                *(_cell(row[name]) for name in names),
                "n/a" if math.isnan(mean) else f"{mean:.4f} ± {std:.4f}",
                *["" if math.isnan(low) else f"{low:.4f} … {high:.4f}"] * len(bounds),
                f"{row['folds_done']}/{row['folds']}" + " left out" * (row["status"] == CANCELLED),
                *["" if math.isnan(fit_seconds) else f"{fit_seconds:.1f}"] * len(seconds),
            ]
        )
    return table


def _cell(value: object) -> str:
    """Return a name or a value of a grid; empty where the candidate does not take it."""
    return "" if value is None or value != value else one_line(str(value))


def as_text(title: str, cells: Sequence[Sequence[str]], verdict: str) -> str:
    """Return a table for the terminal."""
    shown, hidden = cells[: 1 + SHOWN], len(cells) - 1 - SHOWN
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in shown
    )
    more = [f"and {hidden} more, see results.to_frame()"] if hidden > 0 else []
    return "\n".join([f"CVResults: {title}", *lines, *more, verdict])


def as_html(title: str, cells: Sequence[Sequence[str]], verdict: str) -> str:
    """Return verdict and table for a notebook."""
    head, *body = [[html.escape(cell) for cell in line] for line in cells]
    rows = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in body[:SHOWN]]
    hidden = len(body) - SHOWN
    more = f"<p>and {hidden} more, see <code>results.to_frame()</code></p>" if hidden > 0 else ""
    return (
        f"<p><b>{html.escape(verdict)}</b></p>"
        f"<table><thead><tr>"
        f"{''.join(f'<th>{cell}</th>' for cell in head)}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>{more}<p>{html.escape(title)}</p>"
    )


def image_html(svg: bytes) -> str:
    """Return an image of the scores for a notebook; empty without one."""
    if not svg:
        return ""
    image = base64.b64encode(svg).decode()
    alt = "dots: scores of the folds; bar: their mean and its 95 % interval"
    return f'<p><img alt="{alt}" width="760" src="data:image/svg+xml;base64,{image}"></p>'


class ReportPath(type(Path())):  # type: ignore[misc]
    """The path of a page, which notebooks show as a link."""

    def _repr_html_(self) -> str:
        return link_html(self)


def link_html(page: Path) -> str:
    """Return a link to the report for a notebook, relative where that is possible."""
    if not page.is_file():
        return "<p>No report yet: <code>results.report()</code> writes it.</p>"
    with contextlib.suppress(ValueError):
        page = page.absolute().relative_to(Path.cwd())
    address = html.escape(urllib.parse.quote(page.as_posix()))
    return (
        f'<p>Report: <a href="{address}" target="_blank">{html.escape(one_line(str(page)))}</a></p>'
    )
