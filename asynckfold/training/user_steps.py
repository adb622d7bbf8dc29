"""The user's steps: `training_step`, and `validation_step` for the held-out fold.

::

    one optimizer        function ──► loss ──► backward, clip, step: as without a `training_step`
    several optimizers   function ──► state.backward(loss, optimizer): zero, backward, clip, step
    validation           function ──► loss, measures: their means over the held-out samples
"""

from __future__ import annotations

import contextlib
import copy
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from asynckfold.errors import InputError, Problem
from asynckfold.jobs.result import Epoch
from asynckfold.training.calls import AUTOCAST, in_float32
from asynckfold.training.losses import as_given
from asynckfold.training.optimizers import optimizers_of

TAKEN = frozenset(
    {item.name for item in fields(Epoch)}
    | {"loss", "model", "scheduler", "repeat", "fold", "stage", "epoch"}
)
"""Names of other columns of the table of epochs."""

ONE_RULE = "with one optimizer, a training_step returns the loss and leaves the rest to asynckfold"
ONE_REMEDY = (
    "Return the loss without backward() and optimizer.step(); torch.autograd.grad is allowed. To "
    "call state.backward(loss, optimizer), let opt_fn return a tuple of several optimizers."
)
SEVERAL_RULE = "with several optimizers, a training_step trains by state.backward(loss, optimizer)"
SEVERAL_REMEDY = (
    "Call state.backward(loss, optimizer) for an optimizer of state.optimizers, in place of "
    "loss.backward() and optimizer.step()."
)


class Refusal(InputError):  # noqa: N818
    """A rule for what the user passes is broken, which only trying it shows."""

    def __init__(self, rule: str, received: str, remedy: str) -> None:
        super().__init__([Problem(rule, received, remedy)])


