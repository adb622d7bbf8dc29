"""How does one training scale over nodes of several tasks?

::

    node 0: task 0 ─┐ one model in          steps of the whole node,
            task 1 ─┴ shared memory ◄─ every 16 batches of its first task ─►┐
    node 1: task 2 ─┐                                                       │ Server
            task 3 ─┴ one model in shared memory ◄─────────────────────────►┘

A task is a process, pinned to a core of its own. A node is a group of tasks on this machine that
update one model in shared memory without locks (Hogwild, Recht et al. 2011), each with its own
Adam. Several nodes are the replicas of a parameter server (Downpour SGD, Dean et al. 2012), one
more process: a node pushes how far its model has moved, by all its tasks, and applies the movement
of the others. Each push is divided by its staleness (Zhang et al. 2016). The server is reached
through the loopback, which is faster than a network between machines.

All tasks together train on each sample once an epoch, from the same weights; a DBN is pretrained
once before, untimed. Seconds are from when all tasks are ready until the last one has finished;
speedups are against one task without a server. From four cores on a model of computation,
communication between nodes and within them, and rest is fitted; rows beyond these cores are its.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from loops import BATCH, Table, arguments, cores, fast_adam, shown
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.multiprocessing import get_context
from trainers import DEEP_BELIEF, Work, normalised_images, trained_on

from asynckfold import Hogwild, Server
from asynckfold.models import DBN, MLP

EXCHANGE_STEPS = 16
"""Batches of a node's first task between two exchanges with the server."""

WORKS = (
    Work("MLP 784-128-10", MLP, 28, epochs=20, samples=6_000),
    Work("DBN 784-500-500-10", DEEP_BELIEF, 28, epochs=8, samples=6_000),
)

Cluster = tuple[int, int]
"""Nodes, and tasks of each."""


class NodeTraining:
    """One training on a cluster, by processes forked from this one."""

    def __init__(self, work: Work, begun: nn.Module, samples: Any, cluster: Cluster) -> None:
        self.work, (self.nodes, self.tasks) = work, cluster
        self.inputs, self.targets = samples
        self.count = trained_on(len(self.inputs))
        self.models = [copy.deepcopy(begun).share_memory() for _ in range(self.nodes)]
        # The server's model; with one node, the model that its tasks share.
        self.trained = copy.deepcopy(begun).share_memory() if self.nodes > 1 else self.models[0]
        shared: Any = torch.zeros(4, self.nodes * self.tasks, dtype=torch.float64)
        self.ready, self.through, self.began, self.ended = shared.share_memory_()

    def run(self) -> tuple[float, float]:
        """Return the seconds of the training, and the final accuracy."""
        context, server = get_context("fork"), None
        places = sorted(os.sched_getaffinity(0))[: self.nodes * self.tasks]
        calls = [context.Process(target=self.train, args=place) for place in enumerate(places)]
        if self.nodes > 1:
            server = Server(self.trained, address="127.0.0.1:0", staleness_aware=True)
            calls.append(context.Process(target=server.serve, args=(self.nodes,)))
        self.address = server.address if server else ""
        try:
            for call in calls:
                call.start()
            while any(call.is_alive() for call in calls):
                time.sleep(0.01)
                if any(call.exitcode for call in calls):
                    raise RuntimeError("a task ended with an error")
        finally:
            for call in calls:
                call.kill()
                call.join()
            if server:
                server.close()
        with torch.inference_mode():
            classes = self.trained(self.inputs[self.count :]).argmax(1)
        accuracy = float((classes == self.targets[self.count :]).double().mean())
        return float(self.ended.max() - self.began.min()), accuracy

    def train(self, number: int, core: int) -> None:
        """Run a task."""
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)
        node, place = divmod(number, self.tasks)
        model = self.models[node]
        optimizer = fast_adam(model)
        link = Link(model, self.address) if self.address and place == 0 else None
        batches = self.batches(number)
        for rows in batches[:3]:  # warms up
            self.differentiate(model, rows)
        meet(self.ready, number)
        self.began[number] = time.perf_counter()
        for step, rows in enumerate(batches, 1):
            self.differentiate(model, rows)
            optimizer.step()
            if link and step % EXCHANGE_STEPS == 0:
                link.exchange()
        if link:
            # Other tasks of the node may be some batches behind.
            meet(self.through[node * self.tasks : (node + 1) * self.tasks], 0)
            link.exchange()
            link.optimizer.close()
        self.through[number] = 1
        self.ended[number] = time.perf_counter()

    def batches(self, number: int) -> list[Tensor]:
        """Return the sample numbers of a task's batches; each epoch is dealt out."""
        orders = [
            torch.randperm(self.count, generator=torch.Generator().manual_seed(epoch))
            for epoch in range(self.work.epochs)
        ]
        batches = [rows for order in orders for rows in torch.split(order, BATCH)]
        return batches[number :: self.nodes * self.tasks]

    def differentiate(self, model: nn.Module, rows: Tensor) -> None:
        """Compute the gradient of a batch."""
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(self.inputs[rows]), self.targets[rows])
        loss.backward()  # type: ignore[no-untyped-call]


def meet(flags: Tensor, number: int) -> None:
    """Wait until all tasks have arrived."""
    flags[number] = 1
    while not flags.all():
        time.sleep(0.0005)


