"""One sweep on cores and on a GPU at once; the GPU is a stand-in, which computes on a core."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults, InputError, RunStore
from asynckfold.training.worker import execute
from tests import fake_gpu
from tests.system.test_gpus import FakeNvml, FakeNvmlError
from tests.toy import Tiny, adam, samples


class Wide(nn.Module):
    """Enough operations for a GPU, by the rule."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 1024), nn.ReLU(), nn.Linear(1024, 1024))
        self.last = nn.Linear(1024, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(inputs))


def sweep(
    root: Path,
    models: Sequence[Any] = (Tiny, Wide),
    epochs: int = 1,
    spares_caller: bool = False,
    **settings: Any,
) -> CVResults:
    criterion = fake_gpu.StandIn(spares_caller=spares_caller)
    settings = {"baseline": None, "verbose": 0, "fuse": False, **settings}
    kfold = AsyncKFold(3, samples(), root, criterion, 10, **settings)
    return kfold([*models], ["cosine"], adam, {"epochs": epochs})


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch)


@pytest.mark.usefixtures("_gpu")
def test_small_models_train_on_cores_beside_large_ones_on_the_gpu(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sweep(root / "both", refit=True)
    assert re.search(r"<th[^>]*>\s*device", found.report().read_text())
    kind = "cuda:0" if found.best_params_["model"] == "Wide" else "cpu"
    assert found.refitted is not None
    assert set(found.refitted.to_frame("fold")["device"]) == {kind}
    rows = found.to_frame("fold")
    assert set(zip(rows["model"], rows["device"], strict=True)) == {
        ("Tiny", "cpu"),
        ("Wide", "cuda:0"),
    }
    ranking = found.to_frame()
    assert dict(zip(ranking["model"], ranking["device"], strict=True)) == {
        "Tiny": "cpu",
        "Wide": "cuda",
    }
    assert "device" in str(found)
    assert (
        "GPU 0 is GPU-a00" in (root / "both" / "Wide" / "cosine" / "fold-0" / "log.txt").read_text()
    )
    with RunStore.read(root / "both") as store:
        software = next(iter(store.software()))
    notes = told(root / "both", "note")
    assert any(text.startswith("candidates: 1 on cores, 1 on GPUs, by the rule") for text in notes)
    assert software["GPU"] == "Fake"
    # One job at a time and in this process: the same numbers.
    alone = sweep(root / "alone", n_jobs=1, parallelize=False, devices=["cpu", 0])
    assert alone.fingerprint == found.fingerprint
    # A candidate more follows; the others keep their kinds and their results.
    more = sweep(root / "both", [Tiny, Wide, Again], jobs_per_gpu=2)
    assert {name: more.results[name].started for name in found.results} == {
        name: result.started for name, result in found.results.items()
    }
    # Without the GPU it is not continued: other bits.
    monkeypatch.setattr("asynckfold.system.machine.load_nvml", lambda: (None, "no GPU today"))
    with pytest.raises(InputError, match="GPU: Fake there, none here"):
        sweep(root / "both", [Tiny, Wide, Again, Tinier])


class Again(Wide):
    """Another large one."""


class Tinier(Tiny):
    """Another small one."""


@pytest.mark.nightly
@pytest.mark.usefixtures("_gpu")
def test_a_run_on_both_that_was_interrupted_ends_with_the_same_bits(root: Path) -> None:
    whole = sweep(root / "whole", epochs=100)
    begun, sessions = sweep(root / "cut", epochs=100, time_budget_s=3.0), 1
    while begun.counts["pending"]:
        begun, sessions = sweep(root / "cut", epochs=100, time_budget_s=3.0), sessions + 1
    assert sessions > 1
    assert begun.plan.devices == whole.plan.devices == {"Tiny/cosine": "cpu"}
    assert begun.fingerprint == whole.fingerprint


@pytest.mark.usefixtures("_gpu")
def test_devices_may_leave_no_choice(root: Path) -> None:
    on_gpu = sweep(root / "gpu", [Tiny], devices="cuda")
    assert set(on_gpu.to_frame("fold")["device"]) == {"cuda:0"}
    assert "device" not in on_gpu.to_frame()
    on_cores = sweep(root / "cpu", [Wide], devices="cpu")
    assert set(on_cores.to_frame("fold")["device"]) == {"cpu"}
    assert set(sweep(root / "list", [Tiny], devices=["cpu"]).to_frame("fold")["device"]) == {"cpu"}
    # A run that was begun on cores goes on there.
    again = sweep(root / "cpu", [Wide, Again])
    assert set(again.to_frame("fold")["device"]) == {"cpu"}


def test_a_gpu_that_torch_cannot_use_is_left_out_or_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "torch was built without CUDA"
    monkeypatch.setattr("asynckfold.system.machine.has_gpu", lambda: True)
    monkeypatch.setattr("asynckfold.system.gpus.torch_cuda", lambda: None)
    found = sweep(root / "auto", [Tiny])
    assert set(found.to_frame("fold")["device"]) == {"cpu"}
    notes = told(root / "auto", "note")
    assert any(text.startswith(f"no GPU is used: {why}") for text in notes)
    for devices in ("cuda", [0], ["cpu", 0]):
        with pytest.raises(InputError, match=why):
            sweep(root / "asked", [Tiny], devices=devices)


class Rebooted(FakeNvml):
    """GPUs that count the other way round than before."""

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'ba'[handle]}00"


