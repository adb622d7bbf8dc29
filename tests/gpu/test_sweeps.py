"""Sweeps on a real GPU: the command, memory, a full GPU, a kill, bits."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, AsyncKFoldError, CVResults, RunStore
from asynckfold.system.machine import Machine
from tests.leftovers import descendants, gone
from tests.toy import Tiny, adam, samples

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
    pytest.mark.skipif(not Machine().gpus().gpus, reason="needs NVML"),
    pytest.mark.timeout(300),
]

HOME = Path(__file__).parents[2]
DATA = HOME.parent / "shared" / "data"


def command(
    *words: object, visible: str | None = None, code: str = "", fails: int = 0
) -> tuple[str, str]:
    """What ``asynckfold WORDS`` prints, in a process of its own."""
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    head = ["-c", code] if code else ["-m", "asynckfold"]
    ended = subprocess.run(
        [sys.executable, *head, *map(str, words)],
        cwd=HOME,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == fails, ended.stderr[-4000:]
    return ended.stdout, ended.stderr


def sweep_words(root: Path, *more: object) -> list[object]:
    return [
        *("run", "--data", "digits", "--limit", 400, "--models", "mlp,lenet5", "--folds", 3),
        *("--epochs", 2, "--baseline", "none", "--no-report", "--root", root, "--json", "-q"),
        *more,
    ]


def devices_of(root: Path) -> set[str]:
    with RunStore.read(root) as store:
        return {attempt.device for attempt in store.attempts()}


def test_the_doctor_finds_it() -> None:
    found = json.loads(command("doctor", "--json")[0])
    assert found["gpus"], found["gpu_reason"]
    hidden = json.loads(command("doctor", "--json", visible="")[0])
    assert (hidden["gpus"], bool(hidden["gpu_reason"])) == ([], True)


def test_a_sweep_from_the_shell_runs_on_it(root: Path) -> None:
    command(*sweep_words(root, "--devices", "cuda"))
    assert devices_of(root) == {"cuda:0"}
    with RunStore.read(root) as store:
        peaks = [result.peak_gpu_memory for result in store.results().values()]
    assert len(peaks) == 6
    assert min(peaks) > 0


@pytest.mark.skipif(not (DATA / "MNIST").is_dir(), reason="needs MNIST in ../shared/data")
def test_mnist_runs_on_it(root: Path) -> None:
    words = sweep_words(root, "--devices", "cuda", "--data-root", DATA)
    words[words.index("digits")] = "mnist"
    words[words.index(400)] = 6000
    command(*words)
    assert devices_of(root) == {"cuda:0"}


def test_without_visible_gpus_cores_are_used_or_the_call_is_refused(root: Path) -> None:
    command(*sweep_words(root), visible="")
    assert devices_of(root) == {"cpu"}
    _, told = command(*sweep_words(root / "no", "--devices", "cuda"), visible="", fails=2)
    assert "devices" in told


def run(root: Path, models: Any = (Tiny,), epochs: int = 3, **words: Any) -> CVResults:
    settings = {"baseline": None, "verbose": 0, "devices": [0], **words}
    kfold = AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, **settings)
    return kfold(models, ["cosine"], adam, {"epochs": epochs})


class Slow(Tiny):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01 if self.training else 0)
        # A step that waits for the GPU stays eager.
        return super().forward(inputs) + 0.0 * inputs.mean().item()


def test_two_jobs_share_it(root: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    assert run(root, [Slow], epochs=10, jobs_per_gpu=2, fuse=False).counts["done"] == 3
    with RunStore.read(root) as store:
        attempts = sorted(store.attempts(), key=lambda item: item.started)
    assert {item.device for item in attempts} == {"cuda:0"}
    pairs = itertools.pairwise(attempts)
    assert any(one.ended is not None and two.started < one.ended for one, two in pairs)


class Greedy(Tiny):
    """Needs 0.6 of the GPU in training: more than half, and not all."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and inputs.is_cuda:
            _, total = torch.cuda.mem_get_info(inputs.device)
            torch.empty(int(0.6 * total), dtype=torch.uint8, device=inputs.device)
            # Else a workspace of cuBLAS takes its place, and the next step needs as much again.
            torch.cuda.empty_cache()
        return super().forward(inputs)


def test_a_job_that_runs_out_of_its_memory_is_tried_again_alone(root: Path) -> None:
    gpu = Machine().gpus().gpus[0]
    if gpu.free < 0.8 * gpu.total:
        pytest.skip("others hold the GPU's memory")
    results = run(root, [Greedy, Tiny], jobs_per_gpu=2, fuse=False)
    assert results.counts["done"] == 6
    with RunStore.read(root) as store:
        events, attempts = store.events(), store.attempts()
    again = [event.job_id for event in events if event.kind == "oom_retry"]
    # The memory that the first one took is expected of the others.
    assert again
    assert all(name.startswith("Greedy") for name in again)
    assert [item.attempt for item in attempts if item.job_id.startswith("Tiny")] == [1, 1, 1]


SCRIPT = """
import sys, time, torch
torch.use_deterministic_algorithms(True)
from asynckfold import AsyncKFold
from torch import nn
from tests.toy import Tiny, adam, samples

class Slow(Tiny):
    def forward(self, inputs):
        time.sleep(0.02 if self.training else 0)
        # A step that waits for the GPU stays eager.
        return super().forward(inputs) + 0.0 * inputs.mean().item()

kfold = AsyncKFold(3, samples(), sys.argv[1], nn.CrossEntropyLoss(), 10, baseline=None, verbose=0,
                   devices=[0], engine=sys.argv[2])
results = kfold([Slow], ["cosine"], adam, {"epochs": 20})
print(results.fingerprint)
"""


def start(root: Path, engine: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, root, engine],
        cwd=HOME,
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        stdout=subprocess.PIPE,
        text=True,
    )


def has_checkpoint(root: Path) -> bool:
    try:
        with RunStore.read(root) as store:
            return any(store.checkpoints(job.id) for job in store.plan.jobs)
    except AsyncKFoldError:
        return False  # there is no run yet


@pytest.fixture
def processes() -> Iterator[Callable[[Path, str], subprocess.Popen[str]]]:
    begun: list[subprocess.Popen[str]] = []

    def begin(root: Path, engine: str) -> subprocess.Popen[str]:
        begun.append(start(root, engine))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("engine", ["auto", "process"])
def test_killed_and_called_again_it_has_the_bits_of_a_run_that_was_left_alone(
    tmp_path: Path, processes: Callable[[Path, str], subprocess.Popen[str]], engine: str
) -> None:
    killed = processes(tmp_path / "killed", engine)
    deadline = time.monotonic() + 120
    while not has_checkpoint(tmp_path / "killed"):
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.05)
    family = descendants(killed.pid)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert gone(family)
    fingerprints = []
    for name in ("killed", "whole"):
        process = processes(tmp_path / name, engine)
        printed, _ = process.communicate(timeout=200)
        assert process.returncode == 0
        fingerprints.append(printed.strip())
    assert fingerprints[0] == fingerprints[1] != ""
    text = "".join(path.read_text() for path in (tmp_path / "killed").rglob("log.txt"))
    assert "continues after epoch" in text
