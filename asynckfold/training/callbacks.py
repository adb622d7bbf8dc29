"""Callbacks: objects with methods that the built-in loop calls, and the ones that are shipped.

::

    on_fit_start ─ [ batches: on_batch_end ─ scores ─ on_epoch_end ] × epochs ─ on_fit_end ─ score
                                                          │
                                 stop()? the epoch is the last

A callback sees the training fold, and the part of it that `inner_valid` sets aside; never the
numbers of the held-out fold, which would then no longer say what may be expected of new samples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from asynckfold.errors import Problem
from asynckfold.jobs.argument import one_line
from asynckfold.jobs.recipe import pack
from asynckfold.jobs.result import BEST_EPOCH
from asynckfold.training.losses import as_given, trained_parameters
from asynckfold.training.user_steps import TAKEN, Refusal, column_of

METHODS = ("on_fit_start", "on_batch_end", "on_epoch_end", "on_fit_end")


@dataclass(eq=False)
class FitState:
    """What each method of a callback gets.

    Parameters
    ----------
    job : str
        Its id, ``"LeNet/cosine/fold-0"``.
    model, optimizer, lr_schedule, device, criterion : object
        As the job trains them.
    epochs : int
        How many epochs are planned.
    epoch, batch : int
        Finished epochs, and finished batches of the present one. In `on_epoch_end`, `epoch` counts
        the one that ends.
    metrics : Mapping of str to float
        Of the epoch that ended: ``train_loss``, ``lr``, what a `training_step` logged, and with
        `inner_valid` ``inner_loss`` and, for classes, ``inner_accuracy``.
    """

    job: str
    model: nn.Module
    optimizer: Any
    lr_schedule: Any
    device: torch.device
    epochs: int
    epoch: int = 0
    batch: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    stopped: bool = False
    criterion: Any = None
    logged: dict[str, list[float]] = field(default_factory=dict)

    @property
    def trained(self) -> nn.Module:
        """The model; with a criterion that is trained, too, both as one module."""
        is_trained = bool(trained_parameters(self.criterion))
        return nn.ModuleList([self.model, self.criterion]) if is_trained else self.model

    def log(self, name: str, value: Any) -> None:
        """Record a number in the table of epochs; of several in an epoch, the mean."""
        number = column_of("what a callback logs", name, value, TAKEN.union(self.metrics))
        self.logged.setdefault(name, []).append(float(number))

    def stop(self) -> None:
        """End the job with this epoch."""
        self.stopped = True


class Callbacks:
    """The callbacks of one job.

    Parameters
    ----------
    callbacks : sequence of object
        Copied: jobs share nothing.
    state : FitState
        What they get.
    """

    def __init__(self, callbacks: Sequence[Any], state: FitState) -> None:
        self.items = [copy.deepcopy(item) for item in callbacks]
        self.state = state

    def start(self) -> None:
        """Begin the job, before a checkpoint is loaded."""
        self._call("on_fit_start")

    def end_batch(self, epoch: int, batch: int) -> None:
        """End a batch; `epoch` counts the finished ones."""
        self.state.epoch, self.state.batch = epoch, batch
        self._call("on_batch_end")

    def end_epoch(self, number: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """End an epoch; return what was logged in it."""
        state = self.state
        state.epoch, state.batch, state.metrics = number, 0, metrics
        self._call("on_epoch_end")
        logged, state.logged = state.logged, {}
        return {name: math.fsum(values) / len(values) for name, values in logged.items()}

    def end(self) -> bool:
        """End the job; return whether a callback has ``on_fit_end``."""
        self._call("on_fit_end")
        return any(hasattr(item, "on_fit_end") for item in self.items)

    def _call(self, method: str) -> None:
        for item in self.items:
            if hasattr(item, method):
                getattr(item, method)(self.state)

    def state_dict(self, *, ended: bool = False) -> dict[str, Any]:
        """Return what a checkpoint holds; of a job that ended, only that it did."""
        tree: dict[str, Any] = {"stopped": self.state.stopped}
        if not ended:
            tree["logged"] = self.state.logged
            tree["items"] = [
                item.state_dict() if hasattr(item, "state_dict") else None for item in self.items
            ]
        return tree

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.state.stopped = tree["stopped"]
        self.state.logged = {name: list(values) for name, values in tree.get("logged", {}).items()}
        for item, state in zip(self.items, tree.get("items", ()), strict=False):
            if state is not None:
                item.load_state_dict(state)


class _Monitor:
    """What watches a number of the epochs, and knows its best.

    Parameters
    ----------
    monitor : str
        A key of `FitState.metrics`.
    min_delta : float
        Least change that counts as better.
    mode : {"min", "max"} or None
        Which way is better; by default the smaller, but the greater of what ends in ``accuracy``.
    """

    def __init__(
        self, monitor: str = "inner_loss", min_delta: float = 0.0, mode: str | None = None
    ) -> None:
        self.monitor, self.min_delta = monitor, min_delta
        self.mode = mode or ("max" if monitor.endswith("accuracy") else "min")
        self.best: float | None = None
        self.best_epoch = 0

    def _is_better(self, state: FitState) -> bool:
        """Whether the epoch is the best so far; it is remembered then."""
        value, sign = state.metrics[self.monitor], {"max": 1, "min": -1}[self.mode]
        best = math.nan if self.best is None else self.best
        if not math.isnan(best) and not sign * (value - best) > self.min_delta:
            return False
        self.best, self.best_epoch = value, state.epoch
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its epoch."""
        return {"best": self.best, BEST_EPOCH: self.best_epoch}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.best, self.best_epoch = tree["best"], tree[BEST_EPOCH]


