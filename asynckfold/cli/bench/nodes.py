"""One model on nodes of several tasks each: workers against time and speedup.

::

    node 0: task 0 ─┐ one model in          steps of the whole node,
            task 1 ─┴ shared memory ◄─ every 16 batches of its first task ─►┐
    node 1: task 2 ─┐                                                       │ Server
            task 3 ─┴ one model in shared memory ◄─────────────────────────►┘

A task is a process, pinned to a core of its own. A node is declared: a group of tasks on this
machine that update one model in shared memory without locks (Hogwild [1]_), each with its own Adam.
Several nodes are the replicas of a parameter server (Downpour SGD [2]_), which is a process more,
without a core of its own: a node pushes how far its model has moved, by all its tasks, and takes up
where the others have moved to. What several nodes push at a time is divided by its staleness [3]_.
The server is reached through the loopback, which is faster than a network between machines.

All tasks together train on each sample once an epoch; no task waits for another.

References
----------
.. [1] Recht, Ré, Wright, Niu (2011). Hogwild!: A lock-free approach to parallelizing stochastic
   gradient descent. NIPS 24.
.. [2] Dean et al. (2012). Large scale distributed deep networks. NIPS 25, section 4.1.
.. [3] Zhang, Gupta, Lian, Liu (2016). Staleness-aware async-SGD for distributed deep learning.
   IJCAI.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn

from asynckfold.cli.bench.loops import BATCH, cores, fast_adam, threads
from asynckfold.cli.bench.table import BenchTable, in_words, machine_facts, shown, silent
from asynckfold.cli.bench.trainers import (
    HELD_OUT,
    Outcome,
    Work,
    dbn,
    median_time,
    prepared,
    trained_on,
)
from asynckfold.models import DBN, MLP
from asynckfold.system import process
from asynckfold.training.parameter_server import Hogwild, Server
from asynckfold.training.process_group.members import ProcessGroup
from asynckfold.training.process_group.shared_tensors import share_model, shared

COLUMNS = (
    "table",
    "model",
    "nodes",
    "tasks a node",
    "seconds",
    "speedup",
    "samples/s",
    "seconds to goal",
    "speedup to goal",
    "accuracy",
    "origin",
)

WORKS = (
    Work("MLP 784-128-10", MLP, 28, epochs=20, target=0.9, samples=6_000),
    Work("DBN 784-500-500-10", dbn, 28, epochs=8, target=0.9, samples=6_000),
)
QUICK = tuple(replace(work, epochs=4, samples=2_000) for work in WORKS)

EXCHANGE_STEPS = 16
"""Batches of a node's first task between two exchanges with the server."""

LOOKS = 40
"""How often the model of the first node is copied meanwhile, to be judged afterwards."""

WAIT_SECONDS = 0.0005
"""Between two looks of a task at whether the others are there."""

WARM_UP_STEPS = 3

FEWEST_COUNTS = 4
"""Of measured counts, from which the model of three terms has something to be tested with."""

FURTHER = (2, 4)
"""Times the greatest measured count: how far the model is told."""

MEASURED, MODELLED = "measured", "model, not measured"


@dataclass(frozen=True)
class Cluster:
    """So many nodes with so many tasks each."""

    nodes: int
    tasks: int

    @property
    def workers(self) -> int:
        """Tasks of all nodes."""
        return self.nodes * self.tasks


ONE = Cluster(1, 1)


def counts(most: int) -> list[int]:
    """Return which numbers of nodes, and of tasks, are tried on so many cores.

    Examples
    --------
    >>> counts(2), counts(12)
    ([1, 2], [1, 2, 3, 4, 8, 12])
    """
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return sorted({number for number in (*powers, 3, most) if number <= most})


def clusters(most: int) -> list[Cluster]:
    """Return what is measured on so many cores: one task first.

    Examples
    --------
    >>> [(item.nodes, item.tasks) for item in clusters(3)]
    [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1)]
    """
    found = [Cluster(nodes, tasks) for nodes in counts(most) for tasks in counts(most)]
    return [item for item in found if item.workers <= most]


@dataclass(frozen=True)
class Series:
    """A table: clusters in which one count, "nodes" or "tasks", grows, and the other stays."""

    name: str
    grows: str
    found: tuple[Cluster, ...]

    def count(self, cluster: Cluster) -> int:
        """Return the count that grows."""
        return int(getattr(cluster, self.grows))

    @property
    def more(self) -> list[Cluster]:
        """Those beyond, of which the model tells."""
        last = max(self.found, key=self.count)
        return [replace(last, **{self.grows: times * self.count(last)}) for times in FURTHER]


