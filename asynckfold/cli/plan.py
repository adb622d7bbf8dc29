"""The verb ``plan``: the decisions for a sweep with their reasons, and its predicted time."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from asynckfold.cli.doctor import now
from asynckfold.cli.output import Output
from asynckfold.cli.sweep_file import make_kfold, sweep_parts
from asynckfold.cli.text_charts import gantt
from asynckfold.errors import Problem, refuse
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.plan import Plan
from asynckfold.planning.forecast import Forecast
from asynckfold.planning.workload import Choice
from asynckfold.results.utilization import forecast_of
from asynckfold.scheduling.place import place
from asynckfold.store import RunStore
from asynckfold.store.layout import DATABASE
from asynckfold.system.units import duration, gibibytes, named_cores


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
    found = kfold.forecast(*sweep, **sweep.grid)
    threads = min(found.choice.threads.values())
    count = resolve_n_jobs(kfold.settings.n_jobs, machine.max_cores)
    load = machine.load(count, threads=threads)
    # The load of the other nodes of a cluster is not known here any more.
    first = [] if found.choice.nodes else place(list(found.units.values()), [], load)
    out.data(
        {
            **_numbers(found),
            "cores": list(load.cores),
            "threads_per_job": kfold.settings.threads_per_job,
            "first": [{"jobs": item.jobs, "cores": item.cores, "gpu": item.gpu} for item in first],
        }
    )
    _say(found, out)
    if kfold.settings.refit:
        named = kfold.settings.refit not in (True, "best")
        who = kfold.settings.refit if named else "the best candidate"
        out.say(f"then {who} on all samples; its time is not in the prediction")
    if not found.choice.nodes:
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
        found = forecast_of(store)
    if found is None:
        rule = "DIR must hold a run whose decisions were recorded"
        remedy = f"`asynckfold status {folder}` prints its progress."
        refuse([Problem(rule, f"{folder}, a run of an earlier version", remedy)])
        return
    out.data(_numbers(found))
    _say(found, out)


def _numbers(found: Forecast) -> dict[str, Any]:
    """Return the object of ``--json``."""
    plan, choice = found.plan, found.choice
    return {
        "jobs": [job.id for job in plan.jobs],
        "candidates": list(plan.candidate_names),
        "folds": [{"train": len(fold.train), "valid": len(fold.valid)} for fold in found.folds],
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
            for name, item in found.requests.items()
        },
        "groups": plan.groups,
        "fusing": dict(found.fusing),
        "spans": [
            {"job": span.job, "start": span.start, "end": span.end, "cores": span.cores}
            | ({} if span.gpu is None else {"gpu": span.gpu})
            | ({"node": span.node} if span.node else {})
            | ({"jobs": found.units[span.job].jobs} if found.units[span.job].jobs else {})
            for span in found.simulation.spans
        ],
        "failures": dict(found.failures),
        "notes": list(found.notes),
    }


def _channels_last(plan: Plan) -> list[str]:
    """Return the models with a job in the memory format channels_last."""
    return list(dict.fromkeys(job.model for job in plan.jobs if plan.is_channels_last(job)))


def _say(found: Forecast, out: Output) -> None:
    out.say(_table(found))
    for line in _lines(found):
        out.say(line)


def _table(found: Forecast) -> Table:
    """Return one row a candidate."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    both = ("device",) if found.plan.devices else ()
    words = ("model", "scheduler", *both)
    for name in (*words, "folds", "train", "valid", "threads", "s per job", "memory"):
        table.add_column(name, justify="left" if name in words else "right")
    trains = [len(fold.train) for fold in found.folds]
    valids = [len(fold.valid) for fold in found.folds]
    for model, lr_schedule in found.plan.candidates:
        asked = [
            found.requests[job.id]
            for job in found.plan.jobs
            if (job.model, job.lr_schedule) == (model, lr_schedule)
        ]
        table.add_row(
            Text(model),
            Text(lr_schedule),
            *(found.plan.device_of(candidate_name(model, lr_schedule)) for _ in both),
            str(len(asked)),
            _range(trains),
            _range(valids),
            _range([item.threads for item in asked]),
            f"{math.fsum(item.seconds for item in asked) / len(asked):.1f}",
            gibibytes(asked[0].memory),
        )
    return table


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _lines(found: Forecast) -> Iterator[str]:
    plan, choice = found.plan, found.choice
    if choice.devices:
        yield choice.devices
    yield "threads per job (step times from the built-in cost model):"
    for model in dict.fromkeys(job.model for job in plan.jobs):
        yield f"  {model}: {choice.why[model]}"
    if found.fusing:
        yield "fusion:"
        yield from (f"  {model}: {text}" for model, text in found.fusing.items())
    if last := _channels_last(plan):
        yield f"memory format channels_last: {', '.join(last)}"
    yield from found.notes
    for name, line in found.failures.items():
        yield f"{name} fails: {line.strip().splitlines()[-1]}"
    prediction, cores = choice.prediction, choice.cores
    options = "".join(f", {name}={value}" for name, value in plan.params.options.items())
    yield (
        f"{len(plan.jobs)} jobs on {plan.device_text}, {plan.params.epochs} epochs in batches of "
        f"{plan.batch_size}{options}"
    )
    yield (
        f"predicted: {duration(prediction.makespan)} on {cores} "
        f"{'core' if cores == 1 else 'cores'}{_of_nodes(choice)}, if they are idle; lower bound "
        f"{duration(prediction.lower_bound)}, the larger of core-seconds / cores and the longest "
        f"job ({duration(prediction.longest)})"
    )
    if any(len(group) > 1 for group in plan.groups):
        yield "the gain of fusion is an estimate"
    sizes = zip(found.simulation.names, found.simulation.nodes, strict=True)
    nodes = {name: size.cores for name, size in sizes if choice.nodes}
    yield from gantt(found.simulation.spans, range(0 if nodes else cores), nodes=nodes)


def _of_nodes(choice: Choice) -> str:
    """Return ``" of 3 nodes"``; empty for one machine."""
    count = len(choice.nodes)
    return f" of {count} {'node' if count == 1 else 'nodes'}" if count else ""
