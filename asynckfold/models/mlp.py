"""A multilayer perceptron for flat or image input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import nn


class MLP(nn.Sequential):
    """Linear layers with rectified units between them; flattens its input itself.

    Parameters
    ----------
    in_features : int
        Numbers per sample: 784 for an image of 1×28×28.
    hidden : sequence of int
        Units of each hidden layer; empty for a linear classifier.
    num_classes : int
        Length of an output row.

    References
    ----------
    .. [1] Rumelhart, Hinton, Williams (1986). Learning representations by back-propagating
       errors. Nature 323.

    Examples
    --------
    >>> import torch
    >>> MLP()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    >>> MLP(9, hidden=(64, 32), num_classes=6)(torch.zeros(2, 9)).shape
    torch.Size([2, 6])
    """

    def __init__(
        self, in_features: int = 784, hidden: Sequence[int] = (128,), num_classes: int = 10
    ) -> None:
        super().__init__(
            nn.Flatten(),
            *_hidden_layers((in_features, *hidden)),
            nn.Linear((in_features, *hidden)[-1], num_classes),
        )


def _hidden_layers(widths: Sequence[int]) -> Iterator[nn.Module]:
    for width, next_width in pairwise(widths):
        yield nn.Linear(width, next_width)
        yield nn.ReLU()