class StepState:
    """What a `training_step` gets beside the model and the batch.

    Parameters
    ----------
    optimizers : tuple of torch.optim.Optimizer
        What ``opt_fn`` returned.
    epoch, batch_index : int
        From 0.
    criterion : callable
        The job's copy of the criterion; with autocast it computes in float32, outside of it.
    device : torch.device
        Where model and batch are.
    """

    def __init__(
        self,
        optimizers: tuple[torch.optim.Optimizer, ...],
        criterion: Callable[..., Any],
        device: torch.device,
        precision: str = "fp32",
        clip_grad_norm: float | None = None,
    ) -> None:
        dtype, criterion = AUTOCAST.get(precision), as_given(criterion)
        self.criterion = criterion if dtype is None else _in_float32(criterion, device, dtype)
        self.optimizers, self.device = optimizers, device
        self.epoch = self.batch_index = 0
        self.measures: dict[str, torch.Tensor] = {}
        self.backwards = 0
        self._clip_grad_norm = clip_grad_norm

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The only optimizer, or the first."""
        return self.optimizers[0]

    def backward(
        self, loss: torch.Tensor, optimizer: torch.optim.Optimizer, *, retain_graph: bool = False
    ) -> None:
        """Take one step of one of several optimizers down the gradient of a loss.

        Gradients of its parameters are those of this loss alone, clipped together.
        """
        if len(self.optimizers) == 1:
            raise Refusal(ONE_RULE, "a call of state.backward", ONE_REMEDY)
        if not any(optimizer is item for item in self.optimizers):
            received = f"{type(optimizer).__name__}, which is none of them"
            raise Refusal(SEVERAL_RULE, received, SEVERAL_REMEDY)
        check_loss(loss)
        self.backwards += 1
        with torch.autocast(self.device.type, enabled=False):
            optimizer.zero_grad()
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            if self._clip_grad_norm is not None:
                parameters = [item for group in optimizer.param_groups for item in group["params"]]
                nn.utils.clip_grad_norm_(parameters, self._clip_grad_norm)
            optimizer.step()
        # Autocast keeps converted weights, which are old now.
        torch.clear_autocast_cache()

    def log(self, **measures: Any) -> None:
        """Record numbers; the epochs table holds their means over the samples of each epoch."""
        for name, value in measures.items():
            self.measures[name] = column_of("what a step logs", name, value)


class TrainingStep:
    """The user's function, and what it logged in the batches of the epoch."""

    def __init__(
        self,
        function: Callable[..., Any],
        optimizer: Any,
        criterion: Callable[..., Any],
        device: torch.device,
        precision: str,
        clip_grad_norm: float | None = None,
    ) -> None:
        self.function, self._precision = function, precision
        optimizers = optimizers_of(optimizer)
        self.is_several = len(optimizers) > 1
        self.state = StepState(optimizers, criterion, device, precision, clip_grad_norm)
        self.logged: dict[str, list[tuple[torch.Tensor, int]]] = {}

    def loss(self, model: nn.Module, batch: Any, epoch: int, batch_index: int) -> torch.Tensor:
        """Call the function on a batch; return its loss. With several optimizers, it has stepped.

        What it logs counts once a batch, however often an optimizer asks for the loss.
        """
        state = self.state
        state.epoch, state.batch_index, state.backwards = epoch, batch_index, 0
        state.measures = {}
        with autocast(state.device, self._precision):
            answer = self.function(model, batch, state)
        loss = parsed("training_step", answer, state, differentiable=not self.is_several)
        assert loss is not None
        return loss.float() if loss.dtype is AUTOCAST.get(self._precision) else loss

    def keep_measures(self, samples: int) -> None:
        """Add what a batch of so many samples logged to the epoch."""
        for name, value in self.state.measures.items():
            self.logged.setdefault(name, []).append((value, samples))

    def means(self) -> dict[str, float]:
        """Return the mean of each measure over the samples of the epoch, and begin anew."""
        tables, self.logged = self.state_dict(), {}
        return {
            name: float(values @ sizes / sizes.sum()) for name, (values, sizes) in tables.items()
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what was logged in the epoch: by name (2, batches), values above their samples."""
        return {
            name: torch.stack(
                [
                    torch.stack([value for value, _ in rows]).double().cpu(),
                    torch.tensor([size for _, size in rows], dtype=torch.float64),
                ]
            )
            for name, rows in self.logged.items()
        }

    def load_state_dict(self, tree: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state_dict` returned."""
        device = self.state.device
        self.logged = {
            name: [(value, int(size)) for value, size in zip(values.to(device), sizes, strict=True)]
            for name, (values, sizes) in tree.items()
        }


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return the context in which the user's functions compute."""
    dtype = AUTOCAST.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _in_float32(
    criterion: Callable[..., Any], device: torch.device, dtype: torch.dtype
) -> Callable[..., Any]:
    """Return the criterion as the built-in step computes it, see `precision`."""

    def computed(outputs: Any, targets: Any) -> Any:
        with torch.autocast(device.type, enabled=False):
            return criterion(in_float32(outputs, dtype), targets)

    return computed


def parsed(
    name: str, answer: Any, state: StepState, *, differentiable: bool, needed: bool = True
) -> torch.Tensor | None:
    """Log what a function returned beside the loss; return the loss, None only if not `needed`."""
    if isinstance(answer, Mapping):
        if "loss" not in answer and needed:
            names = ", ".join(map(str, answer)) or "nothing"
            raise Refusal(
                f"a dict that {name} returns must hold the loss",
                f"a dict of {names}",
                "Return {'loss': loss, ...}.",
            )
        state.log(**{str(key): answer[key] for key in answer if key != "loss"})
        answer = answer.get("loss")
    if answer is None and not needed:
        return None
    check_loss(answer, name, differentiable=differentiable)
    loss: torch.Tensor = answer
    return loss


def user_step(
    recipe: Any,
    params: Any,
    optimizer: Any,
    criterion: Callable[..., Any],
    device: torch.device,
    precision: str = "",
) -> TrainingStep | None:
    """Return the step of a recipe for one job; None if it has none."""
    if recipe.training_step is None:
        return None
    # A callable object of the user's may keep a state, which must not reach the next job.
    function = copy.deepcopy(recipe.training_step)
    precision = precision or params.precision
    return TrainingStep(function, optimizer, criterion, device, precision, params.clip_grad_norm)


def check_loss(
    loss: Any,
    name: str = "training_step",
    *,
    differentiable: bool = True,
    remedy: str = "Return the loss of the batch as a scalar tensor, such as "
    "state.criterion(model(inputs), targets).",
) -> None:
    """Refuse a loss that is not one number with a gradient."""
    is_number = isinstance(loss, torch.Tensor) and loss.numel() == 1
    if is_number and (loss.requires_grad or not differentiable):
        return
    gradient = " with a gradient" * differentiable
    raise Refusal(
        f"{name} must give one number{gradient} as loss",
        f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
        if isinstance(loss, torch.Tensor)
        else repr(loss)[:80],
        remedy,
    )


def column_of(what: str, name: str, value: Any, taken: Collection[str] = TAKEN) -> torch.Tensor:
    """Return a value for the table of epochs, as a scalar in float64 on its device."""
    if name in taken:
        raise Refusal(
            f"{what} must not have the name of another column of the epochs",
            repr(name),
            "Choose another name.",
        )
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(()).double()
    if isinstance(value, numbers.Real):
        return torch.tensor(float(value), dtype=torch.float64)
    raise Refusal(
        "what is logged must be numbers", f"{name}={value!r:.60}", "Pass a number or a scalar."
    )


class ValidationStep:
    """The user's function, and its measures of the last epoch.

    Parameters
    ----------
    function : callable
        (model, batch, state) → None, a loss, or a dict of these and other measures.
    optimizers, criterion, device, precision
        As for an `TrainingStep`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        optimizers: tuple[torch.optim.Optimizer, ...],
        criterion: Callable[..., Any],
        device: torch.device,
        precision: str,
    ) -> None:
        self._function, self._precision = function, precision
        self.state = StepState(optimizers, criterion, device, precision)
        self.measures: dict[str, float] = {}
        self.has_loss = False

    def loss(
        self, model: nn.Module, batches: Iterable[tuple[tuple[Any, Any], int]], epoch: int
    ) -> float | None:
        """Measure a model in evaluation mode; return the loss, if the function returns any.

        The loss and what was logged, in `mean_loss`, are means over the samples that had them.
        `batches` are pairs of inputs and targets, and how many samples they hold.
        """
        sums: dict[str, torch.Tensor] = {}
        counts: dict[str, int] = {}
        state = self.state
        with torch.no_grad():
            for number, (batch, size) in enumerate(batches):
                state.epoch, state.batch_index, state.measures = epoch, number, {}
                with autocast(state.device, self._precision):
                    loss = self._function(model, batch, state)
                loss = parsed("validation_step", loss, state, differentiable=False, needed=False)
                returned = {} if loss is None else {"loss": loss.detach().reshape(()).double()}
                for name, value in {**state.measures, **returned}.items():
                    sums[name] = sums[name] + value * size if name in sums else value * size
                    counts[name] = counts.get(name, 0) + size
        means = {name: float(total) / counts[name] for name, total in sums.items()}
        mean_loss = means.pop("loss", None)
        self.measures, self.has_loss = means, mean_loss is not None
        return mean_loss


def user_validation(
    recipe: Any, optimizers: tuple[Any, ...], criterion: Any, device: torch.device, precision: str
) -> ValidationStep | None:
    """Return the `validation_step` of a recipe for one job; None if it has none."""
    if recipe.validation_step is None:
        return None
    function = copy.deepcopy(recipe.validation_step)
    return ValidationStep(function, optimizers, criterion, device, precision)


def joined(logged: dict[str, Any], measured: dict[str, float]) -> dict[str, Any]:
    """Return what both steps logged in an epoch."""
    if both := sorted(logged.keys() & measured.keys()):
        raise Refusal(
            "training_step and validation_step must log different names",
            ", ".join(map(repr, both)),
            "Rename one of them.",
        )
    return logged | measured
