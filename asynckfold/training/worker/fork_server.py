"""The clean process that workers are forked from.

It imports torch once and then runs nothing: no OpenMP thread exists, so forking is safe, and a
worker starts in some 10 ms instead of the 1.5 s of importing torch. As the parent of all workers it
alone can signal them without mistaking a reused pid. When the process that started it ends, in
whatever way, it kills them all.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, TextIO

from asynckfold.system import file_descriptors, process, terminal
from asynckfold.system.heartbeat import Heartbeats


def serve(descriptor: int, heartbeats: int, preload: list[str], nice: int = 0) -> None:
    """Fork and reap workers as the control pipe says, until it closes.

    Commands: ``("import", None, modules)``; ``("fork", name)``, with the worker's pipe as a
    descriptor after it, under a name chosen by the engine; ``("signal", name, number)``, ``("pin",
    name, cores)``, ``("kill", name)``. Answers: ``("serving", None, None)`` after the import of
    torch and each further import, ``("unborn", name, errno)``, ``("killed", name, None)``,
    ``("exited", name, (status, peak bytes since the last task began))``.

    `descriptor` is the control pipe, `heartbeats` shared memory; `nice` is the least niceness of
    all workers and their children.
    """
    if nice:
        process.renice(nice)
    # Inherited by the workers.
    process.keep_freed_memory()
    # An inherited mask might block SIGCHLD, which tells that a worker ended.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # A terminal or a batch system sends these to every process; the sweep decides what follows.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    process.adopt_orphans()
    # Imports leave no garbage; collecting took a tenth of the start.
    gc.disable()
    _warm_up()
    for name in ["asynckfold.training.worker.main", *preload]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    _Server(Connection(descriptor), Heartbeats(heartbeats)).run()
    # Frozen objects cannot be finalised in order, and there is nothing to save.
    os._exit(0)


def _warm_up() -> None:
    """Import torch, and what a first optimizer imports; compute nothing."""
    import torch

    from asynckfold.training.torch_settings import flush_denormals
    from asynckfold.training.worker.lazy_dynamo import import_on_demand

    flush_denormals()
    import_on_demand()
    torch.optim.SGD([torch.nn.Parameter(torch.empty(1))])


END_SECONDS, LOOK_SECONDS = 1.0, 0.002
"""How long to wait for killed workers to end, and how often to check."""

GENERATIONS = 100
"""How often to look for children of workers: one that forks for ever is not waited for."""


class _Server:
    def __init__(self, control: Connection[Any, Any], heartbeats: Heartbeats) -> None:
        self.control = control
        self.heartbeats = heartbeats
        self.workers: dict[int, int] = {}
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self.control.fileno(), selectors.EVENT_READ)
        selector.register(self.wake_read, selectors.EVENT_READ)
        self.tell("serving")
        try:
            while True:
                for key, _ in selector.select():
                    if key.fd == self.wake_read:
                        self.reap()
                    elif not self.obey():
                        return
        finally:
            self.end_all()

    def end_all(self) -> None:
        """Kill the workers, then the children that they leave."""
        for pid in self.workers:
            _kill(pid)
        end = time.monotonic() + END_SECONDS
        while self.workers and time.monotonic() < end:
            for pid in list(self.workers):
                if _reaped(pid):
                    del self.workers[pid]
            time.sleep(LOOK_SECONDS)
        self.end_orphans()

    def end_orphans(self) -> None:
        """Kill orphans of workers, which are in other sessions."""
        for _ in range(GENERATIONS):
            # Killed, each leaves its children to this process.
            orphans = process.children() - {*self.workers}
            alive = [pid for pid in orphans if not _reaped(pid)]
            if not alive:
                return
            for pid in alive:
                _kill_group(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(LOOK_SECONDS)

    def obey(self) -> bool:
        """Carry out one command; False if the other end is closed."""
        try:
            command, name, *arguments = self.control.recv()
        except (EOFError, OSError):
            return False
        if command == "fork":
            self.fork(name)
            return True
        if command == "import":
            self.preload(*arguments)
            return True
        for pid in [pid for pid, known in self.workers.items() if known == name]:
            if command == "kill":
                _kill(pid)
                self.tell("killed", name)
            elif command == "pin":
                # If the kernel refuses, it keeps its cores, with the same result.
                process.pin(pid, arguments[0])
            else:
                os.kill(pid, arguments[0])
        return True

    def preload(self, names: list[str]) -> None:
        """Import modules for future workers, which report import errors."""
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        gc.freeze()
        self.tell("serving")

    def fork(self, name: int) -> None:
        try:
            (pipe,) = file_descriptors.receive(self.control, 1)
        except OSError as error:
            self.tell("unborn", name, error.errno)
            return
        try:
            pid = os.fork()
        except OSError as error:
            self.tell("unborn", name, error.errno)
        else:
            if pid == 0:
                self.become_worker(name, pipe)
            self.workers[pid] = name
        finally:
            os.close(pipe)

    def tell(
        self, what: str, name: int | None = None, detail: int | tuple[int, int] | None = None
    ) -> None:
        """Answer; if the other end is closed, `obey` notices."""
        with contextlib.suppress(OSError):
            self.control.send((what, name, detail))

    def become_worker(self, name: int, pipe: int) -> None:
        """In the child: close what belongs to the server, serve, and exit."""
        status, stderr = 1, sys.stderr
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (self.wake_read, self.wake_write, self.control.fileno()):
                os.close(descriptor)
            stderr = _detach_output()
            from asynckfold.training.worker import main

            main.main(pipe, self.heartbeats[name])
            status = 0
        except SystemExit as request:
            # User code called sys.exit: without an answer, the sweep sees a dead worker.
            status = request.code if isinstance(request.code, int) else 1
        except BaseException:  # noqa: BLE001
            with contextlib.suppress(OSError, ValueError):
                traceback.print_exc(file=stderr)
        finally:
            terminal.flush()
            os._exit(status)

    def reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_read, 4096)
        for pid in list(self.workers):
            try:
                ended, status, used = os.wait4(pid, os.WNOHANG)
                peak = used.ru_maxrss * 1024
            except ChildProcessError:
                ended, status, peak = pid, 0, 0
            if ended:
                name = self.workers.pop(pid)
                # With its children, such as DataLoader workers.
                _kill_group(pid)
                self.tell("exited", name, (os.waitstatus_to_exitcode(status), peak))
        self.end_orphans()


def _detach_output() -> TextIO:
    """Point stdout and stderr to nowhere; return a stderr that forked processes do not inherit.

    A child of a worker may outlive everything, and a reader of the caller's output would wait for
    it. During a job, output goes to its log.
    """
    stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.register_at_fork(after_in_child=lambda: os.close(stderr.fileno()))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)
    return stderr


def _reaped(pid: int) -> bool:
    """Reap a child if it ended; return whether it is gone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _kill_group(pid: int) -> None:
    """Kill the process group that a worker leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _kill(pid: int) -> None:
    """Kill a worker that is not reaped yet, and its group."""
    _kill_group(pid)
    os.kill(pid, signal.SIGKILL)
