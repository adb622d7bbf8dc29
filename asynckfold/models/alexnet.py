"""AlexNet, scaled down to grey images of 32×32."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


class AlexNet(nn.Sequential):
    """AlexNet [1]_ for small images: five convolutions and one linear layer.

    The widths of the convolutions, 64-192-384-256-256, are those of the single column of [2]_.
    After three poolings of 2×2 an image of 32×32 has become one pixel of 256 channels, which a
    single linear layer classifies; the paper's three serve maps of 6×6. Dropout and local response
    normalisation are left out.

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
    .. [2] Krizhevsky (2014). One weird trick for parallelizing convolutional neural networks.
       arXiv:1404.5997.

    Examples
    --------
    >>> import torch
    >>> AlexNet()(torch.zeros(2, 1, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        features = nn.Sequential(
            nn.Conv2d(in_channels, 64, 11, stride=4, padding=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        classifier = nn.Linear(256, num_classes)
        super().__init__(
            OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier)
        )
