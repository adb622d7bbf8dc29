"""The rules of torch's functions, one family per file."""

from __future__ import annotations

from asynckfold.training.fusion.lowering import Rules
from asynckfold.training.fusion.rules import (
    convolution,
    elementwise,
    linear,
    lookup,
    losses,
    normalisation,
    random,
    reductions,
    shapes,
    spatial,
)

RULES = Rules(
    functions={
        **elementwise.FUNCTIONS,
        **linear.FUNCTIONS,
        **convolution.FUNCTIONS,
        **normalisation.FUNCTIONS,
        **spatial.FUNCTIONS,
        **shapes.FUNCTIONS,
        **reductions.FUNCTIONS,
        **random.FUNCTIONS,
        **lookup.FUNCTIONS,
        **losses.FUNCTIONS,
    },
    methods={**elementwise.METHODS, **linear.METHODS, **shapes.METHODS, **reductions.METHODS},
    leaves={**convolution.LEAVES, **normalisation.LEAVES, **lookup.LEAVES},
    aliases=elementwise.ALIASES | shapes.ALIASES | random.ALIASES,
    random=random.NAMES,
)
"""All of them."""