class Link:
    """Synchronises a node's model, which its tasks keep updating, with the server."""

    def __init__(self, model: nn.Module, address: str) -> None:
        self.model, self.before = model, copy.deepcopy(model)
        # With a learning rate of 1, the gradient is the movement, negated.
        self.optimizer = Hogwild(self.before.parameters(), 1.0, 1, 1, self.before, address=address)

    def exchange(self) -> None:
        """Push the model's movement since the last exchange, and apply that of the others."""
        pairs = list(zip(self.model.parameters(), self.before.parameters(), strict=True))
        now = [held.detach().clone() for held, _ in pairs]
        for (_, before), held in zip(pairs, now, strict=True):
            before.grad = before.detach() - held
        self.optimizer.step()
        with torch.no_grad():
            for (live, served), held in zip(pairs, now, strict=True):
                live.add_(served - held)


def clusters(most: int) -> list[Cluster]:
    """Return the clusters to measure on `most` cores: one task first."""
    counts = sorted({n for n in (1, 2, 3, 4, 8, 16, 32, 64, most) if n <= most})
    return [(nodes, tasks) for nodes in counts for tasks in counts if nodes * tasks <= most]


def scaling(seconds: Mapping[Cluster, float]) -> tuple[Callable[[int, int], float], str] | None:
    """Fit seconds by cluster; return the model, and in words.

    Non-negative least squares of the ratios; None with fewer than five clusters, which four terms
    always fit.
    """
    if len(seconds) < 5:
        return None

    def terms(nodes: int, tasks: int) -> list[float]:
        return [1 / (nodes * tasks), nodes - 1, tasks - 1, 1]

    ratios = np.array([terms(*cluster) for cluster in seconds]) / [[s] for s in seconds.values()]
    factors, _ = nnls(ratios, np.ones(len(ratios)))
    work, between, within, rest = (shown(round(float(factor), 9)) for factor in factors)
    return (
        lambda nodes, tasks: float(factors @ terms(nodes, tasks)),
        f"{work} / (nodes × tasks) + {between} × (nodes − 1) + {within} × (tasks − 1) + {rest} s, "
        f"off by at most {abs(ratios @ factors - 1).max():.0%}",
    )


def main() -> None:
    """Train each model on every division of the cores into nodes and tasks, in turns."""
    parsed = arguments(__doc__, 3, "--data", "--picture")
    table = Table(
        "One model on nodes of several tasks",
        "model | nodes | tasks a node | seconds | speedup | samples/s | accuracy | origin",
    )
    torch.set_num_threads(1)  # tasks are forked: this process must not start a thread pool
    every, laws = clusters(cores()), []
    for work in WORKS:
        if parsed.quick:
            work = work._replace(epochs=4, samples=2_000)
        samples = normalised_images(work.size, work.samples, parsed.data)
        torch.manual_seed(0)
        begun = work.model()
        if isinstance(begun, DBN):
            begun.pretrain(samples[0][: trained_on(len(samples[0]))], torch.Generator())
        turns = [
            {cluster: NodeTraining(work, begun, samples, cluster).run() for cluster in every}
            for _ in range(parsed.turns)
        ]
        seconds = {cluster: median(turn[cluster][0] for turn in turns) for cluster in every}
        rows: dict[Cluster, tuple[float, float | None, str]] = {
            cluster: (spent, median(turn[cluster][1] for turn in turns), "measured")
            for cluster, spent in seconds.items()
        }
        if law := scaling(seconds):
            laws.append(f"{work.name}: {law[1]}")
            most = cores()
            for nodes, tasks in ((1, 2 * most), (2, most), (4, most), (2 * most, 1), (4 * most, 1)):
                rows[nodes, tasks] = law[0](nodes, tasks), None, "model, not measured"
        trained = trained_on(len(samples[0])) * work.epochs
        for (nodes, tasks), (spent, accuracy, origin) in rows.items():
            speedup = seconds[1, 1] / spent
            table.add(*(work.name, nodes, tasks, spent, speedup, trained / spent, accuracy, origin))
    images = "MNIST" if parsed.data else "digits of scikit-learn, enlarged"
    table.print(f"Medians of {parsed.turns} turns; {images}.", *laws)
    if parsed.picture:
        draw(table.rows, parsed.picture)


def draw(rows: Sequence[Sequence[Any]], path: Path) -> None:
    """Draw cores against speedup, beside the ideal."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for place, (model, origin) in enumerate(dict.fromkeys((row[0], row[-1]) for row in rows)):
        mine = [row for row in rows if (row[0], row[-1]) == (model, origin)]
        # Rows of one node, and rows of one task a node: both begin with one core.
        for column, style, what in ((1, "o-", "one node of several tasks"), (2, "s--", "nodes")):
            points = sorted((row[1] * row[2], row[4]) for row in mine if row[column] == 1)
            label, (cores, speedups) = f"{model}, {what}, {origin}", zip(*points, strict=True)
            axes.plot(cores, speedups, style, color=f"C{place}", label=label)
    most = max(row[1] * row[2] for row in rows)
    axes.plot([1, most], [1, most], "k:", label="ideal")
    axes.set(xlabel="cores", ylabel="speedup")
    figure.legend(loc="outside lower center")
    figure.savefig(path)


if __name__ == "__main__":
    main()
