"""The trial of GPUs in a process of its own, with a stand-in for CUDA."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest
import torch

from asynckfold.training.worker import gpu_trial


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on a core; what happens to a GPU is told by its UUID."""
    ones = torch.ones

    def init() -> None:
        uuid = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if uuid == "GPU-crash":
            os._exit(3)
        if uuid == "GPU-hang":
            time.sleep(60)
        if uuid == "GPU-old":
            raise RuntimeError("the NVIDIA driver on your system\n is too old")

    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch, "ones", lambda count, device: ones(count))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (5 + index, 10))
    seen = SimpleNamespace(name="Fake", uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu_trial, "EACH_SECONDS", 3.0)


@pytest.mark.nightly
@pytest.mark.usefixtures("_cuda")
def test_each_gpu_is_tried_and_a_bad_one_hides_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_trial.main(["GPU-crash", "GPU-good", "MIG-good", "GPU-old", "GPU-hang"])
    found = json.loads(capsys.readouterr().out)
    good = {"free": 5, "total": 10, "name": "Fake"}
    assert found == {
        "GPU-crash": {"failure": "its process died"},
        "GPU-good": {**good, "uuid": "GPU-good"},
        "MIG-good": {**good, "uuid": "MIG-good"},
        "GPU-old": {"failure": "RuntimeError: the NVIDIA driver on your system is too old"},
        "GPU-hang": {"failure": "no answer within 3 s"},
    }
    assert os.environ.get("CUDA_VISIBLE_DEVICES", "") != "GPU-good"


@pytest.mark.usefixtures("_cuda")
def test_without_uuids_all_that_torch_sees_is_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_trial.main([])
    found = json.loads(capsys.readouterr().out)
    assert {name: (item["free"], item["uuid"]) for name, item in found.items()} == {
        "0": (5, "GPU-abc"),
        "1": (6, "GPU-abc"),
    }
    monkeypatch.setattr(torch.version, "cuda", None)  # AMD's UUIDs do not name a device here
    gpu_trial.main([])
    assert json.loads(capsys.readouterr().out)["0"]["uuid"] == ""
