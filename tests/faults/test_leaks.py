"""Many runs in one process leave it as it was; a run needs no network."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch import nn

from asynckfold import AsyncKFold, RunStore
from asynckfold.engines import warm_pool
from tests.leftovers import alive, descendants, descriptors, parent_of, shared_memory
from tests.toy import Tiny, adam, samples

HOME = Path(__file__).parents[2]
PAGE = os.sysconf("SC_PAGE_SIZE")


def run(root: Path, *, parallelize: bool) -> str:
    settings = {"verbose": 0, "n_jobs": 2}
    kfold = AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 20, parallelize, **settings)
    return kfold({"tiny": Tiny}, ["constant"], adam, {"epochs": 1}).fingerprint


def resident(pid: int) -> int:
    """Return the resident set of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def semaphores(pid: int) -> int:
    """Return how many named semaphores a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("/sem." in line for line in lines)


def holdings(pids: list[int]) -> dict[str, object]:
    """Return what must not grow, of some processes; memory is apart."""
    return {
        "descriptors": [len(descriptors(pid)) for pid in pids],
        "threads": [len(os.listdir(f"/proc/{pid}/task")) for pid in pids],  # noqa: PTH208
        "semaphores": [semaphores(pid) for pid in pids],
        "threads of Python": len(threading.enumerate()),
        "shared memory": shared_memory(),
        "children": descendants(),
    }


def settled(pids: list[int]) -> dict[str, object]:
    """Return the holdings once they stay: a worker that has just answered still closes its log."""
    last, equal = holdings(pids), 0
    while equal < 10:
        time.sleep(0.05)
        now = holdings(pids)
        last, equal = now, equal + 1 if now == last else 0
    return last


def grown(before: list[int], pids: list[int]) -> list[int]:
    """Return by how many bytes the resident sets of some processes grew."""
    return [resident(pid) - old for pid, old in zip(pids, before, strict=True)]


@pytest.mark.nightly
def test_fifty_runs_in_one_process_leave_it_as_it_was(tmp_path: Path) -> None:
    me = [os.getpid()]
    # What is imported and cached at first is no leak.
    fingerprints = {run(tmp_path / f"first-{number}", parallelize=False) for number in range(10)}
    gc.collect()
    before, memory = holdings(me), [resident(os.getpid())]
    for number in range(50):
        fingerprints.add(run(tmp_path / str(number), parallelize=False))
    gc.collect()
    assert holdings(me) == before
    assert grown(memory, me)[0] < 50 * 100_000, "a tenth of a megabyte a run"
    assert len(fingerprints) == 1


def test_five_runs_with_worker_processes_leave_them_as_they_were(tmp_path: Path) -> None:
    run(tmp_path / "first", parallelize=True)
    gc.collect()
    pool = warm_pool._warm.kept
    assert pool is not None
    workers = [pid for pid in descendants() if parent_of(pid) == pool.server.pid]
    pids = [os.getpid(), pool.server.pid, *sorted(workers)]
    before, memory = settled(pids), [resident(pid) for pid in pids]
    for number in range(5):
        run(tmp_path / str(number), parallelize=True)
    gc.collect()
    assert all(map(alive, pids))
    assert settled(pids) == before
    assert max(grown(memory, pids)) < 5 * 2_000_000, "two megabytes a run"


WITHOUT_NETWORK = ["unshare", "--user", "--map-root-user", "--net"]

SCRIPT = """
import sys
from pathlib import Path
from tests.faults.test_leaks import run
run(Path(sys.argv[1]), parallelize=True)
from asynckfold.results.report.page import write_report
from asynckfold.store import RunStore
with RunStore.read(Path(sys.argv[1])) as store:
    print(write_report(store))
"""


@pytest.mark.nightly
def test_a_run_and_its_report_need_no_network(root: Path) -> None:
    tried = subprocess.run([*WITHOUT_NETWORK, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no network namespace may be made here: {tried.stderr.strip()}")
    done = subprocess.run(
        [*WITHOUT_NETWORK, sys.executable, "-c", SCRIPT, str(root)],
        cwd=HOME,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_file()
    with RunStore.read(root) as store:
        assert store.counts()["done"] == 2
