"""The cost of a decision: the time of `place` by the number of pending jobs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from asynckfold.cli.bench.table import BenchTable
from asynckfold.jobs.placement import Load, Placement, Request
from asynckfold.scheduling.backlog import Backlog
from asynckfold.scheduling.place import place
from asynckfold.scheduling.random_sweep import draw_scenario
from asynckfold.scheduling.reservations import Reservations

PENDING = (100, 1_000, 10_000, 100_000)
QUICK = {"pending": PENDING[:3]}

CORES, GPUS = 64, 4

NODES = 64
"""Nodes of the last row, each with as many cores and GPUs."""

TARGET_MS = 1.0
"""Milliseconds that a decision may take with 10,000 pending jobs."""


def table(pending: Sequence[int] = PENDING, repeats: int = 200) -> BenchTable:
    """Time `place` with what is kept between calls, and with a plain list.

    Medians are over `repeats` calls, a tenth of them with a plain list.
    """
    return BenchTable(
        "What a decision costs",
        "nodes | pending jobs | busy: decision ms | empty: call ms | empty: decisions | "
        "empty: decision ms | add and remove µs | plain list: call ms | target: decision ms",
        (
            *(_row(count, repeats) for count in pending),
            _row(pending[-1], max(3, repeats // 10), NODES),
        ),
        (
            f"{CORES} cores and {GPUS} GPUs on each node; medians. A decision places one job.",
            "Busy: a job has just ended and its cores are free. Empty: nothing runs.",
            "Add and remove: of one job, in a Backlog. Plain list: the empty machine; the call "
            "builds the Backlog.",
        ),
    )


def _row(count: int, repeats: int, nodes: int = 1) -> tuple[float, ...]:
    scenario = draw_scenario(count, CORES, GPUS, seed=0, nodes=nodes)
    requests = {item.job_id: item for item in scenario.requests}
    load = scenario.machine.load()
    backlog, first = Backlog(requests.values()), next(iter(requests))
    decisions = len(place(backlog, (), load))
    empty = median(_seconds(lambda: place(backlog, (), load)) for _ in range(repeats))
    plain = [*requests.values()]
    listed = median(_seconds(lambda: place(plain, (), load)) for _ in range(repeats // 10 + 1))
    changes = median(_seconds(lambda: backlog.add(backlog.remove(first))) for _ in range(repeats))
    calls = list(_busy(backlog, requests, load, repeats))
    return (
        nodes,
        count,
        median(seconds / placed for seconds, placed in calls if placed) * 1e3,
        empty * 1e3,
        decisions,
        empty / decisions * 1e3,
        changes * 1e6,
        listed * 1e3,
        TARGET_MS,
    )


def _busy(
    backlog: Backlog, requests: Mapping[str, Request], load: Load, repeats: int
) -> Iterator[tuple[float, int]]:
    """Yield seconds and placements of each call on a busy machine; ended jobs are pending again."""
    reservations, running = Reservations(), deque[Placement]()
    for call in range(repeats + 1):
        started = time.perf_counter()
        placed = place(backlog, reservations, load)
        seconds = time.perf_counter() - started
        for placement in placed:
            backlog.remove(placement.jobs[0])
            reservations.add(placement)
        running.extend(placed)
        if call:
            yield seconds, len(placed)
        ended = running.popleft()
        reservations.remove(ended)
        backlog.add(requests[ended.jobs[0]])


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
