"""Texts of different length, models of them, and the loop that a user of torch would write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import Dataset

from asynckfold import CVResults
from asynckfold.training import batches, seeding

N, BATCH, EPOCHS, WORDS = 40, 8, 2, 20


class Texts(Dataset[Any]):
    """Token ids of 2 to 9 words; the class is whether the first half of the vocabulary prevails."""

    def __init__(self, change: Callable[[Tensor, int], Any] = lambda ids, y: (ids, y)) -> None:
        draws = np.random.default_rng(0)
        self.ids = [torch.from_numpy(draws.integers(1, WORDS, 2 + at % 8)) for at in range(N)]
        self.labels = [int((ids < WORDS // 2).double().mean() > 0.5) for ids in self.ids]
        self.change = change

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.change(self.ids[index].clone(), self.labels[index])


def collate(samples: list[Any]) -> Any:
    texts, targets = zip(*samples, strict=True)
    return pad_sequence(texts, batch_first=True), torch.tensor(targets)


def with_lengths(samples: list[Any]) -> Any:
    padded, targets = collate(samples)
    return (padded, torch.tensor([len(text) for text, _ in samples])), targets


def of_dicts(samples: list[Any]) -> Any:
    padded = pad_sequence([torch.as_tensor(item["ids"]) for item in samples], batch_first=True)
    lengths = torch.tensor([len(item["ids"]) for item in samples])
    return {
        "ids": padded,
        "lengths": lengths,
        "labels": torch.tensor([item["label"] for item in samples]),
    }


class Mean(nn.Module):
    """The mean of the words, with dropout; padding counts as nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, padding_idx=0)
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.embed(ids).sum(1) / (ids > 0).sum(1, keepdim=True)
        logits: Tensor = self.out(self.drop(words))
        return logits


class Recurrent(nn.Module):
    """A GRU over packed texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 2)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        logits: Tensor = self.out(self.gru(packed)[1][0])
        return logits


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with torch's fused kernel, as the package chooses it."""
    return torch.optim.Adam(model.parameters(), 1e-2, fused=True)


def plain_loop(
    model_type: type[nn.Module],
    dataset: Any,
    results: CVResults,
    function: Callable[[list[Any]], Any],
    call: Callable[[nn.Module, Any], Tensor],
    order_of: Callable[[Any, int, int], Any] = batches.epoch_order,
    criterion: nn.Module | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Train the first job by hand; return its weights, and its outputs on the held-out fold."""
    threads, job, fold = torch.get_num_threads(), results.plan.jobs[0], results.folds[0]
    torch.set_num_threads(1)
    try:
        with seeding.preserved():
            seeding.seed_all(job.seed)
            model = model_type()
            optimizer, criterion = adam(model), copy.deepcopy(criterion or nn.CrossEntropyLoss())
            for epoch in range(EPOCHS):
                order = order_of(fold.train, job.seed, epoch)
                seeding.seed_all(seeding.epoch_seed(job.seed, epoch))
                model.train()
                for low in range(0, len(order), BATCH):
                    inputs, targets = function([dataset[at] for at in order[low : low + BATCH]])
                    optimizer.zero_grad()
                    criterion(call(model, inputs), targets).backward()
                    optimizer.step()
            model.eval()
            size, found = results.plan.params.eval_batch_size, []
            with torch.no_grad():
                for low in range(0, len(fold.valid), size):
                    rows = fold.valid[low : low + size]
                    found.append(call(model, function([dataset[at] for at in rows])[0]))
    finally:
        torch.set_num_threads(threads)
    return model.state_dict(), torch.cat(found)
