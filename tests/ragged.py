"""Texts of different length, and models of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import Dataset

N, WORDS = 40, 20


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
