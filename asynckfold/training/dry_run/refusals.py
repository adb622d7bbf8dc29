"""Refusals of the dry run, and which exceptions become one.

An exception that torch raises for a wrong argument or shape is a refusal, which names the place. An
exception that the user's code raises on purpose only fails the jobs of its candidate.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from asynckfold.data.transforms.trees import is_tree, kinds_text
from asynckfold.errors import InputError
from asynckfold.jobs.digests.ownership import is_asynckfold, is_own_file

_LAYER_CALL = "torch.nn.modules.module"
"""Where a layer is called, with ``self``, ``args`` and ``kwargs`` in the frame."""

OF_SHAPES: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, IndexError)
"""What torch raises for inputs that do not fit."""

_OTHER_CAUSES = ("cuda", "memory", "not implemented")
"""Words of errors that say nothing of shapes: a GPU may have what a core lacks."""


class Refusal(Exception):  # noqa: N818
    """A rule is broken; the arguments are (rule, received, remedy)."""


class TooFewOutputs(Exception):  # noqa: N818
    """The model has too few outputs for the class indices, which can be renumbered."""


def first_line(error: Exception) -> str:
    """Return the first line of a message, cut to 200 characters."""
    return next(iter(str(error).strip().splitlines()), "")[:200]


def shape_text(batch: Any) -> str:
    """Return the shape of a tensor; of a tree, paths, types and shapes."""
    return str(tuple(batch.shape)) if isinstance(batch, torch.Tensor) else kinds_text(batch)


@contextmanager
def attempting(
    rule: str,
    where: Callable[[Exception], str] = lambda error: "",
    remedy: str = "Correct it",
    kinds: tuple[type[Exception], ...] = (Exception,),
) -> Iterator[None]:
    """Refuse what torch, Python or a library raises, but nothing that the user's code raises.

    `where` says which layer failed, or for which shapes. Only errors of these `kinds` are refused.
    """
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        last = _tracebacks(error)[-1]
        instruction = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]]
        is_raised = instruction in ("RAISE_VARARGS", "RERAISE")
        is_on_purpose = is_raised and _is_users(last.tb_frame)
        is_other = any(word in str(error).lower() for word in _OTHER_CAUSES)
        is_refusable = isinstance(error, kinds) and not isinstance(error, MemoryError)
        if is_on_purpose or is_other or not is_refusable:
            raise
        kind = f"{type(error).__name__}{where(error)}"
        raise Refusal(
            rule,
            f"{kind}: {first_line(error)}{_place(error)}",
            f"{remedy}; pass keep_going=True to train the others.",
        ) from error


@contextmanager
def trying(rule: str, remedy: str) -> Iterator[None]:
    """Refuse whatever the user's function raises."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        received = f"{type(error).__name__}: {first_line(error)}{_place(error)}"
        raise Refusal(rule, received, remedy) from error


def layer_of(model: nn.Module, inputs: Any, error: Exception) -> str:
    """Return ``" in its layer 1.0, Linear(...), which gets float32 (10, 8)"``."""
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
    is_leaf = next(layer.children(), None) is None
    text = " ".join(repr(layer).split())[:120] if is_leaf else type(layer).__name__
    where = f"its layer {path}, {text}, which" if path else "its forward(), which"
    return f" in {where} gets {', '.join(map(kinds_of, received))}"


def kinds_of(value: Any) -> str:
    """Return types and shapes of a tensor or a tree of them; of anything else, the class."""
    is_known = isinstance(value, torch.Tensor) or is_tree(value)
    return kinds_text(value) if is_known else type(value).__name__


def _place(error: Exception) -> str:
    """Return ``" (net.py, line 7)"``, the last place in the user's code; empty if none."""
    for traceback in reversed(_tracebacks(error)):
        if _is_users(traceback.tb_frame):
            file = Path(traceback.tb_frame.f_code.co_filename).name
            return f" ({file}, line {traceback.tb_lineno})"
    return ""


def _is_users(frame: FrameType) -> bool:
    """Whether a frame runs the user's code."""
    module = str(frame.f_globals.get("__name__"))
    return not is_asynckfold(module) and is_own_file(frame.f_code.co_filename)


def _tracebacks(error: Exception) -> list[TracebackType]:
    """Return the places that an error passed, the innermost last."""
    places, place = [], error.__traceback__
    while place:
        places.append(place)
        place = place.tb_next
    return places
