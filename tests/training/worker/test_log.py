"""The log of a job: what user code prints, kept to a length, with the last words of a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asynckfold import RunStore
from asynckfold.store import job_folder
from asynckfold.training.job_log import LOG_BYTES, JobLog
from tests.durability.work import FOLDS, PLAN, TARGETS

HOME = Path(__file__).parents[3]
JOB = PLAN.jobs[0]


@pytest.fixture
def begun(root: Path) -> Path:
    with RunStore.hold(root) as store:
        store.begin(PLAN, FOLDS, TARGETS)
    return root


def test_a_log_keeps_its_begin_and_its_end(begun: Path) -> None:
    with JobLog(begun, JOB) as log:
        log.write("the very first line\n")
        os.write(log.fileno(), bytes(2 * LOG_BYTES))
        log.write("the very last line\n")
        assert log.path.stat().st_size < LOG_BYTES
    data = (job_folder(begun, JOB) / "log.txt").read_bytes()
    assert data.startswith(b"the very first line\n")
    assert data.endswith(b"\0the very last line\n")
    assert data.count(b"the middle of this log was left out") == 1


FLOOD = """
import ctypes, os, resource, sys, torch, warnings
from asynckfold import AsyncKFold

warnings.simplefilter("ignore")
X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))

class Loud(torch.nn.Linear):
    def forward(self, inputs):
        for number in range(12):
            print(f"line {number} " + "x" * (1 << 20))
        os.write(1, bytes(range(256)) * 256)
        return super().forward(inputs)

class Crashing(Loud):
    def forward(self, inputs):
        super().forward(inputs)
        os.write(2, b"these were the last words\\n")
        ctypes.string_at(0)

kfold = AsyncKFold(
    2, (X, (X[:, 0] > 0).long()), sys.argv[1], torch.nn.CrossEntropyLoss(), 20,
    baseline=None, verbose=0, n_jobs=1, report=False, engine="process",
)
model = {"Loud": Loud, "Crashing": Crashing}[sys.argv[2]]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
results = kfold(
    {"A": lambda: model(4, 2)}, ["constant"],
    lambda model: torch.optim.SGD(model.parameters(), 0.1), {"epochs": 2},
)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(results.counts["done"], grown >> 10)
"""


@pytest.mark.nightly
def test_a_flood_of_prints_neither_fills_the_disk_nor_stops_the_job(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FLOOD, root, "Loud"], cwd=HOME, capture_output=True, text=True
    )
    jobs, grown = map(int, done.stdout.split())
    assert (jobs, done.stderr) == (2, "")
    assert grown < 50, "megabytes of the sweep's own memory"
    for fold in range(2):
        data = (root / f"A/constant/fold-{fold}/log.txt").read_bytes()
        assert len(data) <= LOG_BYTES
        assert data.startswith(b"line 0 xxx")
        _, cut, end = data.partition(b"the middle of this log was left out")
        assert cut
        # Prints take another way into the file, and may come a moment later.
        assert b"epoch 2 train_loss" in end


@pytest.mark.nightly
def test_a_crash_after_a_flood_leaves_its_stack(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FLOOD, root, "Crashing"], cwd=HOME, capture_output=True, text=True
    )
    assert "AllJobsFailedError" in done.stderr
    end = (root / "A/constant/fold-0/log.txt").read_bytes()[-4096:]
    assert b"these were the last words" in end
    assert b"Segmentation fault" in end
    assert b"in forward" in end
