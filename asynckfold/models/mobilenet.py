"""MobileNet, version 1, for colour images of 32×32."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

# Output channels at width 1 and stride of each depthwise separable convolution: table 1 of the
# paper.
_BLOCKS = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *((512, 1),) * 5,
    (1024, 2),
    (1024, 1),
)


class MobileNet(nn.Sequential):
    """MobileNet [1]_: thirteen depthwise separable convolutions, average pooling, one linear layer.

    The first convolution has stride 1 instead of 2, so that an image of 32×32 leaves a map of 2×2
    for the pooling.

    Parameters
    ----------
    num_classes : int
        Length of an output row.
    in_channels : int
        Channels of an image.
    width : float
        The paper's width multiplier: scales the channels of every layer.

    References
    ----------
    .. [1] Howard et al. (2017). MobileNets: efficient convolutional neural networks for mobile
       vision applications. arXiv:1704.04861.

    Examples
    --------
    >>> import torch
    >>> MobileNet(width=0.125)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width: float = 1.0) -> None:
        channels = _scaled(32, width)
        stem = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        normalisation, layers = nn.BatchNorm2d(channels), []
        for full_width, stride in _BLOCKS:
            out_channels = _scaled(full_width, width)
            layers.append(_separable(channels, out_channels, stride))
            channels = out_channels
        super().__init__(
            OrderedDict(
                conv1=stem,
                bn1=normalisation,
                relu=nn.ReLU(),
                layers=nn.Sequential(*layers),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                linear=nn.Linear(channels, num_classes),
            )
        )


def _scaled(channels: int, width: float) -> int:
    return max(1, round(channels * width))


def _separable(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(
                in_channels, in_channels, 3, stride, padding=1, groups=in_channels, bias=False
            ),
            bn1=nn.BatchNorm2d(in_channels),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(in_channels, out_channels, 1, bias=False),
            bn2=nn.BatchNorm2d(out_channels),
            relu2=nn.ReLU(),
        )
    )
