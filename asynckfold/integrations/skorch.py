"""A skorch `NeuralNet` taken apart: what trains it, as arguments of `AsyncKFold` and its call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from asynckfold.errors import Problem, refuse
from asynckfold.jobs.argument import one_line
from asynckfold.jobs.recipe import InitialState

_PARTS = ("module", "criterion", "optimizer")
"""Parameters that take further ones, such as ``module__width``."""

_GROUPS = "optimizer__param_groups"
_LIBRARIES = ("skorch", "sklearn", "builtins")

_AFTER = ("predict", "score", "forward", "save_", "load_", "get_params", "set_params", "__")
"""Beginnings of methods that do not train."""


@dataclass(frozen=True)
class NetParts:
    """What trains a net.

    Parameters
    ----------
    criterion, batch_size
        Arguments of `AsyncKFold`.
    models, schedulers, opt_fn, trainer_params
        Arguments of its call; `opt_fn` takes ``lr``, which a grid may set.
    """

    criterion: Any
    batch_size: int
    models: dict[str, Any]
    schedulers: tuple[str, ...]
    opt_fn: NetOptimizer
    trainer_params: dict[str, Any]

    @property
    def call(self) -> tuple[Any, ...]:
        """The arguments of the call, in their order."""
        return self.models, self.schedulers, self.opt_fn, self.trainer_params


@dataclass(frozen=True)
class NetOptimizer:
    """As ``opt_fn``: the optimizer of a net."""

    make: Callable[..., Any]
    rate: float
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: nn.Module, lr: float | None = None) -> Any:
        """Return the optimizer of a model, with the net's learning rate or another."""
        keywords = {"lr": self.rate, **self.keywords} | ({} if lr is None else {"lr": lr})
        return self.make(model.parameters(), **keywords)


class _WithNonlinearity(nn.Module):
    """A module, and what a net makes of its outputs before the criterion."""

    def __init__(self, make: Callable[..., nn.Module], **keywords: Any) -> None:
        super().__init__()
        self.module = make(**keywords)

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """Return what the criterion gets."""
        return self.end(self.module(*inputs, **named))

    def end(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return what a net makes of outputs."""
        raise NotImplementedError


class LogProbabilities(_WithNonlinearity):
    """With the logarithm that `NeuralNetClassifier` takes for `NLLLoss`."""

    def end(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities."""
        return torch.log(outputs + torch.finfo(outputs.dtype).eps)


class OneColumn(_WithNonlinearity):
    """Without the axis that `NeuralNetBinaryClassifier` drops."""

    def end(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return outputs of shape (n,)."""
        return outputs.squeeze(1) if outputs.dim() == 2 else outputs


def parts_of(net: Any) -> NetParts:
    """Return what trains a net; refuse by name what has no counterpart.

    Parameters
    ----------
    net : skorch.NeuralNet
        Its module, criterion, optimizer, ``lr``, ``max_epochs`` and ``batch_size`` are taken over,
        fitted or not.

    Returns
    -------
    NetParts
        For ``AsyncKFold(5, (X, y), root_dir, parts.criterion, parts.batch_size)(*parts.call)``.

    Raises
    ------
    InputError
        The net has what only skorch's loop can do.
    """
    refuse(_problems(net))
    of_module, of_criterion, of_optimizer = (net.get_params_for(name) for name in _PARTS)
    criterion = net.criterion if isinstance(net.criterion, nn.Module) else net.criterion()
    if of_criterion:
        criterion = net.criterion(**of_criterion)
    module = net.module
    name = getattr(module, "__name__", type(module).__name__)
    if (ended := _ended(net, criterion)) is not None:
        is_made = isinstance(module, nn.Module)
        module = functools.partial(ended, InitialState.of(module) if is_made else module)
    model = functools.partial(module, **of_module) if of_module else module
    return NetParts(
        criterion,
        net.batch_size,
        {name: model},
        ("constant",),
        NetOptimizer(net.optimizer, net.lr, of_optimizer),
        {"epochs": net.max_epochs},
    )


def _ended(net: Any, criterion: Any) -> type[_WithNonlinearity] | None:
    from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier

    if isinstance(net, NeuralNetBinaryClassifier):
        return OneColumn
    is_log = isinstance(net, NeuralNetClassifier) and isinstance(criterion, nn.NLLLoss)
    return LogProbabilities if is_log else None


def _problems(net: Any) -> Iterator[Problem]:
    from skorch import NeuralNet
    from skorch.dataset import Dataset
    from torch.utils.data import DataLoader

    if not isinstance(net, NeuralNet):
        yield Problem("net must be a skorch.NeuralNet", one_line(net), "Pass a NeuralNet.")
        return
    usual = {
        "callbacks": (None, "disable", [], ()),
        "iterator_train": (DataLoader,),
        "iterator_valid": (DataLoader,),
        "dataset": (Dataset,),
        "predict_nonlinearity": ("auto", None),
        "threshold": (0.5,),
        "warm_start": (False,),
        "compile": (False,),
        "device": ("cpu",),
        "iterator_train__shuffle": (True,),
    }
    known = {*inspect.signature(NeuralNet.__init__).parameters, "classes"}
    for name, value in sorted(net.get_params(deep=False).items()):
        part = name.partition("__")[0]
        if name.startswith("_"):
            continue
        if name in usual:
            is_used = any(value is item or value == item for item in usual[name])
        else:
            is_used = name in known if part == name else part in _PARTS
        if not is_used or name == _GROUPS:
            yield Problem(
                "a net is its module, criterion, optimizer, lr, max_epochs and batch_size here",
                f"{name}={one_line(value, 80)}",
                "Leave it out; pass LR schedules and {'compile': True} to the call, devices to "
                "AsyncKFold.",
            )
    if isinstance(net.module, nn.Module) and net.get_params_for("module"):
        received = ", ".join(f"module__{name}" for name in net.get_params_for("module"))
        rule = "parameters of a module need its class"
        yield Problem(rule, f"{received} of an instance", "Pass the class.")
    kinds = [kind for kind in type(net).__mro__ if not kind.__module__.startswith(_LIBRARIES)]
    for name in sorted({name for kind in kinds for name in vars(kind) if hasattr(NeuralNet, name)}):
        if callable(getattr(NeuralNet, name)) and not name.startswith(_AFTER):
            rule = "a net must train as its class of skorch does"
            received = f"{type(net).__name__}.{name}"
            yield Problem(rule, received, "Write it as training_step or fit_fn for AsyncKFold.")
