"""VGG 11, 13, 16 and 19, for colour images of 32×32."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from torch import nn

from asynckfold.errors import Problem, nearest, refuse

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

    Raises
    ------
    InputError
        There is no such variant.

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
        refuse(_variant_problems(variant))
        channels = [max(1, round(full_width * width)) for full_width in _CHANNELS]
        super().__init__(
            OrderedDict(
                features=nn.Sequential(*_stages(_STAGES[variant], in_channels, channels)),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                classifier=nn.Linear(channels[-1], num_classes),
            )
        )


def _variant_problems(variant: str) -> Iterator[Problem]:
    if variant not in _STAGES:
        yield Problem(
            "variant must be one of VGG11, VGG13, VGG16, VGG19",
            repr(variant),
            f"The default is 'VGG19'.{nearest(str(variant).upper(), _STAGES)}",
        )


def _stages(depths: tuple[int, ...], in_channels: int, channels: list[int]) -> Iterator[nn.Module]:
    for depth, out_channels in zip(depths, channels, strict=True):
        for _ in range(depth):
            yield nn.Conv2d(in_channels, out_channels, 3, padding=1)
            yield nn.BatchNorm2d(out_channels)
            yield nn.ReLU()
            in_channels = out_channels
        yield nn.MaxPool2d(2)
