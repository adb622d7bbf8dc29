"""Less memory traffic in the batched graph, bit for bit the same numbers.

``max(relu(x)) == relu(max(x))``, and the gradient goes to the same element: behind the pooling, the
rectifier has a quarter of the work. Where it is the only reader of a layer's output, and the layer
does not need it for its gradient, it works in place. Rectifiers of the first layer took 4 of 33 ms
of a step of five LeNets (batches of 32×3×32×32, 1 core).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from asynckfold.training.fusion.rules.convolution import CONVOLUTIONS, convolve_images
from asynckfold.training.fusion.rules.linear import affine
from asynckfold.training.fusion.rules.normalisation import normalise_batch

RECTIFIERS = frozenset({F.relu, torch.relu})

POOLINGS = frozenset(
    function
    for owner in (F, torch)
    for spatial in (1, 2, 3)
    if (function := getattr(owner, f"max_pool{spatial}d", None)) is not None
)

FORGOTTEN = frozenset({*CONVOLUTIONS, *POOLINGS, affine, convolve_images, normalise_batch})
"""Functions whose gradient does not need their output."""


def exchange(graph: fx.Graph) -> None:
    """Move rectifiers behind poolings, and let them work in place where they can."""
    for node in list(graph.nodes):
        if node.target in POOLINGS and _alone(node.args[0], RECTIFIERS):
            rectifier = node.args[0]
            node.replace_input_with(rectifier, rectifier.args[0])
            with graph.inserting_after(node):
                later = graph.call_function(F.relu, (node,))
            node.replace_all_uses_with(
                later, delete_user_cb=lambda user, own=later: user is not own
            )
            graph.erase_node(rectifier)
    for node in graph.nodes:
        if node.target in RECTIFIERS and _alone(node.args[0], FORGOTTEN):
            node.target = torch.relu_


def _alone(node: Any, targets: frozenset[Any]) -> bool:
    """Whether it calls one of these functions and has one reader."""
    return isinstance(node, fx.Node) and node.target in targets and len(node.users) == 1
