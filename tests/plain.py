"""The loop that a user of torch would write, with the random streams of a job spelled out."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from asynckfold import CVResults

BATCH, EPOCHS = 8, 2


def stream(seed: int, *path: int) -> int:
    """Return the seed of a part of a job."""
    return int(np.random.SeedSequence([seed, *path]).generate_state(1, np.uint64)[0])


def seed_all(seed: int) -> None:
    """Seed the global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def epoch_order(train: Any, seed: int, epoch: int) -> Any:
    """Return the samples of a training fold in the order of an epoch."""
    return np.random.default_rng([seed, 0, epoch]).permutation(train)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as the jobs do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def adam(model: nn.Module) -> optim.Optimizer:
    """Return an optimizer with torch's fused kernel, as the package chooses it."""
    return optim.Adam(model.parameters(), 1e-2, fused=True)


def train(
    results: CVResults,
    make: Callable[[], nn.Module],
    dataset: Any,
    loss_of: Callable[[nn.Module, Any, Any], Any],
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    batch: int = BATCH,
    epochs: int = EPOCHS,
    order_of: Callable[[Any, int, int], Any] = epoch_order,
    after_epoch: Callable[[nn.Module], object] = id,
) -> nn.Module:
    """Train the first job of a run by an ordinary loop over a DataLoader; return the model."""
    job, fold = results.plan.jobs[0], results.folds[0]
    with one_thread():
        seed_all(job.seed)
        model = make()
        optimizer = adam(model)
        for epoch in range(epochs):
            order = order_of(fold.train, job.seed, epoch).tolist()
            parts = [order[low : low + batch] for low in range(0, len(order), batch)]
            loader = DataLoader(
                dataset, batch_sampler=parts, collate_fn=collate, generator=torch.Generator()
            )
            seed_all(stream(job.seed, epoch + 1))
            model.train()
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss_of(model, inputs, targets).backward()
                optimizer.step()
            after_epoch(model.eval())
    return model


def assert_bits(results: CVResults, weights: dict[str, Tensor], outputs: Tensor) -> None:
    """Assert that the first job of a run has these weights and outputs, to the bit."""
    found = results.state_dict(results.candidates[0].name, fold=0)
    assert {name: item.tolist() for name, item in found.items()} == {
        name: item.tolist() for name, item in weights.items()
    }
    stored = results.results[results.plan.jobs[0].id].outputs
    assert stored is not None
    assert np.array_equal(stored, outputs.numpy())


def plain_loop(
    make: Callable[[], nn.Module],
    dataset: Any,
    results: CVResults,
    call: Callable[[nn.Module, Any], Tensor],
    collate: Callable[[list[Any]], Any] | None = None,
    order_of: Callable[[Any, int, int], Any] = epoch_order,
    criterion: Any = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Train the first job of a run; return its weights, and its outputs on the held-out fold."""
    loss, fold = copy.deepcopy(criterion or nn.CrossEntropyLoss()), results.folds[0]

    def loss_of(model: nn.Module, inputs: Any, targets: Any) -> Any:
        return loss(call(model, inputs), targets)

    model = train(results, make, dataset, loss_of, collate=collate, order_of=order_of)
    held_out = DataLoader(dataset, batch_sampler=[fold.valid.tolist()], collate_fn=collate)
    with one_thread(), torch.no_grad():
        outputs = torch.cat([call(model, inputs) for inputs, _ in held_out])
    return model.state_dict(), outputs
