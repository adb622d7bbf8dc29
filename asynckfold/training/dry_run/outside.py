"""Whose parameters a job trains: those of its model, and of its copy of the criterion.

Anything else is one object for all jobs of a process: each job would continue what the one before
it learned, on other folds, and stored weights would lack it.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from gc import get_referents
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from asynckfold.jobs.digests.ownership import is_own
from asynckfold.jobs.recipe import Recipe, parts_of
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.training.dry_run.checks import few, kind_of, optimized
from asynckfold.training.dry_run.user_code import Live
from asynckfold.training.losses import as_given, trained_parameters
from asynckfold.training.model_state import attributes
from asynckfold.training.user_steps import Refusal

MOST = 5_000
"""Objects in which modules are looked for, the nearest first: some 30 ms."""

_PLAIN = (bool, int, float, str, bytes, type(None), np.ndarray)

_CONTAINERS = (dict, list, tuple, set, frozenset, functools.partial, MethodType)

_BOTH = "def opt_fn(model, criterion): return Adam([*model.parameters(), *criterion.parameters()])"
_REGISTER = (
    "Register it in the model, as by self.head = nn.Linear(8, 2) in __init__, or by nn.ModuleList: "
    "all jobs of a process share what is outside, and stored weights lack it"
)


def check_optimized(name: str, live: Live, recipe: Recipe, params: TrainerParams) -> None:
    """Refuse an optimizer of tensors outside, or of too few, and a trainer that leaves some out."""
    kind, criterion = kind_of(live.optimizer), live.criterion
    held = {id(item): item for item in optimized(live.optimizer)}
    of_model, of_criterion = list(live.model.parameters()), trained_parameters(criterion)
    if of_model and not any(id(item) in held for item in of_model):
        raise Refusal(
            "opt_fn must optimise the model that it gets",
            f"{kind}, which holds no parameter of model {name}",
            "Write for instance: def opt_fn(model): return Adam(model.parameters(), 1e-3)",
        )
    inside = {id(item) for item in (*of_model, *of_criterion)}
    others = [item for key, item in held.items() if key not in inside and item.requires_grad]
    if others:
        paths = {id(item): path for path, item in _outside(recipe, name, live)}
        raise Refusal(
            "opt_fn must optimise parameters of the model and of the criterion only",
            f"{kind} of model {name}, with "
            + few([paths.get(id(item), f"one of shape {tuple(item.shape)}") for item in others]),
            f"{_REGISTER}. For a loss, pass an nn.Module as criterion; take its parameters by "
            f"{_BOTH}.",
        )
    if not of_criterion:
        return
    names = few([path for path, _ in as_given(criterion).named_parameters()])
    if not any(id(item) in held for item in of_criterion):
        raise Refusal(
            "opt_fn must optimise the parameters of the criterion, too",
            f"{kind}, which holds none of {names}",
            f"Write for instance: {_BOTH}. If they are to stay as they are, call "
            "criterion.requires_grad_(False) before.",
        )
    if params.processes > 1 and params.trainer != "allreduce":
        raise Refusal(
            "a criterion with parameters is trained by one process, or by trainer='allreduce'",
            f"trainer={params.trainer!r}, processes={params.processes}, and {names}",
            "Pass trainer='allreduce', or processes=1.",
        )


@contextmanager
def only_inside(recipe: Recipe, name: str, live: Live) -> Iterator[None]:
    """Refuse a step that changes a module outside, or computes a gradient for one."""
    modules = [item for item in (live.model, live.criterion) if isinstance(item, nn.Module)]
    inside = {id(item) for part in modules for item in (*part.parameters(), *part.buffers())}
    before = [
        (path, item, _versions(item), _copied(item))
        for path, item in _outside(recipe, name, live)
        if id(item) not in inside and not item.is_inference() and not is_lazy(item)
    ]
    yield
    changed, reached = [], []
    for path, item, (version, gradient), copied in before:
        # A kernel of BatchNorm changes statistics without a new version.
        same = copied is None or torch.equal(item, copied) or bool(copied.isnan().any())
        version_now, gradient_now = _versions(item)
        if version_now != version or not same:
            changed.append(path)
        if gradient_now != gradient:
            reached.append(path)
        # In the caller's process all stays as it was.
        if copied is not None and not same:
            with torch.no_grad():
                item.copy_(copied)
        if gradient is None and item.is_leaf:
            item.grad = None
    if changed or reached:
        what = f"changes {few(changed)}"
        if not changed:
            what = f"computes a gradient for {few(reached)}, which nothing trains"
        raise Refusal(
            "a step must change nothing but the model, the criterion and the optimizer",
            f"model {name}, which {what}",
            f"{_REGISTER}. If it is to stay as it is, call eval() and requires_grad_(False) on it. "
            "Use the job's copy of the criterion: state.criterion, in a fit_fn context.criterion.",
        )


def _versions(item: torch.Tensor) -> tuple[int, int | None]:
    """Return how often a tensor was changed, and its gradient, if it has one."""
    has_gradient = item.is_leaf and item.grad is not None
    return item._version, item.grad._version if has_gradient else None  # type: ignore[union-attr]


def _copied(item: torch.Tensor) -> torch.Tensor | None:
    """Return a copy, but of frozen weights, which may be many."""
    is_frozen = isinstance(item, nn.Parameter) and not item.requires_grad
    return None if is_frozen else item.detach().clone()


def _outside(recipe: Recipe, name: str, live: Live) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield path and tensor of parameters and modules that the user's code reaches by name."""
    criteria = as_given(live.criterion), as_given(recipe.criterion)
    functions = recipe.opt_fn, recipe.models[name], recipe.training_step, recipe.fit_fn
    roots = [("self", live.model), *(("criterion", item) for item in criteria)]
    roots += [("", item) for item in (*functions, *map(type, live.model.modules()))]
    queue, seen = deque(roots), dict[int, Any]()
    while queue and len(seen) < MOST:
        path, value = queue.popleft()
        if id(value) in seen:
            continue
        # Kept alive: another object could have its id.
        seen[id(value)] = value
        if isinstance(value, nn.Parameter):
            yield path.lstrip("."), value
        if isinstance(value, nn.Module):
            for key, item in {**value._parameters, **value._buffers}.items():
                if item is not None:
                    yield f"{path}.{key}".lstrip("."), item
        if isinstance(value, (type, FunctionType)):
            # Globals and classes are known by name.
            path = value.__name__ if isinstance(value, type) else ""
        # Objects of the user's may raise anything; a list of a million samples is not worth more.
        with suppress(Exception):
            for step, part in islice(_parts_of(value), MOST // 25):
                if not isinstance(part, _PLAIN):
                    queue.append((f"{path}{step}", part))


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a value leads to: only the user's objects, and collections, are looked into."""
    if isinstance(value, nn.Module):
        inside = {**attributes(value), **value._modules}
        yield from ((f".{name}", part) for name, part in inside.items())
    elif type(value).__name__ in ("_lru_cache_wrapper", "_lru_list_elem"):
        yield from (("()", part) for part in get_referents(value))
    else:
        plain = inspect.unwrap(value) if isinstance(value, FunctionType) else value
        is_named = isinstance(value, (type, FunctionType, ModuleType))
        if isinstance(value, _CONTAINERS) or is_own(plain if is_named else type(value)):
            yield from parts_of(plain)
