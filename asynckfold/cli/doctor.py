"""The verb ``doctor``: what this machine offers, how many jobs would run now, and why."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from asynckfold.api.arguments import MachineArguments, Settings
from asynckfold.cli.flags import flag_values
from asynckfold.cli.output import Output
from asynckfold.errors import refuse
from asynckfold.jobs.placement import Load
from asynckfold.results.report.sentences import plural
from asynckfold.system.machine import resolve_n_jobs, watched
from asynckfold.system.units import gibibytes, named_cores

OPENMP = ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT")


def doctor(parsed: argparse.Namespace, out: Output) -> int:
    """Print what this machine offers."""
    sharing = MachineArguments(**flag_values(parsed, Settings))
    refuse([*parsed.problems, *sharing.problems()])
    machine = watched(sharing.machine())
    n_jobs = resolve_n_jobs(sharing.n_jobs, machine.max_cores)
    facts, load = machine.describe(n_jobs), machine.load(n_jobs)
    out.data({**facts, "now": asdict(now(facts["cpu"], load))})
    for subject, sentence in lines(facts, load):
        out.say(f"{subject:12}{sentence}")
    return 0


@dataclass(frozen=True)
class Now:
    """What a run would use now: jobs of one thread, their cores, and the limit that decides."""

    jobs: int
    cores: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        if not self.jobs:
            return f"nothing would start now: {self.why}"
        where = f" on {named_cores(self.cores, most=16)}" if self.cores else ""
        return f"{plural(self.jobs, 'job')} of one thread would run now{where}: {self.why}"


def now(cpu: Mapping[str, Any], load: Load) -> Now:
    """Return how many jobs would run now, of the ``cpu`` part of `Machine.describe` and the load.

    Examples
    --------
    >>> cpu = {"limit": "affinity", "allowed": 2, "busy": [0], "foreign_load": {"0": 0.97, "1": 0}}
    >>> print(now(cpu, Load((0, 1), (1,), 1)))
    1 job of one thread would run now on core 1: the limit is affinity, 2 cores; others use core 0 \
(97 %)
    """
    allowed = f"the limit is {cpu['limit']}, {plural(cpu['allowed'], 'core')}"
    shares = {core: 100 * cpu["foreign_load"][str(core)] for core in cpu["busy"]}
    used = ", ".join(f"core {core} ({share:.0f} %)" for core, share in shares.items())
    if load.blocked:
        return Now(0, (), load.blocked)
    if not load.idle:
        why = f"{allowed}; others use {used or 'all of them'}, and one job always runs"
        return Now(1, load.cores[:1], why)
    rest = f"others use {used}" if used else "nobody else uses them"
    if load.gpus:
        rest += f"; with GPUs, one job on each: {', '.join(str(gpu.index) for gpu in load.gpus)}"
    return Now(len(load.idle), tuple(sorted(load.idle)), f"{allowed}; {rest}")


def lines(facts: Mapping[str, Any], load: Load) -> Iterator[tuple[str, str]]:
    """Yield (subject, sentence) for each fact of `Machine.describe`."""
    cpu, memory = facts["cpu"], facts["memory"]
    yield "now", str(now(cpu, load))
    yield "cores", f"{cpu['allowed']} of {cpu['cores']} may be used, {cpu['model']}"
    limits = (
        f"{name} {cores:g}{' (the smallest wins)' if name == cpu['limit'] else ''}"
        for name, cores in cpu["limits"].items()
        if cores is not None
    )
    unset = ", ".join(name for name, cores in cpu["limits"].items() if cores is None)
    yield "limits", ", ".join(limits) + (f"; not set: {unset}" if unset else "")
    environment = facts.get("environment", {})
    # They are often mistaken for limits of the cores.
    openmp = [f"{name} {environment[name]}" for name in OPENMP if name in environment]
    text = ", ".join(openmp) or f"{' and '.join(OPENMP)} are not set"
    yield "OpenMP", f"{text}; they limit the threads of a process, not the cores"
    shares = [f"{core}: {100 * share:.0f} %" for core, share in cpu["foreign_load"].items()]
    yield "others use", ", ".join(shares)
    limit, most = memory["cgroup_limit"], memory["max_memory"]
    sizes = {name: "?" if size is None else gibibytes(size) for name, size in memory.items()}
    group = f"control group allows {sizes['cgroup_limit']}" if limit else "no control group limit"
    yield (
        "memory",
        f"{sizes['available']} of {sizes['total']} available, {group}, "
        f"{'no max_memory' if most is None else 'max_memory ' + sizes['max_memory']}; "
        f"nothing starts below {sizes['min_free_memory']} (min_free_memory)",
    )
    gpus = [
        f"{gpu['index']}: {gpu['name']}, {gibibytes(gpu['free'])} of {gibibytes(gpu['total'])} "
        f"free, {100 * gpu['use']:.0f} % busy"
        for gpu in facts["gpus"]
    ]
    missing = facts["gpu_reason"]
    yield "GPUs", "; ".join([*gpus, missing] if missing and gpus else gpus) or f"none: {missing}"
    yield "versions", ", ".join(f"{name} {value}" for name, value in facts["versions"].items())
    yield "platform", f"Python {facts['python']}, {facts['platform']}"
    if environment:
        yield "environment", ", ".join(f"{name}={value}" for name, value in environment.items())
