"""A tiny RBM against all its states, written out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asynckfold import InputError
from asynckfold.models import RBM, Pretraining

pytestmark = pytest.mark.usefixtures("one_thread")

Parts = dict[str, Tensor]

CHAINS = 40_000
"""Chains from each sample; their mean is within five standard errors of what is expected."""


def tiny(visible: str) -> RBM:
    generator = torch.Generator().manual_seed(0)
    rbm = RBM(2 if visible == "gaussian" else 3, 2, visible, generator).double()
    with torch.no_grad():
        for parameter in rbm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return rbm


def samples(rbm: RBM) -> Tensor:
    n_visible = rbm.weight.shape[1]
    if rbm.visible == "binary":
        return torch.tensor([[1.0, 0, 1], [0, 1, 1], [0.2, 1, 0.7]], dtype=torch.float64)
    return torch.randn(3, n_visible, generator=torch.Generator().manual_seed(1)).double()


def states(units: int) -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=units)), dtype=torch.float64)


def log_partition(rbm: RBM) -> Tensor:
    """Over all hidden values; what is left over the visible ones is a product or a Gaussian."""
    hidden = states(len(rbm.hidden_bias))
    drive = hidden @ rbm.weight
    if rbm.visible == "binary":
        rest = torch.nn.functional.softplus(drive + rbm.visible_bias).sum(1)
    else:
        rest = (drive * rbm.visible_bias + drive.square() / 2).sum(1) + np.log(2 * np.pi)
    return torch.logsumexp(hidden @ rbm.hidden_bias + rest, 0)


def exact(rbm: RBM) -> Parts:
    """The gradient of the mean negative log-likelihood."""
    loss = rbm.free_energy(samples(rbm)).mean() + log_partition(rbm)
    loss.backward()
    return {name: parameter.grad for name, parameter in rbm.named_parameters()}  # type: ignore[misc]


def estimates(rbm: RBM, k: int) -> tuple[Parts, Parts]:
    """Mean and standard error of CD-k, over groups of chains."""
    generator = torch.Generator().manual_seed(2)
    groups = [
        rbm.contrastive_divergence(samples(rbm).repeat(CHAINS // 100, 1), k, generator)
        for _ in range(100)
    ]
    stacked = {name: torch.stack([group[name] for group in groups]) for name in groups[0]}
    return (
        {name: values.mean(0) for name, values in stacked.items()},
        {name: values.std(0) / 10 for name, values in stacked.items()},
    )


def within_five_errors(found: tuple[Parts, Parts], expected: Parts) -> bool:
    mean, error = found
    assert max(value.max().item() for value in error.values()) < 0.01
    return all(
        bool(torch.all((mean[name] - value).abs() < 5 * error[name]))
        for name, value in expected.items()
    )


@pytest.fixture(params=["binary", "gaussian"])
def rbm(request: pytest.FixtureRequest) -> RBM:
    return tiny(request.param)


def test_long_chains_give_the_gradient_of_the_likelihood(rbm: RBM) -> None:
    expected = exact(rbm)
    assert within_five_errors(estimates(rbm, 30), expected)
    # It can be told from what one step gives.
    assert not within_five_errors(estimates(rbm, 1), expected)


def stripes(count: int, visible: str) -> Tensor:
    """Two patterns with noise."""
    generator = torch.Generator().manual_seed(3)
    pattern = torch.tensor([[1.0, 1, 0, 0, 1, 0], [0, 0, 1, 1, 0, 1]])
    chosen = pattern[torch.randint(2, (count,), generator=generator)]
    if visible == "gaussian":
        return 2 * chosen - 1 + 0.3 * torch.randn(chosen.shape, generator=generator)
    flipped = torch.rand(chosen.shape, generator=generator) < 0.02
    return (chosen - flipped.float()).abs()


@pytest.mark.parametrize("visible", ["binary", "gaussian"])
def test_fitting_lowers_the_error_and_repeats_to_the_bit(visible: str) -> None:
    data = stripes(400, visible)
    how = Pretraining(epochs=8, lr=0.1, gaussian_lr=0.01, batch_size=20)

    def fitted(seed: int) -> tuple[RBM, list[Any]]:
        told: list[Any] = []
        generator = torch.Generator().manual_seed(seed)
        rbm = RBM(6, 3, visible, generator)
        torch.rand(1)  # the global generator has no part in it
        rbm.fit(data[:350], data[350:], how, generator, lambda *item: told.append(item))
        return rbm, told

    (one, told), (again, told_again), (other, _) = fitted(0), fitted(0), fitted(1)
    assert told == told_again
    assert [epoch for epoch, _ in told] == list(range(1, 9))
    assert told[-1][1]["reconstruction_error"] < 0.6 * told[0][1]["reconstruction_error"]
    for name, value in one.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
        assert not torch.equal(value, other.state_dict()[name])


def test_a_step_is_that_of_sgd_on_the_centred_energy() -> None:
    data, generator = stripes(10, "binary"), torch.Generator().manual_seed(0)
    rbm = RBM(6, 3, generator=generator)
    by_hand = {name: value.clone() for name, value in rbm.state_dict().items()}
    state = generator.get_state()
    how = Pretraining(epochs=3, lr=0.1, momentum=0.5, weight_decay=0.01, k=2, batch_size=10)
    rbm.fit(data, data[:2], how, generator)

    generator.set_state(state)
    copy = RBM(6, 3)
    speed = {name: torch.zeros_like(value) for name, value in by_hand.items()}
    mean, hidden_mean = data.mean(0), torch.full((3,), 0.5)
    for _ in range(3):
        copy.load_state_dict(by_hand)
        rows = torch.randperm(10, generator=generator)
        with torch.no_grad():
            hidden_mean = 0.99 * hidden_mean + 0.01 * copy(data[rows]).mean(0)
        found = copy.contrastive_divergence(data[rows], 2, generator)
        found["weight"] -= torch.outer(hidden_mean, found["visible_bias"])
        found["weight"] -= torch.outer(found["hidden_bias"], mean)
        found["weight"] += 0.01 * by_hand["weight"]
        # Biases of the centred energy: b + λW and c + Wμ.
        by_hand["visible_bias"] += hidden_mean @ by_hand["weight"]
        by_hand["hidden_bias"] += by_hand["weight"] @ mean
        for name in by_hand:
            speed[name] = 0.5 * speed[name] + found[name]
            by_hand[name] = by_hand[name] - 0.1 * speed[name]
        by_hand["visible_bias"] -= hidden_mean @ by_hand["weight"]
        by_hand["hidden_bias"] -= by_hand["weight"] @ mean
    torch.testing.assert_close(dict(rbm.state_dict()), by_hand)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: RBM(visible="ternary"), "visible must be binary or gaussian: received 'ternary'"),
        (lambda: Pretraining(epochs=-1), "epochs must be a whole number of at least 0: received"),
        (lambda: Pretraining(k=0), "k must be a whole number of at least 1: received 0"),
        (lambda: Pretraining(momentum=1.0), "momentum must be a number of at least 0 and below 1"),
        (lambda: Pretraining(lr=float("nan")), "lr must be a number of at least 0"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(InputError, match=told):
        make()


def test_it_starts_at_the_means_of_the_samples() -> None:
    for visible in ("binary", "gaussian"):
        rbm, data = RBM(6, 3, visible), stripes(200, visible)
        rbm.start_at(data)
        torch.testing.assert_close(rbm.visible_mean(torch.zeros(3)), data.mean(0))
