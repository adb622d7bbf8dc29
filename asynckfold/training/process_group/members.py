"""The further processes of a job that trains on several: forked by its worker, gone with it.

::

    worker ─ fork ─► member: waits for an order ─ works, until done or asked to pause ─ answers
       └─ close: killed and reaped          what it raises, its worker raises; its death, too

A member is in the session and the process group of its worker: whoever kills that, kills it too. It
is forked before any thread of OpenMP exists, and has one thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import cloudpickle
import torch

from asynckfold.errors import WorkerDiedError
from asynckfold.system import process, terminal

Work = Callable[[int, Any], Any]
"""What a member does with its rank and an order; what it returns is the answer."""


@dataclass(eq=False)
class _Member:
    rank: int
    pid: int
    pipe: Connection[Any, Any]
    busy: bool = False


class _RemoteTraceback(Exception):  # noqa: N818
    """Shows, as the cause of an error, where in the member it was raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class ProcessGroup:
    """Processes that carry out orders, of ranks 1 and above; their worker has rank 0.

    Parameters
    ----------
    count : int
        How many, besides the worker.
    work : callable
        What they do; it sees what this process saw when it forked them, and what is shared.
    cores : sequence of int
        Of all ranks; empty for no pinning.
    """

    def __init__(self, count: int, work: Work, cores: Sequence[int] = ()) -> None:
        self._members: list[_Member] = []
        self._work, self._cores = work, cores
        self.answers: dict[int, Any] = {}
        self.enlist(range(1, count + 1))

    def enlist(self, ranks: Iterable[int]) -> None:
        """Fork members of these ranks, but for those that are there."""
        there = {member.rank for member in self._members}
        try:
            for rank in ranks:
                if rank not in there:
                    self._members.append(self._forked(rank))
        except BaseException:
            self.close()
            raise

    def _forked(self, rank: int) -> _Member:
        mine, theirs = Pipe()
        parent = os.getpid()
        terminal.flush()
        with warnings.catch_warnings():
            # The one further thread of a worker shortens its log, and holds no lock of ours.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                mine.close()
                for member in self._members:
                    member.pipe.close()
                process.die_with_parent(parent)
                process.pin(0, self._cores[rank : rank + 1])
                torch.set_num_threads(1)
                _obey(rank, theirs, self._work)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    terminal.flush()
                os._exit(0)
        theirs.close()
        return _Member(rank, pid, mine)

    @property
    def idle(self) -> bool:
        """Whether every member has answered its last order."""
        return not any(member.busy for member in self._members)

    def order(self, what: Any) -> None:
        """Give every member an order.

        Raises
        ------
        WorkerDiedError
            One of them is gone.
        """
        for member in self._members:
            member.busy = True
            try:
                member.pipe.send(what)
            except OSError:
                raise self._death(member) from None

    def hear(self, timeout_s: float = 0.0) -> None:
        """Take the answers that come within `timeout_s`, the first of which ends the waiting.

        Raises
        ------
        WorkerDiedError
            A member is gone.
        Exception
            What a member raised.
        """
        found = wait([member.pipe for member in self._members], timeout_s)
        for member in [member for member in self._members if member.pipe in found]:
            try:
                answer, error, text = member.pipe.recv()
            except (EOFError, OSError):
                raise self._death(member) from None
            member.busy = False
            if text:
                raise _unpacked(error, text) from _RemoteTraceback(text)
            self.answers[member.rank] = answer

    def gather(self, look: Callable[[], None] = lambda: None, every_s: float = 0.05) -> None:
        """Wait until every member has answered; `look` is called meanwhile.

        Raises
        ------
        WorkerDiedError
            A member is gone.
        Exception
            What a member raised.
        """
        while not self.idle:
            self.hear(every_s)
            look()

    def close(self) -> None:
        """Kill and reap all members; what they hold in shared memory stays as it is."""
        for member in self._members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        for member in self._members:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(member.pid, 0)
            member.pipe.close()
        self._members = []

    def _death(self, member: _Member) -> WorkerDiedError:
        """Tell how a member ended, whose pipe closed a moment ago."""
        for _ in range(100):
            pid, status = os.waitpid(member.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                break
            time.sleep(0.01)
        else:
            how = "its pipe closed"
        self._members.remove(member)
        member.pipe.close()
        text = f"process {member.rank + 1} of the job ended ({how}), and with it the attempt"
        return WorkerDiedError(member.pid, text)


def _obey(rank: int, pipe: Connection[Any, Any], work: Work) -> None:
    while True:
        try:
            what = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send((work(rank, what), None, ""))
        except BaseException as error:  # noqa: BLE001
            # The user's code may raise anything, of which not everything can be sent.
            text = traceback.format_exc()
            try:
                packed = cloudpickle.dumps(error)
            except Exception:  # noqa: BLE001
                packed = b""
            pipe.send((None, packed, text))


def _unpacked(packed: bytes, text: str) -> BaseException:
    try:
        error = cloudpickle.loads(packed)
    except Exception:  # noqa: BLE001
        error = None
    if isinstance(error, Exception):
        return error
    return RuntimeError(text.strip().splitlines()[-1])
