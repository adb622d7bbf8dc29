"""A fusion group on a GPU: what it asks of the host. A device of shapes counts copies."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import TrainerParams
from asynckfold.jobs.messages import Task
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training.fusion import group as trainer
from asynckfold.training.fusion.group import FusionGroup
from tests.training.counting import Counting
from tests.training.fusion.test_trainer import Grouped, raised
from tests.training.test_gpu_step import META, Conv, Event, images


def built(tiny: Grouped, device: torch.device, logs: ExitStack, data: object = None) -> FusionGroup:
    tasks = [Task(job) for job in tiny.jobs]
    batches = data or tiny.batches
    return trainer.build(tiny.bundle, tasks, batches, device, Heartbeat(), logs, raised)


def test_the_host_waits_for_no_step_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a single job: sample numbers and draws of an epoch are sent once."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    params = TrainerParams(epochs=2, clip_grad_norm=1.0)
    # The mean of nn.CrossEntropyLoss depends on values of the targets, which are not there.
    tiny = Grouped(tmp_path, {"conv": Conv}, params=params, criterion=nn.functional.cross_entropy)
    with ExitStack() as logs:
        group = built(tiny, META, logs, images())
        # torch does not know the device's autocast.
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
        with Counting() as mode:
            group.begin_epoch()
            begun = mode.take()
            # For each job its order, and the draws of two steps.
            assert (begun.sent, begun.synchronisations) == (3 * len(tiny.jobs), 0), begun
            group.step()
            mode.take()
            for _ in range(group.batches - 1):
                group.step()
                step = mode.take()
                assert (step.sent, step.fetched, step.synchronisations) == (0, 0, 0), step


def test_batches_by_orders_that_were_sent_are_those_that_are_gathered_together() -> None:
    data, generator = images(), np.random.default_rng(1)
    orders = [generator.permutation(60) for _ in range(3)]
    seeds = [7, 8, 9]
    sent = [
        data.ordered(order, seed, 3, training=True)
        for order, seed in zip(orders, seeds, strict=True)
    ]
    for low, high in ((0, 16), (50, 60)):
        found = data.train_in_order(sent, low, high)
        rows = torch.from_numpy(np.stack([order[low:high] for order in orders]))
        for one, other in zip(found, data.train_together(rows, seeds, 3), strict=True):
            assert torch.equal(one, other)
