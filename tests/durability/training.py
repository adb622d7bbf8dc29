"""One job of a real trainer, with a checkpoint after every epoch: what a worker does to the disk.

A nursery like `tests.durability.work`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path

import torch

from asynckfold import TrainerParams
from asynckfold.jobs.messages import CheckpointRef, NewCheckpoint, RunEvent, Task
from asynckfold.training import checkpoint, loop
from tests.durability.work import nursery
from tests.training.tiny import CPU, Noisy, Tiny, never

EPOCHS = 4


def train(root: Path, refs: Sequence[CheckpointRef], tell: Callable[[CheckpointRef], None]) -> str:
    """Train, or continue from checkpoints, newest first; return the digest of the result."""

    def hear(item: RunEvent) -> None:
        if isinstance(item, NewCheckpoint):
            tell(item.ref)

    tiny = Tiny(root, {"noisy": Noisy}, params=TrainerParams(EPOCHS))
    attempt = max((ref.attempt for ref in refs), default=0) + 1
    task = Task(tiny.jobs[0], attempt, tuple(refs))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = loop.train(tiny.bundle, task, tiny.batches, CPU, hear, never)
    finally:
        torch.set_num_threads(threads)
    assert result is not None
    return result.digest


def work(root: Path, acknowledge: int) -> None:
    """Train, acknowledging each checkpoint that was reported."""

    def tell(ref: CheckpointRef) -> None:
        os.write(acknowledge, f"{json.dumps(astuple(ref))}\n".encode())

    train(root, [], tell)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # As the server of workers does: the first optimizer imports a second's worth of torch.
    torch.optim.SGD([torch.nn.Parameter(torch.empty(1))])
    checkpoint.EPOCH_SECONDS, checkpoint.SHARE = 0.0, math.inf
    nursery(work)
