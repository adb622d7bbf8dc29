"""A stage before the training: on the training fold, before the optimizer, the same bits always."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn

from asynckfold import AsyncKFold, RunStore, TrainerParams
from asynckfold.models import DBN, Pretraining
from asynckfold.models import dbn as dbn_module
from tests.training.multiprocess.attempts import train as train_several
from tests.training.sweeps import events, in_pieces, sgd, sweep, train
from tests.training.tiny import Plain, Tiny, samples

SEEN: list[list[int]] = []
"""The numbers of the samples, of each call of `Spy.pretrain` in this process."""


class Spy(Plain):
    """Notes whom it is pretrained on; draws from the generator, as it should."""

    def pretrain(self, inputs: torch.Tensor, generator: torch.Generator, report: Any) -> None:
        SEEN.append([int(value) for value in inputs[:, 0]])
        with torch.no_grad():
            self.linear.weight.normal_(generator=generator)
        report("linear", 1, {"error": 0.75})
        report("linear", 2, {"error": 0.5})


SPIED: dict[str, Any] = {"models": {"spy": Spy}, "params": {"epochs": 3}}


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


def test_each_job_is_pretrained_once_on_all_of_its_training_fold_with_the_same_bits(
    tmp_path: Path,
) -> None:
    results = sweep(tmp_path / "run", **SPIED)
    assert sorted(SEEN) == sorted(fold.train.tolist() for fold in results.folds)
    digests = {item.digest for item in results.results.values()}
    assert len(digests) == 3
    torch.rand(5)
    again = sweep(tmp_path / "again", **SPIED)
    assert {item.digest for item in again.results.values()} == digests
    (result, *_) = results.results.values()
    stages = [(item.stage, item.number, dict(item.measures)) for item in result.pretraining]
    assert stages == [("linear", 1, {"error": 0.75}), ("linear", 2, {"error": 0.5})]
    assert all(item.seconds >= 0 for item in result.pretraining)


def test_it_comes_before_the_optimizer_and_has_the_preprocessed_inputs(tmp_path: Path) -> None:
    biases: list[float] = []

    class Scaled(Plain):
        def pretrain(self, inputs: torch.Tensor, generator: torch.Generator, report: Any) -> None:
            torch.testing.assert_close(inputs.mean(0), torch.zeros(8), atol=1e-5, rtol=0)
            with torch.no_grad():
                self.linear.bias.fill_(7)

    def opt_fn(model: Any) -> Any:
        biases.append(model.linear.bias[0].item())
        return sgd(model)

    train(tmp_path / "run", {"scaled": Scaled}, opt_fn=opt_fn, preprocess=StandardScaler())
    assert biases[-1] == 7


def test_a_job_stopped_after_every_batch_is_pretrained_once_and_ends_alike(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", **SPIED)
    SEEN.clear()
    pieces, attempts = in_pieces(tmp_path / "pieces", **SPIED)
    assert pieces.digest == whole.digest
    assert attempts > 3
    assert len(SEEN) == 1
    assert [vars(item) | {"seconds": 0} for item in pieces.pretraining] == [
        vars(item) | {"seconds": 0} for item in whole.pretraining
    ]


@pytest.mark.damages("checkpoints are damaged on purpose")
@pytest.mark.parametrize("kept", [0, 1])
def test_after_damaged_checkpoints_an_older_one_or_pretraining_is_repeated(
    tmp_path: Path, kept: int
) -> None:
    whole = train(tmp_path / "whole", **SPIED)
    SEEN.clear()
    root = tmp_path / "damaged"
    train(root, job_timeout_s=1e-9, **SPIED)
    paths = sorted(root.rglob("checkpoint-*"), reverse=True)
    assert [path.name[:22] for path in paths] == [f"checkpoint-0000-00000{n}" for n in (1, 0)]
    for path in paths[: len(paths) - kept]:
        path.write_bytes(b"damaged")
    assert train(root, **SPIED).digest == whole.digest
    assert len(SEEN) == 2 - kept
    assert len(events(root, "damage")) == 2 - kept


def test_processes_of_a_job_share_pretraining_that_accepts_summing(tmp_path: Path) -> None:
    shared: list[bool] = []

    class Shared(DBN):
        def pretrain(
            self, inputs: Any, generator: Any, report: Any = None, summing: Any = None
        ) -> Any:
            shared.append(summing is not None)
            with mock.patch.object(dbn_module, "LEAST_ROWS", 1):
                return super().pretrain(inputs, generator, report, summing)

    def stages(name: str, **given: Any) -> list[Any]:
        params = TrainerParams(epochs=1, **given)
        tiny = Tiny(tmp_path / name, {"dbn": dbn(Shared)}, params=params)
        result = train_several(tiny) if given else tiny.train()
        return [(item.stage, item.number, dict(item.measures)) for item in result.pretraining]

    one = stages("one")
    for trainer in ("averaging", "allreduce"):
        several = stages(trainer, trainer=trainer, processes=2)
        for (stage, epoch, mine), (name, number, theirs) in zip(one, several, strict=True):
            assert (stage, epoch) == (name, number)
            assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    assert shared == [False, True, True]


def test_an_estimate_skips_pretraining_and_a_measured_baseline_does_not(tmp_path: Path) -> None:
    for kind, count in (("estimate", 3), ("measure", 6)):
        SEEN.clear()
        sweep(tmp_path / kind, baseline=kind, **SPIED)
        assert len(SEEN) == count


def test_an_exception_in_pretraining_fails_the_job(tmp_path: Path) -> None:
    class Raising(Plain):
        def pretrain(self, inputs: Any, generator: Any, report: Any) -> None:
            raise ValueError("no such luck")

    result = train(tmp_path / "run", {"raising": Raising})
    assert (result.status, result.error) == ("failed", "ValueError: no such luck")


# A sweep, with workers


class Mortal(DBN):
    """Is killed in the middle of its stage, as long as there is a file that says so."""

    def __init__(self, *given: Any, doom: Path, **more: Any) -> None:
        super().__init__(*given, **more)
        self.doom = doom

    def pretrain(self, inputs: Any, generator: Any, report: Any = None, summing: Any = None) -> Any:
        def told(*item: Any) -> None:
            report(*item)
            if item[:2] == ("layer 2", 1) and self.doom.exists():
                self.doom.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

        with mock.patch.object(dbn_module, "LEAST_ROWS", 1):
            return super().pretrain(inputs, generator, told, summing)


def dbn(kind: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return partial(kind, 8, (6, 4), 3, pretraining=Pretraining(epochs=2, batch_size=10))


@pytest.mark.nightly
@pytest.mark.parametrize(("trainer", "processes"), [("plain", 1), ("allreduce", 2)])
def test_a_job_killed_during_pretraining_ends_with_the_same_bits(
    tmp_path: Path, trainer: str, processes: int
) -> None:
    marker = tmp_path / "doom"

    def run(name: str, n_jobs: int) -> Any:
        kfold = AsyncKFold(
            3, samples(), tmp_path / name, nn.CrossEntropyLoss(), 10,
            n_jobs=n_jobs, baseline=None, verbose=0, threads_per_job=1,
            trainer=trainer, processes=processes,
        )  # fmt: skip
        net = dbn(partial(Mortal, doom=marker))
        return kfold({"dbn": net}, ["cosine"], sgd, {"epochs": 2})

    whole = run("whole", 1)
    marker.touch()
    killed = run("killed", 2 // processes)
    assert not marker.exists()
    assert killed.fingerprint == whole.fingerprint
    for results in (whole, killed):
        frame = results.to_frame("epoch")
        stages = frame[frame["stage"] != ""]
        assert len(stages) == 3 * 2 * 2
        assert stages[["reconstruction_error", "free_energy_gap"]].notna().all(axis=None)
    with RunStore.read(tmp_path / "killed") as store:
        assert all(len(item.pretraining) == 4 for item in store.results().values())
    told = [event.text for event in RunStore.read(tmp_path / "killed").events()
            if event.kind == "pretrained"]  # fmt: skip
    assert len(told) == 3
    assert all("layer 2 after 2 epochs reconstruction_error" in text for text in told)
