"""The campaign's side of the gate: hears how far a run is, and holds whoever is aimed at."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from pathlib import Path


class Keeper:
    """Answers the processes of a run, one after another.

    Attributes
    ----------
    stage : str
        The phase that lasts now: ``"start"``, ``"resume"``, ``"train"``, ``"report"``,
        ``"shutdown"``.
    reached : Event
        Set when the phase that is aimed at was reached.
    held : int
        Who reached it.
    deaths : dict of int to float
        When the sweep wrote down that a worker died, by its process number.
    """

    def __init__(self, address: Path) -> None:
        self.stage = "start"
        self.reached = threading.Event()
        self.held = 0
        self.deaths: dict[int, float] = {}
        self._resumed = self._begun = False
        self._aim: tuple[str, int] | None = None
        self._waiting: socket.socket | None = None
        self._lock = threading.Lock()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(str(address))
        self._server.listen()
        self._here, self._there = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="keeper")
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self.release()
        self._there.close()
        self._thread.join()
        self._here.close()
        self._server.close()

    def begin(self, resumed: bool) -> None:
        """A command starts; there may be a plan to come back to."""
        self.release()
        with self._lock:
            self.stage, self._resumed, self._begun = "start", resumed, False

    def aim(self, phase: str, occurrence: int) -> None:
        """Hold whoever reaches the phase for this time from now on."""
        with self._lock:
            self.reached.clear()
            self._aim = (phase, occurrence)

    def release(self) -> None:
        """Aim no more; let whoever is held go on."""
        with self._lock:
            self._aim = None
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            _let_go(waiting)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as lines:
            for source in (self._here, self._server):
                selector.register(source, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    if source is self._here:
                        return
                    if source is self._server:
                        line = lines.enter_context(self._server.accept()[0])
                        selector.register(line, selectors.EVENT_READ)
                    elif not self._hear(source):
                        selector.unregister(source)
                        source.close()

    def _hear(self, line: socket.socket) -> bool:
        """Take one word; False when the process is gone."""
        try:
            said = line.recv(4096).decode()
        except OSError:
            return False
        if not said:
            return False
        word, pid = said.split()
        if not self._holds(word, int(pid), line):
            _let_go(line)
        return True

    def _holds(self, word: str, pid: int, line: socket.socket) -> bool:
        with self._lock:
            phase = self._phase(word)
            if self._aim is None or self._aim[0] != phase:
                return False
            self._aim = (phase, self._aim[1] - 1)
            if self._aim[1] > 0:
                return False
            self._aim, self._waiting, self.held = None, line, pid
            self.reached.set()
            return True

    def _phase(self, word: str) -> str | None:
        """Return the phase that a process's word means, if it means one now."""
        if word.startswith("died-"):
            self.deaths.setdefault(int(word[5:]), time.monotonic())
            return None
        if word in ("opened", "begun"):
            self._begun |= word == "begun"
            if not self._resumed:
                return None
            word = "resume"
        if word == "train" and not self._begun:
            return None  # a dry run
        if word == "shutdown" and self.stage not in ("report", "shutdown"):
            return None  # the end of a worker, not of the run
        if word in ("resume", "train", "report", "shutdown"):
            self.stage = word
        return word


def _let_go(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.send(b".")
