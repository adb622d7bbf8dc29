"""Cross-validate a GRU and a small transformer encoder on made-up texts of different length.

``python examples/text.py --quick`` takes one epoch on few texts.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from asynckfold import AsyncKFold


def make_texts(count):
    draws = np.random.default_rng(0)
    texts = [torch.from_numpy(draws.integers(1, 50, draws.integers(5, 40))) for _ in range(count)]
    return [(ids, int((ids < 25).double().mean() > 0.5)) for ids in texts]


def collate(samples):
    texts, targets = zip(*samples, strict=True)
    inputs = pad_sequence(texts, batch_first=True), torch.tensor(list(map(len, texts)))
    return inputs, torch.tensor(targets)


class GRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 32), nn.Linear(32, 2)
        self.gru = nn.GRU(32, 32, batch_first=True)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), True, enforce_sorted=False)
        return self.out(self.gru(packed)[1][0])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 32), nn.Linear(32, 2)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, ids, lengths):
        words = self.encoder(self.embed(ids), src_key_padding_mask=ids == 0)
        return self.out((words * (ids > 0)[:, :, None]).sum(1) / lengths[:, None])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one epoch")
    parser.add_argument("--root-dir", default="runs/text", help="folder of the run")
    args = parser.parse_args()
    kfold = AsyncKFold(3, make_texts(60 if args.quick else 2000), args.root_dir,
                       nn.CrossEntropyLoss(), 32, collate_fn=collate)  # fmt: skip
    epochs, adam = 1 if args.quick else 5, lambda model: torch.optim.Adam(model.parameters(), 3e-3)
    print(kfold([GRU, Transformer], ["cosine"], adam, {"epochs": epochs}).report())
