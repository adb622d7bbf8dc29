"""The random-kill campaign: SIGKILL at any time and at every phase, then the same command again.

::

    kills, from the seed ──► chains of up to ten kills on one run
                               │
       start the command ◄─────┤        the gate tells how far the run is
            │ wait for the moment
            │ kill
            │ look: nothing left, nothing lost
            └── again, until the run is done: the same bits as the golden run

``python -m tests.chaos --seed 0 --kills 200`` makes the campaign and prints its table; it exits
with 1 when a run was hurt, and with 2 when the campaign proves nothing: the golden run is not the
same twice, or some phase got too few kills.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.leftovers import shared_memory
from tests.nursery import Nursery, nursery
from tests.watched.chain import INTERVAL, Chain, Hurt, Landed, canonical, compare
from tests.watched.kills import LAST, PHASES, TARGETS, Kill, planned

LONGEST_CHAIN = 10
MISSES = 6
"""In so many runs a kill may come too late, each time half as late, before it is given up."""


BOUND = ": by the rule of three, a kill does harm with a probability (95 % confidence) below"


class Invalid(Exception):
    """The campaign proves nothing."""


@dataclass
class Outcome:
    """What a campaign came to."""

    seed: int
    kills: int
    golden_seconds: float = 0.0
    seconds: float = 0.0
    landed: list[Landed] = field(default_factory=list)
    chains: int = 0
    starts: int = 0
    redone: int = 0
    failures: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def invalid(self) -> list[str]:
        """Return why this proves nothing: kills that never landed, phases with too few.

        Of a large campaign each phase must have got a tenth of the kills: 20 of 200.
        """
        wanted = max(1, self.kills // 10) if self.kills >= 100 else 1
        counts = Counter(item.phase for item in self.landed)
        thin = [phase for phase in PHASES if counts[phase] < wanted]
        return [*self.missed, *(f"{counts[phase]} kills at {phase}" for phase in thin)]


class Campaign:
    """Makes golden runs, then chains of kills, several at a time.

    Parameters
    ----------
    outcome : Outcome
        Filled in.
    kills : sequence of Kill
        What is to land.
    folder : Path
        For the runs; those that were not hurt are removed.
    nurseries : sequence of Nursery
        One for each run at a time: processes begin where importing torch has ended.
    """

    def __init__(
        self, outcome: Outcome, kills: Sequence[Kill], folder: Path, nurseries: Sequence[Nursery]
    ) -> None:
        self.outcome = outcome
        self._queue = deque(kills)
        self._nurseries = nurseries
        self._folder = folder
        self._draw = random.Random(f"chains of {outcome.seed}")
        self._lock = threading.Lock()
        self._misses: Counter[int] = Counter()
        self._golden: dict[str, Any] = {}

    def run(self) -> None:
        """Work until every kill has landed.

        Raises
        ------
        Invalid
            The golden run is not the same twice.
        Hurt
            It did not even end well undisturbed.
        """
        for starter in self._nurseries:
            starter.wait_until_ready()
        started, memory = time.monotonic(), shared_memory()
        first, second = self._each(self._make_golden)
        try:
            compare(first, second)
        except Hurt as hurt:
            raise Invalid(f"the golden run is not the same twice: {hurt}") from None
        self._golden, self.outcome.golden_seconds = first, time.monotonic() - started
        self._each(self._work)
        if left := shared_memory() - memory:
            self.outcome.failures.append(f"left in /dev/shm: {sorted(left)}")
        self.outcome.seconds = time.monotonic() - started

    def _each(self, work: Callable[[Nursery], Any]) -> list[Any]:
        """Work with all nurseries side by side."""
        with ThreadPoolExecutor(len(self._nurseries)) as threads:
            return list(threads.map(work, self._nurseries))

    def _make_golden(self, nursery: Nursery) -> dict[str, Any]:
        folder = self._folder / f"golden-{nursery.pid}"
        with contextlib.closing(Chain(folder, 0.0, nursery)) as chain:
            chain.finish()
            return canonical(chain.root)

    def _work(self, nursery: Nursery) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    return
                self.outcome.chains += 1
                number, length = self.outcome.chains, self._draw.randint(1, LONGEST_CHAIN)
            folder, seconds = self._folder / f"chain-{number}", self.outcome.golden_seconds
            with contextlib.closing(Chain(folder, seconds, nursery)) as chain:
                self._make_chain(chain, length)

    def _make_chain(self, chain: Chain, length: int) -> None:
        try:
            for _ in range(length):
                kill = self._next(chain.remaining)
                if kill is None or not self._lands(chain, kill):
                    break
            chain.finish()
            compare(canonical(chain.root), self._golden)
        except Hurt as hurt:
            self._failed(hurt, chain)
        else:
            shutil.rmtree(chain.root.parent)
        with self._lock:
            self.outcome.landed += [item for item in chain.landed if item.kill.index >= 0]
            self.outcome.starts += chain.starts
            self.outcome.redone = max(self.outcome.redone, chain.redone)
            print(
                f"{chain.root.parent.name}: {len(chain.landed)} kills, {chain.starts} starts; "
                f"{len(self.outcome.landed)} of {self.outcome.kills} kills so far, "
                f"{len(self.outcome.failures)} failures",
                file=sys.stderr,
                flush=True,
            )

    def _lands(self, chain: Chain, kill: Kill) -> bool:
        if chain.strike(kill):
            return True
        # It came too late: the same kill in the next run, and half as late, at last at once.
        if kill.index >= 0:
            with self._lock:
                self._misses[kill.index] += 1
                if self._misses[kill.index] < MISSES:
                    is_last = self._misses[kill.index] == MISSES - 1
                    self._queue.appendleft(kill.scaled(0.0 if is_last else 0.5))
                else:
                    self.outcome.missed.append(f"{kill}, tried {MISSES} times")
        return False

    def _next(self, remaining: float | None) -> Kill | None:
        """Take the first kill that is possible, with this share of the jobs still to do."""
        with self._lock:
            for kill in self._queue:
                if (kill.phase != "resume" or remaining) and (remaining != 0 or kill.phase in LAST):
                    self._queue.remove(kill)
                    return kill
            if self._queue and remaining is None:
                # Only kills at a resume are left: one that does not count goes before.
                return Kill(-1, "everything", "train", 9)
            return None

    def _failed(self, hurt: Hurt, chain: Chain) -> None:
        kills = [item.kill for item in chain.landed]
        again = " ".join(str(kill.index) for kill in kills if kill.index >= 0)
        with self._lock:
            self.outcome.failures.append(
                f"{hurt}\n  after {'; '.join(map(str, kills)) or 'no kill'}\n  again: python -m "
                f"tests.chaos --seed {self.outcome.seed} --kills {self.outcome.kills} "
                f"--only {again}"
            )


def table(outcome: Outcome, command: str) -> str:
    """Return the campaign as Markdown."""
    found = [item.detect_seconds for item in outcome.landed if item.detect_seconds is not None]
    stayed = max((item.gone_seconds for item in outcome.landed), default=0.0)
    aimed = sum(item.kill.phase is not None for item in outcome.landed)
    total, failed = len(outcome.landed), len(outcome.failures)
    lines = [
        "# Kills at random",
        "",
        "```console",
        f"$ {command}",
        "```",
        "",
        "After each SIGKILL the same command ran again, until the run was done. Then its weights,",
        "outputs, scores and epochs were compared byte for byte with those of an undisturbed run,",
        "which was made twice.",
        "Kills by where the run was and by who was hit:",
        "",
        *_counted(outcome.landed),
        "",
        f"- {total} kills, {aimed} aimed at a phase, {total - aimed} at any time; "
        f"{outcome.chains} runs, {outcome.starts - outcome.chains} resumes",
        f"- {failed} failures" + (f"{BOUND} {3 / total:.1%}" if total and not failed else ""),
        f"- most work done again by a job: {outcome.redone} batches, with a checkpoint at least "
        f"every {INTERVAL}",
        f"- longest until the sweep wrote down a dead worker: {max(found, default=0.0):.2f} s "
        f"(of {len(found)} that had a job)",
        f"- longest until everything that goes with the killed one was gone: {stayed:.2f} s",
        f"- seed {outcome.seed}; {outcome.seconds:.0f} s; "
        f"torch {metadata.version('torch')}, Python {platform.python_version()}, "
        f"{len(os.sched_getaffinity(0))} cores",
    ]
    if reasons := outcome.invalid():
        lines += ["", f"**This proves nothing: {', '.join(reasons)}.**"]
    return "\n".join([*lines, ""])


def _counted(landed: Sequence[Landed]) -> Iterator[str]:
    counts = Counter((item.phase, item.target) for item in landed)
    yield _row(["", *TARGETS, "all"])
    yield _row(["---"] * (len(TARGETS) + 2))
    for phase in PHASES:
        row = [counts[phase, target] for target in TARGETS]
        yield _row([phase, *row, sum(row)])
    column = [sum(counts[phase, target] for phase in PHASES) for target in TARGETS]
    yield _row(["all", *column, sum(column)])


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main(words: Sequence[str]) -> int:
    """Make a campaign; print its table."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Kill at random.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    parser.add_argument("--only", type=int, nargs="+", help="these kills alone")
    parser.add_argument("--report", type=Path, help="a file for the table")
    parsed = parser.parse_args(words)
    kills = planned(parsed.seed, parsed.kills)
    if parsed.only:
        kills = [kills[index] for index in parsed.only]
    outcome = Outcome(parsed.seed, parsed.kills)
    try:
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        print(f"The runs are in {folder}; those that were not hurt are removed")
        with contextlib.ExitStack() as stack:
            starters = [stack.enter_context(nursery()) for _ in range(parsed.at_once)]
            Campaign(outcome, kills, folder, starters).run()
    except (Hurt, Invalid) as error:
        print(f"invalid: {error}")
        return 2
    command = f"python -m tests.chaos {' '.join(words)}".strip()
    print(table(outcome, command))
    for failure in outcome.failures:
        print(f"FAILURE: {failure}\n")
    if parsed.report:
        parsed.report.write_text(table(outcome, command))
    if outcome.failures:
        return 1
    return 2 if outcome.invalid() and not parsed.only else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
