"""What the plan records of the live objects: text that is the same in every process.

A run is only continued with the same plan, so none of these texts may change.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import torch
from torch import nn

from asynckfold.training.optimizers import SeveralOptimizers, SeveralSchedules


def architecture_of(model: nn.Module) -> str:
    """Digest of a model's text, and of its tensors' names, shapes and types."""
    shapes = [
        f"{name}:{tuple(tensor.shape)}:{tensor.dtype}" for name, tensor in tensors_of(model).items()
    ]
    return _digest("\n".join([text_of(model), *shapes]))


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the ``state_dict``."""
    entries = module.state_dict().items()
    return {name: value for name, value in entries if isinstance(value, torch.Tensor)}


def optimizer_settings(optimizer: Any) -> str:
    """Class and hyperparameters of each parameter group."""
    if isinstance(optimizer, SeveralOptimizers):
        return "; ".join(map(optimizer_settings, optimizer.parts))
    groups = [
        {key: text_of(value) for key, value in group.items() if key not in ("params", "initial_lr")}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {json.dumps(groups, sort_keys=True)}"


def lr_schedule_settings(lr_schedule: Any) -> str:
    """Class and initial state, which holds the settings."""
    if isinstance(lr_schedule, SeveralSchedules):
        return "; ".join(map(lr_schedule_settings, lr_schedule.parts))
    state = lr_schedule.state_dict()
    shown = sorted(state.items()) if isinstance(state, dict) else state
    return f"{type(lr_schedule).__name__} {text_of(shown)}"


def text_of(value: object) -> str:
    """`repr` without memory addresses."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
