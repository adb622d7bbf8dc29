"""The fused kernels are taken where the user left the choice open, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from asynckfold.training.optimizers import OFFERED, with_fused_kernel


def _choice(optimizer: Any, model: nn.Module | None = None) -> list[object]:
    found = with_fused_kernel(lambda _: optimizer, model or nn.Linear(2, 1))
    assert found is optimizer
    return [group.get("fused") for group in found.param_groups]


def _parameters(**settings: Any) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, **settings))]


@pytest.mark.parametrize("kind", sorted(OFFERED, key=lambda kind: kind.__name__))
def test_the_fused_kernel_is_the_default_and_steps_nearly_the_same(kind: type) -> None:
    models = [nn.Linear(40, 30) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        kind(models[0].parameters(), lr=1e-2),
        with_fused_kernel(lambda model: kind(model.parameters(), lr=1e-2), models[1]),
    ]
    for _ in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 40)).square().sum().backward()
            optimizer.step()
    assert [item.param_groups[0]["fused"] for item in optimizers] == [None, True]
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_users_choice_of_kernel_is_kept() -> None:
    for settings in ({"fused": False}, {"foreach": True}, {"foreach": False}):
        optimizer = optim.Adam(_parameters(), **settings)
        assert _choice(optimizer) == [settings.get("fused")]
    assert _choice(optim.Adam(_parameters(), fused=True)) == [True]
    assert _choice(optim.SGD(_parameters(), 0.1, differentiable=True)) == [None]


def test_unsupported_parameters_keep_the_default_kernel() -> None:
    class Own(optim.Adam):
        pass

    assert _choice(Own(_parameters())) == [None]
    assert _choice(optim.RMSprop(_parameters())) == [None]
    assert _choice(optim.Adam(_parameters(dtype=torch.complex64))) == [None]
    assert _choice(optim.Adam(_parameters(), lr=torch.tensor(1e-3))) == [None]
    assert _choice(optim.SGD(_parameters(), 0.1), nn.Embedding(3, 2, sparse=True)) == [None]
    assert with_fused_kernel(lambda model: 5, nn.Linear(1, 1)) == 5
