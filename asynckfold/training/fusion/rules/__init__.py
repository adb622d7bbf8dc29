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

RULES = Rules(
    functions={
        **elementwise.FUNCTIONS,
        **linear.FUNCTIONS,
        **convolution.FUNCTIONS,
        **normalisation.FUNCTIONS,
        **shapes.FUNCTIONS,
        **random.FUNCTIONS,
    },
    methods={**elementwise.METHODS, **linear.METHODS, **shapes.METHODS},
    leaves={**normalisation.LEAVES, **linear.LEAVES},
    aliases=elementwise.ALIASES | shapes.ALIASES | random.ALIASES,
    random=random.NAMES,
)
"""All of them."""
