"""The restricted Boltzmann machine, of which a deep belief network is stacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from asynckfold.errors import Problem, refuse

Report = Callable[[int, Mapping[str, float]], None]
"""Hears the number of an epoch, from 1, and what was measured after it, by name."""

Part = Callable[[Any, int, int], Sequence[Tensor]]
"""The part of one process in what an order asks for: (order, rank, processes) → tensors."""


class Summing(Protocol):
    """Sums what the processes of a job compute for each order, while a context lasts."""

    @property
    def processes(self) -> int:
        """How many they are."""

    def __call__(
        self, part: Part, seen: Sequence[Tensor], like: Sequence[Tensor]
    ) -> AbstractContextManager[Callable[[Any], Sequence[Tensor]]]:
        """Return order → sum over ranks, shaped like `like`; all see changes to `seen`."""


class _Alone:
    """`Summing` in one process."""

    processes = 1

    @contextmanager
    def __call__(
        self, part: Part, seen: Sequence[Tensor], like: Sequence[Tensor]
    ) -> Iterator[Callable[[Any], Sequence[Tensor]]]:
        yield lambda order: part(order, 0, 1)


alone = _Alone()


VISIBLE = ("binary", "gaussian")

CENTRE_SHARE = 0.01
"""Of a batch in the running mean of the hidden units [3]_, see `RBM.fit`."""


LEAST_ROWS = 256
"""Of a batch, for each of several processes: what each has to add up is as large as the weights,
however few its rows are. Two processes on 784-500 units took 0.8 times the samples a second of one
in batches of 32, 1.0 times of 128, 1.07 of 256, 1.2 of 512, 1.4 of 1024 (2 cores, AMD EPYC)."""


@dataclass(frozen=True)
class Pretraining:
    """How each layer of a deep belief network is trained by itself.

    Hinton's guide [1]_ says what to look at when they are changed.

    Parameters
    ----------
    epochs : int
        Of each layer; 0 leaves the stage out.
    lr, gaussian_lr : float
        Learning rate of binary visible units, and of Gaussian ones, which need less.
    momentum, weight_decay : float
        Of the updates; the decay is that of weights, not of biases.
    k : int
        Steps of Gibbs sampling in contrastive divergence.
    batch_size : int
        Samples of an update. In a job of several processes they are divided among these, where each
        gets at least `LEAST_ROWS`.
    validation : float
        Share of the samples that is not trained on, for the free-energy gap.

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
    """One process's rows of a batch of `count`."""

    low: int
    high: int
    count: int

    def chosen(self, probability: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw 0 or 1: on a CPU the bits of `torch.bernoulli`, in less than half the time.

        Draws for the whole batch, so that each row gets the same number in any process.
        """
        numbers = torch.rand(
            (self.count, probability.shape[1]),
            generator=generator,
            dtype=probability.dtype,
            device=probability.device,
        )
        return (numbers[self.low : self.high] < probability).to(probability.dtype)

    def noise(self, mean: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw from N(0, 1), in the same way."""
        numbers = mean.new_empty(self.count, mean.shape[1])
        return numbers.normal_(generator=generator)[self.low : self.high]


def _whole(batch: Tensor) -> _Rows:
    return _Rows(0, len(batch), len(batch))


class RBM(nn.Module):
    """Visible and hidden units, connected with each other but not among themselves [1]_.

    With visible values v, hidden values h in {0, 1}, weights W and biases b, c the energy is
    −b·v − c·h − h·Wv for binary v, and ½|v − b|² − c·h − h·Wv for Gaussian v, whose variance given
    h is 1: scale such inputs to variance 1.

    Parameters
    ----------
    n_visible, n_hidden : int
        Units.
    visible : {"binary", "gaussian"}
        Kind of the visible units; inputs of binary ones are probabilities, from 0 to 1.
    generator : torch.Generator, optional
        What the weights are drawn from, N(0, 0.01²); the biases are zero.

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
        if visible not in VISIBLE:
            known = "binary or gaussian"
            refuse([Problem(f"visible must be {known}", repr(visible), "Pass one of them.")])
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

    def sample_hidden(self, visible: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw hidden values."""
        return _whole(visible).chosen(self(visible), generator)

    def sample_visible(self, hidden: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw visible values."""
        return self._around(self.visible_mean(hidden), generator, _whole(hidden))

    def _around(self, mean: Tensor, generator: torch.Generator | None, rows: _Rows) -> Tensor:
        if self.visible == "binary":
            return rows.chosen(mean, generator)
        return mean + rows.noise(mean, generator)

    def free_energy(self, visible: Tensor) -> Tensor:
        """Return F(v), (B,): exp(−F) is proportional to the probability of v."""
        field = functional.linear(visible, self.weight, self.hidden_bias)
        if self.visible == "gaussian":
            own = 0.5 * (visible - self.visible_bias).square().sum(1)
        else:
            own = -(visible @ self.visible_bias)
        return own - functional.softplus(field).sum(1)

    def free_energy_gap(self, train: Tensor, valid: Tensor) -> float:
        """Return how much higher the free energy of validation samples is: grows with overfitting.

        Hinton (2010), section 6: the mean over validation samples minus that over a fixed subset of
        the training samples; the unknown partition function cancels.
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

        Parameters
        ----------
        visible : Tensor, shape (B, n_visible)
            Samples.
        k : int
            Steps of Gibbs sampling that begin at the samples.
        generator : torch.Generator, optional
            What they draw from.

        Returns
        -------
        dict of str to Tensor
            By the name of the parameter.
        """
        count = len(visible)
        weight, of_visible, of_hidden, _ = self._sums(visible, k, generator, _whole(visible))
        return {
            "weight": weight / count,
            "visible_bias": of_visible / count,
            "hidden_bias": of_hidden / count,
        }

    @torch.no_grad()
    def _sums(
        self, visible: Tensor, k: int, generator: torch.Generator | None, rows: _Rows
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sum up CD-k over some rows of a batch: of weights, biases, hidden units at the start."""
        begin = self(visible)
        hidden, drawn = begin, visible
        for _ in range(k):
            mean = self.visible_mean(rows.chosen(hidden, generator))
            drawn = self._around(mean, generator, rows)
            # In the statistics probabilities stand for drawn values: the same mean, less noise.
            hidden = self(drawn)
        return (
            hidden.t() @ drawn - begin.t() @ visible,
            (drawn - visible).sum(0),
            (hidden - begin).sum(0),
            begin.sum(0),
        )

    @torch.no_grad()
    def start_at(self, samples: Tensor) -> None:
        """Set the visible biases so that without weights the visible means are the samples' own."""
        mean = samples.mean(0)
        self.visible_bias.copy_(mean if self.visible == "gaussian" else mean.logit(0.01))

    def fit(
        self,
        train: Tensor,
        valid: Tensor,
        how: Pretraining,
        generator: torch.Generator,
        report: Report = lambda epoch, measures: None,
        summing: Summing = alone,
    ) -> None:
        """Train by contrastive divergence, centred [3]_.

        The steps are those of the energy over v − μ and h − λ, μ the mean of the samples and λ a
        running mean of the hidden units, written back to this one. Without, what all units have in
        common is learned as one large step of every weight: of 500 units over 500 others (digits,
        standardised) all were switched off, with a mean of 2e-11; with it their mean was 0.5.

        Several processes take the steps of one, where each has `LEAST_ROWS` of a batch: each does
        CD-k for its rows, what they found is added up in the order of the ranks, and one of them
        updates what all see. All draw the numbers of the whole batch, each of its rows, so that it
        is the same to rounding: until a probability lies within rounding of the number that it is
        drawn with.

        Parameters
        ----------
        train, valid : Tensor, shape (n, n_visible) and (m, n_visible)
            Samples to train on, and others for the free-energy gap.
        how : Pretraining
            Settings.
        generator : torch.Generator
            Everything that is drawn comes from it.
        report : callable
            Hears `reconstruction_error` and `free_energy_gap` after each epoch, of the validation
            samples and against as many samples that were trained on, always the same.
        summing : callable
            Divides each batch among processes; this one alone by default.
        """
        groups: list[dict[str, Any]] = [
            {"params": [self.weight], "weight_decay": how.weight_decay},
            {"params": [self.visible_bias, self.hidden_bias]},
        ]
        optimizer = torch.optim.SGD(
            groups, how.gaussian_lr if self.visible == "gaussian" else how.lr, how.momentum
        )
        mean, hidden_mean = train.mean(0), torch.full_like(self.hidden_bias, 0.5)
        order = torch.empty(0)

        def part(batch: tuple[int, int], rank: int, processes: int) -> Sequence[Tensor]:
            # Every process hears of every batch, so that their generators stay in step.
            nonlocal order
            low, high = batch
            if low == 0:
                order = torch.randperm(len(train), generator=generator, device=generator.device)
            count = high - low
            rows = _Rows(count * rank // processes, count * (rank + 1) // processes, count)
            samples = train[order[low + rows.low : low + rows.high]]
            return self._sums(samples, how.k, generator, rows)

        shapes = [self.weight, self.visible_bias, self.hidden_bias, hidden_mean]
        rows = min(how.batch_size, len(train))
        by = summing if rows >= LEAST_ROWS * summing.processes else alone
        with by(part, list(self.parameters()), shapes) as total:
            for epoch in range(1, how.epochs + 1):
                for low in range(0, len(train), how.batch_size):
                    high = min(low + how.batch_size, len(train))
                    means = [found.div_(high - low) for found in total((low, high))]
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
        """Update by the means of a batch that `_sums` has the sums of."""
        (weight, of_visible, of_hidden, hidden), (mean, hidden_mean) = means, centre
        before = self.weight.clone()
        hidden_mean.lerp_(hidden, CENTRE_SHARE)
        weight -= torch.outer(hidden_mean, of_visible)
        weight -= torch.outer(of_hidden, mean)
        self.weight.grad, self.visible_bias.grad, self.hidden_bias.grad = (
            weight,
            of_visible,
            of_hidden,
        )
        optimizer.step()
        # What the weights changed for the means is taken back: a centred energy has no such part.
        change = self.weight - before
        self.visible_bias.sub_(hidden_mean @ change)
        self.hidden_bias.sub_(change @ mean)
