"""The serial engine: jobs run one after another in this process.

It serves as debugger (breakpoints and prints work), as test double, and as the reference to which
results of worker processes are compared bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from threadpoolctl import threadpool_limits

from asynckfold.engines.engine import Answer, Engine, ReadLoad, Tell
from asynckfold.errors import StorageError, WorkerDiedError
from asynckfold.jobs.messages import Task
from asynckfold.jobs.placement import Load, Placement
from asynckfold.system.signals import Interruption

if TYPE_CHECKING:
    from asynckfold.data.batches import Batches
    from asynckfold.training.bundle import Bundle


@contextmanager
def in_this_process(engine: SerialEngine) -> Iterator[SerialEngine]:
    """Yield an engine, with what workers have from their start, and this process may not have."""
    from asynckfold.training.worker.lazy_dynamo import imported_on_demand

    # Sums of linear algebra have other bits with more threads.
    with imported_on_demand(), threadpool_limits(1, "blas"), closing(engine):
        yield engine


class SerialEngine:
    """Runs each placement inside `submit`; preserves the caller's random state and threads.

    The first signal lets a job save itself, the second interrupts it. ``between`` is called after
    each batch, and may take the events so far. A process that has lost its GPU cannot use it again:
    from then on, what `make_spare` makes goes on, if it is given.
    """

    runs_in_submit = True
    batch_seconds: float | None = None

    def __init__(
        self,
        bundle: Bundle,
        data: Batches,
        read_load: ReadLoad,
        tell: Tell,
        signals: Interruption | None = None,
        make_spare: Callable[[], Engine] | None = None,
    ) -> None:
        self._bundle = bundle
        self._data = data
        self._read_load = read_load
        self._tell = tell
        self._signals = signals or Interruption()
        self._make_spare = make_spare
        self._spare: Engine | None = None
        self.between: Callable[[], None] = lambda: None

    def _stop(self) -> bool:
        self.between()
        return self._signals.stop_requested()

    def load(self, running: Sequence[Placement]) -> Load:
        """Return the machine's load."""
        return self._read_load(running, {}) if self._spare is None else self._spare.load(running)

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        """Run the placement; return a completed future, of a spare engine one that is not."""
        if self._spare is not None:
            return self._spare.submit(placement, tasks)
        from asynckfold.training import seeding
        from asynckfold.training.worker.execute import execute, in_turn

        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()
        results: list[Any] = []
        tell, stop = self._tell, self._stop
        try:
            with seeding.preserved(), self._signals.breakable():
                for part in in_turn(placement, tasks, results, tell, stop):
                    results += execute(self._bundle, self._data, placement, part, tell, stop)
            future.set_result(Answer(results, os.getpid()))
        except (StorageError, WorkerDiedError) as error:
            future.set_exception(error)
            is_lost = isinstance(error, WorkerDiedError) and error.outcome == "device_lost"
            if is_lost and self._make_spare is not None:
                self._spare = self._make_spare()
        return future

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        """Nothing runs outside `submit`, but in a spare engine."""
        if self._spare is not None:
            self._spare.shift(future, cores)

    def close(self, grace_s: float = 0.0) -> None:
        """Close the spare engine, if there is one."""
        if self._spare is not None:
            self._spare.close(grace_s)
