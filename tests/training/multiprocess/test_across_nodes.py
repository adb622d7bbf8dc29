"""Jobs across nodes: what ends them, and the bits of all-reduce."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.result import DONE, Result
from asynckfold.jobs.trainer_params import Trainer, TrainerParams
from asynckfold.training.process_group import ranks
from asynckfold.training.process_group.meeting import accepted, connected, pipe_of
from tests.leftovers import listening, sockets
from tests.training.multiprocess.peers import attempt, replace_models
from tests.training.tiny import Noisy, Tiny, always

pytestmark = pytest.mark.usefixtures("one_thread", "hasty_disk", "_this_process_stays")


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


@TRAINERS
def test_a_killed_rank_of_another_node_ends_the_attempt(tmp_path: Path, trainer: Trainer) -> None:
    def killed() -> Fails:
        return Fails(lambda: os.kill(os.getpid(), signal.SIGKILL))

    made = replace_models(tiny(tmp_path, 1, trainer), noisy=killed)
    begun = time.monotonic()
    with pytest.raises(WorkerDiedError, match="its connection closed"):
        attempt(made)
    assert time.monotonic() - begun < 60


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
