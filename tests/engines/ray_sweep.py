"""A digits sweep as a process of its own: ``ray_sweep.py KIND ENGINE ROOT [ADDRESS]``.

KIND is plain, fused, decided (all that is open is decided by the plan), or the name of a trainer of
two PROCESSES, PER_NODE of them on a node. With TAKEN, each of them has a stand-in GPU, and writes
its UUID into that file.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from asynckfold import AsyncKFold

WIDTH = int(os.environ.get("WIDTH", "32"))
"""Of this process: it travels with the model."""


class Net(nn.Sequential):
    """Slow if SLOW says so; kills its process once, after a checkpoint, where KILL_ONCE says so."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, 10))
        self.steps = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if "ASYNCKFOLD_SCRATCH" in os.environ and self.steps == 100:
            kill = Path(os.environ.get("KILL_ONCE", "none"))
            if kill.is_file():
                kill.unlink(missing_ok=True)
                os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == 1:
            print("a word for the log, the time is", time.time(), "s")
        if "SLOW" in os.environ:
            # libfaketime breaks `time.sleep` of Python 3.11.
            select.select([], [], [], float(os.environ["SLOW"]))
        return super().forward(inputs[:, :64])


def plain() -> nn.Module:
    """Return a model that can be fused."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.Adam(model.parameters(), 1e-3)


def main(kind: str, engine: str, root: str, address: str = "") -> None:
    """Train, and print fingerprint, finished jobs and nodes."""
    inputs, targets = load_digits(return_X_y=True)
    # More columns make more data; the model does not look at them.
    more = int(os.environ.get("MORE_COLUMNS", "0"))
    data = (np.pad(inputs.astype("float32") / 16, ((0, 0), (0, more))), targets)
    given: dict[str, Any] = {"fuse": 3 if kind == "fused" else False, "threads_per_job": 1}
    if kind == "decided":
        given = {"fuse": True}
    elif kind not in ("plain", "fused"):
        count = int(os.environ.get("PROCESSES", "2"))
        given = {"trainer": kind, "processes": count}
    if address:
        given |= {"ray_address": address, "n_jobs": int(os.environ.get("N_JOBS", "1"))}
    kfold = AsyncKFold(
        3,
        data,
        root,
        nn.CrossEntropyLoss(),
        32,
        engine=engine,
        verbose=0,
        baseline=None,
        report=False,
        **given,
    )
    model = plain if kind in ("fused", "decided") else Net
    params = {"epochs": int(os.environ.get("EPOCHS", "4"))}
    results = kfold({"net": model}, ["cosine", "step"], adam, params)
    print(results.fingerprint, results.counts["done"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
