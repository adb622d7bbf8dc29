"""One run that is killed several times, continued to its end, and looked at whenever it rests."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asynckfold import AsyncKFoldError, RunStore
from asynckfold.store import job_folder
from tests import accounts
from tests.leftovers import (
    alive,
    descendants,
    described,
    gone,
    marked,
    processes,
    temporaries,
)
from tests.nursery import Nursery, Started
from tests.watched import gate
from tests.watched.kills import TARGETS, Family, Kill
from tests.watched.sweep import BATCH_SECONDS, BATCHES

INTERVAL = BATCHES * math.ceil(gate.EPOCH_SECONDS / (BATCHES * BATCH_SECONDS))
"""Batches between two checkpoints of a job, at most: they are written at the end of an epoch."""

GONE_SECONDS = 5.0
HANG_SECONDS = 120.0
ATTEMPTS = 3
"""After so many dead workers in one start, a job has failed."""


_SERIAL = itertools.count()


class Hurt(Exception):
    """A kill was no non-event."""


@dataclass
class Landed:
    """A kill that hit, and what came of it.

    Parameters
    ----------
    kill : Kill
        As it was meant.
    target, phase : str
        Who was hit, and where the run was.
    pid, at : int, float
        The process, and when.
    gone_seconds : float
        Until everything that goes with it was gone.
    """

    kill: Kill
    target: str
    phase: str
    pid: int
    at: float
    gone_seconds: float = 0.0
    detect_seconds: float | None = None


@dataclass
class Rest:
    """What a run had durably when it last rested."""

    finished: dict[str, str] = field(default_factory=dict)
    attempts: Counter[str] = field(default_factory=Counter)
    logs: dict[str, int] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)


class Chain:
    """One run and the processes of its command.

    Parameters
    ----------
    folder : Path
        A new folder for the run, its notes and its output.
    seconds : float
        How long a golden run takes.
    nursery : Nursery
        Starts the command.
    """

    def __init__(self, folder: Path, seconds: float, nursery: Nursery) -> None:
        self.root = folder / "run"
        self.landed: list[Landed] = []
        self.starts = 0
        self.redone = 0
        self._seconds = seconds
        self._nursery = nursery
        self._output = folder / "output.txt"
        self._notes = folder / "notes"
        self._notes.mkdir(parents=True)
        self._process: Started | None = None
        self._deaths = 0
        self._rest = Rest()

    def close(self) -> None:
        """End whatever is left."""
        self._kill_all(random.Random(0))
        if self._process is not None:
            self._process.wait()

    @property
    def remaining(self) -> float | None:
        """The share of jobs without a result; None before there is a plan."""
        try:
            with RunStore.read(self.root) as store:
                return 1 - len(store.finished()) / len(store.plan.jobs)
        except AsyncKFoldError:
            return None

    def finish(self) -> None:
        """Let the command end, and again where jobs failed because their workers were killed."""
        while True:
            try:
                code = self._running().wait(HANG_SECONDS)
            except subprocess.TimeoutExpired:
                raise Hurt(f"the command still runs after {HANG_SECONDS} s") from None
            self._process = None
            if self._ended(code):
                break
        stored = dict(line.split() for line in self._note("deaths").splitlines())
        for item in self.landed:
            if f"{item.pid}" in stored:
                item.detect_seconds = float(stored[f"{item.pid}"]) - item.at

    def strike(self, kill: Kill) -> bool:
        """Kill at the moment that is meant; False when the run ended, or its start did, before."""
        process = self._running()
        reached = self._moment(kill, process)
        stage = self._note("stage").strip().rpartition("\n")[2] or "start"
        if not reached or (kill.phase == "start" and stage != "start"):
            self._release()
            return False
        family = Family.of(process.pid)
        target = kill.target if TARGETS[kill.target](family) else "sweep"
        possible = TARGETS[target](family)
        held = int(self._note("held") or 0)
        pid = held if held in possible else random.Random(kill.index).choice(possible)
        doomed = self._doomed(target, pid)
        phase = stage if kill.phase in (None, "start") else str(kill.phase)
        landed = Landed(kill, target, phase, pid, time.monotonic())
        self._hit(target, pid, kill)
        self._release()
        self.landed.append(landed)
        if not gone(doomed, GONE_SECONDS):
            raise Hurt(f"after {kill} these stay: {described(doomed)}")
        landed.gone_seconds = time.monotonic() - landed.at
        if target in ("sweep", "everything"):
            process.wait()
            self._process = None
            self._look()
        elif target != "worker's child":  # whose death is no death of a job
            self._deaths += 1
        return True

    # The command

    def _running(self) -> Started:
        if self._process is None:
            for path in self._notes.iterdir():
                if path.name != "deaths":
                    path.unlink()
            if self.remaining is not None:
                (self._notes / "resumed").write_text("1")
            self._deaths = 0
            self.starts += 1
            environment = {
                **os.environ,
                self._nursery.mark: "1",
                gate.FOLDER: str(self._notes),
                "PYTHONFAULTHANDLER": "1",
                # What was not closed is to be seen in the output.
                "PYTHONWARNINGS": "default::ResourceWarning",
            }
            words = ["-m", "tests.watched.sweep", self.root]
            self._process = self._nursery.start(words, self._output, environment)
        return self._process

    def _family(self) -> set[int]:
        mark, others = self._nursery.mark, {self._nursery.pid}
        return {pid for pid in processes() - others if marked(pid, mark) and alive(pid)}

    # The kill

    def _note(self, name: str) -> str:
        path = self._notes / name
        return path.read_text() if path.exists() else ""

    def _release(self) -> None:
        """Aim no more; let whoever is held go on."""
        for name in ("aim", "held"):
            (self._notes / name).unlink(missing_ok=True)

    def _moment(self, kill: Kill, process: Started) -> bool:
        left = self.remaining
        factor = 1.0 if left is None else (1 + left) / 2
        if kill.phase is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(kill.share * self._seconds * factor)
            return process.poll() is None
        aim = f"{kill.phase} {kill.scaled(factor).occurrence} {next(_SERIAL)}"
        (self._notes / "next").write_text(aim)
        (self._notes / "next").rename(self._notes / "aim")
        deadline = time.monotonic() + HANG_SECONDS
        while not self._note("held"):
            if process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise Hurt(f"the command neither ends nor comes to: {kill}")
            time.sleep(0.005)
        if kill.delay:
            self._release()
            time.sleep(kill.delay)
        return process.poll() is None

    def _doomed(self, target: str, pid: int) -> set[int]:
        """Return what must be gone soon after the kill."""
        if target in ("sweep", "everything"):
            return self._family()
        return {pid} if target == "worker's child" else {pid, *descendants(pid)}

    def _hit(self, target: str, pid: int, kill: Kill) -> None:
        if target == "everything":
            self._kill_all(random.Random(kill.index))
            return
        with contextlib.suppress(ProcessLookupError):
            if target == "worker's group" and os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)

    def _kill_all(self, draw: random.Random) -> None:
        while family := sorted(self._family()):
            draw.shuffle(family)
            for member in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)

    # What must be true

    def _ended(self, code: int) -> bool:
        """The command ended by itself: True when the run is done."""
        if not gone(left := self._family(), GONE_SECONDS):
            raise Hurt(f"after the end these stay: {described(left)}")
        output = self._output.read_text(errors="replace")
        if found := re.search(r"resource_tracker|leaked|ResourceWarning", output):
            raise Hurt(f"it says {found[0]!r}:\n{output[-2000:]}")
        self._look()
        if code == 0:
            if names := temporaries(self.root):
                raise Hurt(f"temporary files stay: {names}")
            return True
        if code == 1 and self._deaths >= ATTEMPTS:
            return False
        raise Hurt(f"exit code {code}:\n{output[-3000:]}")

    def _look(self) -> None:
        """Nothing that was finished is lost or done again; each job continued where it could."""
        if self.remaining is None:
            return
        if wrong := accounts.wrong_in(self.root):
            raise Hurt(f"the accounts do not add up: {wrong}")
        with RunStore.read(self.root) as store:
            # The same command tries a failed job again.
            finished = {
                name: item.digest for name, item in store.results().items() if item.status == "done"
            }
            now = Rest(finished, Counter(item.job_id for item in store.attempts()))
            jobs = store.plan.jobs
            newest = {job.id: store.checkpoints(job.id)[:1] for job in jobs}
        for name, digest in self._rest.finished.items():
            if finished.get(name) != digest:
                raise Hurt(f"the result of {name} is lost, or is another one")
            if now.attempts[name] != self._rest.attempts[name]:
                raise Hurt(f"{name} was finished, and was tried again")
        for job in jobs:
            path = job_folder(self.root, job) / "log.txt"
            text = path.read_text() if path.exists() else ""
            self._check_continuation(job.id, text)
            now.logs[job.id] = len(text)
            now.batches[job.id] = sum(ref.epoch * BATCHES + ref.batch for ref in newest[job.id])
        self._rest = now

    def _check_continuation(self, name: str, text: str) -> None:
        """A job continues from its newest recorded checkpoint, and redoes little."""
        found = re.finditer(r"^epoch (\d+)/\d+ batch (\d+)/", text, re.MULTILINE)
        steps = [(match.start(), (int(match[1]) - 1) * BATCHES + int(match[2])) for match in found]
        since = self._rest.logs.get(name, 0)
        later = [step for place, step in steps if place >= since]
        if since and later and later[0] != self._rest.batches[name] + 1:
            raise Hurt(
                f"{name} continued with batch {later[0]}, but its newest checkpoint has "
                f"{self._rest.batches[name]}"
            )
        for (_, before), (_, after) in itertools.pairwise(steps):
            redone = before - after + 1
            self.redone = max(self.redone, redone)
            # One interval, and the one whose checkpoint was not recorded yet.
            if not 0 <= redone <= 2 * INTERVAL:
                raise Hurt(f"{name} went from batch {before} to {after}")


def canonical(root: Path) -> dict[str, Any]:
    """Return what must be the same, byte for byte, whatever happened to a run."""
    with RunStore.read(root) as store:
        results, fingerprint, plan = store.results(), store.fingerprint(), store.plan
        noted = {f"{name} {item.number}": _numbers(item) for name, item in store.epochs()}
    outputs = {name: item.outputs for name, item in results.items() if item.outputs is not None}
    # The fingerprint stands last: what comes before says where it differs.
    return {
        "plan": {"fingerprint": plan.fingerprint},
        "weights": {name: item.weights for name, item in results.items()},
        "outputs": {name: _sha256(array.tobytes()) for name, array in outputs.items()},
        "scores": {
            f"{name} {score}": float(value).hex()
            for name, item in results.items()
            for score, value in item.scores.items()
        },
        "epochs": {
            f"{name} {epoch.number}": _numbers(epoch)
            for name, item in results.items()
            for epoch in item.epochs
        },
        "progress": noted,
        "files": {
            str(path.relative_to(root)): _sha256(path.read_bytes())
            for path in sorted((root / "oof").iterdir())
        },
        "fingerprint": {"results": fingerprint},
    }


def _numbers(epoch: Any) -> list[str]:
    values = (epoch.train_loss, epoch.valid_loss, epoch.accuracy, epoch.lr)
    return [float(value).hex() for value in values]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def compare(found: dict[str, Any], golden: dict[str, Any]) -> None:
    """Raise `Hurt` with every part and every entry that differ from those of the golden run."""
    # Progress may be lost in a crash; what there is of it must be right.
    progress = {key: golden["progress"].get(key) for key in found["progress"]}
    differing = [
        f"{part}: {line}"
        for part, value in {**golden, "progress": progress}.items()
        for line in _differing(found[part], value)
    ]
    if differing:
        count = f"{len(differing)} values differ from the golden run:"
        raise Hurt("\n    ".join([count, *differing]))


def _differing(found: Any, golden: Any) -> list[str]:
    if not isinstance(golden, dict):
        return [] if found == golden else [f"{found} instead of {golden}"]
    return [
        f"{name} is {found.get(name)} instead of {golden.get(name)}"
        for name in sorted({*found, *golden})
        if found.get(name) != golden.get(name)
    ]
