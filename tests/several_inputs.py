"""Models and data of several inputs, and a plain PyTorch loop that trains them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

from asynckfold import CVResults
from asynckfold.training.seeding import epoch_seed, seed_all

N = 60
BATCH = 8
EPOCHS = 2


class TwoInputs(nn.Module):
    """An image and an age, by name or by position; dropout draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.age = nn.Linear(12, 8), nn.Linear(1, 4)
        self.out = nn.Sequential(nn.Dropout(0.2), nn.Linear(12, 3))

    def forward(self, image: Tensor, age: Tensor) -> Tensor:
        ages = self.age(age[:, None].float() / 90).relu()
        return self.out(torch.cat([self.image(image.flatten(1)).relu(), ages], 1))


class OneDict(TwoInputs):
    """The same, of one dict."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["image"], batch["age"])


def arrays() -> tuple[dict[str, Any], Any]:
    """Return ({"image": (N, 3, 2, 2), "age": (N,)}, y), which can be learned."""
    draw = np.random.default_rng(0)
    images = draw.normal(size=(N, 3, 2, 2)).astype(np.float32)
    ages = draw.integers(0, 90, N)
    labels = (images.sum((1, 2, 3)) + ages / 30 > 1.5).astype(np.int64) + (ages > 60)
    return {"image": images, "age": ages}, labels


class Items(Dataset[Any]):
    """A map-style dataset whose items `form` makes of (inputs, target)."""

    def __init__(self, form: Callable[[dict[str, Any], Any], Any] = lambda *pair: pair) -> None:
        self.inputs, self.labels = arrays()
        self.form = form

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        one = {name: array[index] for name, array in self.inputs.items()}
        one["image"] = torch.from_numpy(one["image"])
        return self.form(one, int(self.labels[index]))


def adam(model: nn.Module) -> optim.Optimizer:
    """Return an optimizer with torch's fused kernel, as the package chooses it."""
    return optim.Adam(model.parameters(), 1e-2, fused=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as the jobs do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(
    results: CVResults,
    make: Callable[[], nn.Module],
    dataset: Dataset[Any],
    loss_of: Callable[[nn.Module, Any, Any], Any],
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    batch: int = BATCH,
    epochs: int = EPOCHS,
    after_epoch: Callable[[nn.Module], object] = id,
) -> nn.Module:
    """Train the first job of a run by an ordinary loop over a DataLoader; return the model."""
    job, fold = results.plan.jobs[0], results.folds[0]
    with one_thread():
        seed_all(job.seed)
        model = make()
        optimizer = adam(model)
        for epoch in range(epochs):
            order = np.random.default_rng([job.seed, 0, epoch]).permutation(fold.train).tolist()
            parts = [order[low : low + batch] for low in range(0, len(order), batch)]
            loader = DataLoader(
                dataset, batch_sampler=parts, collate_fn=collate, generator=torch.Generator()
            )
            seed_all(epoch_seed(job.seed, epoch))
            model.train()
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss_of(model, inputs, targets).backward()
                optimizer.step()
            after_epoch(model.eval())
    return model


def plain_loop(
    make: Callable[[], nn.Module],
    dataset: Dataset[Any],
    results: CVResults,
    call: Callable[[nn.Module, Any], Tensor],
    collate: Callable[[list[Any]], Any] | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Train the first job of a run with a DataLoader; return weights and out-of-fold outputs."""
    criterion, fold = nn.CrossEntropyLoss(), results.folds[0]

    def loss_of(model: nn.Module, inputs: Any, targets: Any) -> Any:
        return criterion(call(model, inputs), targets)

    model = train(results, make, dataset, loss_of, collate=collate)
    held_out = DataLoader(dataset, batch_sampler=[fold.valid.tolist()], collate_fn=collate)
    with one_thread(), torch.no_grad():
        outputs = torch.cat([call(model, inputs) for inputs, _ in held_out])
    return model.state_dict(), outputs
