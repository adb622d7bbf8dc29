"""The further processes of a job: forked by its worker, ended with it.

::

    worker ─ fork ─► rank 1, 2 …: waits for an order ─ works, until done or paused ─ answers
       └─ close: kills and reaps them      the worker raises what they raise, and their death

Ranks share the session and the POSIX process group of their worker, so a signal to that group ends
all of them. They are forked before OpenMP starts a thread, and have one thread each. After an error
they end, so that no other rank waits for them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import Any

import cloudpickle
import torch
from torch.utils import _pytree as pytree

from asynckfold.errors import WorkerDiedError
from asynckfold.system import process, terminal
from asynckfold.training.process_group.shared_tensors import place, shared

RankWork = Callable[[int, Any], Any]
"""(rank, order) → answer."""


@dataclass(eq=False)
class _Rank:
    number: int
    pid: int
    pipe: Connection[Any, Any]
    busy: bool = False
    answer: Any = None


class ProcessGroup:
    """Processes of ranks 1 and above that carry out orders; their worker has rank 0.

    ``work`` sees what this process held at the fork, and what is shared; `cores` has a core for
    each rank, or is empty for no pinning.
    """

    def __init__(self, work: RankWork, cores: Sequence[int] = ()) -> None:
        self._ranks: list[_Rank] = []
        self._work, self._cores = work, cores

    def fork(self, ranks: Iterable[int]) -> None:
        """Fork those of these ranks that do not exist yet."""
        for number in {*ranks}.difference(rank.number for rank in self._ranks):
            self._ranks.append(self._forked(number))
        self._ranks.sort(key=lambda rank: rank.number)

    def _forked(self, number: int) -> _Rank:
        """Fork a rank that obeys by a pipe."""
        mine, theirs = Pipe()
        parent = os.getpid()
        terminal.flush()
        with warnings.catch_warnings():
            # The only other thread of a worker shortens its log, and holds no lock of ours.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                for other in (mine, *(rank.pipe for rank in self._ranks)):
                    other.close()
                process.die_with_parent(parent)
                process.pin(0, self._cores[number : number + 1])
                torch.set_num_threads(1)
                _obey(number, theirs, self._work)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    terminal.flush()
                os._exit(0)
        theirs.close()
        return _Rank(number, pid, mine)

    def order(self, what: Any) -> None:
        """Send every rank an order.

        Raises what a rank raised, or `WorkerDiedError` if one has ended.
        """
        packed = _packed(what)
        for rank in self._ranks:
            rank.busy = True
            try:
                rank.pipe.send_bytes(packed)
            except OSError:
                # What it raised before it ended, if it did, comes first.
                self.receive()
                raise _death(rank) from None

    def receive(self, timeout_s: float | None = 0.0) -> None:
        """Wait up to `timeout_s` for the first answer; take all that have come.

        Raises what a rank raised, or `WorkerDiedError` if one has ended.
        """
        ready = wait([rank.pipe for rank in self._ranks], timeout_s)
        for rank in [rank for rank in self._ranks if rank.pipe in ready]:
            try:
                rank.answer, error = pickle.loads(rank.pipe.recv_bytes())
            except (EOFError, OSError):
                raise _death(rank) from None
            rank.busy = False
            if error is not None:
                raise error

    def gather(self) -> list[Any]:
        """Return the answers of all ranks, in their order. Raises as `receive`."""
        while any(rank.busy for rank in self._ranks):
            self.receive(None)
        return [rank.answer for rank in self._ranks]

    def close(self) -> None:
        """Kill and reap all ranks; shared memory stays as they left it."""
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
        for rank in self._ranks:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(rank.pid, 0)
            rank.pipe.close()
        self._ranks = []


def _death(rank: _Rank) -> WorkerDiedError:
    """Return the error for a rank whose pipe has just closed; it stays to be reaped."""
    how = "its pipe closed"
    for _ in range(100):
        try:
            status = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        if status is not None:
            code = status.si_status
            is_exit = status.si_code == os.CLD_EXITED
            how = f"exit code {code}" if is_exit else signal.Signals(code).name
            break
        time.sleep(0.01)
    sentence = f"process {rank.number + 1} of the job ended ({how}), and with it the attempt"
    return WorkerDiedError(rank.pid, sentence)


def _obey(number: int, pipe: Connection[Any, Any], work: RankWork) -> None:
    while True:
        try:
            what = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            pipe.send_bytes(_packed((work(number, what), None)))
        except BaseException as error:  # noqa: BLE001
            # Rank 0 may have hung up during the order: then this reaches nobody.
            with contextlib.suppress(OSError):
                pipe.send_bytes(_packed_error(error))
            return


def _packed_error(error: BaseException) -> bytes:
    """Pickle an error with its traceback; user code may raise anything, picklable or not."""
    with contextlib.suppress(Exception):
        packed: bytes = cloudpickle.dumps(
            (None, ExceptionWithTraceback(error, error.__traceback__))
        )
        if isinstance(pickle.loads(packed)[1], Exception):
            return packed
    line = traceback.format_exception_only(error)[-1].strip()
    return pickle.dumps((None, RuntimeError(line)))


def _packed(tree: Any) -> bytes:
    """Pickle a tree with the values of its tensors, from any device.

    A pipe of torch would send a tensor as the name of shared memory, which a kill leaves behind.
    """
    # A view would be pickled with all of its storage.
    return pickle.dumps(
        pytree.tree_map_only(torch.Tensor, lambda item: item.detach().to("cpu", copy=True), tree)
    )


Part = Callable[[Any, int, int], Sequence[torch.Tensor]]
"""(order, rank, processes) → tensors."""


@dataclass(frozen=True)
class ParallelSum:
    """Forks processes that compute parts of a sum while a context lasts.

    ``processes`` includes this one, which has rank 0; `cores` has a core for each, or is empty for
    no pinning.
    """

    processes: int
    cores: Sequence[int] = ()

    @contextmanager
    def __call__(
        self, part: Part, seen: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
    ) -> Iterator[Callable[[Any], Sequence[torch.Tensor]]]:
        """Yield order → sum over all ranks of what `part` returns, of the shapes of `like`.

        `part` is called in every process with every order, on what this process holds now. `seen`
        is moved into shared memory: all ranks see changes made here with the next order.
        """
        place(seen, shared(seen))
        slots = [shared(like) for _ in range(1, self.processes)]

        def work(rank: int, order: Any) -> None:
            tensors = part(order, rank, self.processes)
            for slot, tensor in zip(slots[rank - 1], tensors, strict=True):
                slot.copy_(tensor)

        def total(order: Any) -> Sequence[torch.Tensor]:
            process_group.order(order)
            tensors = part(order, 0, self.processes)
            process_group.gather()
            for others in slots:
                for mine, theirs in zip(tensors, others, strict=True):
                    mine.add_(theirs)
            return tensors

        process.pin(0, self.cores[:1])
        process_group = ProcessGroup(work, self.cores)
        try:
            process_group.fork(range(1, self.processes))
            yield total
        finally:
            process_group.close()