@pytest.mark.nightly
@pytest.mark.usefixtures("_gpu")
def test_after_a_reboot_with_another_order_of_the_gpus_a_run_goes_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, free = (0, 8 * fake_gpu.GIB, 0), (8 * fake_gpu.GIB, 8 * fake_gpu.GIB, 0)

    def first_log(model: type) -> str:
        return (root / model.__name__ / "cosine" / "fold-0" / "log.txt").read_text()

    def boot(nvml: FakeNvml) -> None:
        monkeypatch.setattr("asynckfold.system.machine.load_nvml", lambda: (nvml, ""))

    boot(FakeNvml(full, free))
    begun = sweep(root, [Wide], devices="cuda")
    assert set(begun.to_frame("fold")["device"]) == {"cuda:1"}
    assert "GPU 1 is GPU-b00" in first_log(Wide)
    boot(Rebooted(free, full))
    found = sweep(root, [Wide, Again], devices="cuda")
    rows = found.to_frame("fold")
    assert list(rows["device"]) == ["cuda:1"] * 3 + ["cuda:0"] * 3
    assert "GPU 0 is GPU-b00" in first_log(Again)
    for name, result in begun.results.items():
        assert found.results[name].digest == result.digest
        assert found.results[name].started == result.started


@pytest.mark.chooses_process
@pytest.mark.usefixtures("_gpu")
def test_a_small_sweep_opens_the_gpu_in_the_process_of_the_caller(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "_device", fake_gpu.on_stand_in)
    here = sweep(root / "here", [Wide])
    assert {item.pid for item in here.results.values()} == {os.getpid()}
    assert set(here.to_frame("fold")["device"]) == {"cuda:0"}
    workers = sweep(root / "workers", [Wide], engine="process")
    assert os.getpid() not in {item.pid for item in workers.results.values()}
    assert here.fingerprint == workers.fingerprint


@pytest.mark.chooses_process
@pytest.mark.usefixtures("_gpu")
def test_workers_go_on_where_the_caller_cannot_open_the_gpu(root: Path) -> None:
    results = sweep(root, [Wide], spares_caller=True)
    assert results.counts["done"] == 3
    assert os.getpid() not in {item.pid for item in results.results.values()}
    with RunStore.read(root) as store:
        assert [item.outcome for item in store.attempts()].count("device_lost") == 1


