"""The Ray engine as the sweep sees it: placements, their futures, their files. No import of ray.

The run's folder is written by this process alone: files arrive as bytes, before the event that
tells of them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from asynckfold.engines.engine import Answer, Tell
from asynckfold.engines.ray_handle import NodeHandle
from asynckfold.engines.ray_node import settle
from asynckfold.engines.ray_room import send
from asynckfold.errors import StorageError, WorkerDiedError
from asynckfold.jobs.messages import CheckpointWritten, Note, Task
from asynckfold.jobs.placement import Load, Placement
from asynckfold.scheduling.reservations import within
from asynckfold.store.layout import FINAL
from asynckfold.system.files import make_folders, read_plain, write_whole
from asynckfold.system.signals import Interruption
from asynckfold.training.job_log import JobLog

if TYPE_CHECKING:
    from asynckfold.data.prepare import Prepared
    from asynckfold.training.bundle import Bundle

END_SECONDS = 10.0
"""Time for nodes to end their workers; then they are left behind."""

LEAVE_SECONDS = 20.0
"""Time for the jobs of a node that will end to save themselves: clouds give 30 seconds or more."""

EXCUSED_LOSSES = 3
"""How often the jobs of a lost node are not to blame for it."""

_LOOK_SECONDS = 0.05


@dataclass(eq=False)
class PlacedWork:
    """A placement, its future, and the task of Ray that holds its cores."""

    number: int
    placement: Placement
    tasks: Sequence[Task]
    node: NodeHandle
    expected: Any = None
    lease: Any = None
    has_begun: bool = False
    is_given_up: bool = False
    cpus: float = 0.0
    future: Future[Answer] = field(default_factory=Future)

    @property
    def wanted(self) -> dict[str, Any]:
        """What Ray shall hold for it on its node, and the name in Ray's dashboard."""
        placement, node = self.placement, self.node
        share = 0.0 if placement.gpu is None else 1 / placement.jobs_per_gpu
        return {
            "num_cpus": self.cpus,
            "num_gpus": min(share, node.gpus),
            "memory": min(placement.memory, node.memory) or None,
            "name": placement.jobs[0] if placement.jobs else placement.trainer,
        }

    def interrupt(self) -> None:
        """End it without a result."""
        self.future.set_result(Answer([None for _ in self.tasks], 0))


class Cluster(Protocol):
    """What the engine needs of a `RayCluster`."""

    numbers: Iterator[int]
    engine: RayEngine | None
    failure: StorageError | None

    @property
    def nodes(self) -> Mapping[str, NodeHandle]:
        """The nodes by name, this machine first."""
        ...

    def begin(self, engine: RayEngine, threads: int, bundle: Bundle, data: Prepared) -> None:
        """Send a bundle and its data to all nodes."""
        ...

    def lease(self, work: PlacedWork) -> Any:
        """Ask Ray for what a placement needs on its node; return the task that holds it."""
        ...

    def cancel(self, work: PlacedWork) -> None:
        """Withdraw that."""
        ...

    def wait(self, answers: Sequence[Any], seconds: float) -> None:
        """Wait for answers of nodes, at most so long."""
        ...

    def look_here(self) -> None:
        """Set `failure` if the node of this machine is gone."""
        ...


