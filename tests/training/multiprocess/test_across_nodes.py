"""All-reduce across nodes: two processes on this machine stand for the nodes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import RANK_ENDED, Meeting, RunEvent, Task
from asynckfold.jobs.placement import Placement, Span
from asynckfold.jobs.result import DONE, Result
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training.multiprocess import across_nodes, train
from asynckfold.training.process_group import ranks
from asynckfold.training.process_group.collectives import NetworkCollectives
from asynckfold.training.process_group.meeting import accepted, connected
from tests.fake_gpu import CpuToTake
from tests.leftovers import descendants, until
from tests.training.tiny import Noisy, Tiny, always, never

pytestmark = pytest.mark.usefixtures("one_thread", "hasty_disk", "_this_process_stays")

HOME = Span("127.0.0.1", "secret")

END_WORKER = ranks.end_worker

IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


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
        here = self.made.params.processes // self.made.params.nodes
        for first in range(here, self.made.params.processes, here):
            span = replace(HOME, ports=event.ports, first=first, task=self.task)
            placement = Placement(("job",), (), here, trainer="allreduce", span=span)
            gpus = [self.gpu_of(rank) for rank in range(first, first + here)]
            given = (gpus,) if self.on_gpus else ()
            pid = os.fork()
            if pid == 0:
                os.closerange(3, 1000)  # as on another machine: nothing of rank 0's
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
    on_gpus: bool = False,
) -> tuple[Result | None, Peers]:
    task = Task(made.jobs[0])
    peers, before = Peers(made, task, work, on_gpus), descendants()
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


@pytest.mark.parametrize("per_node", [1, 2])
def test_each_rank_takes_its_own_gpu_of_its_node(tmp_path: Path, per_node: int) -> None:
    alone, _ = attempt(tiny(tmp_path / "one", None))
    made = tiny(tmp_path / "several", per_node)
    made.bundle = replace(made.bundle, backend="gloo")
    found, peers = attempt(made, on_gpus=True)
    assert numbers(found) == numbers(alone)
    takers = [int((made.root / f"gpu-{rank}").read_text()) for rank in range(4)]
    assert takers[0] == os.getpid()
    assert len({*takers}) == 4
    assert takers[per_node::per_node] == peers.pids


@pytest.mark.parametrize("fails", [False, True])
def test_nccl_connects_by_the_interface_that_the_others_reach(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    seen: dict[str, Any] = {}

    def see(what: str) -> Callable[..., None]:
        def called(*given: Any, **words: Any) -> None:
            seen[what] = [os.environ.get(name) for name in IFNAMES]
            if fails and what == "collective":
                raise RuntimeError("NCCL error: unhandled system error")

        return called

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(torch.distributed, "init_process_group", see("join"))
    # NCCL opens its connections in the first collective, not before.
    monkeypatch.setattr(torch.distributed, "broadcast", see("collective"))
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: device)
    monkeypatch.setattr(NetworkCollectives, "store", lambda self, rank: None)
    found = NetworkCollectives("nccl", 2, "127.0.0.1", 1, "127.0.0.1")
    assert found.backend == "nccl"
    with pytest.raises(RuntimeError, match="NCCL") if fails else nullcontext():
        found.join(1)
    assert seen == {"join": ["lo", "=lo"], "collective": ["lo", "=lo"]}
    assert [os.environ.get(name) for name in IFNAMES] == ["mine", None]


def test_gloo_connects_when_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    found = NetworkCollectives("", 2, "127.0.0.1", 1, "127.0.0.1")
    monkeypatch.setattr(torch.distributed, "broadcast", None)
    found.connect()
    assert found.backend == "gloo"


@pytest.mark.parametrize("on_gpus", [False, True])
def test_a_killed_rank_of_another_node_ends_the_attempt(tmp_path: Path, on_gpus: bool) -> None:
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
        attempt(made, on_gpus=on_gpus)
    assert time.monotonic() - begun < 30


def test_a_worker_that_would_wait_for_a_rank_of_another_node_for_ever_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As with NCCL, of which no call fails: the host waits for a kernel that waits for the rank."""

    def dying(self: NetworkCollectives, part: Any) -> None:
        # After its answer, so that rank 0 goes on to the collective.
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

    monkeypatch.setattr(NetworkCollectives, "offer", dying)
    monkeypatch.setattr(NetworkCollectives, "collect", lambda self, parts: time.sleep(600))
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(ranks, "end_worker", END_WORKER)
    begun = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        worker = os.fork()
    if not worker:
        try:
            attempt(tiny(tmp_path, 2), on_gpus=True)
        finally:
            os._exit(0)
    while not (ended := os.waitpid(worker, os.WNOHANG))[0]:
        assert time.monotonic() - begun < 30
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(ended[1]) == RANK_ENDED
    assert "and with it the attempt; rank 0 still waited for it" in capfd.readouterr().err


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