@pytest.mark.chooses_process
@pytest.mark.usefixtures("_gpu")
def test_a_slice_of_a_gpu_is_seen_by_workers_only(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml((8 * fake_gpu.GIB, 8 * fake_gpu.GIB, 0))
    nvml.nvmlDeviceGetUUID = lambda handle: "MIG-a00"
    monkeypatch.setattr("asynckfold.system.machine.load_nvml", lambda: (nvml, ""))
    results = sweep(root, [Wide])
    assert os.getpid() not in {item.pid for item in results.results.values()}


class Flickering(FakeNvml):
    """A GPU that falls off the bus for a second, once a job on it has begun."""

    log, lost_at = Path(), 0.0

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        now = time.monotonic()
        if not self.lost_at and self.log.exists():
            self.lost_at = now
        if self.lost_at and now < self.lost_at + 1:
            raise FakeNvmlError("GPU is lost")
        return super().nvmlDeviceGetMemoryInfo(handle)


@pytest.mark.usefixtures("_gpu")
def test_a_gpu_lost_in_the_middle_is_waited_for_while_jobs_on_cores_go_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Flickering((8 * fake_gpu.GIB, 8 * fake_gpu.GIB, 0))
    nvml.log = root / "Wide" / "cosine" / "fold-0" / "log.txt"
    monkeypatch.setattr("asynckfold.system.machine.load_nvml", lambda: (nvml, ""))
    found = sweep(root)
    assert nvml.lost_at
    rows = found.to_frame("fold")
    assert set(rows["status"]) == {"done"}
    assert set(rows["device"][rows["model"] == "Wide"]) == {"cuda:0"}


@pytest.mark.usefixtures("_gpu")
def test_a_forecast_tells_who_runs_where(root: Path) -> None:
    kfold = AsyncKFold(3, samples(), root, fake_gpu.StandIn(), 10, verbose=0, fuse=False)
    found = kfold.forecast([Tiny, Wide], ["cosine"], adam, {"epochs": 1})
    assert found.plan.devices == {"Tiny/cosine": "cpu"}
    assert {span.gpu for span in found.simulation.spans if "Wide" in span.job} == {0}
    assert found.choice.devices.startswith("candidates: 1 on cores, 1 on GPUs")
    assert not root.exists()


# Fusion groups on a GPU


def fused(root: Path, *models: Any, epochs: int = 2, **settings: Any) -> CVResults:
    return sweep(root, models, epochs, **{"devices": "cuda", "fuse": True, **settings})


class Recurrent(nn.Module):
    """One that cannot be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.RNN(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(inputs)[0]
        return found


def told(root: Path, kind: str) -> list[str]:
    with RunStore.read(root) as store:
        return [event.text for event in store.events() if event.kind == kind]


@pytest.mark.usefixtures("_gpu")
def test_jobs_on_a_gpu_are_fused_where_that_is_asked_for(root: Path) -> None:
    found = fused(root / "run", Tiny)
    names = tuple(f"Tiny/cosine/fold-{fold}" for fold in range(3))
    assert found.plan.groups == (names,)
    assert set(found.to_frame("fold")["device"]) == {"cuda:0"}
    assert found.counts["done"] == 3
    (why,) = told(root / "run", "fusing")
    assert "fused: 3 of 3 jobs; largest deviation from separate training" in why
    # The same numbers one after another in this process.
    alone = fused(root / "alone", Tiny, n_jobs=1, parallelize=False)
    assert alone.fingerprint == found.fingerprint
    # Continued: the groups stay, whatever is asked now.
    again = fused(root / "run", Tiny, fuse="auto")
    assert (again.plan.groups, again.fingerprint) == (found.plan.groups, found.fingerprint)


@pytest.mark.usefixtures("_gpu")
def test_what_cannot_be_fused_is_refused_or_with_auto_trained_separately(root: Path) -> None:
    with pytest.raises(InputError) as refused:
        fused(root, Tiny, Recurrent)
    assert "model Recurrent: layer layer (RNN) cannot be traced" in str(refused.value)
    assert "Tiny" not in str(refused.value)
    assert not root.exists()
    # A sweep of seconds does not pay for the check.
    found = fused(root, Tiny, Recurrent, fuse="auto", epochs=1)
    assert found.plan.groups == ()
    assert found.counts["done"] == 6
