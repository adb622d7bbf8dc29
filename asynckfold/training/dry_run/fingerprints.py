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

from asynckfold.data.transforms.steps import describe
from asynckfold.training.checkpoint import weights_digest
from asynckfold.training.optimizers import SeveralOptimizers, SeveralSchedules


def architecture_of(model: nn.Module) -> str:
    """Digest of a model's text, and of its tensors' names, shapes and types."""
    shapes = [
        f"{name}:{tuple(tensor.shape)}:{tensor.dtype}" for name, tensor in tensors_of(model).items()
    ]
    return _digest("\n".join([_text(model), *shapes]))


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the ``state_dict``."""
    entries = module.state_dict().items()
    return {name: value for name, value in entries if isinstance(value, torch.Tensor)}


def optimizer_settings(optimizer: Any) -> str:
    """Class and hyperparameters of each parameter group."""
    if isinstance(optimizer, SeveralOptimizers):
        return "; ".join(map(optimizer_settings, optimizer.parts))
    groups = [
        {key: _text(value) for key, value in group.items() if key not in ("params", "initial_lr")}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {json.dumps(groups, sort_keys=True)}"


def lr_schedule_settings(lr_schedule: Any) -> str:
    """Class and initial state, which holds the settings."""
    if isinstance(lr_schedule, SeveralSchedules):
        return "; ".join(map(lr_schedule_settings, lr_schedule.parts))
    state = lr_schedule.state_dict()
    shown = sorted(state.items()) if isinstance(state, dict) else state
    return f"{type(lr_schedule).__name__} {_text(shown)}"


def criterion_text(criterion: Any) -> str:
    """Name or text, and everything that it depends on."""
    if isinstance(criterion, nn.Module):
        # The text alone lacks the label smoothing and class weights of a CrossEntropyLoss.
        plain = {key: value for key, value in vars(criterion).items() if not key.startswith("_")}
        state = criterion.state_dict()
        digest = weights_digest(state)[:16] if state else ""
        return f"{_text(criterion)} {_text(sorted(plain.items()))} {digest}".strip()
    name = getattr(criterion, "__qualname__", type(criterion).__name__)
    return f"{name} {_digest(describe(criterion))}"


def transformer_text(preprocess: Any) -> str:
    """Text and parameters of a scikit-learn transformer."""
    return f"{_text(preprocess)} {_digest(describe(sorted(preprocess.get_params().items())))}"


def _text(value: object) -> str:
    """`repr` without memory addresses."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
