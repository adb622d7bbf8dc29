"""A sweep on a real GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, CVResults
from asynckfold.system.machine import Machine
from tests.toy import Tiny, adam, samples

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
    pytest.mark.skipif(not Machine().gpus().gpus, reason="needs NVML"),
]


def test_workers_run_on_the_gpu_and_this_process_makes_no_context(root: Path) -> None:
    kfold = AsyncKFold(
        3, samples(), root, nn.CrossEntropyLoss(), 10, baseline=None, verbose=0, devices=[0]
    )
    results = kfold([Tiny], ["cosine", "step"], adam, {"epochs": 3})
    assert set(results.to_frame("fold")["device"]) == {"cuda:0"}
    assert results.counts["done"] == 6
    assert not torch.cuda.is_initialized()


def test_the_cpu_is_used_when_it_is_asked_for(root: Path) -> None:
    kfold = AsyncKFold(
        3, samples(), root, nn.CrossEntropyLoss(), 10, baseline=None, verbose=0, devices="cpu"
    )
    results = kfold([Tiny], ["cosine"], adam, {"epochs": 1})
    assert set(results.to_frame("fold")["device"]) == {"cpu"}


@pytest.mark.usefixtures("deterministic_kernels")
def test_the_last_process_of_averaging_computes_on_it_with_the_same_bits(root: Path) -> None:
    cores, words = len(os.sched_getaffinity(0)), {"epochs": 3, "eval_batch_size": 4}
    if cores < 2:
        pytest.skip("needs two cores")

    def run(name: str) -> CVResults:
        kfold = AsyncKFold(
            3,
            samples(),
            root / name,
            nn.CrossEntropyLoss(),
            10,
            baseline=None,
            verbose=0,
            devices=[0],
            trainer="averaging",
            processes=2,
        )
        kinds = {
            "partition_size": {"cpu": 20, "gpu": 40},
            "epochs_per_round": {"cpu": 1, "gpu": 2},
        }
        # Dropout and running statistics, moments, an evaluation that both do.
        return kfold([Tiny], ["cosine"], adam, {**words, **kinds})

    one, two = run("one"), run("two")
    assert one.counts["done"] == 3
    assert set(one.to_frame("fold")["device"]) == {"cuda:0"}
    assert {item.averaged.samples for item in one.results.values() if item.averaged} == {(60, 240)}
    assert one.best_score_ == two.best_score_ > 0.6
    weights = [{name: item.weights for name, item in x.results.items()} for x in (one, two)]
    assert weights[0] == weights[1]
    assert not torch.cuda.is_initialized()


def test_after_a_fork_it_is_taken_where_the_parent_was_shown_none() -> None:
    """As a worker does: it differentiates on a CPU, after it has forked who takes the GPU."""
    script = """
import os, torch
from asynckfold.training.process_group.gpu_handoff import hide_gpus

def train(device):
    layer = torch.nn.Linear(3, 2).to(device)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(4, 3, device=device)).sum().backward()
    optimizer.step()
    return next(layer.parameters()).device.type

with hide_gpus(0) as gpu:
    child = os.fork()
    if child == 0:
        os._exit(0 if train(gpu.take()) == "cuda" else 1)
    assert train("cpu") == "cpu"
    on_cpu = os.fork()
    if on_cpu == 0:
        os._exit(0 if train("cpu") == "cpu" else 1)
    for pid in (child, on_cpu):
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