def series_of(found: Sequence[Cluster]) -> list[Series]:
    """Return the tables that clusters give, each of two rows or more; the first one in any case.

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
    """A model of the seconds that n workers take: computation / n + communication × (n − 1) + rest.

    Parameters
    ----------
    computation, communication, rest : float
        Seconds, none below 0.
    error : float
        The greatest deviation from a measured point, as a share of it.
    """

    computation: float
    communication: float
    rest: float
    error: float

    def seconds(self, count: int) -> float:
        """Return what the model says for so many."""
        return self.computation / count + self.communication * (count - 1) + self.rest

    def __str__(self) -> str:
        return (
            f"{shown(self.computation)} / n + {shown(self.communication)} × (n − 1) + "
            f"{shown(self.rest)} s, off by at most {self.error:.0%}"
        )


def scaling(seconds: Mapping[int, float]) -> Scaling | None:
    """Fit the model to measured seconds by count, by non-negative least squares of their ratios.

    Returns
    -------
    Scaling or None
        None with fewer than `FEWEST_COUNTS` counts, which three terms meet whatever they are.

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


@dataclass(frozen=True)
class Point:
    """What a cluster takes: medians of what was measured, or what the model says."""

    seconds: float
    to_goal: float | None = None
    accuracy: float | None = None
    origin: str = MODELLED


def nodes_table(
    works: Sequence[Work] = WORKS,
    turns: int = 3,
    *,
    data: Path | None = None,
    tell: Callable[[str], None] = silent,
) -> BenchTable:
    """Train each model on every division of the cores into nodes and tasks, in turns.

    Parameters
    ----------
    works : sequence of Work
        What is trained: with Adam at 1e-3, in batches of 32 of each task.
    turns : int
        How often; medians are told.
    data : Path, optional
        Folder of MNIST; scikit-learn's digits, enlarged to its shape, without it.
    tell : callable
        Is told the rows of a model as soon as they are there.
    """
    rows: list[tuple[object, ...]] = []
    laws: list[str] = []
    origin = ""
    tables = series_of(clusters(cores()))
    # Tasks are forked: no pool of threads may come into being here.
    with threads(1):
        for work in works:
            samples, origin = prepared(work, data)
            measured = _measured(work, samples, turns)
            for series in tables:
                law = scaling({series.count(item): measured[item].seconds for item in series.found})
                points = {item: measured[item] for item in series.found}
                if law is not None:
                    laws.append(f"{series.name}, {work.name}: {law}")
                    points |= {item: Point(law.seconds(series.count(item))) for item in series.more}
                for row in _rows(series, work, trained_on(len(samples[0])), points, measured[ONE]):
                    rows.append(row)
                    tell(in_words(COLUMNS, row))
    return BenchTable(
        "One model on nodes of several tasks",
        COLUMNS,
        tuple(rows),
        (
            f"{origin}; all train the same samples for the same epochs, Adam 1e-3, batches of "
            f"{BATCH} of each task. The pretraining of a DBN was done once before, and is not "
            "timed: all go on from the same weights.",
            "A task is a process with a core of its own, a node a group of them on this machine: "
            "within a node one model in shared memory (Hogwild), between nodes a parameter server "
            f"through the loopback, every {EXCHANGE_STEPS} batches. Real nodes have a network in "
            "between.",
            f"Medians of {turns} turns, one after another, from the moment at which all tasks are "
            "ready until the last one is through. Speedups are against one task without a server. "
            f"Goal: an accuracy above {' or '.join(sorted({f'{w.target:.0%}' for w in works}))} on "
            f"the {HELD_OUT:.0%} of the samples that are held out; the model of the first node is "
            "copied meanwhile, and judged afterwards.",
            "Tables share their measurements. –: not reached in most turns, or not modelled.",
            _told(laws, max(len(series.found) for series in tables)),
        ),
        machine_facts(),
    )


