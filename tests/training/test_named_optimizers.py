"""Optimizers by name."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn, optim

from asynckfold.training.optimizers import FULL_BATCH, MOMENTUM, OPTIMIZERS, NamedOptimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_makes_an_optimizer_with_its_settings_that_lowers_a_loss(name: str) -> None:
    made = pickle.loads(pickle.dumps(NamedOptimizer(name, 0.05, 0.5, 0.01)))
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = made(model)
    assert type(optimizer) is getattr(optim, type(optimizer).__name__)
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.05
    assert group.get("weight_decay") == (None if name in FULL_BATCH else 0.01)
    assert ("momentum" in group and group["momentum"] == 0.5) is (name in MOMENTUM)
    inputs = torch.randn(20, 3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
