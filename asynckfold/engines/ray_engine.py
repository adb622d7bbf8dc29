"""The Ray engine: placements run on the nodes of a Ray cluster. Ray itself is not imported here.

::

    submit ──► expect ──► the node's actor (`ray_node`)          checkpoints, log lines, events,
       └─────► hold ────► a task that reserves cores on the node    results and the load come back
                            └─ starts the placement there           by `poll`, one call per node

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

EXCUSED_LOSSES = 3
"""How often the jobs of a lost node are retried without counting as failed."""

_WAIT_SECONDS = 0.05


@dataclass(eq=False)
class RayWork:
    """A placement, its future, and the task of Ray that holds its cores."""

    number: int
    placement: Placement
    tasks: Sequence[Task]
    node: Node
    expected: Any = None  # the actor's answer to `RayNode.expect`
    lease: Any = None  # the task of Ray; None once it has ended
    has_begun: bool = False
    future: Future[Answer] = field(default_factory=Future)

    @property
    def options(self) -> dict[str, Any]:
        """What Ray reserves for it on its node, and its name in Ray's dashboard."""
        placement, node = self.placement, self.node
        share = 0.0 if placement.gpu is None else 1 / placement.jobs_per_gpu
        return {
            "num_cpus": min(len(placement.cores) or 1, node.cpus),
            "num_gpus": min(share, node.gpus),
            "memory": min(placement.memory, node.memory) or None,
            "name": placement.jobs[0] if placement.jobs else placement.command.value,
        }

    def interrupt(self) -> None:
        """End it without a result."""
        self.future.set_result(Answer([None for _ in self.tasks], 0))


