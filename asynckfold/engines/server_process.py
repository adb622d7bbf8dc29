"""The fork server as its parent sees it: a process and the control pipe to it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from asynckfold.jobs.reproducibility import VARIABLES
from asynckfold.system import file_descriptors
from asynckfold.system.heartbeat import Heartbeats

_ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    ),
    "1",
)

CLOSE_SECONDS = 5.0
"""Limit of each step of closing."""

START_SECONDS = 2.5
"""Until a server has imported torch, about: 2 to 4 s on the machines that were measured."""

LIBRARY_SECONDS = 1.0
"""In which it imports a further large library, about."""

LATE_SECONDS = 0.5
"""Until one that takes longer has done so: whatever keeps it busy slows the caller, too."""


class ServerProcess:
    """A fork server, see `asynckfold.training.worker.fork_server.serve`.

    `lost` is set once it has hung up.
    """

    def __init__(self, preload: Sequence[str], nice: int) -> None:
        self.lost = self._has_forked = False
        self._imports = 1  # that it has not reported: of torch, and of further libraries
        self.libraries = library_variables()
        self._due = time.monotonic() + START_SECONDS
        self._lock = threading.Lock()
        file = file_descriptors.nameless_file(size=Heartbeats.SIZE)
        self.heartbeats = Heartbeats(file)
        self._process, self.control = start_server(file, preload, nice)
        os.close(file)

    @property
    def pid(self) -> int:
        """Process number."""
        return self._process.pid

    @property
    def serving(self) -> bool:
        """Whether it has imported all that it was asked for, and answers."""
        return self._imports == 0

    @property
    def seconds_to_serve(self) -> float:
        """Expected seconds until it serves; 0 once it does."""
        return 0.0 if self.serving else max(self._due - time.monotonic(), LATE_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether it runs; a dying server hangs up before it can be waited for."""
        return not self.lost and self._process.poll() is None

    def preload(self, names: Sequence[str]) -> None:
        """Let it import modules for the workers that it forks later."""
        with self._lock:
            self._imports += 1
            self._due = max(self._due, time.monotonic()) + LIBRARY_SECONDS * len(names)
        self.command("import", None, names)

    def has_imported(self) -> None:
        """Note that it has reported an import."""
        with self._lock:
            self._imports -= 1

    def fork(self, worker: int, pipe: int) -> None:
        """Start a worker with its end of a pipe.

        Raises
        ------
        OSError
            The server is gone; or no further file can be opened (``EMFILE``, ``ENFILE``).
        """
        with self._lock:
            file_descriptors.send(self.control, ("fork", worker), [pipe])
            self._has_forked = True

    def command(self, what: str, worker: int | None, *detail: Any) -> None:
        """Send a command; a server that is gone has taken its workers along."""
        with contextlib.suppress(OSError), self._lock:
            self.control.send((what, worker, *detail))

    def signal(self, worker: int, number: int) -> None:
        """Send a signal to a worker; the server, its parent, cannot mistake a reused pid."""
        self.command("signal", worker, number)

    def pin(self, worker: int, cores: Sequence[int]) -> None:
        """Pin all threads of a worker to these cores."""
        self.command("pin", worker, tuple(cores))

    def kill(self) -> None:
        """Kill it; its workers die with it."""
        self._process.kill()

    def stop(self) -> bool:
        """Hang up, wait, and kill it if need be; return whether it ended in order."""
        self.control.close()
        if not (self.serving and self._has_forked):
            # It may still import, and has no workers to end.
            self.kill()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_SECONDS)
        return self._process.returncode == 0


def start_server(
    heartbeats: int, preload: Sequence[str], nice: int
) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    """Start a fork server; return its process and the control pipe."""
    here, there = multiprocessing.Pipe()
    code = (
        f"import sys; sys.path[:] = {json.dumps(sys.path)}; "
        f"from asynckfold.training.worker.fork_server import serve; "
        f"serve({there.fileno()}, {heartbeats}, {json.dumps(list(preload))}, {nice})"
    )
    with there:
        server = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno(), heartbeats],
            env=environment(os.environ),
            start_new_session=True,
        )
    return server, here


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server and its workers.

    Libraries import with one thread: an existing thread pool would make a fork unsafe. Asking torch
    whether there is a GPU must not initialise CUDA before a fork. CUDA counts GPUs as NVML does,
    unless the user says otherwise.
    """
    defaults = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {**defaults, **variables, **_ONE_THREAD}


def library_variables() -> dict[str, str]:
    """Return the variables that libraries read once: a server keeps them for life."""
    names = (*VARIABLES, "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    return {name: os.environ[name] for name in names if name in os.environ}


def start_failure(number: int) -> str:
    """Return why no worker can be started, and the remedy, by errno."""
    return (
        f"no further worker process could be started: {os.strerror(number)}. Raise the limit of "
        "processes (ulimit -u, or pids.max of the container), of open files (ulimit -n) or of the "
        "size of a file (ulimit -f), or free memory; the same call continues"
    )
