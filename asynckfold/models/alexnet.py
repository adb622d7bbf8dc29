"""AlexNet, scaled down to grey images of 32×32."""

from __future__ import annotations

from torch import nn


class AlexNet(nn.Sequential):
    """AlexNet [1]_ for small images: five convolutions, three linear layers, dropout.

    The widths of the convolutions, 48-128-192-192-128, are those of one of the paper's two
    columns. Because an image is seven times smaller than the paper's, the first convolution is
    5×5 with stride 2 instead of 11×11 with stride 4, pooling (3×3 with stride 2, overlapping as in
    the paper) is padded, and the hidden linear layers have 512 units instead of 4096. Local
    response normalisation is left out.

    Parameters
    ----------
    num_classes : int
        Length of an output row.
    in_channels : int
        Channels of an image.

    References
    ----------
    .. [1] Krizhevsky, Sutskever, Hinton (2012). ImageNet classification with deep convolutional
       neural networks. NIPS.

    Examples
    --------
    >>> import torch
    >>> AlexNet()(torch.zeros(2, 1, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__(
            nn.Conv2d(in_channels, 48, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.Conv2d(48, 128, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.Conv2d(128, 192, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(192, 192, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(192, 128, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(128 * 2 * 2, 512),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, num_classes),
        )
