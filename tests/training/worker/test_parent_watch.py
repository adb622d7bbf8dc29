"""A process that ends with the one that started it, and with nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[3]

BUSY = """
import sys
from asynckfold.training.worker.fork_server import exit_with_parent

sys.setrecursionlimit(200)  # no handlers must nest, however much arrives
with exit_with_parent(int(sys.argv[1])):
    print("busy", flush=True)
    for _ in range(20_000 if sys.argv[2] == "short" else 10**9):
        sum(range(5_000))
print("done", flush=True)
"""


def start(there: socket.socket, how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY, str(there.fileno()), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[there.fileno()],
        env={**os.environ, "PYTHONPATH": str(HOME)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    return process


@pytest.mark.timeout(120)
def test_a_process_exits_when_the_other_end_closes() -> None:
    here, there = socket.socketpair()
    with here, there:
        process = start(there, "long")
        here.close()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")
