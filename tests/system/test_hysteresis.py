"""However others come and go, a run changes its mind at most twice a minute."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from asynckfold.system.cpu_load import CHANGE_SECONDS
from asynckfold.system.limits import Host
from asynckfold.system.machine import Machine
from tests import size
from tests.system.fakes import FakeMachine

CORES = 3
TICK = 0.25


@dataclass(frozen=True)
class Wave:
    """Somebody who uses a share of a core for a part of each period, until they leave for good."""

    core: int
    period: float
    part: float
    begin: float
    share: float
    until: float

    def at(self, now: float) -> float:
        on = self.begin <= now < self.until and (now - self.begin) % self.period < (
            self.part * self.period
        )
        return self.share if on else 0.0


waves = st.lists(
    st.builds(
        Wave,
        st.integers(0, CORES - 1),
        st.floats(0.3, 90),
        st.floats(0.05, 1),
        st.floats(0, 60),
        st.floats(0.1, 1),
        st.floats(0, 100),
    ),
    max_size=5,
)


def most_in_a_minute(moments: list[float]) -> int:
    return max(
        (sum(first <= moment < first + CHANGE_SECONDS for moment in moments) for first in moments),
        default=0,
    )


def idle_cores(others: list[Wave], seconds: float) -> list[tuple[float, frozenset[int]]]:
    """What a machine under these waves says at each look."""
    fake, host = FakeMachine(CORES), Host(Path("/no"), Path("/no"), {}, lambda: range(CORES))
    found = Machine("cpu", host=host, readers=fake, clock=fake.clock)
    seen, begun = [], fake.now
    while fake.now - begun < seconds:
        now = fake.now - begun
        load = {
            core: min(1.0, sum(wave.at(now) for wave in others if wave.core == core))
            for core in range(CORES)
        }
        fake.run(TICK, foreign=load)
        seen.append((now, frozenset(found.load().idle)))
    return seen[1:]  # nothing is known at the first


@given(waves)
@settings(max_examples=size.examples(120))
def test_at_most_two_changes_a_minute_and_the_truth_in_the_end(others: list[Wave]) -> None:
    seen = idle_cores(others, 180)
    changes = [after[0] for before, after in pairwise(seen) if before[1] != after[1]]
    assert most_in_a_minute(changes) <= 2
    # All have left after 100 s, which is known some seconds and a minute later at the latest.
    assert seen[-1][1] == frozenset(range(CORES))
