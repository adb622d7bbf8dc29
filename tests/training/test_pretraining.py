"""A stage before the training: on the training fold, before the optimizer, the same bits always."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, Result, RunStore, TrainerParams
from asynckfold.jobs.messages import Note
from asynckfold.jobs.placement import Command
from asynckfold.jobs.result import StageEpoch
from asynckfold.models import DBN, Pretraining
from asynckfold.models import dbn as dbn_module
from tests.training.multiprocess.attempts import train
from tests.training.tiny import Plain, Tiny, always, checkpoints, samples, sgd

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


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


def spied(root: Path, **given: Any) -> Tiny:
    return Tiny(root, **{"models": {"spy": Spy}, "params": TrainerParams(epochs=3), **given})


def test_each_job_is_pretrained_once_on_all_of_its_training_fold_and_nobody_else(
    root: Path,
) -> None:
    tiny = spied(root)
    for job in tiny.jobs:
        SEEN.clear()
        tiny.train(job)
        fold = tiny.bundle.fold_of(job)
        assert [fold.train.tolist()] == SEEN
        assert not set(SEEN[0]) & set(fold.valid.tolist())


def test_it_comes_before_the_optimizer_and_has_the_preprocessed_inputs(root: Path) -> None:
    from sklearn.preprocessing import StandardScaler

    met: list[float] = []

    class Scaled(Plain):
        def pretrain(self, inputs: torch.Tensor, generator: torch.Generator, report: Any) -> None:
            torch.testing.assert_close(inputs.mean(0), torch.zeros(8), atol=1e-5, rtol=0)
            with torch.no_grad():
                self.linear.bias.fill_(7)

    def opt_fn(model: Any) -> Any:
        met.append(model.linear.bias[0].item())
        return sgd(model)

    tiny = spied(root, models={"scaled": Scaled}, opt_fn=opt_fn, preprocess=StandardScaler())
    tiny.train()
    assert met == [7]


def test_the_same_bits_on_repeat_and_others_for_another_fold(tmp_path: Path) -> None:
    one, again = spied(tmp_path / "one"), spied(tmp_path / "again")
    digests = [one.train(job).digest for job in one.jobs]
    torch.rand(5)
    assert digests == [again.train(job).digest for job in again.jobs]
    assert len(set(digests)) == len(digests)


def test_a_job_stopped_after_every_batch_is_pretrained_once_and_ends_alike(tmp_path: Path) -> None:
    whole = spied(tmp_path / "whole").train()
    SEEN.clear()
    pieces, attempts = spied(tmp_path / "pieces").train_with_stops()
    assert pieces.digest == whole.digest
    assert attempts > 3
    assert len(SEEN) == 1
    assert pieces.pretraining == whole_but_for_seconds(whole, pieces)


def whole_but_for_seconds(result: Result, other: Result) -> tuple[StageEpoch, ...]:
    pairs = zip(result.pretraining, other.pretraining, strict=True)
    return tuple(replace(mine, seconds=theirs.seconds) for mine, theirs in pairs)


def test_pretraining_metrics_are_in_the_result_and_the_checkpoint(root: Path) -> None:
    tiny = spied(root)
    _, events = tiny.attempt(stop=always)
    refs = checkpoints(events)
    result, _ = tiny.attempt(attempt=2, refs=refs)
    assert result is not None
    told = [(item.stage, item.number, dict(item.measures)) for item in result.pretraining]
    assert told == [("linear", 1, {"error": 0.75}), ("linear", 2, {"error": 0.5})]
    assert all(item.seconds >= 0 for item in result.pretraining)
    assert len(SEEN) == 1


@pytest.mark.parametrize("kept", [0, 1])
def test_after_damaged_checkpoints_an_older_one_or_pretraining_is_repeated(
    tmp_path: Path, kept: int
) -> None:
    whole = spied(tmp_path / "whole").train()
    SEEN.clear()
    tiny = spied(tmp_path / "damaged")
    _, events = tiny.attempt(stop=always)
    refs = checkpoints(events)
    assert [(ref.epoch, ref.batch) for ref in refs] == [(0, 1), (0, 0)]
    for ref in refs[: len(refs) - kept]:
        (tiny.root / ref.file).write_bytes(b"damaged")
    result, events = tiny.attempt(attempt=2, refs=refs)
    assert result is not None
    assert result.digest == whole.digest
    assert len(SEEN) == 2 - kept
    assert sum(isinstance(item, Note) and item.kind == "damage" for item in events) == 2 - kept


def test_processes_of_a_job_share_pretraining_that_accepts_summing(tmp_path: Path) -> None:
    met: list[bool] = []

    class Shared(DBN):
        def pretrain(
            self, inputs: Any, generator: Any, report: Any = None, summing: Any = None
        ) -> Any:
            met.append(summing is not None)
            with mock.patch.object(dbn_module, "LEAST_ROWS", 1):
                return super().pretrain(inputs, generator, report, summing)

    def stages(name: str, **given: Any) -> list[Any]:
        tiny = spied(
            tmp_path / name, models={"dbn": dbn(Shared)}, params=TrainerParams(epochs=1, **given)
        )
        found = train(tiny) if given else tiny.train()
        return [(item.stage, item.number, dict(item.measures)) for item in found.pretraining]

    one = stages("one")
    for trainer in ("averaging", "allreduce", "hogwild"):
        several = stages(trainer, trainer=trainer, processes=2)
        for (stage, epoch, mine), (name, number, theirs) in zip(one, several, strict=True):
            assert (stage, epoch) == (name, number)
            assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    assert met == [False, True, True, True]


def test_estimates_skip_pretraining(root: Path) -> None:
    tiny = spied(root)
    (facts,) = tiny.execute(command=Command.DRY_RUN)
    assert facts.fusible == {"spy": "it has pretraining, which each job runs separately"}
    tiny.execute(command=Command.ESTIMATE)
    assert SEEN == []
    tiny.execute(command=Command.MEASURE)
    assert len(SEEN) == len(tiny.jobs)


def test_an_exception_in_pretraining_fails_the_job(root: Path) -> None:
    class Bad(Plain):
        def pretrain(self, inputs: Any, generator: Any, report: Any) -> None:
            raise ValueError("no such luck")

    tiny = spied(root, models={"bad": Bad})
    (result,) = tiny.execute(tiny.jobs[0])
    assert (result.status, result.error) == ("failed", "ValueError: no such luck")


# A sweep, with workers

X, Y = samples(60)


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
            3, (X, Y), tmp_path / name, nn.CrossEntropyLoss(), 10,
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
