"""Handles workers that hang: requests their stacks, kills them, abandons those that stay."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from asynckfold.engines.engine import Answer
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.worker_handle import Worker
from asynckfold.jobs.placement import Command, Placement
from asynckfold.scheduling.stall_detection import StallDetector, Step, Verdict
from asynckfold.system.heartbeat import STACKS_SIGNAL
from asynckfold.training.job_log import log_path

UNWATCHED = (Command.MEASURE, Command.ESTIMATE)
"""What is timed: the loops run as outside, without heartbeats."""


class HungWorkers:
    """Watches the workers of one engine."""

    def __init__(self, pool: WorkerPool, root: Path, timeout: float | str | None) -> None:
        self._pool = pool
        self._root = root
        self._detector: StallDetector[Future[Answer]] = StallDetector(timeout)
        self._log_sizes: dict[Future[Answer], int] = {}

    def end(self, workers: Iterable[Worker]) -> None:
        """Take the next step against each worker that hangs; never waits."""
        watched = {
            worker.work.future: worker
            for worker in workers
            if worker.work is not None and _is_watched(worker.work.placement)
        }
        # While the server imports torch it starts no worker, so silence means nothing.
        heartbeats = {key: worker.heartbeat.value for key, worker in watched.items()}
        paused = {key for key, worker in watched.items() if worker.heartbeat.paused}
        observed = heartbeats if self._pool.server.serving else {}
        for verdict in self._detector.look(time.monotonic(), observed, paused):
            worker = watched[verdict.key]
            if verdict.step is Step.STACKS:
                self._log_sizes[verdict.key] = self._log(worker)[1]
                self._pool.server.signal(worker.name, STACKS_SIGNAL)
            elif verdict.step is Step.KILL:
                self._pool.kill(worker, self._cause(worker, verdict))
            else:
                self._pool.abandon(worker)

    def _cause(self, worker: Worker, verdict: Verdict[Future[Answer]]) -> str:
        path, size = self._log(worker)
        answered = size > self._log_sizes.pop(verdict.key)
        stacks = f"its stacks are in {path}" if answered else "it gave no stacks"
        return f"hang, no batch was finished for {verdict.silent_seconds:.1f} s; {stacks}"

    def _log(self, worker: Worker) -> tuple[Path, int]:
        """Return the worker's log, relative to the run's folder, and its size."""
        tasks = () if worker.work is None else worker.work.tasks
        if not tasks:
            return Path(), 0
        path = log_path(self._root, tasks[0].job)
        return path.relative_to(self._root), path.stat().st_size if path.exists() else 0


def _is_watched(placement: Placement) -> bool:
    return placement.command not in UNWATCHED
