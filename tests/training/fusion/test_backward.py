"""Losses of fused replicas: every criterion, batches of every size, replicas left out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from asynckfold.training.fusion.backward import backward, fuse_criterion, parts_of
from asynckfold.training.fusion.module import fuse

ROWS, BATCH, CLASSES = 3, 6, 4
GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(ROWS, BATCH, CLASSES, generator=GENERATOR).double()
LABELS = torch.randint(CLASSES, (ROWS, BATCH), generator=GENERATOR)
SHARES = SCORES.roll(1, 1).softmax(-1)
IGNORED = LABELS.where(LABELS > 0, -100)
PIXELS = torch.randn(ROWS, BATCH, CLASSES, 2, 3, generator=GENERATOR).double()
PIXEL_LABELS = torch.randint(CLASSES, (ROWS, BATCH, 2, 3), generator=GENERATOR)
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)


def focal(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(outputs, targets, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.inner(outputs, targets) + 0.01 * outputs.pow(2).sum() / len(targets)


Case = tuple[Callable[..., Any], torch.Tensor, torch.Tensor]

TOGETHER: dict[str, Case] = {
    "cross entropy": (nn.CrossEntropyLoss(), SCORES, LABELS),
    "weighted": (nn.CrossEntropyLoss(WEIGHTS), SCORES, IGNORED),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2), SCORES, IGNORED),
    "ignoring": (nn.CrossEntropyLoss(ignore_index=2), SCORES, LABELS),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), SCORES, LABELS),
    "shares": (nn.CrossEntropyLoss(WEIGHTS), SCORES, SHARES),
    "pixels": (nn.CrossEntropyLoss(WEIGHTS), PIXELS, PIXEL_LABELS),
    "nll": (nn.NLLLoss(WEIGHTS), SCORES.log_softmax(-1), IGNORED),
    "mse": (nn.MSELoss(), SCORES, SHARES),
    "mse of vectors": (nn.MSELoss(), SCORES[..., 0], SHARES[..., 0]),
    "l1": (nn.L1Loss(reduction="sum"), SCORES, SHARES),
    "huber": (nn.HuberLoss(delta=0.3), SCORES, SHARES),
    "bce": (nn.BCELoss(), SCORES.sigmoid(), SHARES),
    "bce with logits": (
        nn.BCEWithLogitsLoss(WEIGHTS, pos_weight=WEIGHTS.flip(0)),
        SCORES,
        SHARES,
    ),
    "function": (focal, SCORES, LABELS),
}

APART: dict[str, Case] = {
    "module of the user's": (Penalised(), SCORES, LABELS),
    "kl": (nn.KLDivLoss(reduction="batchmean"), SCORES.log_softmax(-1), SHARES),
}


@pytest.mark.parametrize("name", TOGETHER | APART)
def test_every_criterion_gives_the_plain_losses_and_gradients(name: str) -> None:
    criterion, outputs, targets = (TOGETHER | APART)[name]
    together = fuse_criterion(criterion, ROWS, outputs[0], targets[0])
    assert (together.fused is None) == (name in APART)
    mine, theirs = (outputs.clone().requires_grad_() for _ in range(2))
    losses = together(mine, targets)
    expected = torch.stack([criterion(theirs[row], targets[row]) for row in range(ROWS)])
    losses.sum().backward()
    expected.sum().backward()
    part = together.part(range(1, 3))(outputs[1:], targets[1:])
    pairs = ((losses, expected), (mine.grad, theirs.grad), (part, expected[1:]))
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_each_replica_has_a_criterion_of_its_own() -> None:
    together = fuse_criterion(nn.CrossEntropyLoss(WEIGHTS), ROWS, SCORES[0], LABELS[0])
    for scale, criterion in enumerate(together.criteria, 1):
        criterion.load_state_dict({"weight": WEIGHTS**scale})
    expected = [
        F.cross_entropy(SCORES[row], LABELS[row], WEIGHTS ** (row + 1)) for row in range(ROWS)
    ]
    torch.testing.assert_close(together(SCORES, LABELS), torch.stack(expected))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_parts_hold_every_batch_once_and_in_order(sizes: list[int]) -> None:
    batches = [
        (torch.full((size, 2), float(replica)), torch.full((size,), replica)) if size else None
        for replica, size in enumerate(sizes)
    ]
    parts = parts_of(batches)
    replicas = [replica for part in parts for replica in part.replicas]
    assert replicas == [replica for replica, size in enumerate(sizes) if size]
    for part in parts:
        for place, replica in enumerate(part.replicas):
            batch = batches[replica]
            assert batch is not None
            assert torch.equal(part.inputs[place], batch[0])
            assert torch.equal(part.targets[place], batch[1])
    for one, following in pairwise(parts):
        touching = one.replicas.stop == following.replicas.start
        assert not (touching and one.inputs.shape[1:] == following.inputs.shape[1:])


@settings(deadline=None, max_examples=5)
@given(st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_ragged_batches_give_exactly_the_plain_losses(sizes: list[int]) -> None:
    torch.manual_seed(sum(sizes))
    plain = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double() for _ in sizes]
    batches = [(torch.randn(size, 3).double(), torch.randint(2, (size,))) for size in sizes]
    expected = []
    for model, (inputs, targets) in zip(plain, batches, strict=True):
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        expected.append(loss.detach())
    gradients = [[p.grad.clone() for p in model.parameters()] for model in plain]
    fused = fuse(plain, [batches[0][0]])
    criterion = fuse_criterion(nn.CrossEntropyLoss(), 3, torch.zeros(2, 2).double(), batches[0][1])
    losses = backward(fused, criterion, parts_of(batches))
    torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-12, atol=1e-12)
    for replica, expected_gradients in enumerate(gradients):
        computed = list(fused.gradients_of(replica).values())
        torch.testing.assert_close(computed, expected_gradients, rtol=1e-12, atol=1e-12)