class RayEngine:
    """Executes placements on the nodes of a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        bundle: Bundle,
        data: Prepared,
        tell: Tell,
        threads: int = 1,
        signals: Interruption | None = None,
        most: int | None = None,
    ) -> None:
        self._cluster, self._root, self.say = cluster, bundle.root, tell
        self._signals = signals or Interruption()
        self._works: dict[int, PlacedWork] = {}
        self._losses: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._most = most
        cluster.begin(self, threads, bundle, data)

    def load(self, running: Sequence[Placement]) -> Load:
        """Return the latest load of each node; after a failure, one that lets a job start.

        Its submission then tells of the failure, as this must not raise.
        """
        if self._cluster.failure is not None:
            return Load((0,), (0,), 1 << 62)
        left, found = self._most, []
        for node in self._cluster.nodes.values():
            found.append(self._of(node, running, left))
            left = None if left is None else left - len(found[-1].cores)
        return replace(found[0], peers=tuple(found[1:]))

    def _of(self, node: NodeHandle, running: Sequence[Placement], left: int | None) -> Load:
        if not node.is_used:
            why = f"{node.place} {node.left_out or 'is lost'}"
            return Load((), (), 0, blocked=why, node=node.name)
        held = [item for item in running if item.node == node.name]
        load = replace(node.load, node=node.name)
        # What Ray has given to others is not free, even if it is idle. Ray is late to tell that a
        # task has ended, so that only what it tells twice counts.
        most = node.cpus - min(node.reserved)
        most = most if left is None else min(left, most)
        return load if len(load.cores) <= most else within(load, held, int(most))

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        """Ask Ray for the cores of a placement, which starts when it has them."""
        work = self._work(placement, tasks)
        if any(task.checkpoints for task in tasks):
            self._cluster.look_here()
        if work.node.is_lost or self._cluster.failure is not None:
            self._end_lost(work, "")
            return work.future
        if work.node.left_out:
            work.interrupt()
            return work.future
        with self._lock:
            self._works[work.number] = work
        self._expect(work)
        return work.future

    def _work(self, placement: Placement, tasks: Sequence[Task]) -> PlacedWork:
        node = self._cluster.nodes[placement.node]
        work = PlacedWork(next(self._cluster.numbers), placement, tasks, node)
        work.future.set_running_or_notify_cancel()
        work.cpus = min(len(placement.cores) or 1, node.cpus)
        return work

    def _expect(self, work: PlacedWork) -> None:
        """Send a placement to its node, and ask Ray for what it needs there."""
        node = work.node
        files = [*send(node.actor, self._files(work.tasks))]
        work.expected = node.actor.expect.remote(
            work.number, work.placement, list(work.tasks), node.begun, *files
        )
        work.lease = self._cluster.lease(work)

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        """Pin a worker to other cores of its node, or pause it."""
        work = next((work for work in [*self._works.values()] if work.future is future), None)
        if work is not None and not work.node.is_lost:
            work.node.actor.shift.remote(work.number, tuple(cores), work.expected)

    def close(self, grace_s: float = 0.0) -> None:
        """Ask for checkpoints, wait, end what is left; the nodes stay."""
        if self._closed:
            return
        self._closed = True
        for work in self._take(lambda work: not work.has_begun):
            # Its task finds that nobody waits for it, and ends.
            if work.lease is not None:
                self._cluster.cancel(work)
            work.interrupt()
        nodes = [node for node in self._cluster.nodes.values() if not node.is_lost]
        if grace_s > 0:
            for node in nodes:
                node.actor.stop.remote(grace_s)
            end = time.monotonic() + grace_s
            while self._works and time.monotonic() < end and not self._signals.urgent():
                time.sleep(_LOOK_SECONDS)
        for node in nodes:
            node.actor.hurry.remote()
        ends = [node.actor.end.remote() for node in nodes if not node.is_lost]
        self._cluster.wait(ends, END_SECONDS)
        end = time.monotonic() + END_SECONDS
        while self._works and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        for work in self._take(lambda work: True):
            work.future.set_exception(WorkerDiedError(0, "its node did not answer"))
        if self._cluster.engine is self:
            self._cluster.engine = None

    def hear(self, message: tuple[Any, ...]) -> None:
        """Take a message of a node, in the listening thread."""
        kind, *content = message
        if kind == "begun":
            if (work := self._works.get(content[0])) is not None:
                work.has_begun = True
        elif kind == "answer":
            number, outcome = content
            for work in self._take(lambda work: work.number == number):
                if work.node.left_out and outcome[0] == "died":
                    self._end_lost(work, work.node.left_out)
                else:
                    settle(work.future, outcome)
        elif kind == "log":
            job, lines = content
            with self._disk(job.id), JobLog(self._root, job) as log:
                log.append(lines)
        else:
            event, files = content
            # Files come with checkpoints only.
            with self._disk(event.ref.job_id if isinstance(event, CheckpointWritten) else ""):
                for name, data in files:
                    path = self._root / name
                    make_folders(self._root, path.parent)
                    write_whole(path, data, self._root)
                self.say(event)

    def lose(self, node: NodeHandle, why: str) -> None:
        """End the placements of a node that is gone."""
        self.say(Note(None, "cluster", f"{node.place} is lost: {why}"))
        for work in self._take(lambda work: work.node is node):
            self._end_lost(work, why)

    def leave_out(self, node: NodeHandle, why: str) -> None:
        """Place nothing more on a node; what runs there saves itself, and continues elsewhere."""
        if not node.is_used:
            return
        node.left_out = why
        self.say(Note(None, "cluster", f"{node.place} {why}: it gets no jobs any more"))
        # A placement that has not begun finds nobody; its task then ends.
        node.actor.stop.remote(LEAVE_SECONDS)

    def leases(self) -> dict[Any, PlacedWork]:
        """Return the placements whose tasks Ray may have given up, by these tasks."""
        works = [*self._works.values()]
        return {work.lease: work for work in works if work.lease and not work.is_given_up}

    def give_up(self, work: PlacedWork, error: WorkerDiedError | None, *, is_lost: bool) -> None:
        """Take note that the task of a placement has ended; its node ends what it has begun.

        Without an error, in order.
        """
        work.is_given_up = True
        if error is None or (work.has_begun and error.outcome != "oom"):
            return
        for item in self._take(lambda item: item is work):
            if not item.node.is_lost:
                item.node.actor.forget.remote(item.number)
            if item.node.left_out:
                item.interrupt()
            elif is_lost:
                self._end_lost(item, error.cause)
            else:
                item.future.set_exception(error)

    def reserved_on(self, node: NodeHandle) -> float:
        """Return the cores that Ray holds for this engine on a node."""
        return sum(work.cpus for work in [*self._works.values()] if work.node is node)

    def fail(self, failure: StorageError) -> None:
        """End one placement by a failure, which ends the sweep; the others may save themselves."""
        works = [*self._works.values()]
        first = min((work.number for work in works), default=None)
        for work in self._take(lambda work: work.number == first):
            work.future.set_exception(failure)

    def _end_lost(self, work: PlacedWork, why: str) -> None:
        """Let its jobs be placed again; they are to blame only if that happens again and again."""
        if self._cluster.failure is not None:
            work.future.set_exception(self._cluster.failure)
            return
        names = [task.job.id for task in work.tasks]
        for name in names:
            self._losses[name] = self._losses.get(name, 0) + 1
        if names and max(self._losses[name] for name in names) <= EXCUSED_LOSSES:
            work.interrupt()
        else:
            text = f"node {work.node.name or 'of this process'} is lost: {why}"
            work.future.set_exception(WorkerDiedError(0, text))

    def _take(self, which: Callable[[PlacedWork], bool]) -> list[PlacedWork]:
        """Remove the placements for which `which` holds; whoever has one completes its future."""
        with self._lock:
            found = [work for work in self._works.values() if which(work)]
            for work in found:
                del self._works[work.number]
        return found

    @contextmanager
    def _disk(self, job_id: str) -> Iterator[None]:
        """End the placement of a job if this machine's disk refuses."""
        try:
            yield
        except StorageError as error:
            for work in self._take(lambda work: any(t.job.id == job_id for t in work.tasks)):
                work.future.set_exception(error)

    def _files(self, tasks: Sequence[Task]) -> Iterator[tuple[str, bytes]]:
        """Yield the files that earlier attempts have left, by their names in the run's folder."""
        for task in tasks:
            for ref in task.checkpoints:
                path = self._root / ref.file
                for item in (path, path.with_name(FINAL)):
                    # A worker that misses a file says so, and takes an older one.
                    with contextlib.suppress(OSError):
                        yield item.relative_to(self._root).as_posix(), read_plain(item, self._root)
