"""Refusals of the dry run, and which exceptions become one.

An exception that torch raises for a wrong argument or shape is a refusal, which names the place. An
exception that the user's own code raises on purpose only fails the jobs of its candidate.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from asynckfold.data.transforms import is_tree, kinds_text
from asynckfold.errors import InputError
from asynckfold.jobs.digests.ownership import is_asynckfold, is_own_file

_LAYER_CALL = "torch.nn.modules.module"
"""Where a layer is called, with ``self``, ``args`` and ``kwargs`` in the frame."""

_OTHER_CAUSES = ("cuda", "memory", "not implemented")
"""Words of errors that say nothing of shapes: a GPU may have what a core lacks."""

_CORRECT = "Correct it; pass keep_going=True to train the others."


class Refused(Exception):  # noqa: N818
    """A rule is broken; the arguments are (rule, received, remedy)."""

    @classmethod
    def first_of(cls, error: InputError) -> Refused:
        """Return the first problem of an `InputError`."""
        problem = error.problems[0]
        return cls(problem.rule, problem.received, problem.remedy)


class TooFewOutputs(Exception):  # noqa: N818
    """The model has too few outputs for the class indices, which can be renumbered."""


def first_line(error: Exception) -> str:
    """Return the first line of a message, cut to 200 characters."""
    return next(iter(str(error).strip().splitlines()), "")[:200]


def shape_text(batch: Any) -> str:
    """Return the shape of a tensor; of a tree, paths, types and shapes."""
    return str(tuple(batch.shape)) if isinstance(batch, torch.Tensor) else kinds_text(batch)


@contextmanager
def making(rule: str) -> Iterator[None]:
    """Refuse a part of a candidate that cannot be made, such as by a wrong argument."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        frame = _tracebacks(error)[-1].tb_frame
        is_on_purpose = _is_users(frame) and _is_raised(error)
        if is_on_purpose or any(word in str(error).lower() for word in _OTHER_CAUSES):
            raise
        raise Refused(rule, _text(error), _CORRECT) from error


@contextmanager
def trying(rule: str, remedy: str) -> Iterator[None]:
    """Refuse whatever the user's function raises."""
    try:
        yield
    except InputError as error:
        raise Refused.first_of(error) from error
    except Exception as error:
        raise Refused(rule, _text(error), remedy) from error


def misfit(name: str, model: nn.Module, inputs: Any, error: Exception) -> Refused | None:
    """Return the refusal of a model whose forward torch cannot compute for the samples, or None.

    It names the layer, and what the layer gets.
    """
    if not _is_of_shapes(error):
        return None
    layer: nn.Module = model
    received: tuple[Any, ...] = (inputs,)
    for traceback in _tracebacks(error):
        frame = traceback.tb_frame
        called = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") == _LAYER_CALL and isinstance(called, nn.Module):
            layer = called
            args, keywords = (frame.f_locals.get(word) for word in ("args", "kwargs"))
            received = (*(args or ()), *([keywords] if keywords else ()))
    path = next((path for path, item in model.named_modules() if item is layer), "")
    where = f"its layer {path}, {_described(layer)}, which" if path else "its forward(), which"
    return Refused(
        f"model {name} must take the samples, in batches of {_shapes((inputs,))}",
        f"{type(error).__name__} in {where} gets {_shapes(received)}: {first_line(error)}",
        "Change the model or transform the samples; pass keep_going=True to train the others.",
    )


def criterion_misfit(
    name: str, outputs: Any, targets: torch.Tensor, users_targets: Any, error: Exception
) -> Refused | None:
    """Return the refusal of a criterion that torch cannot compute, or None."""
    if not _is_of_shapes(error):
        return None
    is_one = isinstance(outputs, torch.Tensor) and outputs.shape != targets.shape
    if is_one and outputs.squeeze(-1).shape == targets.squeeze(-1).shape:
        return unlike(name, outputs, targets)
    return Refused(
        f"the criterion must take the outputs of model {name} and the targets",
        f"{type(error).__name__} for outputs {kinds_text(outputs)} and targets "
        f"{kinds_text(users_targets)}: {first_line(error)}{_place(error)}",
        "Change the criterion, the last layer of the model, or the targets.",
    )


def unlike(name: str, outputs: Any, targets: torch.Tensor) -> Refused:
    """Return the refusal of outputs whose shape is not that of the targets."""
    fewer = isinstance(outputs, torch.Tensor) and outputs.ndim < targets.ndim
    return Refused(
        f"model {name} must return outputs of the shape of the targets",
        f"outputs {shape_text(outputs)}, targets {shape_text(targets)}",
        "Return outputs[:, None] in forward, or pass targets of shape (samples,)."
        if fewer
        else "Squeeze the outputs in forward, or pass targets of shape (samples, 1).",
    )


def _is_of_shapes(error: Exception) -> bool:
    """Whether torch raised it for its arguments: in its own code, or in C called from anywhere."""
    if not isinstance(error, (RuntimeError, ValueError, TypeError, IndexError)):
        return False
    if any(word in str(error).lower() for word in _OTHER_CAUSES):
        return False
    module = str(_tracebacks(error)[-1].tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] == "torch" or not _is_raised(error)


def _is_raised(error: Exception) -> bool:
    """Whether a ``raise`` in Python code raised it, not an operation."""
    last = _tracebacks(error)[-1]
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}{_place(error)}"


def _place(error: Exception) -> str:
    """Return ``" (net.py, line 7)"``, the last place in the user's own code; empty if none."""
    for traceback in reversed(_tracebacks(error)):
        if _is_users(traceback.tb_frame):
            file = Path(traceback.tb_frame.f_code.co_filename).name
            return f" ({file}, line {traceback.tb_lineno})"
    return ""


def _is_users(frame: FrameType) -> bool:
    """Whether a frame runs the user's own code."""
    module = str(frame.f_globals.get("__name__"))
    return not is_asynckfold(module) and is_own_file(frame.f_code.co_filename)


def _tracebacks(error: Exception) -> list[TracebackType]:
    """Return the places that an error passed, the innermost last."""
    places, place = [], error.__traceback__
    while place:
        places.append(place)
        place = place.tb_next
    return places


def _described(layer: nn.Module) -> str:
    is_leaf = next(layer.children(), None) is None
    return " ".join(repr(layer).split())[:120] if is_leaf else type(layer).__name__


def _shapes(values: Any) -> str:
    return ", ".join(
        kinds_text(item) if isinstance(item, torch.Tensor) or is_tree(item) else type(item).__name__
        for item in values
    )
