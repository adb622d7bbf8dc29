"""Fusion groups on a GPU, which is a stand-in that computes on a core."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults, InputError, RunStore
from tests import fake_gpu
from tests.several_inputs import TwoInputs, arrays
from tests.toy import Tiny, adam, samples


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch)


class Recurrent(nn.Module):
    """One that cannot be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.RNN(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(inputs)[0]
        return found


def sweep(root: Path, *models: Any, epochs: int = 2, **settings: Any) -> CVResults:
    settings = {"baseline": None, "verbose": 0, "devices": "cuda", "fuse": True, **settings}
    kfold = AsyncKFold(3, samples(), root, fake_gpu.StandIn(), 10, **settings)
    return kfold([*models], ["cosine"], adam, {"epochs": epochs})


def told(root: Path, kind: str) -> list[str]:
    with RunStore.read(root) as store:
        return [event.text for event in store.events() if event.kind == kind]


def test_jobs_on_a_gpu_are_fused_where_that_is_asked_for(root: Path) -> None:
    found = sweep(root / "run", Tiny)
    names = tuple(f"Tiny/cosine/fold-{fold}" for fold in range(3))
    assert found.plan.groups == (names,)
    assert set(found.to_frame("fold")["device"]) == {"cuda:0"}
    assert found.counts["done"] == 3
    (why,) = told(root / "run", "fusing")
    assert "fused: 3 of 3 jobs; largest deviation from separate training" in why
    # The same numbers one after another in this process.
    alone = sweep(root / "alone", Tiny, n_jobs=1, parallelize=False)
    assert alone.fingerprint == found.fingerprint
    # Continued: the groups stay, whatever is asked now.
    again = sweep(root / "run", Tiny, fuse="auto")
    assert (again.plan.groups, again.fingerprint) == (found.plan.groups, found.fingerprint)


def test_jobs_of_several_inputs_are_fused_on_a_gpu(root: Path) -> None:
    settings = {"baseline": None, "verbose": 0, "devices": "cuda", "parallelize": False}
    runs = [
        AsyncKFold(3, arrays(), root / f"{fuse}", fake_gpu.StandIn(), 10, fuse=fuse, **settings)(
            [TwoInputs], ["constant"], adam, {"epochs": 2}
        )
        for fuse in (True, False)
    ]
    assert [len(run.plan.groups) for run in runs] == [1, 0]
    for fold in range(3):
        fused, plain = (run.state_dict("TwoInputs/constant", fold=fold) for run in runs)
        torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-5)


def test_what_cannot_be_fused_is_refused_or_with_auto_trained_separately(root: Path) -> None:
    with pytest.raises(InputError) as refused:
        sweep(root, Tiny, Recurrent)
    assert "model Recurrent: layer layer (RNN) is recurrent" in str(refused.value)
    assert "Tiny" not in str(refused.value)
    assert not root.exists()
    # A sweep of seconds does not pay for the check.
    found = sweep(root, Tiny, Recurrent, fuse="auto", epochs=1)
    assert found.plan.groups == ()
    assert found.counts["done"] == 6


@pytest.mark.nightly
def test_a_group_on_a_gpu_that_was_interrupted_ends_with_the_same_bits(root: Path) -> None:
    whole = sweep(root / "whole", Tiny, epochs=3000)
    begun, sessions = sweep(root / "cut", Tiny, epochs=3000, time_budget_s=3.0), 1
    while begun.counts["pending"]:
        started = time.monotonic()
        begun = sweep(root / "cut", Tiny, epochs=3000, fuse=False, time_budget_s=3.0)
        sessions += 1
        assert time.monotonic() - started < 60
    assert sessions > 1
    assert begun.plan.groups == whole.plan.groups != ()
    assert begun.fingerprint == whole.fingerprint
