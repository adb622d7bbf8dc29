"""Pinning and peak memory of real processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asynckfold.system import process

ALL = sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _cores_come_back() -> Iterator[None]:
    yield
    for thread in Path("/proc/self/task").iterdir():
        # Threads of libraries come and go.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), ALL)


def test_all_threads_are_pinned() -> None:
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert process.pin(0, ALL[-1:])
        masks = [os.sched_getaffinity(thread.native_id or 0) for thread in threads]
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert masks == [{ALL[-1]}] * 3
    assert os.sched_getaffinity(0) == {ALL[-1]}


@pytest.mark.parametrize("cores", [(4000,), (-1,), (10**30,)])
def test_a_missing_core_is_reported_and_changes_nothing(cores: tuple[int, ...]) -> None:
    assert not process.pin(0, cores)
    assert sorted(os.sched_getaffinity(0)) == ALL


def test_a_refusal_and_a_process_that_ended_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert not process.pin(child.pid, ALL[:1])

    def refuse(pid: int, cores: object) -> None:
        raise PermissionError("no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setaffinity", refuse)
        assert not process.pin(0, ALL)


def test_the_peak_counts_what_is_free_again_until_it_is_reset() -> None:
    size = 64 << 20
    before = process.peak_memory()
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    del block
    assert process.peak_memory() >= max(before, size)
    if not process.reset_peak_memory():
        pytest.skip("this kernel does not reset the peak")
    assert process.peak_memory() < before + size


FAULTS = """
import resource
from asynckfold.system import process as proc
kept = {keep}
def step():
    # Together more than what glibc keeps by itself.
    blocks = [bytearray(b"x") * (8 << 20) for _ in range(6)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
before = step()
faults = [step() for _ in range(20)][-1] - before
peaks = [proc.peak_memory()]
proc.reset_peak_memory()
print(int(kept), faults, peaks[0] - proc.peak_memory())
"""


def test_what_is_freed_is_used_again_without_page_faults() -> None:
    told = [
        subprocess.run(
            [sys.executable, "-c", FAULTS.format(keep=keep)], capture_output=True, check=True
        ).stdout.split()
        for keep in ("False", "proc.keep_freed_memory()")
    ]
    (_, faults, _), (kept, fewer, given_back) = [[int(word) for word in line] for line in told]
    if not kept:
        pytest.skip("the C library is no glibc")
    pages = 20 * 6 * (8 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults > pages / 2 > 10 * fewer
    if process.reset_peak_memory():
        assert given_back > 6 * 8 << 19


@pytest.mark.parametrize("name", ["nvidiactl", "kfd", "dxg"])
def test_a_gpu_is_known_by_its_device(tmp_path: Path, name: str) -> None:
    assert not process.has_gpu(dev=tmp_path)
    (tmp_path / name).touch()
    assert process.has_gpu(dev=tmp_path)
