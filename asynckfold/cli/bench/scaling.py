"""How time scales with workers: clusters to measure, and a model of three terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from asynckfold.cli.bench.table import shown

FEWEST_COUNTS = 4
"""Measured counts from which on the model of three terms can be tested."""

FURTHER = (2, 4)
"""Multiples of the greatest measured count to which the model extrapolates."""


@dataclass(frozen=True)
class Cluster:
    """Nodes with `tasks` tasks each."""

    nodes: int
    tasks: int

    @property
    def workers(self) -> int:
        """Tasks of all nodes."""
        return self.nodes * self.tasks


def counts(most: int) -> list[int]:
    """Return the numbers of nodes, and of tasks, to try on `most` cores.

    Examples
    --------
    >>> counts(2), counts(12)
    ([1, 2], [1, 2, 3, 4, 8, 12])
    """
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return sorted({number for number in (*powers, 3, most) if number <= most})


def clusters(most: int) -> list[Cluster]:
    """Return the clusters to measure on `most` cores: one task first.

    Examples
    --------
    >>> [(item.nodes, item.tasks) for item in clusters(3)]
    [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1)]
    """
    found = [Cluster(nodes, tasks) for nodes in counts(most) for tasks in counts(most)]
    return [item for item in found if item.workers <= most]


@dataclass(frozen=True)
class Series:
    """A table: clusters in which one count, "nodes" or "tasks", grows."""

    name: str
    grows: str
    found: tuple[Cluster, ...]

    def count(self, cluster: Cluster) -> int:
        """Return the count that grows."""
        return int(getattr(cluster, self.grows))

    @property
    def more(self) -> list[Cluster]:
        """Larger clusters, for the model."""
        last = max(self.found, key=self.count)
        return [replace(last, **{self.grows: times * self.count(last)}) for times in FURTHER]


def series_of(found: Sequence[Cluster]) -> list[Series]:
    """Return tables of clusters, each of two rows or more; always the first one.

    Examples
    --------
    >>> [(item.name, len(item.found)) for item in series_of(clusters(2))]
    [('workers of 1 node', 2), ('nodes with 1 task each', 2)]
    """
    tables = []
    for fixed in dict.fromkeys(item.nodes for item in found):
        name = "workers of 1 node" if fixed == 1 else f"tasks of {fixed} nodes"
        same = tuple(item for item in found if item.nodes == fixed)
        tables.append(Series(name, "tasks", same))
    for fixed in dict.fromkeys(item.tasks for item in found):
        name = f"nodes with {fixed} task{'s' * (fixed > 1)} each"
        same = tuple(item for item in found if item.tasks == fixed)
        tables.append(Series(name, "nodes", same))
    return tables[:1] + [item for item in tables[1:] if len(item.found) > 1]


@dataclass(frozen=True)
class Scaling:
    """The seconds of n workers as computation / n + communication × (n − 1) + rest.

    ``error`` is the greatest deviation from a measured point, as a share of it.
    """

    computation: float
    communication: float
    rest: float
    error: float

    def seconds(self, count: float) -> float:
        """Return the modelled seconds of `count` workers."""
        return self.computation / count + self.communication * (count - 1) + self.rest

    def __str__(self) -> str:
        return (
            f"{shown(self.computation)} / n + {shown(self.communication)} × (n − 1) + "
            f"{shown(self.rest)} s, off by at most {self.error:.0%}"
        )


def scaling(seconds: Mapping[int, float]) -> Scaling | None:
    """Fit the model to seconds by count, by non-negative least squares of their ratios.

    Returns
    -------
    Scaling or None
        None with fewer than `FEWEST_COUNTS` counts, which three terms always fit.

    Examples
    --------
    >>> found = scaling({n: 8 / n + 0.1 * (n - 1) + 1 for n in (1, 2, 3, 4)})
    >>> round(found.computation, 6), round(found.communication, 6), round(found.rest, 6)
    (8.0, 0.1, 1.0)
    >>> scaling({1: 8.0, 2: 4.0}) is None
    True
    """
    if len(seconds) < FEWEST_COUNTS:
        return None
    n, measured = np.array(list(seconds)), np.array(list(seconds.values()))
    terms = np.stack([1 / n, n - 1.0, np.ones(len(n))], axis=1) / measured[:, None]
    found, _ = nnls(terms, np.ones(len(n)))
    computation, communication, rest = found.tolist()
    error = float(np.abs(terms @ found - 1).max())
    return Scaling(computation, communication, rest, error)
