"""Ends workers that hang: asks for their stacks, kills them, goes on without those that stay."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from asynckfold.engines.engine import Answer
from asynckfold.engines.pool import Worker, WorkerPool
from asynckfold.scheduling.stall_detection import Stalls, Step, Verdict
from asynckfold.system.heartbeat import STACKS_SIGNAL
from asynckfold.training.job_log import log_path

UNWATCHED = ("measure", "estimate")
"""Trainers that are timed: they run as they would elsewhere, and give no signs of life."""


class Hangs:
    """Watches the workers of one engine.

    Parameters
    ----------
    pool : WorkerPool
        Where they come from.
    root : Path
        The run's folder, with the logs of the jobs.
    timeout : float, "auto" or None
        Seconds without a finished batch after which a worker hangs, see `Stalls`.
    """

    def __init__(self, pool: WorkerPool, root: Path, timeout: float | str | None) -> None:
        self._pool = pool
        self._root = root
        self._stalls: Stalls[Future[Answer]] = Stalls(timeout)
        self._logged: dict[Future[Answer], int] = {}

    def end(self, workers: Iterable[Worker]) -> None:
        """Take the next step against each worker that hangs; never waits."""
        watched = {
            worker.work.future: worker
            for worker in workers
            if worker.work is not None and worker.work.placement.trainer not in UNWATCHED
        }
        # A server that still imports torch starts nobody: its workers are not quiet yet.
        heartbeats = {key: worker.heartbeat.value for key, worker in watched.items()}
        paused = {key for key, worker in watched.items() if worker.heartbeat.paused}
        looked = heartbeats if self._pool.serving else {}
        for verdict in self._stalls.look(time.monotonic(), looked, paused):
            worker = watched[verdict.key]
            if verdict.step is Step.STACKS:
                self._logged[verdict.key] = self._log(worker)[1]
                self._pool.signal(worker, STACKS_SIGNAL)
            elif verdict.step is Step.KILL:
                self._pool.kill(worker, self._cause(worker, verdict))
            else:
                self._pool.abandon(worker)

    def _cause(self, worker: Worker, verdict: Verdict[Future[Answer]]) -> str:
        path, size = self._log(worker)
        answered = size > self._logged.pop(verdict.key)
        stacks = f"its stacks are in {path}" if answered else "it gave no stacks"
        return f"hang, no batch was finished for {verdict.quiet:.1f} s; {stacks}"

    def _log(self, worker: Worker) -> tuple[Path, int]:
        """Where the worker writes, relative to the run's folder, and how much stands there."""
        tasks = () if worker.work is None else worker.work.tasks
        if not tasks:
            return Path(), 0
        path = log_path(self._root, tasks[0].job)
        return path.relative_to(self._root), path.stat().st_size if path.exists() else 0