class RayEngine:
    """Executes placements on the nodes of a cluster; one engine at a time uses it."""

    runs_in_submit = False
    batch_seconds = NODE_BATCH_SECONDS

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
        self._cluster, self._root, self._tell, self._most = cluster, bundle.root, tell, most
        self._signals = signals or Interruption()
        self._works: dict[int, RayWork] = {}
        self._losses: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        cluster.begin(bundle, threads, data)
        self._listener = threading.Thread(target=self._listen, name="asynckfold-ray", daemon=True)
        self._listener.start()

    def load(self, running: Sequence[Placement]) -> Load:
        """Return the latest load of each node; after a failure, one that lets a job start.

        Its submission then reports the failure, as this must not raise.
        """
        if self._cluster.failure is not None:
            return Load((0,), (0,), 1 << 62)
        left, loads = self._most, []
        for node in self._cluster.nodes.values():
            if node.is_lost:
                loads.append(Load((), (), 0, blocked=f"{node.place} is lost", node=node.name))
                continue
            held = [item for item in running if item.node == node.name]
            load = replace(node.load, node=node.name)
            # Ray may have been started with fewer cores.
            most = int(node.cpus if left is None else min(left, node.cpus))
            loads.append(load if len(load.cores) <= most else within(load, held, most))
            left = None if left is None else left - len(loads[-1].cores)
        return replace(loads[0], peers=tuple(loads[1:]))

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        """Ask Ray for the cores of a placement, which starts when it has them."""
        node = self._cluster.nodes[placement.node]
        work = RayWork(next(self._cluster.numbers), placement, tasks, node)
        work.future.set_running_or_notify_cancel()
        if node.is_lost or self._cluster.failure is not None:
            self._end_lost(work, "")
            return work.future
        with self._lock:
            self._works[work.number] = work
        files = dict(self._files(tasks))
        work.expected = node.actor.expect.remote(work.number, placement, tasks, files, node.begun)
        work.lease = self._cluster.lease(node, work.number, work.expected, work.options)
        return work.future

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        """Pin a worker to other cores of its node, or pause it."""
        work = next((work for work in [*self._works.values()] if work.future is future), None)
        if work is not None and not work.node.is_lost:
            work.node.actor.shift.remote(work.number, tuple(cores), work.expected)

    def close(self, grace_s: float = 0.0) -> None:
        """Ask for checkpoints, wait, end what is left; the nodes stay."""
        if self._closing.is_set():
            return
        for work in self._take(lambda work: not work.has_begun):
            # Its task finds that nobody waits for it, and ends.
            self._cluster.cancel(work.lease)
            work.interrupt()
        actors = [node.actor for node in self._cluster.nodes.values() if not node.is_lost]
        for seconds in [grace_s, 0.0] if grace_s > 0 else [0.0]:
            for actor in actors:
                actor.stop.remote(seconds)
            end = time.monotonic() + (seconds or END_SECONDS)
            while self._works and time.monotonic() < end:
                if seconds and self._signals.urgent():
                    break
                time.sleep(_WAIT_SECONDS)
        for work in self._take(lambda work: True):
            work.future.set_exception(WorkerDiedError(0, "its node did not answer"))
        self._closing.set()
        self._listener.join(END_SECONDS)
        self._cluster.wait([actor.end.remote() for actor in actors], END_SECONDS)

    def _take(self, which: Callable[[RayWork], bool]) -> list[RayWork]:
        """Remove the placements for which `which` holds; whoever has one completes its future."""
        with self._lock:
            taken = [work for work in self._works.values() if which(work)]
            for work in taken:
                del self._works[work.number]
        return taken

    # The listening thread: messages of nodes, the end of Ray's tasks, nodes that come and go

    def _listen(self) -> None:
        """Listen until `close`; whatever Ray raises ends the sweep, which would wait for ever."""
        polls: dict[Any, Node] = {}
        looked = answered = time.monotonic()
        try:
            while not self._closing.is_set():
                self._hear_nodes(polls)
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

    def _hear_nodes(self, polls: dict[Any, Node]) -> None:
        """Take the answers that are there; `polls` are those to `RayNode.poll`, one per node."""
        present = [node for node in self._cluster.nodes.values() if not node.is_lost]
        for node in present:
            if node not in polls.values():
                polls[node.actor.poll.remote(POLL_SECONDS)] = node
        begins = {node.begun: node for node in present if not node.is_ready}
        leases = {work.lease: work for work in [*self._works.values()] if work.lease is not None}
        for answer in self._cluster.ready([*begins, *polls, *leases], POLL_SECONDS):
            if answer in leases:
                self._hear_end_of_task(leases[answer])
                continue
            node = begins[answer] if answer in begins else polls.pop(answer)
            if node.is_lost:
                continue
            try:
                value = self._cluster.get(answer)
            except self._cluster.exceptions.RayError as error:
                # A node that cannot take the data must not be tried again.
                has_died = isinstance(error, self._cluster.exceptions.RayActorError)
                self._lose(node, one_line(error), for_good=answer in begins and not has_died)
                continue
            node.is_ready = node.is_ready or answer in begins
            if answer not in begins:
                node.load, messages = value
                for message in messages:
                    self._hear(message)

    def _hear(self, message: tuple[Any, ...]) -> None:
        kind, *content = message
        if kind == "begun":
            if (work := self._works.get(content[0])) is not None:
                work.has_begun = True
        elif kind == "answer":
            number, outcome = content
            for work in self._take(lambda work: work.number == number):
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
                    path = self._root / name
                    make_folder(path.parent)
                    write_whole(path, data)
                self._tell(event)

    def _hear_end_of_task(self, work: RayWork) -> None:
        """Handle the end of the task that held the cores of a placement."""
        lease, work.lease = work.lease, None
        known = self._cluster.exceptions
        try:
            self._cluster.get(lease)
        except (known.NodeDiedError, known.TaskUnschedulableError) as error:
            # It has died, or Ray drains it.
            self._lose(work.node, one_line(error), for_good=True)
        except known.RayActorError as error:
            self._lose(work.node, one_line(error), for_good=False)
        except known.RayError as error:
            outcome = "oom" if isinstance(error, known.OutOfMemoryError) else "died"
            # The node reports the end of what has begun.
            is_silent = outcome == "oom" or not work.has_begun
            for item in self._take(lambda item: item is work and is_silent):
                text = f"Ray gave up its cores: {one_line(error)}"
                item.future.set_exception(WorkerDiedError(0, text, outcome))
            if not work.node.is_lost:
                work.node.actor.kill.remote(work.number)

    def _lose(self, node: Node, why: str, *, for_good: bool) -> None:
        """Take note that a node is lost, until another actor starts there, or for good."""
        if node.is_lost:
            return
        self._note(f"{node.place} is lost: {why}")
        self._cluster.lose(node, for_good=for_good)
        for work in self._take(lambda work: work.node is node):
            self._end_lost(work, why)
        if for_good and all(item.is_lost for item in self._cluster.nodes.values()):
            self._fail(f"no node of the Ray cluster is left: {why}")

    def _end_lost(self, work: RayWork, why: str) -> None:
        """Let its jobs be placed again; they count as failed only after several losses."""
        if self._cluster.failure is not None:
            work.future.set_exception(self._cluster.failure)
            return
        names = [task.job.id for task in work.tasks]
        for name in names:
            self._losses[name] = self._losses.get(name, 0) + 1
        if names and max(self._losses[name] for name in names) <= EXCUSED_LOSSES:
            work.interrupt()
        else:
            work.future.set_exception(WorkerDiedError(0, f"{work.node.place} is lost: {why}"))

    def _fail(self, what: str) -> None:
        """End one placement by a failure, which ends the sweep; the others may save themselves."""
        if self._cluster.failure is None:
            text = f"{what}. See that the cluster runs; the same call continues"
            self._cluster.failure = failure = StorageError(errno.ENOTCONN, text)
            first = min(self._works, default=None)
            for work in self._take(lambda work: work.number == first):
                work.future.set_exception(failure)

    def _note(self, text: str) -> None:
        self._tell(Note(None, "cluster", text))

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
                        yield item.relative_to(self._root).as_posix(), read_plain(item)
