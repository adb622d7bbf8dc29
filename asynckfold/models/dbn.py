"""A deep belief network, and the restricted Boltzmann machines (RBMs) that it is stacked of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from asynckfold.errors import InputError, Problem, refuse

Part = Callable[[Any, int, int], Sequence[Tensor]]
"""(order, rank, processes) → tensors: what one process contributes to a sum."""


ProcessSum = Any
"""What sums over the processes of a job, see `ParallelSum` of the trainers of several processes."""

VISIBLE = ("binary", "gaussian")
CENTRE_SHARE = 0.01
"""Weight of a batch in the running mean of the hidden units [3]_, see `RBM.fit`."""

LEAST_ROWS = 256
"""Rows of a batch for each of several processes. Each sums gradients as large as the weights: two
processes on 784-500 units took 0.8 times the samples a second of one in batches of 32, 1.0 times of
128, 1.07 of 256, 1.2 of 512, 1.4 of 1024 (2 cores, AMD EPYC)."""


@dataclass(frozen=True)
class Pretraining:
    """Settings of contrastive divergence, for each layer of a deep belief network [1]_.

    Parameters
    ----------
    epochs : int
        Epochs of each layer; 0 disables pretraining.
    lr, gaussian_lr : float
        Learning rate for binary visible units, and for Gaussian ones, which need a smaller one.
    momentum, weight_decay : float
        Of the updates; biases do not decay.
    k : int
        Steps of Gibbs sampling.
    batch_size : int
        Samples of an update. The processes of a job divide them, if each gets `LEAST_ROWS`.
    validation : float
        Share of the samples to hold out for the free-energy gap.

    References
    ----------
    .. [1] Hinton (2010). A practical guide to training restricted Boltzmann machines. UTML TR
       2010-003.
    """

    epochs: int = 10
    lr: float = 0.05
    gaussian_lr: float = 0.002
    momentum: float = 0.9
    weight_decay: float = 2e-4
    k: int = 1
    batch_size: int = 32
    validation: float = 0.1

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[Problem]:
        for name, least in (("epochs", 0), ("k", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                rule = f"{name} must be a whole number of at least {least}"
                yield Problem(rule, repr(value), "Leave it out for the default.")
        for name in ("lr", "gaussian_lr", "momentum", "weight_decay", "validation"):
            value = getattr(self, name)
            most = 1.0 if name in ("momentum", "validation") else float("inf")
            if not isinstance(value, (int, float)) or not 0 <= value < most:
                rule = f"{name} must be a number of at least 0 and below {most:g}"
                yield Problem(rule, repr(value), "Leave it out for the default.")


@dataclass(frozen=True)
class _Rows:
    """One process's rows of a batch of `count`.

    Random numbers are drawn for the whole batch, so that each row gets the same in any process.
    """

    low: int
    high: int
    count: int

    def binary(self, probability: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw 0 or 1: on a CPU the bits of `torch.bernoulli`, in less than half the time."""
        numbers = torch.rand(
            (self.count, probability.shape[1]),
            generator=generator,
            dtype=probability.dtype,
            device=probability.device,
        )
        return (numbers[self.low : self.high] < probability).to(probability.dtype)

    def noise(self, mean: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw from N(0, 1)."""
        numbers = mean.new_empty(self.count, mean.shape[1])
        return numbers.normal_(generator=generator)[self.low : self.high]


class RBM(nn.Module):
    """A restricted Boltzmann machine: no connections within the visible or the hidden units [1]_.

    With visible values v, hidden values h in {0, 1}, weights W and biases b, c the energy is
    −b·v − c·h − h·Wv for binary v, and ½|v − b|² − c·h − h·Wv for Gaussian v, whose variance given
    h is 1: scale such inputs to variance 1.

    Parameters
    ----------
    n_visible, n_hidden : int
        Number of units.
    visible : {"binary", "gaussian"}
        Kind of the visible units; binary ones take probabilities, from 0 to 1.
    generator : torch.Generator, optional
        Draws the weights from N(0, 0.01²); biases are zero.

    References
    ----------
    .. [1] Smolensky (1986). Information processing in dynamical systems: foundations of harmony
       theory. Parallel Distributed Processing 1.
    .. [2] Hinton (2002). Training products of experts by minimizing contrastive divergence. Neural
       Computation 14(8).
    .. [3] Melchior, Fischer, Wiskott (2016). How to center deep Boltzmann machines. Journal of
       Machine Learning Research 17(99).

    Examples
    --------
    >>> rbm = RBM(4, 2)
    >>> rbm.reconstruct(torch.zeros(3, 4)).shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        n_visible: int = 784,
        n_hidden: int = 500,
        visible: str = "binary",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check_visible(visible, VISIBLE)
        self.visible = visible
        device = None if generator is None else generator.device
        self.weight = nn.Parameter(torch.empty(n_hidden, n_visible, device=device))
        self.visible_bias = nn.Parameter(torch.zeros(n_visible, device=device))
        self.hidden_bias = nn.Parameter(torch.zeros(n_hidden, device=device))
        nn.init.normal_(self.weight, 0, 0.01, generator=generator)

    def extra_repr(self) -> str:
        n_hidden, n_visible = self.weight.shape
        return f"{n_visible}, {n_hidden}, visible={self.visible!r}"

    def forward(self, visible: Tensor) -> Tensor:
        """Return the probability of each hidden unit, (B, n_hidden), for (B, n_visible)."""
        return torch.sigmoid(functional.linear(visible, self.weight, self.hidden_bias))

    def visible_mean(self, hidden: Tensor) -> Tensor:
        """Return the mean of each visible unit, (B, n_visible), for (B, n_hidden)."""
        field = functional.linear(hidden, self.weight.t(), self.visible_bias)
        return field if self.visible == "gaussian" else torch.sigmoid(field)

    def free_energy(self, visible: Tensor) -> Tensor:
        """Return F(v), (B,): exp(−F) is proportional to the probability of v."""
        field = functional.linear(visible, self.weight, self.hidden_bias)
        if self.visible == "gaussian":
            energy = 0.5 * (visible - self.visible_bias).square().sum(1)
        else:
            energy = -(visible @ self.visible_bias)
        return energy - functional.softplus(field).sum(1)

    def free_energy_gap(self, train: Tensor, valid: Tensor) -> float:
        """Return the mean free energy of `valid` minus that of `train`: grows with overfitting.

        Hinton (2010), section 6; the unknown partition function cancels.
        """
        with torch.no_grad():
            return float(self.free_energy(valid).mean() - self.free_energy(train).mean())

    def reconstruct(self, visible: Tensor) -> Tensor:
        """Return the visible means for the hidden probabilities of (B, n_visible)."""
        return self.visible_mean(self(visible))

    def reconstruction_error(self, visible: Tensor) -> float:
        """Return the mean square difference to the reconstruction, over samples and units."""
        with torch.no_grad():
            return float(functional.mse_loss(self.reconstruct(visible), visible))

    @torch.no_grad()
    def contrastive_divergence(
        self, visible: Tensor, k: int = 1, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Return the CD-k estimate of the gradient of the mean negative log-likelihood [2]_.

        `visible` are samples, shape (B, n_visible), at which `k` steps of Gibbs sampling start. The
        gradients have the names of the parameters.
        """
        count = len(visible)
        sums = self._sums(visible, k, generator, _Rows(0, count, count))
        names = ("weight", "visible_bias", "hidden_bias")
        return {name: total / count for name, total in zip(names, sums, strict=False)}

    @torch.no_grad()
    def _sums(
        self, visible: Tensor, k: int, generator: torch.Generator | None, rows: _Rows
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sum over rows of a batch: gradients of weights and both biases; first hidden values."""
        begin = self(visible)
        hidden, drawn = begin, visible
        for _ in range(k):
            drawn = self.visible_mean(rows.binary(hidden, generator))
            if self.visible == "binary":
                drawn = rows.binary(drawn, generator)
            else:
                drawn = drawn + rows.noise(drawn, generator)
            # Statistics use probabilities in place of drawn values: the same mean, less noise.
            hidden = self(drawn)
        return (
            hidden.t() @ drawn - begin.t() @ visible,
            (drawn - visible).sum(0),
            (hidden - begin).sum(0),
            begin.sum(0),
        )

    @torch.no_grad()
    def start_at(self, samples: Tensor) -> None:
        """Set the visible biases to give, without weights, the means of the samples."""
        mean = samples.mean(0)
        self.visible_bias.copy_(mean if self.visible == "gaussian" else mean.logit(0.01))

    def fit(
        self,
        train: Tensor,
        valid: Tensor,
        settings: Pretraining,
        generator: torch.Generator,
        report: Callable[[int, Mapping[str, float]], None] = lambda epoch, measures: None,
        summing: ProcessSum | None = None,
    ) -> None:
        """Train by contrastive divergence, centred [3]_.

        The steps are those of the energy over v − μ and h − λ, where μ is the mean of the samples
        and λ a running mean of the hidden units; they are written back to this energy. Uncentred, a
        common part of all units is learned as one large step of every weight: 500 units over 500
        others (digits, standardised) were all switched off, with a mean of 2e-11; centred, their
        mean was 0.5.

        With several processes, each computes CD-k for its rows of a batch, the sums are added in
        the order of the ranks, and rank 0 updates the shared parameters. The steps equal those of
        one process up to rounding, until a probability lies within rounding of the number that
        decides its draw.

        Parameters
        ----------
        train, valid : Tensor, shape (n, n_visible) and (m, n_visible)
            Training samples, and others for the free-energy gap.
        settings : Pretraining
            Settings.
        generator : torch.Generator
            Source of all random numbers.
        report : callable
            Called after each epoch, from 1, with `reconstruction_error` of the validation samples
            and `free_energy_gap` between them and as many training samples.
        summing : callable, optional
            Divides batches among processes if each gets `LEAST_ROWS`.
        """
        groups: list[dict[str, Any]] = [
            {"params": [self.weight], "weight_decay": settings.weight_decay},
            {"params": [self.visible_bias, self.hidden_bias]},
        ]
        optimizer = torch.optim.SGD(
            groups,
            settings.gaussian_lr if self.visible == "gaussian" else settings.lr,
            settings.momentum,
        )
        mean, hidden_mean = train.mean(0), torch.full_like(self.hidden_bias, 0.5)
        order = torch.empty(0)

        def part(batch: tuple[int, int], rank: int, processes: int) -> Sequence[Tensor]:
            # Every process gets every batch, so that all generators stay in step.
            nonlocal order
            low, high = batch
            if low == 0:
                order = torch.randperm(len(train), generator=generator, device=generator.device)
            count = high - low
            rows = _Rows(count * rank // processes, count * (rank + 1) // processes, count)
            samples = train[order[low + rows.low : low + rows.high]]
            return self._sums(samples, settings.k, generator, rows)

        shapes = [self.weight, self.visible_bias, self.hidden_bias, hidden_mean]
        most_rows = min(settings.batch_size, len(train))
        context: AbstractContextManager[Callable[[Any], Sequence[Tensor]]]
        if summing is None or most_rows < LEAST_ROWS * summing.processes:
            context = nullcontext(lambda batch: part(batch, 0, 1))
        else:
            context = summing(part, list(self.parameters()), shapes)
        with context as total:
            for epoch in range(1, settings.epochs + 1):
                for low in range(0, len(train), settings.batch_size):
                    high = min(low + settings.batch_size, len(train))
                    means = [sums.div_(high - low) for sums in total((low, high))]
                    self._step(optimizer, means, (mean, hidden_mean))
                gap = self.free_energy_gap(train[: len(valid)], valid)
                measures = {"reconstruction_error": self.reconstruction_error(valid)}
                report(epoch, {**measures, "free_energy_gap": gap})

    @torch.no_grad()
    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        means: Sequence[Tensor],
        centre: tuple[Tensor, Tensor],
    ) -> None:
        """Update by the means of what `_sums` gives for a batch."""
        (weight, visible_bias, hidden_bias, hidden), (mean, hidden_mean) = means, centre
        before = self.weight.clone()
        hidden_mean.lerp_(hidden, CENTRE_SHARE)
        weight -= torch.outer(hidden_mean, visible_bias)
        weight -= torch.outer(hidden_bias, mean)
        self.weight.grad, self.visible_bias.grad = weight, visible_bias
        self.hidden_bias.grad = hidden_bias
        optimizer.step()
        # In the centred energy, a change of the weights leaves the means as they are.
        change = self.weight - before
        self.visible_bias.sub_(hidden_mean @ change)
        self.hidden_bias.sub_(change @ mean)


class DBN(nn.Sequential):
    """A classifier whose hidden layers are pretrained, one by one, as stacked RBMs [1]_ [2]_.

    Sigmoid layers and a linear one on top; flattens its input. A sweep calls `pretrain` on the
    training fold of each job, before an ordinary training by back-propagation.

    Parameters
    ----------
    in_features : int
        Numbers per sample: 784 for an image of 1×28×28.
    hidden : sequence of int
        Units of each hidden layer.
    num_classes : int
        Length of an output row.
    visible : {"auto", "binary", "gaussian"}
        Kind of the units that take the input; "auto": binary if all inputs of the pretraining lie
        between 0 and 1. All other layers are binary.
    pretraining : Pretraining, optional
        Settings for each layer.

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
        _check_visible(visible, ("auto", *VISIBLE))
        layers: list[nn.Module] = [nn.Flatten()]
        for below, width in pairwise((in_features, *hidden)):
            layers += [nn.Linear(below, width), nn.Sigmoid()]
        super().__init__(*layers, nn.Linear((in_features, *hidden)[-1], num_classes))
        self.visible = visible
        self.pretraining = pretraining or Pretraining()

    def extra_repr(self) -> str:
        return f"visible={self.visible!r}, {self.pretraining}"

    def pretrain(
        self,
        inputs: Tensor,
        generator: torch.Generator,
        report: Callable[[str, int, Mapping[str, float]], None] = lambda stage, epoch, values: None,
        summing: ProcessSum | None = None,
    ) -> list[RBM]:
        """Train the hidden layers, from below, each as an RBM over the outputs of the one below.

        Parameters
        ----------
        inputs : Tensor, shape (n, ...)
            At least two samples of the training fold, on the model's device. A share of them is
            held out for the free-energy gap.
        generator : torch.Generator
            Source of all random numbers: the same seed, the same bits.
        report : callable
            Called as ``report("layer 1", epoch, measures)`` after each epoch; see `RBM.fit`.
        summing : callable, optional
            Divides large batches among the processes of a job; see `RBM.fit`.

        Returns
        -------
        list of RBM
            From below; weights and hidden biases are copied to the network.

        Raises
        ------
        ValueError
            There are too few inputs, or binary units cannot take them.
        """
        settings, values = self.pretraining, inputs.flatten(1)
        if len(values) < 2:
            raise ValueError(f"pretraining needs at least 2 samples, it has {len(values)}")
        low, high = values.min(), values.max()
        is_binary = bool(low >= 0 and high <= 1)
        if self.visible == "binary" and not is_binary:
            raise ValueError(
                f"binary visible units need inputs from 0 to 1, these are from {low:g} to "
                f"{high:g}. Scale them, or pass visible='gaussian'"
            )
        if not settings.epochs:
            return []
        order = torch.randperm(len(values), generator=generator, device=generator.device)
        count = min(max(1, round(settings.validation * len(values))), len(values) - 1)
        valid, train = values[order[:count]], values[order[count:]]
        kind = self.visible
        if kind == "auto":
            kind = "binary" if is_binary else "gaussian"
        rbms = []
        hidden = [layer for layer in self if isinstance(layer, nn.Linear)][:-1]
        for number, layer in enumerate(hidden, 1):
            rbm = RBM(layer.in_features, layer.out_features, kind, generator)
            rbm.start_at(train)
            rbm.fit(train, valid, settings, generator, partial(report, f"layer {number}"), summing)
            with torch.no_grad():
                layer.weight.copy_(rbm.weight)
                layer.bias.copy_(rbm.hidden_bias)
                train, valid = rbm(train), rbm(valid)
            rbms.append(rbm)
            kind = "binary"
        return rbms


def _check_visible(visible: str, known: Sequence[str]) -> None:
    if visible not in known:
        rule = f"visible must be {', '.join(known[:-1])} or {known[-1]}"
        raise InputError.one(rule, repr(visible), "Pass one of them.")
