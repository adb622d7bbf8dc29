"""One training on nodes of several tasks.

::

    node 0: task 0 ─┐ one model in          steps of the whole node,
            task 1 ─┴ shared memory ◄─ every 16 batches of its first task ─►┐
    node 1: task 2 ─┐                                                       │ Server
            task 3 ─┴ one model in shared memory ◄─────────────────────────►┘

A task is a process, pinned to a core of its own. A node is a group of tasks on this machine that
update one model in shared memory without locks (Hogwild [1]_), each with its own Adam. Several
nodes are the replicas of a parameter server (Downpour SGD [2]_), one more process without a core of
its own: a node pushes how far its model has moved, by all its tasks, and applies the movement of
the others. With several nodes, each push is divided by its staleness [3]_. The server is reached
through the loopback, which is faster than a network between machines.

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
from typing import Any

import torch
from torch import nn

from asynckfold.cli.bench.loops import BATCH, fast_adam
from asynckfold.cli.bench.scaling import Cluster
from asynckfold.cli.bench.trainers import Outcome, Work, trained_on
from asynckfold.models import DBN
from asynckfold.system import process
from asynckfold.training.parameter_server import Hogwild, Server
from asynckfold.training.process_group.ranks import ProcessGroup
from asynckfold.training.process_group.shared_tensors import share_model, shared

EXCHANGE_STEPS = 16
"""Batches of a node's first task between two exchanges with the server."""

LOOKS = 40
"""Copies of the first node's model during training, to be scored afterwards."""

WAIT_SECONDS = 0.0005
"""Polling interval of a task that waits for the others."""

WARM_UP_STEPS = 3


def beginning(work: Work, inputs: torch.Tensor) -> nn.Module:
    """Return the initial model of every training: pretrained where it can be."""
    torch.manual_seed(0)
    model = work.model()
    if isinstance(model, DBN):
        model.pretrain(inputs[: trained_on(len(inputs))], torch.Generator().manual_seed(0))
    return model


class NodeTraining:
    """One training on a cluster, by processes forked from this one."""

    def __init__(
        self, work: Work, begun: nn.Module, samples: tuple[Any, Any], cluster: Cluster
    ) -> None:
        self.work, self.cluster = work, cluster
        self.inputs, self.targets = samples
        self.count = trained_on(len(self.inputs))
        self.models = [copy.deepcopy(begun) for _ in range(cluster.nodes)]
        # The server's model; with one node, the model that its tasks share.
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
        """Train and score."""
        own = sorted(os.sched_getaffinity(0))[: self.cluster.workers]
        if self.cluster.nodes > 1:
            self.server = Server(self.trained, address="127.0.0.1:0", staleness_aware=True)
        process_group = None
        try:
            # Rank 0 is this process, which only waits.
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
        """In a forked process: run a task and return its begin and end, or run the server."""
        process.keep_freed_memory()
        if rank <= self.cluster.workers:
            return self.train(rank - 1)
        assert self.server is not None
        self.server.serve(self.cluster.nodes)
        return None

    def train(self, number: int) -> tuple[float, float]:
        """Run a task; return its begin and end."""
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
            # Other tasks of the node may be some batches behind.
            mates = slice(number, number + self.cluster.tasks)
            self.meet(self.through, number, mates)
            link.leave()
        else:
            self.through[number] = 1
        return began, time.perf_counter()

    def batches(self, number: int) -> list[torch.Tensor]:
        """Return the sample numbers of a task's batches; each epoch is dealt out."""
        orders = [
            torch.randperm(self.count, generator=torch.Generator().manual_seed(epoch))
            for epoch in range(self.work.epochs)
        ]
        batches = [rows for order in orders for rows in torch.split(order, BATCH)]
        return batches[number :: self.cluster.workers]

    def differentiate(self, model: nn.Module, rows: torch.Tensor) -> None:
        """Compute the gradient of a batch."""
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(self.inputs[rows]), self.targets[rows])
        loss.backward()  # type: ignore[no-untyped-call]

    def meet(self, flags: torch.Tensor, number: int, others: slice) -> None:
        """Wait until all others have arrived too."""
        flags[number] = 1
        while not flags[others].all():
            time.sleep(WAIT_SECONDS)

    def look(self, place: int) -> None:
        """Copy the first node's model, with the time."""
        self.moments[place] = time.perf_counter()
        with torch.no_grad():
            self.looks[place] = nn.utils.parameters_to_vector(self.models[0].parameters())

    def seconds_to_goal(self, began: float) -> float | None:
        """Return the seconds until a copied model first exceeded the goal."""
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
    """Synchronises a node's model, which its tasks keep updating, with the server."""

    def __init__(self, model: nn.Module, address: str) -> None:
        self.model = model
        self.before = copy.deepcopy(model)
        # With a learning rate of 1, the gradient is the movement, negated.
        self.optimizer = Hogwild(self.before.parameters(), 1.0, 1, 1, self.before, address=address)

    def exchange(self) -> None:
        """Push the model's movement since the last exchange, and apply that of the others."""
        pairs = list(zip(self.model.parameters(), self.before.parameters(), strict=True))
        now = [own.detach().clone() for own, _ in pairs]
        for (_, before), held in zip(pairs, now, strict=True):
            before.grad = before.detach() - held
        self.optimizer.step()
        with torch.no_grad():
            for (own, served), held in zip(pairs, now, strict=True):
                own.add_(served - held)

    def leave(self) -> None:
        """Push the rest, and disconnect."""
        self.exchange()
        self.optimizer.close()