class EarlyStopping(_Monitor):
    """End a job when a number has not improved for `patience` epochs.

    The model is scored as it is then; add `BestWeights` to score that of the best epoch.

    Parameters
    ----------
    monitor : str
        ``"inner_loss"``, ``"inner_accuracy"``, ``"train_loss"``, or what a `training_step` logs.
    patience : int
        Epochs without a better value, at least 1.
    min_delta : float
        Least change that counts as better.
    mode : {"min", "max"} or None
        Which way is better; by default the smaller, but the greater of what ends in ``accuracy``.
    """

    def __init__(
        self,
        monitor: str = "inner_loss",
        patience: int = 10,
        min_delta: float = 0.0,
        mode: str | None = None,
    ) -> None:
        super().__init__(monitor, min_delta, mode)
        self.patience = patience

    def on_epoch_end(self, state: FitState) -> None:
        """Stop after too many epochs without a better one."""
        if not self._is_better(state) and state.epoch - self.best_epoch >= self.patience:
            state.stop()


class BestWeights(_Monitor):
    """Score the model as it was after its best epoch.

    Parameters
    ----------
    monitor : str
        As in `EarlyStopping`.
    min_delta : float
        Least change that counts as better.
    mode : {"min", "max"} or None
        Which way is better; by default the smaller, but the greater of what ends in ``accuracy``.
    """

    weights: dict[str, torch.Tensor] | None = None

    def on_epoch_end(self, state: FitState) -> None:
        """Keep the weights of a better epoch."""
        if self._is_better(state):
            state_dict = state.trained.state_dict()
            self.weights = {name: value.detach().clone() for name, value in state_dict.items()}
        state.log(BEST_EPOCH, self.best_epoch)

    def on_fit_end(self, state: FitState) -> None:
        """Put the best weights back."""
        assert self.weights is not None
        state.trained.load_state_dict(self.weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its epoch and its weights."""
        return {**super().state_dict(), "weights": self.weights}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        super().load_state_dict(tree)
        self.weights = tree["weights"]


class LastEpoch:
    """End a job after an epoch; its LR schedule stays that of all planned epochs.

    Parameters
    ----------
    number : int
        Of the epoch, from 1.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def on_epoch_end(self, state: Any) -> None:
        """Stop after the epoch."""
        if state.epoch >= self.number:
            state.stop()


class WeightAverage:
    """Score the mean of the weights over the training, by `torch.optim.swa_utils`.

    Parameters
    ----------
    decay : float or None
        Of an exponential moving average (EMA), updated after each batch. None: the plain mean of
        the weights after each epoch (SWA, Izmailov et al. 2018, arXiv:1803.05407).
    start : float
        Share of the planned epochs before the first one that counts.
    """

    def __init__(self, decay: float | None = 0.999, start: float = 0.0) -> None:
        self.decay, self.start = decay, start
        self.averaged: swa_utils.AveragedModel | None = None

    def on_fit_start(self, state: FitState) -> None:
        """Make the model that holds the average."""
        function = None
        if self.decay is not None:
            function = swa_utils.get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        # With the statistics of BatchNorm, which would not fit the mean of the weights otherwise.
        self.averaged = swa_utils.AveragedModel(
            state.model, multi_avg_fn=function, use_buffers=True
        )

    def on_batch_end(self, state: FitState) -> None:
        """Count the weights after each batch, of an EMA."""
        if self.decay is not None:
            self._count(state, state.epoch)

    def on_epoch_end(self, state: FitState) -> None:
        """Count the weights after each epoch, of a plain mean."""
        if self.decay is None:
            self._count(state, state.epoch - 1)

    def _count(self, state: FitState, finished: int) -> None:
        if finished >= self.start * state.epochs:
            assert self.averaged is not None
            self.averaged.update_parameters(state.model)

    def on_fit_end(self, state: FitState) -> None:
        """Give the model the average, if any epoch counted."""
        assert self.averaged is not None
        if int(self.averaged.n_averaged):
            state.model.load_state_dict(self.averaged.module.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the average."""
        assert self.averaged is not None
        return dict(self.averaged.state_dict())

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        assert self.averaged is not None
        self.averaged.load_state_dict(tree)


class GradientNorm:
    """Record the norm of the gradient, a mean over the batches of each epoch.

    With ``clip_grad_norm`` it is that of the clipped one.
    """

    def on_batch_end(self, state: FitState) -> None:
        """Record it."""
        grads = [item.grad for item in state.model.parameters() if item.grad is not None]
        state.log("gradient_norm", nn.utils.get_total_norm(grads))


BOUNDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("mode", lambda value: value in ("min", "max"), "'min' or 'max'"),
    ("min_delta", lambda value: value >= 0, "at least 0"),
    ("patience", lambda value: isinstance(value, int) and value >= 1, "at least 1"),
    ("decay", lambda value: value is None or 0 < value < 1, "above 0 and below 1, or None"),
    ("start", lambda value: 0 <= value < 1, "at least 0 and below 1"),
)
"""Arguments of the callbacks that are shipped, and what they must be."""


def callbacks_of(
    recipe: Any, job: str, epochs: int, live: tuple[nn.Module, Any, Any, torch.device, Any]
) -> Callbacks | None:
    """Return the callbacks of a recipe for one job, which train `live`, see `FitState`."""
    if not recipe.callbacks:
        return None
    model, optimizer, schedule, device, criterion = live
    state = FitState(job, model, optimizer, schedule, device, epochs)
    state.criterion = as_given(criterion)
    return Callbacks(recipe.callbacks, state)


def monitor_of(callback: Any) -> str:
    """Return the number of the epochs that a callback watches; empty if none."""
    monitor = getattr(callback, "monitor", "")
    return monitor if isinstance(monitor, str) else ""


INNER, HELD_OUT = "inner_", "valid_"
"""What the names of numbers of the inner part, and of the held-out fold, begin with."""


def callback_problems(callbacks: Sequence[Any], *, has_inner: bool) -> Iterator[Problem]:
    """Yield what is wrong with callbacks; `has_inner`: a part is set aside to watch."""
    for item in callbacks:
        name = type(item).__name__
        if isinstance(item, type):
            rule = "a callback must be an object, not a class"
            yield Problem(rule, item.__name__, f"Write {item.__name__}().")
            continue
        if not any(callable(getattr(item, method, None)) for method in METHODS):
            rule = f"a callback must have one of the methods {', '.join(METHODS)}"
            yield Problem(rule, one_line(item), "Define one, each of one argument, the state.")
        kept = [hasattr(item, method) for method in ("state_dict", "load_state_dict")]
        if any(kept) and not all(kept):
            rule = "a callback must have both state_dict and load_state_dict, or neither"
            yield Problem(rule, name, "Define the other, too.")
        # Others may call anything of theirs so.
        arguments = vars(item) if isinstance(item, (_Monitor, WeightAverage)) else {}
        for argument, fits, bounds in BOUNDS:
            if argument in arguments and not fits(arguments[argument]):
                rule = f"{name}: {argument} must be {bounds}"
                yield Problem(rule, repr(arguments[argument]), "Pass another.")
        monitor = monitor_of(item)
        if monitor.startswith(HELD_OUT):
            yield Problem(
                "a callback must not look at the fold that scores",
                f"{name}(monitor={monitor!r})",
                "Pass inner_valid=0.1 and monitor='inner_loss', a part of the training fold.",
            )
        elif monitor.startswith(INNER) and not has_inner:
            yield Problem(
                f"{name} watches a part of each training fold, which must be set aside",
                f"monitor={monitor!r}, inner_valid=None",
                "Pass inner_valid=0.1.",
            )


def try_callbacks(callbacks: Callbacks, metrics: Mapping[str, float]) -> None:
    """Call the methods as in a job of one batch and one epoch.

    Raises
    ------
    Refusal
        A rule is broken: a monitored number that does not exist, a change that no state keeps.
    """
    for item in callbacks.items:
        monitor = monitor_of(item)
        if monitor and monitor not in metrics:
            raise Refusal(
                f"{type(item).__name__} must watch a number of the epochs",
                f"monitor={monitor!r}",
                f"There are {', '.join(map(repr, metrics))}.",
            )
    callbacks.start()
    before = [_kept(item) for item in callbacks.items]
    callbacks.end_batch(0, 1)
    callbacks.end_epoch(1, metrics)
    for item, old in zip(callbacks.items, before, strict=True):
        if old and not hasattr(item, "state_dict") and _kept(item) != old:
            raise Refusal(
                "a callback that changes must keep what changes in the checkpoints",
                f"{type(item).__name__} without state_dict",
                "Define state_dict(), which returns it, and load_state_dict(state).",
            )
    callbacks.end()


def _kept(item: Any) -> bytes:
    """Return what an object holds; empty if that cannot be said."""
    try:
        return pack(vars(item))
    # It may hold anything, such as an open file.
    except Exception:  # noqa: BLE001
        return b""
