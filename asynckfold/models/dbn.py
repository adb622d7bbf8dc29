"""A deep belief network for flat or image input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from asynckfold.errors import Problem, refuse
from asynckfold.models.rbm import RBM, VISIBLE, Pretraining, Summing, alone

Report = Callable[[str, int, Mapping[str, float]], None]
"""Hears the name of a layer, the number of an epoch, from 1, and what was measured after it."""


class DBN(nn.Sequential):
    """A classifier whose hidden layers are pretrained, one by one, as stacked RBMs [1]_ [2]_.

    Sigmoid layers and a linear one on top; flattens its input itself. `pretrain` is the stage
    before an ordinary training by back-propagation; a sweep does it by itself, on the training fold
    of each job.

    Parameters
    ----------
    in_features : int
        Numbers per sample: 784 for an image of 1×28×28.
    hidden : sequence of int
        Units of each hidden layer.
    num_classes : int
        Length of an output row.
    visible : {"auto", "binary", "gaussian"}
        Kind of the units that see the input; "auto": binary where all inputs of the pretraining
        are from 0 to 1. All other layers are binary.
    pretraining : Pretraining, optional
        How each layer is trained.

    Raises
    ------
    InputError
        There is no such kind of units.

    References
    ----------
    .. [1] Hinton, Osindero, Teh (2006). A fast learning algorithm for deep belief nets. Neural
       Computation 18(7).
    .. [2] Bengio (2009). Learning deep architectures for AI. Foundations and Trends in Machine
       Learning 2(1).

    Examples
    --------
    >>> DBN(784, (50, 20), 10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        in_features: int = 784,
        hidden: Sequence[int] = (500, 500),
        num_classes: int = 10,
        *,
        visible: str = "auto",
        pretraining: Pretraining | None = None,
    ) -> None:
        refuse(_visible_problems(visible))
        widths = (in_features, *hidden)
        super().__init__(nn.Flatten(), *_sigmoid_layers(widths), nn.Linear(widths[-1], num_classes))
        self.visible = visible
        self.pretraining = pretraining or Pretraining()

    def extra_repr(self) -> str:
        return f"visible={self.visible!r}, {self.pretraining}"

    def pretrain(
        self,
        inputs: Tensor,
        generator: torch.Generator,
        report: Report = lambda layer, epoch, measures: None,
        summing: Summing = alone,
    ) -> list[RBM]:
        """Train the hidden layers, from below, each as an RBM over what the one below says [1]_.

        Parameters
        ----------
        inputs : Tensor, shape (n, ...)
            At least two samples, on the model's device. Some are set aside for validation: the
            free-energy gap is between samples of the training fold, and the fold that a job holds
            out has no part in it.
        generator : torch.Generator
            Everything that is drawn comes from it: the same seed, the same bits.
        report : callable
            Hears how each layer gets on: ``reconstruction_error`` and ``free_energy_gap``.
        summing : callable
            Divides large batches among the processes of a job, which take the steps of one to
            rounding; see `RBM.fit`. This process alone by default.

        Returns
        -------
        list of RBM
            From below; weights and hidden biases are copied to the network.

        Raises
        ------
        ValueError
            There are too few inputs, or binary units cannot take them.
        """
        how, values = self.pretraining, inputs.flatten(1)
        _check(values, self.visible)
        if not how.epochs:
            return []
        order = torch.randperm(len(values), generator=generator, device=generator.device)
        count = min(max(1, round(how.validation * len(values))), len(values) - 1)
        valid, train = values[order[:count]], values[order[count:]]
        kind = _kind(values) if self.visible == "auto" else self.visible
        rbms = []
        for number, layer in enumerate(self._hidden(), 1):
            rbm = RBM(layer.in_features, layer.out_features, kind, generator)
            rbm.start_at(train)
            rbm.fit(train, valid, how, generator, partial(report, f"layer {number}"), summing)
            with torch.no_grad():
                layer.weight.copy_(rbm.weight)
                layer.bias.copy_(rbm.hidden_bias)
                train, valid = rbm(train), rbm(valid)
            rbms.append(rbm)
            kind = "binary"
        return rbms

    def _hidden(self) -> list[nn.Linear]:
        return [layer for layer in self if isinstance(layer, nn.Linear)][:-1]


def _sigmoid_layers(widths: Sequence[int]) -> Iterator[nn.Module]:
    for width, next_width in pairwise(widths):
        yield nn.Linear(width, next_width)
        yield nn.Sigmoid()


def _visible_problems(visible: str) -> Iterator[Problem]:
    if visible not in ("auto", *VISIBLE):
        yield Problem(
            "visible must be auto, binary or gaussian", repr(visible), "Leave it out for 'auto'."
        )


def _kind(values: Tensor) -> str:
    return "binary" if values.min() >= 0 and values.max() <= 1 else "gaussian"


def _check(values: Tensor, visible: str) -> None:
    if len(values) < 2:
        raise ValueError(f"pretraining needs at least 2 samples, it has {len(values)}")
    if visible == "binary" and _kind(values) != "binary":
        raise ValueError(
            "binary visible units need inputs from 0 to 1, these are from "
            f"{values.min():g} to {values.max():g}. Scale them, or pass visible='gaussian'"
        )
