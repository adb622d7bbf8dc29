"""Jobs across nodes: what ends them, and the bits of all-reduce."""

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
from asynckfold.jobs.messages import RANK_ENDED
from asynckfold.jobs.result import DONE, Result
from asynckfold.jobs.trainer_params import Trainer, TrainerParams
from asynckfold.training.process_group import ranks
from asynckfold.training.process_group.collectives import NetworkCollectives
from asynckfold.training.process_group.meeting import accepted, connected, pipe_of
from tests.leftovers import listening, sockets
from tests.training.multiprocess.peers import attempt, replace_models
from tests.training.tiny import Noisy, Tiny, always

pytestmark = pytest.mark.usefixtures("one_thread", "hasty_disk", "_this_process_stays")

END_WORKER = ranks.end_worker

IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def _this_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests are the worker here."""
    monkeypatch.setattr(ranks, "end_worker", lambda text: None)


TRAINERS = pytest.mark.parametrize("trainer", ["allreduce", "parameter_server"])


def tiny(root: Path, per_node: int | None, trainer: Trainer = "allreduce") -> Tiny:
    """Running statistics and dropout; a batch that does not divide by the ranks."""
    params = TrainerParams(
        trainer=trainer,
        processes=4,
        processes_per_node=per_node,
        epochs=2,
        eval_batch_size=4,
        lr_step="batch",
    )
    changes = {"models": {"noisy": Noisy}, "lr_schedules": {"onecycle": "onecycle"}}
    return Tiny(root, params=params, batch_size=9, **changes)


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


class Fails(Noisy):
    """Does something in the third step of a rank of another node."""

    home = os.getpid()

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act, self.steps = act, 0

    def forward(self, inputs: Any) -> Any:
        self.steps += 1
        if self.steps == 3 and os.getpid() != self.home:
            self.act()
        return super().forward(inputs)


@pytest.mark.parametrize(
    ("trainer", "on_gpus"), [("allreduce", False), ("allreduce", True), ("parameter_server", False)]
)
def test_a_killed_rank_of_another_node_ends_the_attempt(
    tmp_path: Path, trainer: Trainer, on_gpus: bool
) -> None:
    def killed() -> Fails:
        return Fails(lambda: os.kill(os.getpid(), signal.SIGKILL))

    made = replace_models(tiny(tmp_path, 1, trainer), noisy=killed)
    begun = time.monotonic()
    with pytest.raises(WorkerDiedError, match="its connection closed"):
        attempt(made, on_gpus=on_gpus)
    assert time.monotonic() - begun < 60


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


@TRAINERS
def test_what_a_rank_of_another_node_raises_is_raised(tmp_path: Path, trainer: Trainer) -> None:
    def fail() -> None:
        raise FileNotFoundError(2, "gone", "x.png")

    made = replace_models(tiny(tmp_path, 2, trainer), noisy=lambda: Fails(fail))
    with pytest.raises(FileNotFoundError, match="gone"):
        attempt(made)


@TRAINERS
def test_a_request_to_stop_ends_the_wait_for_other_nodes(tmp_path: Path, trainer: Trainer) -> None:
    found, peers = attempt(tiny(tmp_path, 2, trainer), always, lambda *given: None)
    assert found is None
    assert len(peers.pids) == 1


@TRAINERS
def test_an_end_during_the_wait_for_other_nodes_leaves_nothing(
    tmp_path: Path, trainer: Trainer
) -> None:
    def refuse() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(tiny(tmp_path, 2, trainer), refuse, lambda *given: None)
    assert not listening().keys() & sockets()


def test_who_does_not_know_the_secret_is_no_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with connected("127.0.0.1", port, "guessed", 1):
            assert accepted(server, "secret", 1.0) is None
        line = pipe_of(connected("127.0.0.1", port, "secret", 3))
        found = accepted(server, "secret", 1.0)
        assert found is not None
        assert found[0] == 3
        line.send("hello")
        other = pipe_of(found[1])
        assert other.recv() == "hello"
        line.close()
        other.close()
        assert accepted(server, "secret", 0.05) is None
