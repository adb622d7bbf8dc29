"""Replicas and their server within a job: what is pushed and fetched, and what stays."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from asynckfold import InputError, TrainerParams
from asynckfold.jobs.messages import Note
from asynckfold.training import checkpoint
from asynckfold.training.multiprocess.downpour import Replica
from asynckfold.training.parameter_server.flat_parameters import ParameterLayout, ServedParameters
from tests.training.multiprocess.attempts import attempt, params, problems, train_with_stops
from tests.training.tiny import Tiny, checkpoints


class One(nn.Module):
    """One number, which each step of `step` lowers by one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1, dtype=dtype))

    def step(self) -> None:
        with torch.no_grad():
            self.value -= 1


def served(model: nn.Module) -> ServedParameters:
    values = ParameterLayout.of(model).vector(model).numpy()
    return ServedParameters(values, np.zeros(3, np.int64), threading.Lock(), staleness_aware=False)


def replica(held: ServedParameters, model: One, n_push: int = 1, n_pull: int = 1) -> Replica:
    return Replica(model, held, params("parameter_server", n_push=n_push, n_pull=n_pull))


def stepped(model: One, ours: Replica, count: int = 1) -> float:
    for _ in range(count):
        model.step()
        ours.stepped()
    return model.value.item()


def test_what_was_not_pushed_survives_a_fetch() -> None:
    one, other, held = One(), One(), served(One())
    ours, theirs = replica(held, one, n_push=3, n_pull=2), replica(held, other)
    stepped(other, theirs)
    # After two steps the server's -1 is fetched, after three all of them are pushed.
    assert [stepped(one, ours) for _ in range(3)] == [-1, -1, -2]
    theirs.pull()
    assert other.value.item() == -4
    stepped(one, ours)
    ours.settle()
    ours.settle()
    assert one.value.item() == -5
    # Where nothing is left, nothing is pushed; one push of ours was behind that of the other.
    assert held.counts.tolist() == [3, 0, 0]


def test_one_replica_takes_the_steps_of_the_plain_trainer_to_rounding(tmp_path: Path) -> None:
    """Where the other has no part, as of an epoch of two batches the first of which is alone."""

    def opt_fn(model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), 0.05)

    def weights(name: str, given: TrainerParams) -> dict[str, Any]:
        tiny = Tiny(tmp_path / name, opt_fn=opt_fn, params=given, batch_size=20)
        events = (attempt(tiny) if given.processes > 1 else tiny.attempt())[1]
        ref = checkpoints(events)[0]
        found: dict[str, Any] = checkpoint.load(tiny.root / ref.file, ref.sha256)
        return found["model"]

    mine = weights("mine", params("parameter_server", epochs=1))
    theirs = weights("theirs", TrainerParams(epochs=1))
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name])


def test_it_tells_pushes_and_staleness_of_all_attempts(tmp_path: Path) -> None:
    def told(name: str, stops: int) -> str:
        # 8 batches an epoch: the very first alone, then one push each.
        given = params("parameter_server", epochs=2)
        tiny = Tiny(tmp_path / name, params=given, batch_size=5)
        asked = iter([False, True] * stops)
        _, attempts = train_with_stops(tiny, lambda: next(asked, False))
        assert (attempts > 1) == (stops > 0)
        return tiny.log()

    assert "15 pushes, with" in told("whole", 0)
    assert "15 pushes, with" in told("parts", 2)
    tiny = Tiny(tmp_path / "event", params=params("parameter_server", epochs=1))
    (remark,) = [item for item in attempt(tiny)[1] if isinstance(item, Note)]
    assert remark.kind == "parameter_server"
    assert remark.text in tiny.log()


def test_a_model_that_a_server_cannot_hold_is_refused(tmp_path: Path) -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3, bias=False, dtype=torch.complex64)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.linear(inputs.to(torch.complex64)).abs()
            return found

    tiny = Tiny(tmp_path, {"m": Turning}, params=params("parameter_server"))
    ((rule, received, _),) = problems(tiny)
    assert rule == "parameters must be real numbers"
    assert "complex64" in received


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"n_push": 0}, "n_push must be a whole number of at least 1"),
        ({"n_pull": 1.5}, "n_pull must be a whole number of at least 1"),
        ({"staleness_aware": 1}, "staleness_aware must be True or False"),
        ({"trainer": "hogwild", "n_push": 2}, "n_push applies to the trainer 'parameter_server'"),
        ({"shared_state": True}, "shared_state applies to the trainer 'hogwild' only"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        TrainerParams.from_mapping({"trainer": "parameter_server", "processes": 2, **given})
