"""Refuse errors and losses passed as scores: greater must be better."""

from __future__ import annotations

import dis
import functools
import re
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

from asynckfold.errors import Problem

_ERROR = re.compile(
    "bce|brier|cer|cost|deviance|distance|divergence|entropy|err|errors?|hamming|hinge|loss|losses|"
    "mad|mae|mape|mse|msle|nll|perplexity|regret|risk|rmse|rmsle|smape|wer"
)
"""Words that name an error."""

_SCORE = re.compile(
    "accuracy|auc|correlation|gain|improvement|inverse|inverted|minus|neg|negative|precision|"
    "recall|reciprocal|reduction|score|similarity|skill|utility"
)
"""Words that name a score, or a negated error."""

_LIBRARY = re.compile(r"[a-z0-9_]+_(loss|error|deviance|entropy(_with_logits)?)|kl_div")
"""Errors of scikit-learn and torch, where a function calls one."""


def direction_problems(pairs: Sequence[tuple[Any, Any]]) -> Iterator[Problem]:
    """Yield the scores, of pairs (name, score), whose names say that less is better."""
    for name, item in pairs:
        if isinstance(item, str) or not callable(item):
            continue
        if hasattr(item, "_score_func") and hasattr(item, "_sign"):
            error = _name(item._score_func)
            if item._sign > 0 and is_error(error):
                yield _problem(error, f"make_scorer({error})")
            continue
        error = _name(item)
        # A lambda has only the name that the user gave the score.
        error = str(name) if error == "<lambda>" else error
        if error := error if is_error(error) else _called(item):
            yield _problem(error, repr(name))


def _problem(error: str, received: str) -> Problem:
    from sklearn.metrics import get_scorer_names

    scorer = f"neg_{error.removesuffix('_loss') if error.startswith('brier') else error}"
    remedy = (
        f"Pass scoring={scorer!r}."
        if scorer in get_scorer_names()
        else f"Return its negative under a matching name: scoring={{'neg_{error}': lambda labels, "
        f"outputs: -{error}(labels, outputs)}}; or, for a function of labels and predictions, "
        f"make_scorer({error}, greater_is_better=False)."
    )
    rule = f"scores must be such that greater is better, and {error} is an error by its name"
    return Problem(rule, received, remedy)


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def is_error(name: str) -> bool:
    """Whether a name says that it is an error.

    >>> [is_error(name) for name in ("my_loss", "RMSE", "MSELoss", "neg_mse", "lossless")]
    [True, True, True, False, False]
    """
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    words = re.split(r"[^a-z]+", parted)
    if any(map(_SCORE.fullmatch, words)):
        return name == "brier_score_loss"
    return name == "kl_div" or any(map(_ERROR.fullmatch, words))


def _called(function: Any) -> str:
    """Return the error of a library that a function calls without negating it; ``""`` if none."""
    if not isinstance(function, FunctionType):
        return ""
    code = function.__code__
    below = any(isinstance(item, (int, float)) and item < 0 for item in code.co_consts)
    if below or "negative" in code.co_names or any(map(_negates, dis.get_instructions(code))):
        return ""
    return next(filter(_LIBRARY.fullmatch, code.co_names), "")


def _negates(step: dis.Instruction) -> bool:
    """Whether a bytecode step may reverse the order of values: a minus or a division."""
    binary = step.opname == "BINARY_OP" and step.argrepr in ("-", "/", "-=", "/=")
    return binary or step.opname in ("UNARY_NEGATIVE", "BINARY_SUBTRACT", "BINARY_TRUE_DIVIDE")
