"""A keeper ends what a process has started, and removes its folder, however that process ends.

::

    caller ── socket ──► keeper ── runs a command, adopts what it leaves running
       ends ─ closes ──►        ── kills all of that, removes the folder
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from asynckfold.system import process

CLOSE_SECONDS = 20.0
"""How long `Keeper.close` waits: a node's processes may hold gigabytes of shared memory."""

END_SECONDS = 10.0
"""How long to wait for killed processes: one that is stuck in the kernel is left behind."""

_LOOK_SECONDS = 0.05

_OUTPUT = "output"


class Keeper:
    """Keeps a folder, and the processes of a command in it.

    Parameters
    ----------
    folder : Path
        Removed at the end.
    words : sequence of str, optional
        A command to run first, which may leave processes behind.
    environment : Mapping, optional
        Of the command.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._channel, there = socket.socketpair()
        self._buffer = b""
        arguments = (there.fileno(), str(folder), list(words))
        code = (
            f"import sys; sys.path[:] = {json.dumps(sys.path)}; "
            f"from asynckfold.engines.keeper import keep; keep(*{arguments!r})"
        )
        with there:
            starter = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                env=environment,
                start_new_session=True,
            )
        # It forks the keeper, which nobody then takes for a child of this process.
        starter.wait()

    def ended(self, seconds: float) -> tuple[int, str] | None:
        """Return exit code and output of the command, or None if it still runs after `seconds`.

        Raises
        ------
        EOFError
            The keeper is gone.
        """
        if not select.select([self._channel], [], [], seconds)[0]:
            return None
        while not self._buffer.endswith(b"\n"):
            if not (part := self._channel.recv(1 << 16)):
                raise EOFError("the keeper is gone")
            self._buffer += part
        code, output = json.loads(self._buffer)
        return code, output

    def close(self) -> None:
        """End everything, and wait for it."""
        if self._channel.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
            self._channel.settimeout(CLOSE_SECONDS)
            while self._channel.recv(1 << 16):
                pass
        self._channel.close()


def keep(descriptor: int, folder: str, words: list[str]) -> None:
    """Run the command, then wait for the other end to close, and clean up."""
    if os.fork():
        os._exit(0)
    # A terminal or a batch system sends these to every process; the other end decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    process.adopt_orphans()
    channel = socket.socket(fileno=descriptor)
    try:
        if words:
            told = _run(channel, Path(folder), words)
            channel.sendall(told)
        channel.recv(1)
    except OSError:
        pass  # the other end is gone
    finally:
        _end_children()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def _run(channel: socket.socket, folder: Path, words: list[str]) -> bytes:
    """Return exit code and output of a command as a line of JSON; stop it if nobody listens."""
    output = folder / _OUTPUT
    with output.open("wb") as file:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    while child.poll() is None:
        if select.select([channel], [], [], _LOOK_SECONDS)[0]:
            raise OSError("the other end is gone")
    text = output.read_text(errors="replace")[-4096:]
    return json.dumps([child.returncode, text]).encode() + b"\n"


def _end_children() -> None:
    """Kill all descendants: of each that ends, this process adopts the children."""
    end = time.monotonic() + END_SECONDS
    while (found := process.children()) and time.monotonic() < end:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_LOOK_SECONDS)
