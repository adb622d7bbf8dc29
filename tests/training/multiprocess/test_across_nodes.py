"""All-reduce across nodes: two processes on this machine stand for the nodes."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import Meeting, RunEvent, Task
from asynckfold.jobs.placement import Placement, Span
from asynckfold.jobs.result import DONE, Result
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training.multiprocess import across_nodes, train
from asynckfold.training.process_group import ranks
from asynckfold.training.process_group.meeting import accepted, connected
from tests.leftovers import descendants, until
from tests.training.tiny import Noisy, Tiny, always, never

pytestmark = pytest.mark.usefixtures("one_thread", "hasty_disk", "_this_process_stays")

HOME = Span("127.0.0.1", "secret")


@pytest.fixture
def _this_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests are the worker here."""
    monkeypatch.setattr(ranks, "end_worker", lambda text: None)


def tiny(root: Path, per_node: int | None) -> Tiny:
    """Running statistics and dropout; a batch that does not divide by the ranks."""
    params = TrainerParams(
        trainer="allreduce",
        processes=4,
        processes_per_node=per_node,
        epochs=2,
        eval_batch_size=4,
        lr_step="batch",
    )
    changes = {"models": {"noisy": Noisy}, "lr_schedules": {"onecycle": "onecycle"}}
    return Tiny(root, params=params, batch_size=9, **changes)


class Peers:
    """Forks a process for each further node when rank 0 listens."""

    def __init__(self, made: Tiny, task: Task, work: Callable[..., None] = across_nodes.serve):
        self.made, self.task, self.work = made, task, work
        self.pids: list[int] = []
        self.events: list[RunEvent] = []

    def tell(self, event: RunEvent) -> None:
        """Take an event of rank 0."""
        self.events.append(event)
        if not isinstance(event, Meeting):
            return
        here = self.made.params.processes // self.made.params.nodes
        for first in range(here, self.made.params.processes, here):
            span = replace(HOME, ports=event.ports, first=first, task=self.task)
            placement = Placement(("job",), (), here, trainer="allreduce", span=span)
            pid = os.fork()
            if pid == 0:
                os.closerange(3, 1000)  # as on another machine: nothing of rank 0's
                try:
                    self.work(self.made.bundle, placement, self.made.batches, Heartbeat())
                finally:
                    os._exit(0)
            self.pids.append(pid)

    def ended(self) -> None:
        """Reap them; they end by themselves."""
        for pid in self.pids:
            until(lambda pid=pid: os.waitpid(pid, os.WNOHANG)[0] == pid, 20)


def attempt(
    made: Tiny, stop: Callable[[], bool] = never, work: Callable[..., None] = across_nodes.serve
) -> tuple[Result | None, Peers]:
    task = Task(made.jobs[0])
    peers, before = Peers(made, task, work), descendants()
    span = HOME if made.params.nodes > 1 else None
    try:
        found = train.train(made.bundle, task, made.batches, (), peers.tell, stop, span=span)
    finally:
        peers.ended()
        assert descendants() <= before
    return found, peers


def numbers(result: Result | None) -> list[Any]:
    assert result is not None
    assert result.status == DONE
    epochs = [(item.train_loss, item.valid_loss, item.accuracy) for item in result.epochs]
    return [epochs, np.asarray(result.outputs).tobytes()]


@pytest.mark.parametrize("per_node", [1, 2])
def test_the_bits_are_those_of_one_node(tmp_path: Path, per_node: int) -> None:
    alone, _ = attempt(tiny(tmp_path / "one", None))
    found, peers = attempt(tiny(tmp_path / "several", per_node))
    assert len(peers.pids) == 4 // per_node - 1
    assert numbers(found) == numbers(alone)


def test_a_killed_rank_of_another_node_ends_the_attempt(tmp_path: Path) -> None:
    class Dies(Noisy):
        steps = 0

        def forward(self, inputs: Any) -> Any:
            Dies.steps += 1
            if Dies.steps == 3 and os.getpid() != mine:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(inputs)

    mine = os.getpid()
    made = tiny(tmp_path, 1)
    made = replace_models(made, Dies)
    begun = time.monotonic()
    with pytest.raises(WorkerDiedError, match="its connection closed"):
        attempt(made)
    assert time.monotonic() - begun < 30


def replace_models(made: Tiny, model: type) -> Tiny:
    made.bundle = replace(made.bundle, recipe=replace(made.bundle.recipe, models={"noisy": model}))
    return made


def test_a_request_to_stop_ends_the_wait_for_other_nodes(tmp_path: Path) -> None:
    found, peers = attempt(tiny(tmp_path, 2), always, lambda *given: None)
    assert found is None
    assert len(peers.pids) == 1


def test_who_does_not_know_the_secret_is_no_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line, _ = connected("127.0.0.1", port, "guessed", 1)
        assert accepted(server, "secret", 1.0) is None
        line.close()
        line, here = connected("127.0.0.1", port, "secret", 3)
        found = accepted(server, "secret", 1.0)
        assert found is not None
        assert (found[0], here) == (3, "127.0.0.1")
        line.send("hello")
        assert found[1].recv() == "hello"
        line.close()
        found[1].close()
        assert accepted(server, "secret", 0.05) is None
