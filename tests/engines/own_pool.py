"""A process engine over a few toy jobs, with a pool of its own."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from asynckfold.engines.engine import Answer
from asynckfold.engines.pool import Worker, WorkerPool
from asynckfold.engines.process import ProcessEngine
from asynckfold.jobs.placement import Load, Placement
from tests.leftovers import descendants, described, gone, until
from tests.toy import Tiny, task, toy_bundle


def look(running: Sequence[Placement], own: Mapping[int, tuple[int, ...]]) -> Load:
    return Load((0,), (0,), 1 << 30)


class Sleeps(Tiny):
    """Takes a while without using a core."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.05)
        return super().forward(inputs)


@contextmanager
def engine(
    root: Path, model: type[Tiny], preload: tuple[str, ...] = (), **changes: Any
) -> Iterator[tuple[ProcessEngine, WorkerPool, Any, queue.SimpleQueue[Any]]]:
    """An engine with a pool of its own; whatever happens, nothing of it stays."""
    before = descendants()
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stall_timeout = changes.pop("stall_timeout", "auto")
    with toy_bundle(root, models={"model": model}, **changes) as (bundle, data):
        pool = WorkerPool([f"tests.engines.servers.{name}" for name in preload])
        made = ProcessEngine(bundle, data.handle().fds, look, news.put, pool, stall_timeout)
        try:
            yield made, pool, bundle, news
        finally:
            made.close()
            pool.close()
    left = descendants() - before
    assert gone(left), described(left)


def submit(
    made: ProcessEngine, bundle: Any, index: int = 0, threads: int = 1, **changes: Any
) -> Future[Answer]:
    job = bundle.plan.jobs[index]
    return made.submit(Placement((job.id,), (), threads, **changes), [task(job)])


def busy_worker(pool: WorkerPool) -> Worker:
    def busy() -> list[Worker]:
        return [worker for worker in pool.workers if worker.pid and worker.busy]

    until(lambda: bool(busy()), 30)
    return busy()[0]


def watched(made: ProcessEngine, *futures: Future[Answer], seconds: float = 60) -> None:
    """Look after the workers as a sweep does, until all futures ended."""
    deadline = time.monotonic() + seconds
    while not all(future.done() for future in futures):
        assert time.monotonic() < deadline
        made.load([])
        time.sleep(0.05)
