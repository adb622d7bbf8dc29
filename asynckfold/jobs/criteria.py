"""What each criterion asks of targets, and the scale of its outputs: one table.

A model trained with ``BCEWithLogitsLoss`` gives log-odds, one trained with ``PoissonNLLLoss`` the
logarithm of a rate. Labels, scores, predictions and reports all read it here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

CLASSES, ODDS, SIGNS, NUMBERS = "classes", "odds", "signs", "numbers"
"""Targets: class indices; 0 and 1; -1 and 1; numbers. 0 and 1, or -1 and 1, of one class for each
sample (n,), or of several labels (n, L)."""

LOGITS, LOG_PROBABILITIES, PROBABILITIES = "logits", "log-probabilities", "probabilities"
MARGINS, LOG_RATE, VALUES = "margins", "log-rate", "values"
SHARE_LOGITS = "logits of shares"
TRANSFORMED, UNKNOWN = "transformed", "unknown"
"""Scales of outputs. The softmax of the logits of shares is compared with rows of probabilities.
Margins rank and choose a class, but are no probabilities; of an unknown scale
is not even known where one class ends; the user's `output_transform` gives what is to be scored."""


@dataclass(frozen=True)
class Criterion:
    """What a criterion asks for."""

    name: str  # class in ``torch.nn``
    targets: str  # classes, odds, signs, or numbers
    outputs: str  # their scale
    ignore_index: int = -100


TABLE: Mapping[str, Criterion] = {
    row.name: row
    for row in (
        Criterion("CrossEntropyLoss", CLASSES, LOGITS),
        Criterion("NLLLoss", CLASSES, LOG_PROBABILITIES),
        Criterion("MultiMarginLoss", CLASSES, MARGINS),
        Criterion("BCEWithLogitsLoss", ODDS, LOGITS),
        Criterion("MultiLabelSoftMarginLoss", ODDS, LOGITS),
        Criterion("BCELoss", ODDS, PROBABILITIES),
        # log(1 + exp(-y x)) is the loss of log-odds x.
        Criterion("SoftMarginLoss", SIGNS, LOGITS),
        # x of class 1 and margin - x of class -1: a distance, whose bound nothing tells.
        Criterion("HingeEmbeddingLoss", SIGNS, UNKNOWN),
        Criterion("MSELoss", NUMBERS, VALUES),
        Criterion("L1Loss", NUMBERS, VALUES),
        Criterion("SmoothL1Loss", NUMBERS, VALUES),
        Criterion("HuberLoss", NUMBERS, VALUES),
        Criterion("PoissonNLLLoss", NUMBERS, LOG_RATE),
        # Of distributions (n, m): what is scored is probabilities against probabilities.
        Criterion("KLDivLoss", NUMBERS, LOG_RATE),
    )
}
"""Criteria of (outputs, targets) in ``torch.nn``."""

NOT_OF_PAIRS: Mapping[str, str] = {
    # Its targets are lists of classes, filled up with -1, which no score takes.
    "MultiLabelMarginLoss": "Use MultiLabelSoftMarginLoss, with a row of 0 and 1 for each sample.",
    "GaussianNLLLoss": "Write a function of outputs (n, 2), such as lambda outputs, targets: "
    "torch.nn.functional.gaussian_nll_loss(outputs[:, 0], targets, outputs[:, 1].exp()), and pass "
    "output_transform=lambda outputs: outputs[:, 0].",
    "AdaptiveLogSoftmaxWithLoss": "Use CrossEntropyLoss, or a function that returns one number.",
    "LinearCrossEntropyLoss": "Give the model a last linear layer, and use CrossEntropyLoss.",
    **dict.fromkeys(
        (
            "CosineEmbeddingLoss",
            "CTCLoss",
            "MarginRankingLoss",
            "TripletMarginLoss",
            "TripletMarginWithDistanceLoss",
        ),
        "Write a function (outputs, targets) → loss that divides the outputs into what it needs.",
    ),
}
"""Those that take something else than outputs and labels or numbers, and what to do instead."""

_FUNCTIONS: Mapping[str, str] = {
    **{name.lower().removesuffix("loss"): name for name in (*TABLE, *NOT_OF_PAIRS)},
    "binarycrossentropy": "BCELoss",
    "binarycrossentropywithlogits": "BCEWithLogitsLoss",
}
"""Classes by the names of their functions, without underscores and ``loss`` at the end."""


def criterion_of(criterion: Any) -> Criterion | None:
    """Return what a criterion asks for; None for the user's own.

    A subclass of one in ``torch.nn`` asks for what its base asks for.

    >>> from torch import nn
    >>> criterion_of(nn.PoissonNLLLoss(log_input=False)).outputs
    'values'
    >>> criterion_of(functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)).name
    'CrossEntropyLoss'
    >>> criterion_of(lambda outputs, targets: outputs.mean())
    """
    name, words = _name_and_words(criterion)
    row = TABLE.get(name)
    if row is None:
        return None
    if name == "PoissonNLLLoss" and not words.get("log_input", True):
        return replace(row, outputs=VALUES)
    if name == "KLDivLoss" and words.get("log_target", False):
        return replace(row, outputs=VALUES)
    if name in ("CrossEntropyLoss", "NLLLoss"):
        return replace(row, ignore_index=words.get("ignore_index", -100))
    return row


def is_factory(criterion: Any) -> bool:
    """Whether a function makes the criterion of a training fold of its targets.

    So does one that needs a single argument of the name ``train_targets``, and no object with a
    method ``forward``.

    >>> is_factory(lambda train_targets, beta=0.9: None), is_factory(lambda outputs, targets: None)
    (True, False)
    """
    if isinstance(criterion, type) or hasattr(criterion, "forward") or not callable(criterion):
        return False
    try:
        parameters = inspect.signature(criterion).parameters.values()
    except (TypeError, ValueError):
        return False
    return [item.name for item in parameters if item.default is item.empty] == ["train_targets"]


def why_not_of_pairs(criterion: Any) -> tuple[str, str] | None:
    """Return the name of a criterion that does not take (outputs, targets), and a remedy."""
    name, words = _name_and_words(criterion)
    # Whoever has bound the rest of its arguments has made one of pairs of it.
    if name not in NOT_OF_PAIRS or (words and isinstance(criterion, functools.partial)):
        return None
    return name, NOT_OF_PAIRS[name]


def _name_and_words(criterion: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name in ``torch.nn``, ``""`` for others, and the criterion's settings."""
    words: dict[str, Any] = {}
    while isinstance(criterion, functools.partial):
        words = {**criterion.keywords, **words}
        criterion = criterion.func
    module = getattr(criterion, "__module__", "") or ""
    if module.startswith("torch.nn.functional"):
        name = getattr(criterion, "__name__", "").replace("_", "").removesuffix("loss")
        return _FUNCTIONS.get(name, ""), words
    bases = (kind for kind in type(criterion).__mro__ if kind.__module__.startswith("torch.nn."))
    base = next((kind for kind in bases if kind.__name__ in {*TABLE, *NOT_OF_PAIRS}), None)
    return ("", words) if base is None else (base.__name__, vars(criterion))
