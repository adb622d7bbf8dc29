"""Jobs on several nodes: forked processes of this machine stand for the further ones."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from asynckfold.jobs.messages import CheckpointRef, Meeting, RunEvent, Task
from asynckfold.jobs.placement import Placement, Span
from asynckfold.jobs.result import DONE, Result
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training.multiprocess import across_nodes, train
from tests.fake_gpu import CpuToTake
from tests.leftovers import descendants, until
from tests.training.tiny import Tiny, checkpoints, never

HOME = Span("127.0.0.1", "secret")


class Peers:
    """Forks a process for each further node when rank 0 listens."""

    def __init__(
        self,
        made: Tiny,
        task: Task,
        work: Callable[..., None] = across_nodes.serve,
        on_gpus: bool = False,
    ) -> None:
        self.made, self.task, self.work, self.on_gpus = made, task, work, on_gpus
        self.pids: list[int] = []
        self.events: list[RunEvent] = []

    def tell(self, event: RunEvent) -> None:
        """Take an event of rank 0."""
        self.events.append(event)
        if not isinstance(event, Meeting):
            return
        params = self.made.params
        here = params.processes // params.nodes
        for first in range(here, params.processes, here):
            span = replace(HOME, ports=event.ports, first=first, task=self.task)
            placement = Placement(("job",), (), here, trainer=params.trainer, span=span)
            gpus = [self.gpu_of(rank) for rank in range(first, first + here)]
            given = (gpus,) if self.on_gpus else ()
            pid = os.fork()
            if pid == 0:
                # As on another machine: nothing of rank 0's, neither descriptors nor garbage that
                # would close them again when they are those of sockets.
                gc.freeze()
                os.closerange(3, 1000)
                try:
                    self.work(self.made.bundle, placement, self.made.batches, Heartbeat(), *given)
                finally:
                    os._exit(0)
            self.pids.append(pid)

    def gpu_of(self, rank: int) -> CpuToTake:
        """What stands for the GPU of a rank, and notes who takes it."""
        return CpuToTake(self.made.root / f"gpu-{rank}")

    def ended(self) -> None:
        """Reap them; they end by themselves."""
        for pid in self.pids:
            until(lambda pid=pid: os.waitpid(pid, os.WNOHANG)[0] == pid, 20)


def attempt(
    made: Tiny,
    stop: Callable[[], bool] = never,
    work: Callable[..., None] = across_nodes.serve,
    number: int = 1,
    refs: Sequence[CheckpointRef] = (),
    on_gpus: bool = False,
) -> tuple[Result | None, Peers]:
    """One attempt at the first job, and what stood for other nodes; no process is left."""
    task = Task(made.jobs[0], number, tuple(refs))
    peers = Peers(made, replace(task, checkpoints=()), work, on_gpus)
    before = descendants()
    span = HOME if made.params.nodes > 1 else None
    here = range(made.params.processes // made.params.nodes)
    gpus = [peers.gpu_of(rank) for rank in here] if on_gpus else ()
    try:
        found = train.train(
            made.bundle, task, made.batches, (), peers.tell, stop, gpus=gpus, span=span
        )
    finally:
        peers.ended()
        assert descendants() <= before
    return found, peers


def whole(
    made: Tiny, stop: Callable[[int], bool] = lambda number: False
) -> tuple[Result, list[CheckpointRef]]:
    """The first job, continued when `stop` ended an attempt; its checkpoints, newest first."""
    refs: list[CheckpointRef] = []
    for number in range(1, 100):
        result, peers = attempt(made, partial(stop, number), number=number, refs=refs)
        refs = checkpoints(peers.events) + refs
        if result is not None:
            assert result.status == DONE
            return result, refs
    raise AssertionError("the training makes no progress")


def replace_models(made: Tiny, **models: Any) -> Tiny:
    """Other models of the same names in the same plan."""
    made.bundle = replace(made.bundle, recipe=replace(made.bundle.recipe, models=models))
    return made
