"""How well does one queue fill 1 to 1,024 cores? Simulated; `--quick`: up to 64.

A sweep of 100 candidates and 10 folds is placed by the scheduler itself; only time is made up. A
candidate's jobs take a minute in the median, the longest candidates twenty times as long as the
shortest, and jobs of one candidate differ by a tenth. Ways:

- one queue: as asynckfold, no job waits for another candidate;
- by candidate: the folds of one candidate at once, then those of the next, as the ancestor did.

Use is the share of the core-seconds, until the last job ends, in which jobs train. No order can be
faster than the bound: all core-seconds divided by the cores, or the longest job.
"""

from __future__ import annotations

import math

import numpy as np
from loops import Table, arguments

from asynckfold.jobs.placement import NodeSize, Request
from asynckfold.planning.forecast import simulate

CANDIDATES, FOLDS, MOST = 100, 10, 1024


def durations() -> list[list[float]]:
    """Return the seconds of each job, a list for each candidate."""
    random = np.random.default_rng(0)
    candidates = 60 * np.exp(random.uniform(-1, 1, CANDIDATES) * math.log(20) / 2)
    seconds = candidates[:, None] * random.normal(1, 0.1, (CANDIDATES, FOLDS)).clip(0.7, 1.3)
    return [list(map(float, row)) for row in seconds]


def makespan(seconds: list[float], cores: int) -> float:
    """Return the seconds until the last of some jobs ends, started together."""
    requests = [Request(str(number), each) for number, each in enumerate(seconds)]
    return simulate(requests, [NodeSize(cores)]).makespan


def main() -> None:
    """Simulate both ways on each number of cores."""
    parsed = arguments(__doc__, 1)
    by_candidate = durations()
    every = [each for row in by_candidate for each in row]
    table = Table(
        "One queue on 1 to 1,024 cores, simulated",
        "cores | bound, minutes | one queue | use, % | by candidate | use of it, %",
    )
    cores, total = 1, math.fsum(every)
    while cores <= (64 if parsed.quick else MOST):
        ways = makespan(every, cores), math.fsum(makespan(row, cores) for row in by_candidate)
        (queue, use), (barrier, its_use) = (
            (seconds / 60, 100 * total / (cores * seconds)) for seconds in ways
        )
        table.add(cores, max(total / cores, *every) / 60, queue, use, barrier, its_use)
        cores *= 2
    table.print(f"{len(every)} jobs; the longest takes {max(every) / 60:.1f} minutes.")


if __name__ == "__main__":
    main()
