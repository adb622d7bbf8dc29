"""What a campaign kills and when, as its seed says: decided before anything runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle

from tests.leftovers import descendants, is_server, parent_of

MOMENTS = ("spawn", "train", "checkpoint", "commit", "report", "shutdown")
"""Phases that are short beside the start: a kill at any time hits them seldom."""

AIMED, OF = 3, 5
"""So many of so many kills are aimed at moments."""

PHASES = ("start", "spawn", "train", "checkpoint", "commit", "report", "shutdown", "resume")

LAST = (None, "start", "report", "shutdown")
"""What is left of a run whose jobs are all done, when it is started again."""


@dataclass(frozen=True)
class Family:
    """The processes of one command."""

    sweep: int
    servers: tuple[int, ...]
    workers: tuple[int, ...]
    children: tuple[int, ...]

    @classmethod
    def of(cls, sweep: int) -> Family:
        below = descendants(sweep)
        servers = {pid for pid in below if is_server(pid)}
        workers = {pid for pid in below - servers if parent_of(pid) in servers}
        rest = below - servers - workers
        return cls(sweep, *(tuple(sorted(found)) for found in (servers, workers, rest)))


TARGETS: dict[str, Callable[[Family], tuple[int, ...]]] = {
    "worker": lambda family: family.workers,
    "worker's group": lambda family: family.workers,
    "worker's child": lambda family: family.children,
    "server": lambda family: family.servers,
    "sweep": lambda family: (family.sweep,),
    "everything": lambda family: (family.sweep,),
}
"""Of which processes one is hit."""

_WITHOUT_WORKER = ("server", "sweep", "everything")
AT: dict[str | None, tuple[str, ...]] = {
    None: tuple(TARGETS),
    "start": _WITHOUT_WORKER,
    "spawn": ("worker", *_WITHOUT_WORKER),
    "train": tuple(TARGETS),
    "checkpoint": ("worker", "worker's group", *_WITHOUT_WORKER),
    "commit": ("worker", *_WITHOUT_WORKER),
    "report": _WITHOUT_WORKER,
    "shutdown": _WITHOUT_WORKER,
    "resume": ("worker", *_WITHOUT_WORKER),
}
"""What is aimed at when: where there is no worker at work, none is."""

_REACHED = {"start": 2, "spawn": 2, "train": 60, "checkpoint": 8, "commit": 25}
_REACHED |= {"report": 10, "shutdown": 2, "resume": 3}
"""How often a phase is reached in a run, about."""


@dataclass(frozen=True)
class Kill:
    """One kill.

    Parameters
    ----------
    index : int
        Its number in the campaign.
    target : str
        A key of `TARGETS`.
    phase : str or None
        Where it is aimed at; None: at any time.
    occurrence : int
        The how-manieth time that the phase is reached from here on.
    share : float
        Of the time of a golden run, for a kill at any time.
    delay : float
        Seconds after the phase is reached; 0: while it is held there.
    """

    index: int
    target: str
    phase: str | None
    occurrence: int = 1
    share: float = 0.0
    delay: float = 0.0

    def __str__(self) -> str:
        if self.phase is None:
            return f"kill {self.index}: {self.target} after {self.share:.3f} of a run"
        return (
            f"kill {self.index}: {self.target} at {self.phase} {self.occurrence} "
            f"+ {self.delay * 1e3:.1f} ms"
        )

    def scaled(self, factor: float) -> Kill:
        """Return the same kill, for a run of which only a part is left."""
        return replace(
            self,
            occurrence=max(1, round(self.occurrence * factor)),
            share=self.share * factor,
            delay=self.delay * factor,
        )


def planned(seed: int, count: int) -> list[Kill]:
    """Return the kills of a campaign: three of five aimed at moments, two at any time.

    Of the latter, a tenth of all is aimed at each other phase: a start or a resume is over so soon
    that too few would hit it. The times of the rest are uniform, one in each of as many equal parts
    of a run.
    """
    tenth = max(1, count // 10)
    lasting = iter([phase for phase in PHASES if phase not in MOMENTS for _ in range(tenth)])
    moments = cycle(MOMENTS)
    phases = [
        next(moments) if index % OF < AIMED else next(lasting, None) for index in range(count)
    ]
    free = [index for index, phase in enumerate(phases) if phase is None]
    parts = random.Random(f"{seed}").sample(range(len(free)), len(free))
    part_of = dict(zip(free, parts, strict=True))
    return [
        _kill(random.Random(f"{seed}/{index}"), index, phase, part_of.get(index, 0), len(free))
        for index, phase in enumerate(phases)
    ]


def _kill(draw: random.Random, index: int, phase: str | None, part: int, parts: int) -> Kill:
    target = draw.choice(AT[phase])
    if phase is None:
        return Kill(index, target, None, share=(part + draw.random()) / parts)
    occurrence = draw.randint(1, _REACHED[phase])
    if phase == "start":
        delay = draw.uniform(0.0, 0.1)
    elif (phase, target) == ("spawn", "worker") or draw.random() < 0.5:
        delay = draw.uniform(0.001, 0.02)
    else:
        delay = 0.0
    return Kill(index, target, phase, occurrence, delay=delay)
