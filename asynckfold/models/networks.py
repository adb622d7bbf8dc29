"""Networks for tables (MLP) and for images of 32×32 (all others)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import nn


class MLP(nn.Sequential):
    """Linear layers with ReLU between them; flattens its input.

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
        layers: list[nn.Module] = [nn.Flatten()]
        for below, width in pairwise((in_features, *hidden)):
            layers += [nn.Linear(below, width), nn.ReLU()]
        super().__init__(*layers, nn.Linear((in_features, *hidden)[-1], num_classes))


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


# Convolutions in each of the five stages: columns A, B, D and E of the paper's table 1.
_STAGES = {
    "VGG11": (1, 1, 2, 2, 2),
    "VGG13": (2, 2, 2, 2, 2),
    "VGG16": (2, 2, 3, 3, 3),
    "VGG19": (2, 2, 4, 4, 4),
}
_CHANNELS = (64, 128, 256, 512, 512)


class VGG(nn.Sequential):
    """VGG [1]_ with batch normalisation after each convolution and one linear layer.

    After five stages an image of 32×32 has become one pixel of 512 channels, which a single linear
    layer classifies; the paper's three serve maps of 7×7.

    Parameters
    ----------
    variant : {"VGG11", "VGG13", "VGG16", "VGG19"}
        Which of the paper's depths: 9, 9, 15 and 20 million parameters.
    num_classes : int
        Length of an output row.
    in_channels : int
        Channels of an image.
    width : float
        Scales the channels of every convolution.

    References
    ----------
    .. [1] Simonyan, Zisserman (2015). Very deep convolutional networks for large-scale image
       recognition. ICLR.

    Examples
    --------
    >>> import torch
    >>> VGG("VGG11", width=0.125)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        variant: str = "VGG19",
        num_classes: int = 10,
        in_channels: int = 3,
        width: float = 1.0,
    ) -> None:
        channels = [max(1, round(full_width * width)) for full_width in _CHANNELS]
        super().__init__(
            OrderedDict(
                features=nn.Sequential(*_stages(_STAGES[variant], in_channels, channels)),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                classifier=nn.Linear(channels[-1], num_classes),
            )
        )


def _stages(depths: tuple[int, ...], in_channels: int, channels: list[int]) -> Iterator[nn.Module]:
    for depth, out_channels in zip(depths, channels, strict=True):
        for _ in range(depth):
            yield nn.Conv2d(in_channels, out_channels, 3, padding=1)
            yield nn.BatchNorm2d(out_channels)
            yield nn.ReLU()
            in_channels = out_channels
        yield nn.MaxPool2d(2)
