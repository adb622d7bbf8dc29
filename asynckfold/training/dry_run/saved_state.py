"""The live objects of a trial, and whether checkpoints and `results.model` have all that changes.

::

    trained ─ evaluation ─ checkpoint ─► a new model ─ lacks an attribute of the trained one?
                  │                                       │
                  └─ buffers that it changes              └─ next step and evaluation differ, too?

What changes without consequence, such as an attention map kept for a plot, is allowed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from asynckfold.training import gradients, lr_schedules, seeding
from asynckfold.training.dry_run.checks import few
from asynckfold.training.dry_run.fingerprints import tensors_of
from asynckfold.training.dry_run.user_code import Batch, Live
from asynckfold.training.losses import as_given
from asynckfold.training.model_state import StateSnapshot, attributes, describe, same
from asynckfold.training.optimizers import follow_parameters, optimizers_of
from asynckfold.training.user_steps import Refusal

MOST_BYTES = 1 << 30
"""Weights of a larger model are not stepped twice, which would take twice the memory of a job."""

_OF_TORCH = {
    *vars(torch.optim.SGD([torch.zeros(1)])),
    *("step", "_opt_called", gradients.NEEDS_CLOSURE, lr_schedules.ATTACHED),
}
"""Attributes of every optimizer; LR schedules add the next two, and training the last."""


def changed_in_evaluation(
    name: str, trained: Live, made: Callable[[], Live], batch: Batch, *, steps: bool
) -> list[str]:
    """Return the names of what an evaluation changes in a trained model, which is restored.

    `made` returns new objects, the same each time; `steps`: whether they take steps by themselves.

    Raises
    ------
    Refusal
        A new model that loads the checkpoint of the trained one differs from it.
    """
    with seeding.preserved():
        before = StateSnapshot(trained.model)
        trained.evaluated(batch)
        if changed := before.changed():
            before.restore()
        new = _loaded(name, trained, made())
        lacking = list(_lacking(trained, new))
        size = sum(item.nbytes for item in trained.model.parameters())
        kinds = [_stepped] * (steps and size <= MOST_BYTES) + [Live.evaluated]
        for kind in kinds if lacking else []:
            if _differ(kind, trained, new, batch):
                one, other = made(), made()
                if any(_differ(kind, one, other, batch) for kind in kinds):
                    # What is random says nothing.
                    break
                raise Refusal(
                    "checkpoints and results.model must have all that training changes in model "
                    f"{name}",
                    f"after a step, saved and loaded into a new model, which lacks {few(lacking)}, "
                    f"its {'evaluation' if kind is Live.evaluated else 'next training step'} "
                    "differs",
                    "Keep it in the state_dict() of model or criterion: in a persistent buffer, or "
                    "by get_extra_state() and set_extra_state(); an optimizer, in its "
                    "param_groups.",
                )
    return changed


def _stepped(live: Live, batch: Batch) -> list[torch.Tensor]:
    """Take a step; return the loss, and the tensors of the model."""
    seeding.seed_all(1)
    return [live.step(batch).detach(), *tensors_of(live.model).values()]


def _differ(
    kind: Callable[[Live, Batch], Sequence[torch.Tensor]], one: Live, other: Live, batch: Batch
) -> bool:
    first, second = kind(one, batch), kind(other, batch)
    return len(first) != len(second) or not all(map(same, first, second))


def _loaded(name: str, trained: Live, new: Live) -> Live:
    """Let new objects load what a checkpoint of the trained ones would hold."""
    new.set_mode(train=False)
    try:
        new.model.load_state_dict(trained.model.state_dict())
        # Torch keeps the tensors that it loads.
        new.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
        for part in optimizers_of(new.optimizer):
            follow_parameters(part)
        criterion = as_given(new.criterion)
        if isinstance(criterion, nn.Module):
            criterion.load_state_dict(as_given(trained.criterion).state_dict())
    except Exception as error:
        raise Refusal(
            f"new objects of model {name} must take the state_dict() of trained ones",
            " ".join(str(error).split())[:300],
            "Give each buffer its shape in __init__; register one that each forward computes "
            "anew with persistent=False.",
        ) from error
    return new


def _lacking(trained: Live, new: Live) -> Iterator[str]:
    """Name what is outside of a ``state_dict`` and other in new objects that loaded it."""
    for (where, mine), (_, theirs) in zip(_parts(trained), _parts(new), strict=False):
        for name in {**mine, **theirs}:
            # What cannot be pickled may be what differs.
            equal = False
            with contextlib.suppress(Exception):
                equal = same(mine.get(name), theirs.get(name))
            if not equal:
                yield f"{name} of {where}"


def _parts(live: Live) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each part, and what it holds outside of its ``state_dict``."""
    for path, module in live.model.named_modules():
        yield describe(path, module), _unsaved(module)
    criterion = as_given(live.criterion)
    for part in criterion.modules() if isinstance(criterion, nn.Module) else [criterion]:
        yield "the criterion", _unsaved(part)
    for part in optimizers_of(live.optimizer):
        unsaved = {name: value for name, value in vars(part).items() if name not in _OF_TORCH}
        yield "the optimizer", unsaved
    if live.user_step:
        yield "the training_step", _unsaved(live.user_step.function)


def _unsaved(owner: Any) -> dict[str, Any]:
    if not isinstance(owner, nn.Module):
        return dict(getattr(owner, "__dict__", {}))
    buffers = {name: owner._buffers[name] for name in owner._non_persistent_buffers_set}
    return attributes(owner) | buffers
