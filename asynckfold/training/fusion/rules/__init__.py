"""The rules of torch's functions, one family per file."""

from __future__ import annotations

from asynckfold.training.fusion.lowering import Rules
from asynckfold.training.fusion.rules import (
    convolution,
    elementwise,
    linear,
    normalisation,
    random,
    shapes,
)

RULES: Rules = {
    **elementwise.RULES,
    **shapes.RULES,
    **linear.RULES,
    **convolution.RULES,
    **normalisation.RULES,
    **random.RULES,
}
"""All of them."""
