"""The run of a campaign against jobs of several processes; see `tests.watched.sweep`."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

from asynckfold import AsyncKFold
from tests.watched import gate
from tests.watched.sweep import BATCH, BATCH_SECONDS, EPOCHS, FOLDS, SAMPLES, adam

PROCESSES = 2


class Slow(nn.Module):
    """An MLP that takes its time; the process that made it tells how far it is."""

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            if os.getpid() == self.pid:
                gate.reach("train")
            time.sleep(PROCESSES * BATCH_SECONDS)
        found: torch.Tensor = self.layers(inputs)
        return found


def main(root: str, trainer: str) -> None:
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
        n_jobs=1,
        trainer=trainer,
        processes=PROCESSES,
    )
    params = {"epochs": EPOCHS, "print_frequency": 1}
    if trainer == "averaging":
        params["steps_per_round"] = 2
    results = kfold({"slow": Slow}, ["cosine", "step"], adam, params)
    results.report()


if __name__ == "__main__":
    main(*sys.argv[1:])
