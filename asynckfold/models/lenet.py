"""LeNet for colour images of 32×32."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


class LeNet(nn.Sequential):
    """Two convolutions and three linear layers, with rectified units and max-pooling.

    The layer sizes are those of LeNet-5 [1]_; rectified units, max-pooling and full connections
    between the two convolutions are today's substitutes for scaled tanh, trainable subsampling and
    the paper's connection table.

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

    Examples
    --------
    >>> import torch
    >>> LeNet()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(in_channels, 6, 5),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(6, 16, 5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(16 * 5 * 5, 120),
                relu3=nn.ReLU(),
                fc2=nn.Linear(120, 84),
                relu4=nn.ReLU(),
                fc3=nn.Linear(84, num_classes),
            )
        )
