"""The verb ``plan``: the decisions for a sweep with their reasons, and its predicted time."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.cli.doctor import now
from asynckfold.cli.output import Output, table_of
from asynckfold.cli.sweep_file import make_kfold, sweep_parts
from asynckfold.errors import Problem, refuse
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.folds import outer_folds
from asynckfold.jobs.plan import Plan
from asynckfold.planning.forecast import Forecast, Span
from asynckfold.results.report.sentences import plural
from asynckfold.results.utilization import forecast_of
from asynckfold.scheduling.place import place
from asynckfold.store import RunStore
from asynckfold.store.layout import DATABASE
from asynckfold.system.units import duration, gibibytes, named_cores

if TYPE_CHECKING:
    from rich.table import Table

IDLE = "·"


def plan(parsed: argparse.Namespace, out: Output) -> int:
    """Print what a run would do, after a dry run; or what was decided for a run."""
    if parsed.file and (Path(parsed.file) / DATABASE).is_file():
        refuse(parsed.problems)
        _of_run(Path(parsed.file), out)
        return 0
    from asynckfold.system.machine import resolve_n_jobs, watched

    sweep = sweep_parts(parsed)
    kfold = make_kfold(parsed, sweep)
    machine = watched(kfold.settings.machine())
    busy = machine.describe()["cpu"]["busy"]
    forecast = kfold.forecast(*sweep, **sweep.grid)
    threads = min(forecast.choice.threads.values())
    count = resolve_n_jobs(kfold.settings.n_jobs, machine.max_cores)
    load = machine.load(count, threads=threads)
    # The load of the other nodes of a cluster is not known here any more.
    first = [] if forecast.choice.nodes else place(list(forecast.units.values()), [], load)
    out.data(
        {
            **_numbers(forecast),
            "cores": list(load.cores),
            "threads_per_job": kfold.settings.threads_per_job,
            "first": [{"jobs": item.jobs, "cores": item.cores, "gpu": item.gpu} for item in first],
        }
    )
    _say(forecast, out)
    if kfold.settings.refit:
        from asynckfold.api.refit import names_one

        refit = kfold.settings.refit
        who = refit if names_one(refit) else "the best candidate"
        out.say(f"then {who} on all samples; its time is not in the prediction")
    if not forecast.choice.nodes:
        out.say(f"jobs at a time now: {len(first)}; {now(machine.describe()['cpu'], load).why}")
    if busy:
        out.say(
            f"others use {named_cores(busy)}: seconds that are predicted on a busy machine are not "
            "those of an idle one"
        )
    out.say("nothing was trained or written")
    return 0


def _of_run(folder: Path, out: Output) -> None:
    """Print what was decided for a run, from its folder alone."""
    with RunStore.read(folder) as store:
        forecast = forecast_of(store)
    if forecast is None:
        rule = "DIR must hold a run whose decisions were recorded"
        remedy = f"`asynckfold status {folder}` prints its progress."
        refuse([Problem(rule, str(folder), remedy)])
        return
    out.data(_numbers(forecast))
    _say(forecast, out)


def _numbers(forecast: Forecast) -> dict[str, Any]:
    """Return the object of ``--json``."""
    plan, choice = forecast.plan, forecast.choice
    return {
        "jobs": [job.id for job in plan.jobs],
        "candidates": list(plan.candidate_names),
        "folds": [
            {"train": len(fold.train), "valid": len(fold.valid)}
            | ({} if fold.inner is None else {"inner": fold.inner})
            for fold in forecast.folds
        ],
        "classes": list(plan.classes),
        "epochs": plan.params.epochs,
        "batch_size": plan.batch_size,
        "options": plan.params.options,
        "channels_last": _channels_last(plan),
        "device": plan.device_text,
        "devices": {name: plan.device_of(name) for name in plan.candidate_names},
        "why_devices": choice.devices,
        "threads": dict(choice.threads),
        "last_threads": dict(choice.last_threads),
        "why": dict(choice.why),
        "jobs_per_gpu": dict(choice.per_gpu),
        "costs": {name: asdict(cost) for name, cost in choice.costs.items()},
        "allotted_cores": choice.cores,
        "nodes": [asdict(node) for node in choice.nodes],
        "prediction": asdict(choice.prediction),
        "requests": {
            name: {"seconds": item.seconds, "threads": item.threads, "memory": item.memory}
            for name, item in forecast.requests.items()
        },
        "groups": plan.groups,
        "fusing": dict(forecast.fusing),
        "spans": [
            {"job": span.job, "start": span.start, "end": span.end, "cores": span.cores}
            | ({} if span.gpu is None else {"gpu": span.gpu})
            | ({"node": span.node} if span.node else {})
            | ({"jobs": forecast.units[span.job].jobs} if forecast.units[span.job].jobs else {})
            for span in forecast.simulation.spans
        ],
        "failures": dict(forecast.failures),
        "notes": list(forecast.notes),
    }


def _channels_last(plan: Plan) -> list[str]:
    """Return the models with a job in the memory format channels_last."""
    return list(dict.fromkeys(job.model for job in plan.jobs if plan.is_channels_last(job)))


def _say(forecast: Forecast, out: Output) -> None:
    out.say(_table(forecast))
    for line in _lines(forecast):
        out.say(line)


def _table(forecast: Forecast) -> Table:
    """Return one row a candidate."""
    plan = forecast.plan
    both = ["device"] * bool(plan.devices)
    sizes = [
        _range([len(getattr(fold, part)) for fold in forecast.folds]) for part in ("train", "valid")
    ]
    rows = []
    for model, lr_schedule in plan.candidates:
        name = candidate_name(model, lr_schedule)
        jobs = [forecast.requests[job.id] for job in plan.jobs if job.candidate == name]
        devices = [plan.device_of(name) for _ in both]
        threads = _range([job.threads for job in jobs])
        seconds = f"{math.fsum(job.seconds for job in jobs) / len(jobs):.1f}"
        memory = gibibytes(jobs[0].memory)
        count = str(len(jobs))
        if plan.nested:
            count = f"{len(outer_folds(forecast.folds))}, {plan.nested} inner each"
        rows.append([model, lr_schedule, *devices, count, *sizes, threads, seconds, memory])
    names = ["model", "scheduler", *both]
    numbers = ["folds", "train", "valid", "threads", "s per job", "memory"]
    return table_of([*names, *numbers], rows, names)


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _lines(forecast: Forecast) -> Iterator[str]:
    plan, choice = forecast.plan, forecast.choice
    if choice.devices:
        yield choice.devices
    yield "threads per job (step times from the built-in cost model):"
    for model in dict.fromkeys(job.model for job in plan.jobs):
        yield f"  {model}: {choice.why[model]}"
    if forecast.fusing:
        yield "fusion:"
        yield from (f"  {model}: {text}" for model, text in forecast.fusing.items())
    if last := _channels_last(plan):
        yield f"memory format channels_last: {', '.join(last)}"
    yield from forecast.notes
    for name, line in forecast.failures.items():
        yield f"{name} fails: {line.strip().splitlines()[-1]}"
    prediction, cores = choice.prediction, choice.cores
    of_nodes = f" of {plural(len(choice.nodes), 'node')}" if choice.nodes else ""
    options = "".join(f", {name}={value}" for name, value in plan.params.options.items())
    yield (
        f"{len(plan.jobs)} jobs on {plan.device_text}, {plan.params.epochs} epochs in batches of "
        f"{plan.batch_size}{options}"
    )
    yield (
        f"predicted: {duration(prediction.makespan)} on {plural(cores, 'core')}"
        f"{of_nodes}, if they are idle; lower bound "
        f"{duration(prediction.lower_bound)}, the larger of core-seconds / cores and the longest "
        f"job ({duration(prediction.longest)})"
    )
    if any(len(group) > 1 for group in plan.groups):
        yield "the gain of fusion is an estimate"
    lanes = [f"core {core}" for core in range(cores)]
    if choice.nodes:
        pairs = zip(forecast.simulation.names, forecast.simulation.nodes, strict=True)
        lanes = [f"{name}, core {at}" for name, size in pairs for at in range(size.cores)]
    yield from gantt(forecast.simulation.spans, lanes)


def gantt(
    spans: Sequence[Span], lanes: Iterable[str], width: int = 100, most_rows: int = 32
) -> list[str]:
    """Draw a row for each core and GPU, time from left to right.

    `lanes` are the cores that get a row, also idle ones; a job on several is drawn in each of them.
    Of more than `most_rows`, the others are counted. The last line has the times of both ends.
    Brackets hold the name of a job, shortened to fit; ``·`` is idle.

    Examples
    --------
    >>> spans = [Span("mlp", 0, 4, (0,)), Span("vgg", 0, 8, (1,)), Span("mlp", 4, 6, (0,))]
    >>> print("\\n".join(gantt(spans, ["core 0", "core 1"], width=40)))
    core 0  [mlp===========][mlp===]········
    core 1  [vgg===========================]
            0.00 s                     8.0 s
    """
    rows: dict[str, list[Span]] = {lane: [] for lane in lanes}
    for span in sorted(spans, key=lambda span: (span.gpu is not None, span.gpu or 0, span.start)):
        node = f"{span.node}, " if span.node else ""
        held = [f"{node}core {core}" for core in span.cores]
        for lane in [*held, *([] if span.gpu is None else [f"{node}GPU {span.gpu}"])]:
            rows.setdefault(lane, []).append(span)
    end = max((span.end for span in spans), default=0.0)
    label = max(map(len, rows), default=0) + 2
    columns = max(40, width) - label
    drawn = list(rows.items())[:most_rows]
    lines = [f"{lane:{label}}{_row(held, end, columns)}" for lane, held in drawn]
    if len(rows) > most_rows:
        lines.append(f"{'':{label}}and {len(rows) - most_rows} more")
    return [*lines, f"{'':{label}}{duration(0)}{duration(end):>{columns - len(duration(0))}}"]


def _row(spans: Sequence[Span], end: float, columns: int) -> str:
    cells = [IDLE] * columns
    for span in sorted(spans, key=lambda span: span.start) if end else ():
        first, last = round(span.start / end * columns), round(span.end / end * columns)
        if first == last:
            # Shorter than half a column: seen, unless a longer one is there.
            first = min(first, columns - 1)
            last = first + (cells[first] == IDLE)
        size = last - first - 2
        # The end of a name tells folds apart.
        name = span.job if len(span.job) <= size else f"{span.job[: size - 3]}…{span.job[-2:]}"
        name = name if size >= 5 else span.job[: max(0, size)]
        cells[first:last] = f"[{name:=<{size}}]" if size >= 0 else "|" * (last - first)
    return "".join(cells)
