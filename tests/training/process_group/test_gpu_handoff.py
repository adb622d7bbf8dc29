"""The process of a job that computes on a GPU, for which a CPU stands here, beside the others."""

from __future__ import annotations

import os
import time
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asynckfold import TrainerParams
from asynckfold.jobs.messages import Note, Task
from asynckfold.system.heartbeat import Heartbeats
from asynckfold.training.multiprocess import base as several
from asynckfold.training.process_group import gpu_handoff
from asynckfold.training.process_group.gpu_handoff import HiddenGpu, hide_gpus, open_gpu
from tests.fake_gpu import CpuToTake
from tests.training.multiprocess.attempts import (
    OPTIMIZERS,
    attempt,
    noted,
    noting,
    train,
    train_with_stops,
)
from tests.training.tiny import Noisy, Plain, Tiny, never

KINDS: dict[str, Any] = {
    "partition_size": {"cpu": 10, "gpu": 30},
    "epochs_per_round": {"cpu": 1, "gpu": 3},
}


def tiny(root: Path, processes: Any = 3, epochs: int = 3, **given: Any) -> Tiny:
    """40 samples to train on, 20 to evaluate in batches of 4; a schedule that counts batches."""
    changes = {name: given.pop(name) for name in ("models", "opt_fn") if name in given}
    words = {"trainer": "averaging", "processes": processes, "epochs": epochs, **(given or KINDS)}
    params = TrainerParams.from_mapping({"eval_batch_size": 4, "lr_step": "batch", **words})
    schedules = {"onecycle": "onecycle"}
    models = changes.pop("models", {"noisy": Noisy})
    return Tiny(root, models, schedules, params=params, batch_size=5, **changes)


@pytest.mark.nightly(but=["sizes-momentum", "two with parts-adam"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "how",
    [
        {"partition_size": {"cpu": 10, "gpu": 30}, "steps_per_round": 2},
        {"epochs_per_round": {"cpu": 2, "gpu": 1}},
        {"processes": {"cpu": 1, "gpu": 2}, **KINDS},
    ],
    ids=["sizes", "passes", "two with parts"],
)
def test_where_it_computes_changes_no_bit(tmp_path: Path, optimizer: str, how: Any) -> None:
    def made(name: str) -> Tiny:
        return tiny(tmp_path / name, opt_fn=OPTIMIZERS[optimizer], **how)

    on_gpu = train(made("gpu"), CpuToTake(tmp_path / "taken"))
    on_cpus = train(made("cpus"))
    assert on_gpu.digest == on_cpus.digest
    assert on_gpu.averaged == on_cpus.averaged
    assert [item.train_loss for item in on_gpu.epochs] == [
        item.train_loss for item in on_cpus.epochs
    ]


def test_the_last_process_alone_takes_the_gpu_and_trains_its_part(tmp_path: Path) -> None:
    path, models = tmp_path / "noted", {"m": noting(tmp_path / "noted", Plain)}
    _, events = attempt(tiny(tmp_path / "run", models=models), gpu=CpuToTake(tmp_path / "taken"))
    (taker,) = map(int, (tmp_path / "taken").read_text().split())
    counts: dict[int, int] = {}
    for pid, numbers in noted(path):
        counts[pid] = counts.get(pid, 0) + len(numbers)
    assert counts.pop(taker) == 3 * 3 * 30
    assert taker != os.getpid()
    assert counts.pop(os.getpid()) == 3 * 10
    assert list(counts.values()) == [3 * 10]
    (remark,) = [item.text for item in events if isinstance(item, Note)]
    assert remark.endswith("samples × epochs of each process: 30, 30, 270 (the last 1 on the GPU)")


def test_stopped_after_every_round_the_bits_are_the_same(tmp_path: Path) -> None:
    def made(name: str) -> Tiny:
        return tiny(tmp_path / name, epochs=2, opt_fn=OPTIMIZERS["adam"])

    # What was saved goes on where there is no GPU, too, with the same bits here.
    gpus = cycle([CpuToTake(tmp_path / "taken"), None])
    result, attempts = train_with_stops(made("stopped"), gpus=gpus)
    assert attempts > 2
    whole = train(made("whole"), CpuToTake(tmp_path / "taken"))
    assert result.digest == whole.digest
    assert result.averaged == whole.averaged


class Slow(Plain):
    """Takes its time in any process but the first."""

    first = os.getpid()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05 if self.training and os.getpid() != self.first else 0)
        return super().forward(inputs)


