"""What a step may change: only what the model and the criterion own, and checkpoints have.

Anything else is one object for all jobs of a process: each job would continue what the one before
it learned, on other folds, and stored weights would lack it. Of the objects of a job, all that the
next step and an evaluation depend on must be in a checkpoint and in `results.model`::

    trained ─ evaluation ─ checkpoint ─► a new model ─ lacks an attribute of the trained one?
                  │                                       │
                  └─ buffers that it changes              └─ next step and evaluation differ, too?

What changes without consequence, such as an attention map kept for a plot, is allowed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from asynckfold.training import gradients, lr_schedules, seeding
from asynckfold.training.dry_run.checks import few, kind_of, optimized
from asynckfold.training.dry_run.fingerprints import tensors_of
from asynckfold.training.dry_run.user_code import Batch, Live
from asynckfold.training.losses import as_given, trained_parameters
from asynckfold.training.model_state import StateSnapshot, attributes, describe, same
from asynckfold.training.optimizers import follow_parameters, optimizers_of
from asynckfold.training.user_steps import Refusal

MOST_BYTES = 1 << 30
"""Weights of a larger model are not stepped twice, which would take twice the memory of a job."""

_OF_TORCH = {
    *vars(torch.optim.SGD([torch.zeros(1)], fused=True)),
    *("step", "_opt_called", gradients.NEEDS_CLOSURE, lr_schedules.ATTACHED),
}
"""Attributes of every optimizer; LR schedules add the next two, and training the last."""

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


@contextlib.contextmanager
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
        is_same = copied is None or torch.equal(item, copied) or bool(copied.isnan().any())
        version_now, gradient_now = _versions(item)
        if version_now != version or not is_same:
            changed.append(path)
        if gradient_now != gradient:
            reached.append(path)
        # In the caller's process all stays as it was.
        if copied is not None and not is_same:
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
        with contextlib.suppress(Exception):
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


# State that checkpoints lack


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
