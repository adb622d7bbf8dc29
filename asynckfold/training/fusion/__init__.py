"""Replicas of one model, trained as one module: fewer and larger operations, the same numbers.

::

    models ── trace ── a batched graph by rules, or vmap ── FusedModule      fuse
    criterion ─────────────────────────────────────────────── Criterion      fuse_criterion
    optimizers ── one for each LR schedule, on slices ───────── arms         fuse_optimizers
    a step:  backward(parts) ── clip_gradients ── arm.step()

>>> import torch
>>> from torch import nn
>>> models = [nn.Linear(3, 2) for _ in range(4)]
>>> optimizers = [torch.optim.Adam(model.parameters(), 1e-2) for model in models]
>>> batches = [(torch.ones(5, 3), torch.zeros(5, dtype=torch.long)) for _ in models]
>>> fused = fuse(models, [batches[0][0]])
>>> criterion = fuse_criterion(nn.CrossEntropyLoss(), 4, torch.zeros(5, 2), batches[0][1])
>>> arms, reason = fuse_optimizers(fused, optimizers, [range(0, 2), range(2, 4)])
>>> losses = backward(fused, criterion, parts_of(batches))
>>> for arm in arms:
...     arm.step()
>>> losses.shape, fused.state_dict_of(3)["weight"].shape
(torch.Size([4]), torch.Size([2, 3]))
"""

from __future__ import annotations

from asynckfold.training.fusion.backward import (
    Criterion,
    FusedCriterion,
    Part,
    SeparateCriterion,
    backward,
    clip_gradients,
    fuse_criterion,
    parts_of,
)
from asynckfold.training.fusion.equivalence import (
    Differences,
    Equivalence,
    check_equivalence,
)
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.module import FusedModule, fuse, why_not_fusible
from asynckfold.training.fusion.optimizers import (
    ReplicaOptimizer,
    SeparateOptimizer,
    StackedOptimizer,
    fuse_optimizers,
)

__all__ = [
    "ReplicaOptimizer",
    "Criterion",
    "Differences",
    "Equivalence",
    "FusedCriterion",
    "FusedModule",
    "NotFusible",
    "SeparateOptimizer",
    "Part",
    "SeparateCriterion",
    "StackedOptimizer",
    "fuse_optimizers",
    "backward",
    "check_equivalence",
    "clip_gradients",
    "fuse",
    "fuse_criterion",
    "parts_of",
    "why_not_fusible",
]
