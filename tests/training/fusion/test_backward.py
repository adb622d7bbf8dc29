"""Losses of fused replicas: every criterion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from asynckfold.training.fusion.backward import fuse_criterion

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
    "bce with logits": (nn.BCEWithLogitsLoss(WEIGHTS, pos_weight=WEIGHTS.flip(0)), SCORES, SHARES),
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
