"""LeNet-5 for grey images of 32×32, with batch normalisation."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


class LeNet5(nn.Sequential):
    """LeNet-5 [1]_ with batch normalisation [2]_ after each convolution.

    As in `LeNet`, rectified units and max-pooling stand for scaled tanh and trainable subsampling.

    Parameters
    ----------
    num_classes : int
        Length of an output row.
    in_channels : int
        Channels of an image.

    References
    ----------
    .. [1] LeCun, Bottou, Bengio, Haffner (1998). Gradient-based learning applied to document
       recognition. Proceedings of the IEEE 86(11).
    .. [2] Ioffe, Szegedy (2015). Batch normalization: accelerating deep network training by
       reducing internal covariate shift. ICML.

    Examples
    --------
    >>> import torch
    >>> LeNet5()(torch.zeros(2, 1, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__(
            OrderedDict(
                layer1=_convolution(in_channels, 6),
                layer2=_convolution(6, 16),
                flatten=nn.Flatten(),
                fc=nn.Linear(16 * 5 * 5, 120),
                relu=nn.ReLU(),
                fc1=nn.Linear(120, 84),
                relu1=nn.ReLU(),
                fc2=nn.Linear(84, num_classes),
            )
        )


def _convolution(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 5),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