def _measured(work: Work, samples: tuple[Any, Any], turns: int) -> dict[Cluster, Point]:
    begun = beginning(work, samples[0])
    fast_adam(begun)  # what the first optimizer of a process imports, no task has to
    found: dict[Cluster, list[Outcome]] = {cluster: [] for cluster in clusters(cores())}
    for _ in range(turns):
        for cluster, outcomes in found.items():
            outcomes.append(Training(work, begun, samples, cluster).run())
    trained = trained_on(len(samples[0])) * work.epochs
    return {
        cluster: Point(
            trained / median(item.speed for item in outcomes),
            median_time([item.seconds for item in outcomes]),
            median(item.accuracy for item in outcomes),
            MEASURED,
        )
        for cluster, outcomes in found.items()
    }


def _rows(
    series: Series, work: Work, count: int, points: Mapping[Cluster, Point], one: Point
) -> list[tuple[object, ...]]:
    return [
        (
            series.name,
            work.name,
            cluster.nodes,
            cluster.tasks,
            point.seconds,
            one.seconds / point.seconds,
            count * work.epochs / point.seconds,
            point.to_goal,
            one.to_goal / point.to_goal if one.to_goal and point.to_goal else None,
            point.accuracy,
            point.origin,
        )
        for cluster, point in points.items()
    ]


def _told(laws: Sequence[str], longest: int) -> str:
    """Say where the rows of the model come from, or why there are none."""
    if laws:
        return (
            f"{MODELLED}: seconds(n) = computation / n + communication × (n − 1) + rest, n what "
            "grows in the table, by non-negative least squares over its measured rows; the "
            f"network, and the bandwidth of memory, of further cores are unknown. {'; '.join(laws)}"
        )
    return (
        "Nothing is extrapolated beyond the cores at hand: a model of three terms (computation, "
        f"communication, rest) needs {FEWEST_COUNTS} counts in a table to be tested, and the "
        f"longest has {longest}. Other amounts of work would be more points, but none that says "
        "how communication grows with the workers."
    )


def beginning(work: Work, inputs: torch.Tensor) -> nn.Module:
    """Return the model with which every training begins: pretrained, where it can be."""
    torch.manual_seed(0)
    model = work.model()
    if isinstance(model, DBN):
        model.pretrain(inputs[: trained_on(len(inputs))], torch.Generator().manual_seed(0))
    return model


