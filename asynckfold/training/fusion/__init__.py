"""Fused training: replicas of one model as one module, with fewer and larger operations.

::

    models ── trace ── a batched graph by rules ── FusedModule      fuse
    criterion ── the same, or one by one ─────── GroupCriterion      fuse_criterion
    optimizers ── one per LR schedule, on slices ─────────────── fuse_optimizers
    a step:  backward(parts) ── clip_gradients ── optimizer.step()

>>> import torch
>>> from torch import nn
>>> from asynckfold.training.fusion.backward import backward, fuse_criterion, parts_of
>>> from asynckfold.training.fusion.module import fuse
>>> from asynckfold.training.fusion.optimizers import fuse_optimizers
>>> models = [nn.Linear(3, 2) for _ in range(4)]
>>> plain = [torch.optim.Adam(model.parameters(), 1e-2) for model in models]
>>> batches = [(torch.ones(5, 3), torch.zeros(5, dtype=torch.long)) for _ in models]
>>> fused = fuse(models, [batches[0][0]])
>>> criterion = fuse_criterion(nn.CrossEntropyLoss(), 4, torch.zeros(5, 2), batches[0][1])
>>> optimizers = fuse_optimizers(fused, plain, [range(0, 2), range(2, 4)])
>>> losses = backward(fused, criterion, parts_of(batches))
>>> for optimizer in optimizers:
...     optimizer.step()
>>> losses.shape, models[3].weight.shape
(torch.Size([4]), torch.Size([2, 3]))
"""
