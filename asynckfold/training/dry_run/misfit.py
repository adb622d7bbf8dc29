"""Recognise a model that cannot be made or cannot take the samples, and name place and shapes."""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from asynckfold.data.transforms import is_tree, kinds_text
from asynckfold.errors import InputError
from asynckfold.jobs.digests.ownership import is_asynckfold, is_own_file
from asynckfold.training.calls import ONE
from asynckfold.training.dry_run import checks
from asynckfold.training.dry_run.checks import Refused, first_line

_LAYER_CALL = "torch.nn.modules.module"
"""Where a layer is called, with ``self`` and ``args`` in the frame."""

_OTHER_CAUSES = ("cuda", "memory", "not implemented")
"""Words of errors that say nothing of shapes: a GPU may have what a core lacks."""


@contextmanager
def making(rule: str) -> Iterator[None]:
    """Refuse a candidate when a part of it cannot be made, such as by a wrong argument.

    What the user's own code raises is no refusal: only that candidate's jobs fail.
    """
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        if _is_own_raise(error) or any(word in str(error).lower() for word in _OTHER_CAUSES):
            raise
        raise Refused(
            rule,
            f"{type(error).__name__}: {first_line(error)}{own_place(error)}",
            "Correct it; pass keep_going=True to train the others.",
        ) from error


@contextmanager
def trying(rule: str, remedy: str) -> Iterator[None]:
    """Refuse what the user's function raises, or what it breaks of a rule of its own."""
    try:
        yield
    except InputError as error:
        raise Refused.first_of(error) from error
    except Exception as error:
        received = f"{type(error).__name__}: {first_line(error)}{own_place(error)}"
        raise Refused(rule, received, remedy) from error


def misfit(name: str, model: nn.Module, inputs: Any, way: str, error: Exception) -> Refused | None:
    """Return the refusal of a model whose forward pass raised, if torch raised for its inputs.

    `way` is how it gets them, see `calls`.

    What the user's own code raises is no refusal: only that model's jobs fail.
    """
    if way == ONE and isinstance(inputs, Mapping) and not _is_raised(error):
        (argument, *_) = signature(model.forward).parameters
        return Refused(
            f"model {name} must take the samples, in batches of {_shapes((inputs,))}",
            f"{type(error).__name__} in its forward(), whose {argument} is one dict of them, since "
            f"no input has a name that forward takes: {first_line(error)}{own_place(error)}",
            f"Name the inputs as forward does, such as {{{argument!r}: ...}}, or read the dict in "
            "forward; pass keep_going=True to train the others.",
        )
    if not _is_of_shapes(error):
        return None
    layer: nn.Module = model
    received: tuple[Any, ...] = (inputs,)
    for tail in _tails(error):
        frame = tail.tb_frame
        called = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") == _LAYER_CALL and isinstance(called, nn.Module):
            layer = called
            args, named = (frame.f_locals.get(word) for word in ("args", "kwargs"))
            received = (*(args or ()), *([named] if named else ()))
    path = next((path for path, item in model.named_modules() if item is layer), "")
    where = f"its layer {path}, {_described(layer)}, which" if path else "its forward(), which"
    return Refused(
        f"model {name} must take the samples, in batches of {_shapes((inputs,))}",
        f"{type(error).__name__} in {where} gets {_shapes(received)}: {first_line(error)}",
        "Change the model or transform the samples; pass keep_going=True to train the others.",
    )


def criterion_misfit(
    name: str, outputs: Any, targets: torch.Tensor, asked: Any, error: Exception
) -> Refused | None:
    """Return the refusal of a criterion that raised, if torch raised for outputs and targets."""
    if not _is_of_shapes(error):
        return None
    is_one = isinstance(outputs, torch.Tensor) and outputs.shape != targets.shape
    if is_one and outputs.squeeze(-1).shape == targets.squeeze(-1).shape:
        return checks.unlike(name, outputs, targets)
    return Refused(
        f"the criterion must take the outputs of model {name} and the targets",
        f"{type(error).__name__} for outputs {kinds_text(outputs)} and targets "
        f"{kinds_text(asked)}: {first_line(error)}{own_place(error)}",
        "Change the criterion, the last layer of the model, or the targets.",
    )


def _is_of_shapes(error: Exception) -> bool:
    """Whether torch raised it for what it was given."""
    is_of_inputs = isinstance(error, (RuntimeError, ValueError, TypeError, IndexError))
    is_other = any(word in str(error).lower() for word in _OTHER_CAUSES)
    return is_of_inputs and not is_other and _is_of_torch(error)


def _is_of_torch(error: Exception) -> bool:
    """Whether torch raised it: in its own code, or in C called from anywhere."""
    frame = _tails(error)[-1].tb_frame
    if str(frame.f_globals.get("__name__")).partition(".")[0] == "torch":
        return True
    return not _is_raised(error)


def _is_own_raise(error: Exception) -> bool:
    """Whether a ``raise`` in the user's own code raised it."""
    return _is_own(_tails(error)[-1].tb_frame) and _is_raised(error)


def _is_raised(error: Exception) -> bool:
    """Whether a ``raise`` in Python code raised it, not an operation."""
    tail = _tails(error)[-1]
    code = tail.tb_frame.f_code.co_code
    return dis.opname[code[tail.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


def own_place(error: Exception) -> str:
    """Return ``" (net.py, line 7)"``, the last place in the user's own code; empty if none."""
    for tail in reversed(_tails(error)):
        if _is_own(tail.tb_frame):
            return f" ({Path(tail.tb_frame.f_code.co_filename).name}, line {tail.tb_lineno})"
    return ""


def _is_own(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return not is_asynckfold(name) and is_own_file(frame.f_code.co_filename)


def _tails(error: Exception) -> list[TracebackType]:
    """Return the places that an error passed, the innermost last."""
    tails, tail = [], error.__traceback__
    while tail:
        tails.append(tail)
        tail = tail.tb_next
    return tails


def _described(layer: nn.Module) -> str:
    is_leaf = next(layer.children(), None) is None
    return " ".join(repr(layer).split())[:120] if is_leaf else type(layer).__name__


def _shapes(values: Any) -> str:
    return ", ".join(
        kinds_text(item) if isinstance(item, torch.Tensor) or is_tree(item) else type(item).__name__
        for item in values
    )
