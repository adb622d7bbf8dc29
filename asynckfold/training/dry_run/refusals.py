"""Which exceptions of the dry run refuse the sweep, and the place that they name.

An exception that torch raises for a wrong argument or shape is a refusal. One that the user's code
raises on purpose only fails the jobs of its candidate.
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
from asynckfold.training.user_steps import Refusal

_OTHER_CAUSES = ("cuda", "memory", "not implemented")
"""Words of errors that say nothing of shapes: a GPU may have what a core lacks."""


class TooFewOutputs(Exception):  # noqa: N818
    """The model has too few outputs for the class indices, which can be renumbered."""


def first_line(error: Exception) -> str:
    """Return the first line of a message, cut to 200 characters."""
    return next(iter(str(error).strip().splitlines()), "")[:200]


@contextmanager
def attempting(
    rule: str, where: Callable[[Exception], str] = lambda error: "", remedy: str = "Correct it"
) -> Iterator[None]:
    """Refuse what torch, Python or a library raises, but nothing that the user's code raises.

    `where` says which layer failed, or for which shapes.
    """
    remedy = f"{remedy}; pass keep_going=True to train the others."
    with trying(rule, remedy, where, _is_of_library):
        yield


@contextmanager
def trying(
    rule: str,
    remedy: str,
    where: Callable[[Exception], str] = lambda error: "",
    is_refused: Callable[[Exception], bool] = lambda error: True,
) -> Iterator[None]:
    """Refuse whatever the user's function raises."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not is_refused(error):
            raise
        users = [item for item in _tracebacks(error) if _is_users(item.tb_frame)]
        place = ""
        if users:
            file = Path(users[-1].tb_frame.f_code.co_filename).name
            place = f" ({file}, line {users[-1].tb_lineno})"
        received = f"{type(error).__name__}{where(error)}: {first_line(error)}{place}"
        raise Refusal(rule, received, remedy) from error


def _is_of_library(error: Exception) -> bool:
    last = _tracebacks(error)[-1]
    instruction = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]]
    is_on_purpose = instruction in ("RAISE_VARARGS", "RERAISE") and _is_users(last.tb_frame)
    text = f"{type(error).__name__}: {error}".lower()
    return not is_on_purpose and not any(word in text for word in _OTHER_CAUSES)


def layer_of(model: nn.Module, inputs: Any, error: Exception) -> str:
    """Return ``" in its layer 1.0, Linear(...), which gets float32 (10, 8)"``."""
    layer, received = model, (inputs,)
    for traceback in _tracebacks(error):
        names = traceback.tb_frame.f_locals
        is_call = traceback.tb_frame.f_globals.get("__name__") == nn.Module.__module__
        if is_call and {"self", "args", "kwargs"} <= {*names}:
            layer, received = names["self"], (*names["args"], *names["kwargs"].values())
    path = next((path for path, item in model.named_modules() if item is layer), "")
    text = type(layer).__name__ if [*layer.children()] else " ".join(repr(layer).split())[:120]
    where = f"its layer {path}, {text}, which" if path else "its forward(), which"
    return f" in {where} gets {', '.join(map(kinds_of, received))}"


def kinds_of(value: Any) -> str:
    """Return types and shapes of a tensor or a tree of them; of anything else, the class."""
    is_known = isinstance(value, torch.Tensor) or is_tree(value)
    return kinds_text(value) if is_known else type(value).__name__


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
