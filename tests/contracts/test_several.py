"""What every trainer of several processes promises of a job, whether it promises bits or not."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asynckfold import TrainerParams
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import EpochEnd
from asynckfold.jobs.trainer_params import SEVERAL
from asynckfold.training import checkpoint
from tests.training.multiprocess.attempts import (
    OPTIMIZERS,
    Fragile,
    attempt,
    each_sample,
    noted,
    noting,
    params,
    samples_in,
    train,
    train_with_stops,
)
from tests.training.tiny import Noisy, Plain, Tiny, checkpoints

pytestmark = pytest.mark.usefixtures("one_thread", "hasty_disk")

EACH = pytest.mark.parametrize("trainer", SEVERAL)


@EACH
@pytest.mark.parametrize(("optimizer", "step"), [("momentum", "batch"), ("adam", "epoch")])
def test_one_process_gives_the_bits_of_the_plain_trainer(
    tmp_path: Path, trainer: str, optimizer: str, step: str
) -> None:
    def tiny(name: str, given: TrainerParams) -> Tiny:
        return Tiny(
            tmp_path / name,
            {"noisy": Noisy},
            {"onecycle": "onecycle"},
            OPTIMIZERS[optimizer],
            params=given,
        )

    plain = tiny("plain", TrainerParams(epochs=3, lr_step=step)).train()
    found = train(tiny("one", params(trainer, 1, lr_step=step)))
    assert found.weights == plain.weights
    np.testing.assert_array_equal(found.outputs, plain.outputs)
    mine, theirs = (
        [(item.train_loss, item.valid_loss, item.accuracy, item.lr) for item in result.epochs]
        for result in (found, plain)
    )
    assert mine == theirs


@pytest.mark.nightly(but=["hogwild", "averaging"])
@EACH
def test_all_together_see_each_sample_once_an_epoch(tmp_path: Path, trainer: str) -> None:
    path = tmp_path / "noted"
    tiny = Tiny(tmp_path / "run", {"m": noting(path)}, params=params(trainer, 3))
    result, lines = train(tiny), noted(path)
    assert samples_in(path) == each_sample(tiny)
    assert len({pid for pid, _ in lines}) == 3
    assert max(len(numbers) for _, numbers in lines) == tiny.batch_size
    assert [item.number for item in result.epochs] == [1, 2, 3]
    assert all(np.isfinite(item.train_loss) for item in result.epochs)


@EACH
def test_stopped_and_continued_no_sample_is_lost_or_seen_again(
    tmp_path: Path, trainer: str
) -> None:
    path, asked = tmp_path / "noted", iter([False, True, False, True, True])
    tiny = Tiny(
        tmp_path / "run",
        {"m": noting(path)},
        opt_fn=OPTIMIZERS["adam"],
        params=params(trainer),
        batch_size=3,
    )
    _, attempts = train_with_stops(tiny, lambda: next(asked, False))
    assert attempts > 1
    assert samples_in(path) == each_sample(tiny)


@pytest.mark.nightly(but=["2-6-hogwild", "2-6-parameter_server", "3-4-allreduce", "3-10-averaging"])
@EACH
@pytest.mark.parametrize(("processes", "size"), [(2, 6), (3, 4), (3, 10)])
def test_an_evaluation_is_divided_and_is_that_of_the_model_that_is_kept(
    tmp_path: Path, trainer: str, processes: int, size: int
) -> None:
    path = tmp_path / "noted"
    tiny = Tiny(
        tmp_path / "run",
        {"m": noting(path, Noisy, training=False)},
        params=params(trainer, processes, eval_batch_size=size),
        batch_size=5,
    )
    result, events = attempt(tiny)
    assert result is not None
    valid = tiny.bundle.folds[0].valid
    lines = noted(path)
    found = Counter(number for _, numbers in lines for number in numbers)
    assert found == Counter({int(number): 3 for number in valid})
    assert len({pid for pid, _ in lines}) == min(processes, -(-len(valid) // size))
    kept = checkpoints(events)[0]
    model = Noisy().eval()
    model.load_state_dict(checkpoint.load(tiny.root / kept.file, kept.sha256)["model"])
    parts = torch.from_numpy(tiny.data[0][valid]).split(size)
    with torch.no_grad():
        expected = torch.cat([model(part) for part in parts]).numpy()
    np.testing.assert_array_equal(result.outputs, expected)


@EACH
def test_they_learn_what_one_learns(tmp_path: Path, trainer: str) -> None:
    found = train(Tiny(tmp_path, {"noisy": Noisy}, params=params(trainer, epochs=8)))
    assert found.epochs[-1].accuracy is not None
    assert found.epochs[-1].accuracy > 0.7
    assert found.epochs[-1].train_loss < found.epochs[0].train_loss * 0.7


@pytest.mark.nightly(but=["hogwild", "averaging"])
@EACH
def test_every_process_has_its_own_noise(tmp_path: Path, trainer: str) -> None:
    class Drawing(Plain):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with (tmp_path / "drawn").open("a") as file:
                file.write(f"{float(torch.rand(()))}\n" if self.training else "")
            return super().forward(inputs)

    train(Tiny(tmp_path / "run", {"m": Drawing}, params=params(trainer, epochs=2)))
    drawn = (tmp_path / "drawn").read_text().split()
    assert len(drawn) == len(set(drawn)) >= 8


@pytest.mark.parametrize(
    ("trainer", "step"), [*((trainer, "epoch") for trainer in SEVERAL), ("hogwild", "batch")]
)
def test_the_learning_rate_is_that_of_one(tmp_path: Path, trainer: str, step: str) -> None:
    def rates(name: str, given: TrainerParams) -> list[float]:
        schedules = {"exponential": "exponential"}
        tiny = Tiny(tmp_path / name, lr_schedules=schedules, params=given)
        _, events = attempt(tiny) if given.processes > 1 else tiny.attempt()
        return [item.epoch.lr for item in events if isinstance(item, EpochEnd)]

    found = rates("several", params(trainer, lr_step=step))
    assert found == pytest.approx(rates("alone", TrainerParams(3, lr_step=step)))
    assert len(set(found)) == 3


def _raise() -> None:
    raise FileNotFoundError(2, "gone", "x.png")


@pytest.mark.nightly(but=["hogwild", "parameter_server"])
@EACH
def test_what_a_member_raises_is_raised_as_it_is(tmp_path: Path, trainer: str) -> None:
    tiny = Tiny(tmp_path, {"m": lambda: Fragile(_raise)}, params=params(trainer))
    with pytest.raises(FileNotFoundError, match="gone") as caught:
        attempt(tiny)
    assert "_raise" in str(caught.value.__cause__)


class Unsendable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


def _raise_unsendable() -> None:
    raise Unsendable("what it said")


def test_what_cannot_be_sent_is_told(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, {"m": lambda: Fragile(_raise_unsendable)}, params=params("hogwild"))
    with pytest.raises(RuntimeError, match="what it said"):
        attempt(tiny)


@pytest.mark.nightly(but=["<lambda>-SIGKILL-hogwild", "<lambda>-exit code 3-allreduce"])
@EACH
@pytest.mark.parametrize(
    ("act", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: os._exit(3), "exit code 3"),
    ],
)
def test_a_member_that_dies_ends_the_attempt(
    tmp_path: Path, trainer: str, act: Callable[[], object], how: str
) -> None:
    tiny = Tiny(tmp_path, {"m": lambda: Fragile(act)}, params=params(trainer, 3))
    with pytest.raises(WorkerDiedError, match=rf"process \d of the job ended \({how}\)"):
        attempt(tiny)