class Training:
    """One training on a cluster; its processes are forked from this one, and see what it holds.

    Parameters
    ----------
    work : Work
        Epochs, and the accuracy to reach.
    begun : nn.Module
        The model as it begins.
    samples : (Tensor, Tensor)
        Inputs and classes; the last ones are held out.
    cluster : Cluster
        Who trains.
    """

    def __init__(
        self, work: Work, begun: nn.Module, samples: tuple[Any, Any], cluster: Cluster
    ) -> None:
        self.work, self.cluster = work, cluster
        self.inputs, self.targets = samples
        self.count = trained_on(len(self.inputs))
        self.models = [copy.deepcopy(begun) for _ in range(cluster.nodes)]
        # Held by the server; of one node, what its tasks share.
        self.trained = copy.deepcopy(begun) if cluster.nodes > 1 else self.models[0]
        for model in {*self.models, self.trained}:
            share_model(model)
        flat = nn.utils.parameters_to_vector(begun.parameters())
        self.ready, self.through, self.moments, self.looks = shared(
            [
                *torch.zeros(2, cluster.workers, dtype=torch.int64),
                torch.full((LOOKS,), torch.nan, dtype=torch.float64),
                torch.zeros(LOOKS, len(flat)),
            ]
        )
        self.server: Server | None = None

    def run(self) -> Outcome:
        """Train, and judge what came of it."""
        own = sorted(os.sched_getaffinity(0))[: self.cluster.workers]
        if self.cluster.nodes > 1:
            self.server = Server(self.trained, address="127.0.0.1:0", staleness_aware=True)
        process_group = None
        try:
            # Rank 0 is this process, which waits.
            extra = int(self.server is not None)
            process_group = ProcessGroup(self.cluster.workers + extra, self.work_of, (own[0], *own))
            process_group.order(None)
            process_group.gather()
        finally:
            if process_group is not None:
                process_group.close()
            if self.server is not None:
                self.server.close()
        spans = [process_group.answers[rank] for rank in range(1, self.cluster.workers + 1)]
        began = min(span[0] for span in spans)
        seconds = max(span[1] for span in spans) - began
        return Outcome(
            self.count * self.work.epochs / seconds,
            self.seconds_to_goal(began),
            self.accuracy(self.trained),
        )

    def work_of(self, rank: int, order: object) -> tuple[float, float] | None:
        """In a forked process: be a task and return when it began and ended; or the server."""
        process.keep_freed_memory()
        if rank <= self.cluster.workers:
            return self.train(rank - 1)
        assert self.server is not None
        self.server.serve(self.cluster.nodes)
        return None

    def train(self, number: int) -> tuple[float, float]:
        """Do a task's part."""
        node, place = divmod(number, self.cluster.tasks)
        model = self.models[node]
        optimizer = fast_adam(model)
        link = None
        if self.server is not None and place == 0:
            link = Link(model, self.server.address)
        batches = self.batches(number)
        for rows in batches[:WARM_UP_STEPS]:
            self.differentiate(model, rows)
        self.meet(self.ready, number, slice(None))
        began = time.perf_counter()
        looked = 0
        for step, rows in enumerate(batches, 1):
            self.differentiate(model, rows)
            optimizer.step()
            if link is not None and step % EXCHANGE_STEPS == 0:
                link.exchange()
            if number == 0 and step * LOOKS // len(batches) > looked:
                looked = step * LOOKS // len(batches)
                self.look(looked - 1)
        if link is not None:
            # The others of the node may be some batches behind.
            mates = slice(number, number + self.cluster.tasks)
            self.meet(self.through, number, mates)
            link.leave()
        else:
            self.through[number] = 1
        return began, time.perf_counter()

    def batches(self, number: int) -> list[torch.Tensor]:
        """Return the samples of each batch of a task; batches of each epoch are dealt out."""
        orders = [
            torch.randperm(self.count, generator=torch.Generator().manual_seed(epoch))
            for epoch in range(self.work.epochs)
        ]
        batches = [rows for order in orders for rows in torch.split(order, BATCH)]
        return batches[number :: self.cluster.workers]

    def differentiate(self, model: nn.Module, rows: torch.Tensor) -> None:
        """Leave the gradient of a batch with the parameters."""
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(self.inputs[rows]), self.targets[rows])
        loss.backward()  # type: ignore[no-untyped-call]

    def meet(self, flags: torch.Tensor, number: int, others: slice) -> None:
        """Wait until all others are where this task is."""
        flags[number] = 1
        while not flags[others].all():
            time.sleep(WAIT_SECONDS)

    def look(self, place: int) -> None:
        """Copy the first node's model, and note when."""
        self.moments[place] = time.perf_counter()
        with torch.no_grad():
            self.looks[place] = nn.utils.parameters_to_vector(self.models[0].parameters())

    def seconds_to_goal(self, began: float) -> float | None:
        """Return after how many seconds a copied model was first above the goal."""
        model = copy.deepcopy(self.trained)
        for moment, look in zip(self.moments.tolist(), self.looks, strict=True):
            if moment == moment:
                nn.utils.vector_to_parameters(look, model.parameters())
                if self.accuracy(model) > self.work.target:
                    return float(moment - began)
        return None

    def accuracy(self, model: nn.Module) -> float:
        """Return the accuracy on the samples that are held out."""
        with torch.inference_mode():
            said = model(self.inputs[self.count :]).argmax(1)
        return float((said == self.targets[self.count :]).double().mean())


class Link:
    """Keeps a node's model and the parameters of the server together.

    Parameters
    ----------
    model : nn.Module
        In shared memory; tasks of the node go on updating it meanwhile.
    address : str
        Of the server.
    """

    def __init__(self, model: nn.Module, address: str) -> None:
        self.model = model
        self.before = copy.deepcopy(model)
        # With a learning rate of 1, a gradient is what is subtracted.
        self.optimizer = Hogwild(self.before.parameters(), 1.0, 1, 1, self.before, address=address)

    def exchange(self) -> None:
        """Push how far the model has moved since the last time, take up how far the others have."""
        pairs = list(zip(self.model.parameters(), self.before.parameters(), strict=True))
        now = [own.detach().clone() for own, _ in pairs]
        for (_, before), held in zip(pairs, now, strict=True):
            before.grad = before.detach() - held
        self.optimizer.step()
        with torch.no_grad():
            for (own, served), held in zip(pairs, now, strict=True):
                own.add_(served - held)

    def leave(self) -> None:
        """Push what is left, and part from the server."""
        self.exchange()
        self.optimizer.close()
