"""Refuse errors and losses passed as scores: greater must be better."""

from __future__ import annotations

import dis
import functools
import re
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from asynckfold.errors import Problem

ERRORS = {
    **{
        name: f"neg_{name}"
        for name in (
            *("log_loss", "max_error", "mean_absolute_error", "mean_absolute_percentage_error"),
            *("mean_gamma_deviance", "mean_poisson_deviance", "mean_squared_error"),
            *("mean_squared_log_error", "median_absolute_error", "root_mean_squared_error"),
            "root_mean_squared_log_error",
        )
    },
    "brier_score_loss": "neg_brier_score",
    "hamming_loss": "accuracy",
    "zero_one_loss": "accuracy",
    **dict.fromkeys(
        (
            *("coverage_error", "hinge_loss", "label_ranking_loss", "mean_pinball_loss"),
            *("mean_tweedie_deviance", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
            *("cross_entropy", "huber_loss", "kl_div", "l1_loss", "mse_loss", "nll_loss"),
            *("poisson_nll_loss", "smooth_l1_loss"),
        ),
        "",
    ),
}
"""Functions of scikit-learn and torch where less is better, and the scorer to use instead."""

_WORDS = frozenset(
    (
        *("bce", "brier", "cer", "cost", "deviance", "distance", "divergence", "entropy", "err"),
        *("error", "errors", "hamming", "hinge", "loss", "losses", "mad", "mae", "mape", "mse"),
        *("msle", "nll", "perplexity", "regret", "risk", "rmse", "rmsle", "smape", "wer"),
    )
)
"""Words that name an error."""

_NEGATED = frozenset(
    (
        *("accuracy", "auc", "correlation", "gain", "improvement", "inverse", "inverted", "minus"),
        *("neg", "negative", "precision", "recall", "reciprocal", "reduction", "score"),
        *("similarity", "skill", "utility"),
    )
)
"""Words that name a score, or a negated error."""


def direction_problems(pairs: Sequence[tuple[Any, Any]]) -> Iterator[Problem]:
    """Yield the scores, of pairs (name, score), whose names say that less is better."""
    for name, item in pairs:
        if isinstance(item, str) or not callable(item):
            continue
        if hasattr(item, "_score_func") and hasattr(item, "_sign"):
            function = _name(item._score_func)
            if item._sign > 0 and _is_error(function):
                yield _problem(
                    function,
                    f"make_scorer({function})",
                    f"Write make_scorer({function}, greater_is_better=False).",
                )
            continue
        function = _name(item)
        called = _called(item)
        # A lambda has only the name that the user gave the score.
        if _is_error(function) or (function == "<lambda>" and _is_error(str(name))):
            shown = function if function != "<lambda>" else str(name)
            yield _problem(shown, repr(name), _remedy(shown))
        elif called:
            yield _problem(called, f"{name!r}, which returns it as it is", _remedy(called))


def _problem(function: str, received: str, remedy: str) -> Problem:
    rule = f"scores must be such that greater is better, and {function} is an error by its name"
    return Problem(rule, received, remedy)


def _remedy(function: str) -> str:
    scorer = ERRORS.get(function, "")
    if scorer:
        return f"Pass scoring={scorer!r}."
    return (
        f"Return its negative under a matching name: scoring={{'neg_{function}': lambda labels, "
        "outputs: "
        f"-{function}(labels, outputs)}}; or, for a function of labels and predictions, "
        f"make_scorer({function}, greater_is_better=False)."
    )


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name(function: Any) -> str:
    function = _unwrapped(function)
    return str(getattr(function, "__name__", type(function).__name__))


def _is_error(name: str) -> bool:
    """Whether a name says that it is an error.

    >>> [_is_error(name) for name in ("my_loss", "RMSE", "MSELoss", "neg_mse", "lossless")]
    [True, True, True, False, False]
    """
    if name in ERRORS:
        return True
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    words = set(re.split(r"[^a-z]+", parted))
    return bool(words & _WORDS) and not words & _NEGATED


def _called(function: Any) -> str:
    """Return the known error that a function calls without negating it; ``""`` if none."""
    function = _unwrapped(function)
    if not isinstance(function, FunctionType):
        return ""
    code: CodeType = function.__code__
    error = next((name for name in code.co_names if name in ERRORS), "")
    if not error or any(map(_negates, dis.get_instructions(code))):
        return ""
    below = any(isinstance(item, (int, float)) and item < 0 for item in code.co_consts)
    return "" if below or "negative" in code.co_names else error


def _negates(step: dis.Instruction) -> bool:
    """Whether a bytecode step may reverse the order of values: a minus or a division."""
    binary = step.opname == "BINARY_OP" and step.argrepr in ("-", "/", "-=", "/=")
    return binary or step.opname in ("UNARY_NEGATIVE", "BINARY_SUBTRACT", "BINARY_TRUE_DIVIDE")
