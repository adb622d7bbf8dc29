"""Executes placements on the nodes of a Ray cluster; the driver's side of `ray_node`.

The run's folder is written by this process alone: files arrive as bytes, before the event that
announces them. A node that Ray loses, or takes away, is lost: its jobs continue elsewhere from
their last checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from asynckfold.engines.engine import Answer, Tell
from asynckfold.engines.ray_cluster import END_SECONDS, Node, RayCluster, one_line
from asynckfold.errors import StorageError, WorkerDiedError
from asynckfold.jobs.messages import NewCheckpoint, Note, Task
from asynckfold.jobs.placement import Load, Placement
from asynckfold.scheduling.backlog import NODE_BATCH_SECONDS
from asynckfold.scheduling.reservations import within
from asynckfold.store.layout import FINAL
from asynckfold.system.files import make_folder, read_plain, write_whole
from asynckfold.system.signals import Interruption
from asynckfold.training.job_log import JobLog

if TYPE_CHECKING:
    from asynckfold.data.prepare import PreparedData
    from asynckfold.training.bundle import Bundle

POLL_SECONDS = 0.25
"""Age of the load of a node."""

LOOK_SECONDS, HEAD_SECONDS = 1.0, 10.0
"""Interval between looks at the cluster, and how long its head may be silent."""

_WAIT_SECONDS = 0.05


@dataclass(eq=False)
class _Work:
    """A placement on a node, and the task of Ray that holds its cores, until that has ended."""

    tasks: Sequence[Task]
    node: Node | None
    lease: Any = None
    future: Future[Answer] = field(default_factory=Future)


class RayEngine:
    """Executes placements on the nodes of a cluster; one engine at a time uses it."""

    runs_in_submit = False
    batch_seconds: float | None = NODE_BATCH_SECONDS

    def __init__(
        self,
        cluster: RayCluster,
        bundle: Bundle,
        data: PreparedData,
        tell: Tell,
        threads: int = 1,
        signals: Interruption | None = None,
        most: int | None = None,
    ) -> None:
        self._cluster, self._ray = cluster, cluster.ray
        self._root, self._tell, self._most = bundle.root, tell, most
        self._signals = signals or Interruption()
        self._works: dict[int, _Work] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        cluster.begin(bundle, threads, data)
        self._listener = threading.Thread(target=self._listen, name="asynckfold-ray", daemon=True)
        self._listener.start()

    def load(self, running: Sequence[Placement]) -> Load:
        """Return the latest load of each node; after a failure, one that lets a job start.

        Its submission then reports the failure, as this must not raise.
        """
        left, loads = self._most, []
        for node in self._nodes:
            held = [item for item in running if item.node == node.name]
            load = replace(node.load, node=node.name)
            # Ray may have been started with fewer cores.
            cpus = int(node.resources.get("CPU", 0.0))
            most = cpus if left is None else min(left, cpus)
            loads.append(load if len(load.cores) <= most else within(load, held, most))
            left = None if left is None else left - len(loads[-1].cores)
        if self._cluster.failure is not None or not loads:
            return Load((0,), (0,), 1 << 62)
        return replace(loads[0], peers=tuple(loads[1:]))

    @property
    def _nodes(self) -> list[Node]:
        return [*self._cluster.nodes.values()]

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        """Ask Ray for the cores of a placement, which starts when it has them."""
        node = self._cluster.nodes.get(placement.node)
        number, work = next(self._cluster.numbers), _Work(tasks, node)
        work.future.set_running_or_notify_cancel()
        if node is None or self._cluster.failure is not None:
            self._end_lost(work)
            return work.future
        with self._lock:
            self._works[number] = work
        files = dict(self._files(tasks))
        expected = node.actor.expect.remote(number, placement, tasks, files, node.begun)
        work.lease = self._cluster.lease(node, number, placement, expected)
        return work.future

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        """Nothing moves: `yield_to_others` is for one machine."""

    def close(self, grace_s: float = 0.0) -> None:
        """Ask for checkpoints, wait, end what is left; the nodes stay."""
        if self._closing.is_set():
            return
        leases = [work.lease for work in [*self._works.values()] if work.lease is not None]
        for seconds in [grace_s, 0.0] if grace_s > 0 else [0.0]:
            for node in self._nodes:
                node.actor.stop.remote(seconds)
            end = time.monotonic() + (seconds or END_SECONDS)
            while self._works and time.monotonic() < end:
                if seconds and self._signals.urgent():
                    break
                time.sleep(_WAIT_SECONDS)
        for work in self._take(lambda *_: True):
            work.future.set_exception(WorkerDiedError(0, "its node did not answer"))
        self._closing.set()
        self._listener.join(END_SECONDS)
        for lease in leases:
            # Where Ray has not granted the cores, nobody waits for them any more.
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.cancel(lease)

    def _take(self, which: Callable[[int, _Work], bool]) -> list[_Work]:
        """Remove the placements for which `which` holds; whoever has one completes its future."""
        with self._lock:
            taken = {number: work for number, work in self._works.items() if which(number, work)}
            for number in taken:
                del self._works[number]
        return [*taken.values()]

    # The listening thread: messages of nodes, the end of Ray's tasks, nodes that come and go

    def _listen(self) -> None:
        """Listen until `close`; whatever Ray raises ends the sweep, which would wait for ever."""
        looked = answered = time.monotonic()
        try:
            while not self._closing.is_set():
                self._hear_nodes()
                if (now := time.monotonic()) - looked < LOOK_SECONDS:
                    continue
                looked = now
                if self._cluster.head_answers():
                    answered = now
                    for text in self._cluster.look():
                        self._note(text)
                elif now - answered > HEAD_SECONDS:
                    self._fail("the head of the Ray cluster does not answer any more")
        except Exception as error:  # noqa: BLE001
            if not self._closing.is_set():
                self._fail(f"the connection to Ray broke: {type(error).__name__}: {error}")

    def _hear_nodes(self) -> None:
        """Take the answers that are there: to `RayNode.begin` or `poll`, and of Ray's tasks."""
        nodes = {node.answer: node for node in self._nodes}
        leases = {item.lease: at for at, item in [*self._works.items()] if item.lease is not None}
        answers = [*nodes, *leases]
        self._ray.wait(answers, num_returns=1, timeout=POLL_SECONDS)
        for answer in self._ray.wait(answers, num_returns=len(answers), timeout=0)[0]:
            if answer in leases:
                self._hear_end_of_task(leases[answer])
                continue
            node = nodes[answer]
            try:
                value = self._ray.get(answer)
            except self._ray.exceptions.RayError as error:
                self._lose(node, error)
                continue
            node.answer = node.actor.poll.remote(POLL_SECONDS)
            if value is not None:
                node.load, messages = value
                for message in messages:
                    self._hear(message)

    def _hear(self, message: tuple[Any, ...]) -> None:
        kind, *content = message
        if kind == "answer":
            number, outcome = content
            for work in self._take(lambda at, _: at == number):
                if isinstance(outcome, Answer):
                    work.future.set_result(outcome)
                else:
                    work.future.set_exception(outcome)
        elif kind == "log":
            job, lines = content
            with self._disk(job.id), JobLog(self._root, job) as log:
                log.append(lines)
        else:
            event, files = content
            # Files come with checkpoints only.
            with self._disk(event.ref.job_id if isinstance(event, NewCheckpoint) else ""):
                for name, data in files.items():
                    make_folder((self._root / name).parent)
                    write_whole(self._root / name, data)
                self._tell(event)

    def _hear_end_of_task(self, number: int) -> None:
        """Handle the end of the task that held the cores of a placement."""
        work, known = self._works.get(number), self._ray.exceptions
        if work is None or work.node is None:
            return
        lease, work.lease = work.lease, None
        try:
            self._ray.get(lease)
        except (known.NodeDiedError, known.TaskUnschedulableError, known.RayActorError) as error:
            # It has died, or Ray drains it.
            self._lose(work.node, error)
        except known.RayError as error:
            work.node.actor.kill.remote(number)
            outcome = "oom" if isinstance(error, known.OutOfMemoryError) else "died"
            died = WorkerDiedError(0, f"Ray gave up its cores: {one_line(error)}", outcome)
            for item in self._take(lambda at, _: at == number):
                item.future.set_exception(died)

    def _lose(self, node: Node, error: Exception) -> None:
        """Go on without a node, for the rest of the call."""
        if self._cluster.nodes.get(node.name) is not node:
            return
        self._note(f"node {node.name or 'of this machine'} is lost: {one_line(error)}")
        del self._cluster.nodes[node.name]
        self._cluster.kill(node.actor)
        if not self._cluster.nodes:
            self._fail(f"no node of the Ray cluster is left: {one_line(error)}")
        for work in self._take(lambda _, work: work.node is node):
            self._end_lost(work)

    def _end_lost(self, work: _Work) -> None:
        """Let its jobs be placed again, if anywhere."""
        if self._cluster.failure is not None:
            work.future.set_exception(self._cluster.failure)
        elif work.tasks:
            work.future.set_result(Answer([None for _ in work.tasks], 0))
        else:
            work.future.set_exception(WorkerDiedError(0, "its node is lost"))

    def _fail(self, what: str) -> None:
        """End one placement by a failure, which ends the sweep; the others may save themselves."""
        if self._cluster.failure is None:
            text = f"{what}. See that the cluster runs; the same call continues"
            self._cluster.failure = failure = StorageError(errno.ENOTCONN, text)
            first = min(self._works, default=None)
            for work in self._take(lambda at, _: at == first):
                work.future.set_exception(failure)

    def _note(self, text: str) -> None:
        self._tell(Note(None, "cluster", text))

    @contextmanager
    def _disk(self, job_id: str) -> Iterator[None]:
        """End the placement of a job if this machine's disk refuses."""
        try:
            yield
        except StorageError as error:
            for work in self._take(lambda _, it: any(task.job.id == job_id for task in it.tasks)):
                work.future.set_exception(error)

    def _files(self, tasks: Sequence[Task]) -> Iterator[tuple[str, bytes]]:
        """Yield the files that earlier attempts have left, by their names in the run's folder."""
        for task in tasks:
            for ref in task.checkpoints:
                path = self._root / ref.file
                for item in (path, path.with_name(FINAL)):
                    # A worker that misses a file says so, and takes an older one.
                    with contextlib.suppress(OSError):
                        yield item.relative_to(self._root).as_posix(), read_plain(item)