def test_while_the_last_process_has_more_to_do_there_are_signs_of_life(tmp_path: Path) -> None:
    parts = {"partition_size": {"cpu": 5, "gpu": 30}, "epochs_per_round": {"cpu": 1, "gpu": 3}}
    made = tiny(tmp_path / "run", 2, 1, models={"slow": Slow}, **parts)
    heartbeat, gpu = Heartbeats(-1)[0], CpuToTake(tmp_path / "taken")
    task = Task(made.jobs[0], 1, ())
    several.train(made.bundle, task, made.batches, (), lambda events: None, never, heartbeat, gpu)
    # It takes 18 steps, and rank 0 the first batch alone; some more are of the evaluation.
    assert heartbeat.value >= 2 * 18


# The GPU


def test_a_gpu_is_hidden_until_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)

    def see() -> tuple[str | None, str | None]:
        names = ("CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK")
        return os.environ.get(names[0]), os.environ.get(names[1])

    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append(see()))
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    with hide_gpus(1) as gpu:
        assert see() == ("", "1")
        assert not torch.cuda.is_available()
        assert isinstance(gpu, HiddenGpu)
        assert gpu.take() == torch.device("cuda", 1)
    assert calls == [("3,5", None), 1]
    with pytest.raises(ZeroDivisionError), hide_gpus():
        raise ZeroDivisionError
    assert see() == ("3,5", None)
    with hide_gpus() as nothing:
        assert (nothing, see()) == (None, ("", "1"))


class FakeCuda:
    """CUDA with these GPUs, in its own order; it shows those that the variable names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
        self.uuids, self.shown, self.ready = uuids, list(uuids), False
        monkeypatch.setattr(gpu_handoff, "_opened", [])
        for name in ("init", "is_initialized", "device_count", "get_device_properties"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def is_initialized(self) -> bool:
        return self.ready

    def init(self) -> None:
        asked = os.environ.get("CUDA_VISIBLE_DEVICES")
        if not self.ready and asked is not None:
            self.shown = [uuid for uuid in self.uuids if uuid == asked]
        self.ready = True

    def device_count(self) -> int:
        return len(self.shown)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=self.shown[index].removeprefix("GPU-"))


@pytest.mark.parametrize("uuid", ["GPU-b", "MIG-c"])
def test_a_worker_sees_the_gpu_of_its_jobs_and_no_other(
    monkeypatch: pytest.MonkeyPatch, uuid: str
) -> None:
    cuda = FakeCuda(monkeypatch, "GPU-a", "GPU-b", "MIG-c")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert open_gpu(1, uuid, narrow=True) == 0
    assert (cuda.shown, os.environ["CUDA_VISIBLE_DEVICES"]) == ([uuid], "0,1")
    assert open_gpu(1, uuid, narrow=True) == 0
    with pytest.raises(RuntimeError, match=f"CUDA shows no GPU GPU-a, only {uuid}"):
        open_gpu(0, "GPU-a", narrow=True)


def test_the_users_own_process_finds_a_gpu_in_whatever_order_cuda_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch, "GPU-fast", "GPU-slow")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert open_gpu(0, "GPU-slow", narrow=False) == 1
    assert open_gpu(1, "GPU-fast", narrow=False) == 0
    assert len(cuda.shown) == 2
    assert open_gpu(1, "", narrow=False) == 1  # as before, without NVML


def test_a_hidden_gpu_is_taken_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, "GPU-a", "GPU-b")
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with hide_gpus(1, "GPU-b") as gpu:
        assert gpu is not None
        assert gpu.take() == torch.device("cuda", 0)
    assert cuda.shown == ["GPU-b"]
