"""The run of the campaign: slow enough to be hit anywhere, without using a core.

``python -m tests.watched.sweep ROOT`` begins it, and continues it.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import torch
from torch import nn

from asynckfold import AsyncKFold
from tests.watched import gate

SAMPLES, FOLDS, BATCH, EPOCHS = 60, 3, 4, 4
BATCHES = SAMPLES * (FOLDS - 1) // FOLDS // BATCH
"""Batches of one epoch."""

BATCH_SECONDS = 0.015


class Slow(nn.Module):
    """An MLP that draws random numbers, takes its time, and has a process of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            gate.start_child()
            gate.reach("train")
            time.sleep(BATCH_SECONDS)
        found: torch.Tensor = self.layers(inputs)
        return found


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2)


def main(root: str) -> None:
    # Drawing takes seconds and touches no disk.
    figures = {f"figure-{number}.png": b"a figure" for number in range(6)}
    sys.modules["asynckfold.results.report.charts"] = SimpleNamespace(draw=lambda *_: figures)
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, 0] > 0).long()
    kfold = AsyncKFold(
        FOLDS,
        (inputs, targets),
        root,
        nn.CrossEntropyLoss(),
        BATCH,
        baseline=None,
        report=False,
        verbose=0,
        n_jobs=2,
        engine="process",
    )
    results = kfold(
        {"slow": Slow}, ["cosine", "step"], adam, {"epochs": EPOCHS, "print_frequency": 1}
    )
    results.report()


if __name__ == "__main__":
    main(sys.argv[1])
