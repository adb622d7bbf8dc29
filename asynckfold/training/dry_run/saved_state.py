"""Whether checkpoints and `results.model` have all that training changes.

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
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asynckfold.data.transforms.trees import tensors_in
from asynckfold.training import seeding
from asynckfold.training.dry_run.fingerprints import tensors_of
from asynckfold.training.dry_run.refusals import Refusal
from asynckfold.training.evaluation import set_mode
from asynckfold.training.losses import as_given
from asynckfold.training.model_state import StateSnapshot, attributes, describe, same
from asynckfold.training.optimizers import follow_parameters, optimizers_of
from asynckfold.training.user_steps import TrainingStep

MOST_BYTES = 1 << 30
"""Weights of a larger model are not stepped twice, which would take twice the memory of a job."""

_OF_TORCH = {*vars(torch.optim.SGD([torch.zeros(1)])), "step", "_opt_called"}
"""Attributes of every optimizer; LR schedules add the last two."""


@dataclass(frozen=True, eq=False)
class Live:
    """The live objects of a job."""

    model: nn.Module
    optimizer: Any
    criterion: Any
    user_step: TrainingStep | None

    def set_mode(self, *, train: bool) -> None:
        """Set the mode of all that has one."""
        set_mode(self.model, self.criterion, self.optimizer, train=train)


@dataclass(frozen=True, eq=False)
class CheckpointTrial:
    """Compares a trained model with a new one that loads its checkpoint.

    Parameters
    ----------
    name : str
        Of the model.
    make : callable
        Returns new objects, with the same seed each time.
    evaluate : callable
        Model → its outputs on a batch.
    step : callable or None
        Takes a training step, and returns its loss; None where the user's loop does.
    """

    name: str
    make: Callable[[], Live]
    evaluate: Callable[[nn.Module], Any]
    step: Callable[[Live], torch.Tensor] | None

    def check(self, trained: Live) -> list[str]:
        """Return the names of what an evaluation changes in a trained model, which is restored.

        Raises
        ------
        Refused
            The new model differs from the trained one.
        """
        with seeding.preserved():
            kept = StateSnapshot(trained.model)
            self._outputs(trained)
            if changed := kept.changed():
                kept.restore()
            new = self._loaded(trained)
            lacking = list(_lacking(trained, new))
            difference = self._difference(trained, new) if lacking else ""
        if difference:
            raise Refusal(
                f"checkpoints and results.model must have all that training changes in model "
                f"{self.name}",
                f"after a step, saved and loaded into a new model, which lacks "
                f"{few(lacking)}, {difference}",
                "Keep it in the state_dict() of model or criterion: in a persistent buffer, or by "
                "get_extra_state() and set_extra_state(); an optimizer, in its param_groups.",
            )
        return changed

    def _difference(self, trained: Live, new: Live) -> str:
        """Say what new objects do differently; empty if nothing, or if it is random."""
        size = sum(item.nbytes for item in trained.model.parameters())
        steps = size <= MOST_BYTES and not _equal(self._stepped(trained), self._stepped(new))
        if not steps and _equal(self._outputs(trained), self._outputs(new)):
            return ""
        one, other = self.make(), self.make()
        repeats = _equal(self._stepped(one), self._stepped(other))
        if not repeats or not _equal(self._outputs(one), self._outputs(other)):
            return ""
        return "its next training step differs" if steps else "its evaluation differs"

    def _outputs(self, live: Live) -> list[torch.Tensor]:
        live.set_mode(train=False)
        seeding.seed_all(0)
        with torch.no_grad():
            return list(tensors_in(self.evaluate(live.model)))

    def _stepped(self, live: Live) -> list[torch.Tensor]:
        """Take a step, if there is one; return the loss, and the tensors of the model."""
        if self.step is None:
            return []
        live.set_mode(train=True)
        seeding.seed_all(1)
        return [self.step(live).detach(), *tensors_of(live.model).values()]

    def _loaded(self, trained: Live) -> Live:
        """Return new objects that loaded what a checkpoint of the trained ones would hold."""
        new, what = self.make(), f"model {self.name}"
        # As the trained ones.
        new.set_mode(train=False)
        try:
            new.model.load_state_dict(trained.model.state_dict())
            what = "optimizer"
            # Torch keeps the tensors that it loads.
            new.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
            for part in optimizers_of(new.optimizer):
                follow_parameters(part)
            what = "criterion"
            criterion = as_given(new.criterion)
            if isinstance(criterion, nn.Module):
                criterion.load_state_dict(as_given(trained.criterion).state_dict())
        except Exception as error:
            raise Refusal(
                f"a new {what} must take the state_dict() of a trained one",
                " ".join(str(error).split())[:300],
                "Give each buffer its shape in __init__; register one that each forward computes "
                "anew with persistent=False.",
            ) from error
        return new


def few(names: Sequence[str]) -> str:
    """Join the first three names, and count the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(same, one, other))


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
        unsaved = {
            name: value
            for name, value in vars(part).items()
            if name not in _OF_TORCH and not name.startswith("_asynckfold")
        }
        yield "the optimizer", unsaved
    if live.user_step:
        yield "the training_step", _unsaved(live.user_step.function)


def _unsaved(owner: Any) -> dict[str, Any]:
    if not isinstance(owner, nn.Module):
        return dict(getattr(owner, "__dict__", {}))
    buffers = {name: owner._buffers[name] for name in owner._non_persistent_buffers_set}
    return attributes(owner) | buffers
