"""Recognise a model that cannot take the samples, and name the layer and the shapes."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from asynckfold.data.transforms import is_tree, kinds_text
from asynckfold.training.dry_run.checks import Refused, first_line

_LAYER_CALL = "torch.nn.modules.module"
"""Where a layer is called, with ``self`` and ``args`` in the frame."""

_OTHER_CAUSES = ("cuda", "memory", "not implemented")
"""Words of errors that say nothing of shapes: a GPU may have what a core lacks."""


def misfit(name: str, model: nn.Module, inputs: Any, error: Exception) -> Refused | None:
    """Return the refusal of a model whose forward pass raised, if torch raised for its inputs.

    What the user's own code raises is no refusal: only that model's jobs fail.
    """
    text = str(error).lower()
    is_of_inputs = isinstance(error, (RuntimeError, ValueError, TypeError, IndexError))
    if not (is_of_inputs and _is_of_torch(error)) or any(word in text for word in _OTHER_CAUSES):
        return None
    layer: nn.Module = model
    received: tuple[Any, ...] = (inputs,)
    for frame in _frames(error):
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


def _is_of_torch(error: Exception) -> bool:
    """Whether torch raised it: in its own code, or in C called from anywhere."""
    tail = error.__traceback__
    assert tail is not None
    while tail.tb_next:
        tail = tail.tb_next
    frame = tail.tb_frame
    if str(frame.f_globals.get("__name__")).partition(".")[0] == "torch":
        return True
    return dis.opname[frame.f_code.co_code[tail.tb_lasti]] not in ("RAISE_VARARGS", "RERAISE")


def _frames(error: Exception) -> Iterator[FrameType]:
    tail: TracebackType | None = error.__traceback__
    while tail:
        yield tail.tb_frame
        tail = tail.tb_next


def _described(layer: nn.Module) -> str:
    is_leaf = next(layer.children(), None) is None
    return " ".join(repr(layer).split())[:120] if is_leaf else type(layer).__name__


def _shapes(values: Any) -> str:
    return ", ".join(
        kinds_text(item) if isinstance(item, torch.Tensor) or is_tree(item) else type(item).__name__
        for item in values
    )
