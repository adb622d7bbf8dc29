"""Operations are counted by shapes: equal on every machine, and what a reader would compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from asynckfold.training.flops import FlopCounter


def counted(model: nn.Module, *shape: int, backward: bool = True) -> int:
    inputs = torch.randn(shape)
    with FlopCounter() as counter:
        found = model(inputs)
        if backward:
            (found[0] if isinstance(found, tuple) else found).sum().backward()
    return counter.flops


def test_a_linear_layer() -> None:
    forward = 2 * 4 * 8 * 16
    assert counted(nn.Linear(8, 16), 4, 8, backward=False) == forward
    # The first layer's inputs need no gradient; those of the second do.
    assert counted(nn.Linear(8, 16), 4, 8) == 2 * forward
    assert counted(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), 4, 8) == 5 * forward


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_grouped_convolution(groups: int) -> None:
    forward = 2 * (3 * 8 * 6 * 6) * (4 // groups * 3 * 3)
    layer = nn.Conv2d(4, 8, 3, groups=groups)
    assert counted(layer, 3, 4, 8, 8, backward=False) == forward
    assert counted(layer, 3, 4, 8, 8) == 2 * forward
    with FlopCounter() as counter:
        layer(torch.ones(3, 4, 8, 8)).sum().backward()
    assert counter.products == 3


def test_a_recurrent_layer_and_attention_are_counted() -> None:
    products = 2 * (2 * 5) * (4 * 6) * (3 + 6)
    assert counted(nn.LSTM(3, 6, batch_first=True), 2, 5, 3) == 3 * products
    queries = torch.randn(2, 4, 10, 8, requires_grad=True)
    with FlopCounter() as counter:
        nn.functional.scaled_dot_product_attention(queries, queries, queries).sum().backward()
    product = 2 * 2 * 4 * 10 * 10 * 8
    assert counter.flops == 7 * product
