"""Well-known architectures for small images and tables, and their names for the shell.

Every class can be made without arguments, takes ``num_classes``, and flattens with ``nn.Flatten``,
so that the channels-last memory format works. Any other ``nn.Module`` is as welcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from torch import nn

from asynckfold.errors import InputError
from asynckfold.models.dbn import DBN, RBM, Pretraining
from asynckfold.models.networks import MLP, VGG, AlexNet, LeNet, LeNet5, MobileNet

__all__ = [
    "ARCHITECTURES",
    "DBN",
    "MLP",
    "RBM",
    "VGG",
    "AlexNet",
    "Architecture",
    "LeNet",
    "LeNet5",
    "MobileNet",
    "Pretraining",
    "shared_input_shape",
]


@dataclass(frozen=True)
class Architecture:
    """What the shell needs to build a model."""

    name: str  # on the command line
    model: type[nn.Module]
    # (channels, height, width) that it is made for; None: any
    input_shape: tuple[int, int, int] | None = None
    variant: str = ""  # first argument of the class, if any

    def build(
        self, input_shape: tuple[int, ...], num_classes: int | None
    ) -> Callable[[], nn.Module]:
        """Return a picklable factory for samples of shape (channels, height, width) or (features,).

        Without classes, the model returns one number for each sample, shape (n,). Raises
        `InputError` where it cannot take the samples.

        >>> factory = ARCHITECTURES["lenet5"].build((3, 32, 32), num_classes=6)
        >>> factory().layer1[0].in_channels
        3
        """
        if num_classes is None:
            return partial(_of_one_output, self.build(input_shape, 1))
        if self.input_shape is None:
            return partial(self.model, math.prod(input_shape), num_classes=num_classes)
        if len(input_shape) != 3 or input_shape[1:] != self.input_shape[1:]:
            raise InputError.one(
                f"{self.name} needs images of {self.input_shape[1]}×{self.input_shape[2]}",
                f"samples of shape {'×'.join(map(str, input_shape))}",
                "Resize images; use mlp for tables.",
            )
        first = (self.variant,) if self.variant else ()
        return partial(self.model, *first, num_classes=num_classes, in_channels=input_shape[0])


def _of_one_output(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a model of one output as one that returns a number for each sample."""
    model = build()
    last = nn.Flatten(0)
    # Appended, it keeps the class, which may be pretrained, and the names of the weights.
    return model.append(last) if isinstance(model, nn.Sequential) else nn.Sequential(model, last)


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        item.name: item
        for item in (
            Architecture("alexnet", AlexNet, (1, 32, 32)),
            Architecture("dbn", DBN),
            Architecture("lenet", LeNet, (3, 32, 32)),
            Architecture("lenet5", LeNet5, (1, 32, 32)),
            Architecture("mlp", MLP),
            Architecture("mobilenet", MobileNet, (3, 32, 32)),
            *(
                Architecture(name.lower(), VGG, (3, 32, 32), name)
                for name in ("VGG11", "VGG13", "VGG16", "VGG19")
            ),
        )
    }
)


def shared_input_shape(
    architectures: Iterable[Architecture], sample_shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the one sample shape that suits all models of a sweep.

    Channels come from the data; height and width from the models, or from the data if every model
    takes any shape. Rows of a table stay as they are.

    >>> shared_input_shape([ARCHITECTURES["mlp"], ARCHITECTURES["lenet5"]], (1, 8, 8))
    (1, 32, 32)
    >>> shared_input_shape([ARCHITECTURES["mlp"]], (1, 8, 8))
    (1, 8, 8)
    """
    needed = [item.input_shape for item in architectures if item.input_shape is not None]
    if not needed or len(sample_shape) != 3:
        return sample_shape
    return (sample_shape[0], *needed[0][1:])
