"""Recorded losses are means over samples, and criteria that mix samples are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from asynckfold import CVResults
from asynckfold.training.dry_run import criteria
from tests.training.sweeps import ONE_FOLD, epoch_batches, problems, seed_all, sweep, train
from tests.training.tiny import CLASSES, FEATURES, Plain, samples

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


pytestmark = pytest.mark.usefixtures("one_thread", "hasty_disk")


# Criteria that compare an output with the targets of other samples

COUNT = 8


def gathered(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A weighted likelihood that forgot to squeeze."""
    known = outputs.log_softmax(1).gather(1, targets[:, None])
    return -(known * torch.tensor([1.0, 2.0, 3.0])[targets]).mean()


def in_part(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Only one of its terms is wrong."""
    return F.mse_loss(outputs[:, 0], targets) + 0.1 * (outputs - targets).abs().mean()


def numbers(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


LABELS = torch.arange(COUNT) % 3

MIXING: dict[str, tuple[Loss, torch.Tensor, torch.Tensor]] = {
    "square": (lambda o, t: ((o - t) ** 2).mean(), numbers(COUNT, 1), numbers(COUNT)),
    "in place": (lambda o, t: (o * 1).sub(t).pow_(2).mean(), numbers(COUNT, 1), numbers(COUNT)),
    "where": (
        lambda o, t: torch.where(t > 0.5, o, -o).mean(),
        numbers(COUNT, 1),
        numbers(COUNT),
    ),
    "by hand": (
        lambda o, t: -(t * o.sigmoid().log() + (1 - t) * (1 - o.sigmoid()).log()).mean(),
        numbers(COUNT, 1),
        (numbers(COUNT) > 0.5).float(),
    ),
    "gathered": (gathered, numbers(COUNT, 3), LABELS),
    "one term": (in_part, numbers(COUNT, 1), numbers(COUNT)),
}


def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Supervised contrastive loss (Khosla et al. 2020)."""
    known = F.normalize(outputs)
    near = known @ known.T / 0.1
    near = near - near.max(1, keepdim=True).values.detach()
    same = (targets[:, None] == targets[None]).float().fill_diagonal_(0)
    log = near - near.exp().sum(1, keepdim=True).log()
    return -((same * log).sum(1) / same.sum(1).clamp(min=1)).mean()


def moments(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """All pairs on purpose: the energy distance of two distributions."""
    return (outputs[:, None] - targets[None, :]).abs().mean()


ORDINARY: dict[str, tuple[Loss, torch.Tensor, torch.Tensor]] = {
    "cross entropy": (nn.CrossEntropyLoss(), numbers(COUNT, 3), LABELS),
    "weights by hand": (
        lambda o, t: (torch.rand(3) * -o.log_softmax(1) * F.one_hot(t, 3)).sum(1).mean(),
        numbers(COUNT, 3),
        LABELS,
    ),
    "squares": (nn.MSELoss(), numbers(COUNT), numbers(COUNT)),
    "segments": (
        nn.CrossEntropyLoss(),
        numbers(COUNT, 3, 4, 4),
        LABELS[:, None, None].expand(-1, 4, 4),
    ),
    "contrastive": (contrastive, numbers(COUNT, 4), LABELS),
    "on purpose": (moments, numbers(COUNT), numbers(COUNT)),
}


def test_a_loss_that_mixes_samples_is_detected() -> None:
    for loss, outputs, targets in MIXING.values():
        shapes = criteria.mixes_samples(loss, outputs, targets)
        assert shapes is not None
        # Its mark: whose target is whose does not matter to the term that was detected.
        assert torch.broadcast_shapes(*shapes).numel() >= COUNT**2


def test_ordinary_losses_are_accepted() -> None:
    for loss, outputs, targets in ORDINARY.values():
        assert criteria.mixes_samples(loss, outputs, targets) is None
        # With as many samples as outputs, too, where sizes agree by chance.
        if outputs.dim() > 1 and 1 < outputs.shape[1] <= COUNT:
            few = outputs.shape[1]
            assert criteria.mixes_samples(loss, outputs[:few], targets[:few]) is None


class Column(nn.Module):
    """One output, in a column or squeezed."""

    def __init__(self, *, flat: bool = False) -> None:
        super().__init__()
        self.linear, self.flat = nn.Linear(FEATURES, 1), flat

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(inputs)
        return outputs.squeeze(1) if self.flat else outputs


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


def test_the_dry_run_refuses_a_loss_that_mixes_samples(tmp_path: Path) -> None:
    inputs, targets = samples()
    words: dict[str, Any] = {"criterion": squared, "task": "regression"}
    words["data"] = inputs / 60, targets.astype(np.float32)
    ((rule, received, remedy),) = problems(tmp_path / "column", {"m": Column}, **words)
    assert rule == "the criterion must compare each output with the target of its own sample"
    assert "outputs float32 (10, 1) and targets float32 (10,)" in received
    assert "10 × 10" in received
    assert "squeeze" in remedy
    assert not problems(tmp_path / "flat", {"m": partial(Column, flat=True)}, **words)


# What is recorded


def by_hand(
    results: CVResults, criterion: Any, summed: Loss, counts: Loss | None, size: int
) -> list[tuple[float, float]]:
    """The losses of each epoch by an ordinary loop with the same seeds: sums over sums."""
    job, fold = results.plan.jobs[0], results.folds[0]
    seed_all(job.seed)
    model = Plain()
    optimizer = small(model)
    inputs, targets = map(torch.from_numpy, samples())

    def mean(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        of = [float(counts(*part)) if counts else len(part[1]) for part in parts]
        return sum(float(summed(*part)) for part in parts) / sum(of)

    losses = []
    for epoch in range(2):
        trained = []
        model.train()
        for rows in epoch_batches(fold.train, job.seed, epoch, size):
            outputs = model(inputs[rows])
            optimizer.zero_grad()
            criterion(outputs, targets[rows]).backward()
            optimizer.step()
            trained.append((outputs.detach(), targets[rows]))
        with torch.no_grad():
            held_out = model.eval()(inputs[fold.valid]), targets[fold.valid]
        losses.append((mean(trained), mean([held_out])))
    return losses


def recorded(results: CVResults) -> list[tuple[float, float]]:
    result = results.results[results.plan.jobs[0].id]
    assert result.status == "done"
    return [(item.train_loss, item.valid_loss) for item in result.epochs]


WEIGHTS = torch.tensor([1.0, 5.0, 0.2])


def entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def weighted_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, WEIGHTS, reduction="sum")


def weighed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return WEIGHTS[targets].sum()


RECORDED: dict[str, tuple[Any, Loss, Loss | None]] = {
    "mean": (nn.CrossEntropyLoss(), entropy, None),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), entropy, None),
    "own sum": (entropy, entropy, None),
    "weights": (nn.CrossEntropyLoss(WEIGHTS), weighted_entropy, weighed),
}


def small(model: nn.Module) -> optim.Optimizer:
    """Steps that a sum bears."""
    return optim.SGD(model.parameters(), lr=0.002, foreach=False)


@pytest.mark.parametrize("kind", RECORDED)
def test_the_recorded_loss_is_the_mean_of_an_ordinary_loop(tmp_path: Path, kind: str) -> None:
    """In jobs by themselves, in the serial baseline, and fused."""
    criterion, *parts = RECORDED[kind]
    words = {"criterion": criterion, "opt_fn": small, "batch_size": 7}
    results = sweep(tmp_path / "alone", baseline="measure", **words)
    expected = by_hand(results, criterion, *parts, 7)
    assert recorded(results) == [pytest.approx(pair, rel=1e-6) for pair in expected]
    assert results.baseline is not None
    epochs = results.baseline.epochs[results.plan.jobs[0].id]
    losses = [train_loss for train_loss, _ in expected]
    assert [loss for _, loss in epochs] == pytest.approx(losses, rel=1e-5)
    fused = sweep(tmp_path / "fused", fuse=True, **words)
    assert len(fused.plan.groups) == 1
    assert recorded(fused) == [pytest.approx(pair, rel=1e-5) for pair in expected]


@pytest.mark.nightly(but=["averaging-own sum", "allreduce-weights"])
@pytest.mark.parametrize("kind", ["own sum", "weights"])
@pytest.mark.parametrize("trainer", ["averaging", "allreduce"])
def test_trainers_of_several_processes_record_the_same_loss(
    tmp_path: Path, kind: str, trainer: str
) -> None:
    """Averages of models that learn nothing; the gradient of a batch, of its parts."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    criterion, *_ = RECORDED[kind]
    words: dict[str, Any] = {"criterion": criterion, "batch_size": 16, "cv": ONE_FOLD}
    words["opt_fn"] = small if trainer == "allreduce" else frozen
    alone = sweep(tmp_path / "alone", **words)
    given = {"trainer": trainer, "processes": 2, "engine": "process"}
    assert recorded(sweep(tmp_path / "several", **words, **given)) == [
        pytest.approx(pair, rel=1e-5) for pair in recorded(alone)
    ]


def frozen(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.0)


SUMS: dict[str, tuple[Any, bool]] = {
    "sum": (nn.CrossEntropyLoss(reduction="sum"), True),
    "own sum": (lambda o, t: F.cross_entropy(o, t, reduction="none").sum(), True),
    "sum over classes": (lambda o, t: ((o - F.one_hot(t, CLASSES)) ** 2).sum(1).mean(), False),
    "nothing": (lambda o, t: o.sum() * 0, False),
    "random": (lambda o, t: o.mean() * torch.rand(()), False),
}


def test_a_criterion_that_sums_is_detected(tmp_path: Path) -> None:
    for name, (criterion, sums) in SUMS.items():
        words = {"criterion": criterion, "opt_fn": small, "cv": ONE_FOLD}
        recipe = sweep(tmp_path / name, params={"epochs": 1}, **words).plan.recipe
        assert ("loss" in recipe) is sums


# Candidates that would learn nothing, or from each other


class Detached(Plain):
    """Its outputs know nothing of its parameters."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).detach().requires_grad_()


class LogSoftmax(Plain):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).log_softmax(1)


class Body(nn.Module):
    """A body with running statistics, and a head."""

    def __init__(self, body: nn.Module | None = None, frozen: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 4) if body is None else body
        self.body.requires_grad_(not frozen)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(inputs))
        return found


def trainable(model: nn.Module) -> optim.Optimizer:
    return optim.SGD([item for item in model.parameters() if item.requires_grad], 0.1)


def elsewhere(model: nn.Module, other: nn.Module | None = None) -> optim.Optimizer:
    """The mistake of an optimizer of a global model."""
    return optim.SGD((other or Plain()).parameters(), 0.1)


def one_for_all(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    made = make()
    return lambda: made


def on_one_body(make: Callable[[], nn.Module], frozen: bool = False) -> Callable[[], nn.Module]:
    made = make()
    return lambda: Body(made, frozen)


def normalising() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4))


HOPELESS: dict[str, tuple[dict[str, Any], str]] = {
    "another optimizer": ({"opt_fn": elsewhere}, "optimise the model that it gets"),
    "detached outputs": ({"models": {"m": Detached}}, "gradient for the optimised parameters"),
    "a number made anew": (
        {"criterion": lambda o, t: torch.tensor(float(F.cross_entropy(o, t)), requires_grad=True)},
        "gradient for the optimised parameters",
    ),
    "one model": ({"models": {"m": one_for_all(Plain)}}, "must make a new model"),
    "one frozen body with statistics": (
        {"models": {"m": on_one_body(normalising, frozen=True)}, "opt_fn": trainable},
        "must make a new model",
    ),
    "scores for NLLLoss": ({"criterion": nn.NLLLoss()}, "logarithms of probabilities"),
}


def test_candidates_that_learn_nothing_or_leak_are_refused(tmp_path: Path) -> None:
    for name, (parts, rule) in HOPELESS.items():
        (problem,) = problems(tmp_path / name, **parts)
        assert rule in problem[0]


LEARNING: dict[str, dict[str, Any]] = {
    "frozen body": {"models": {"m": partial(Body, None, True)}, "opt_fn": trainable},
    "one frozen body": {
        "models": {"m": on_one_body(lambda: nn.Linear(FEATURES, 4), frozen=True)},
        "opt_fn": trainable,
    },
    "logarithms": {"models": {"m": LogSoftmax}, "criterion": nn.NLLLoss()},
}


def test_candidates_that_learn_are_accepted(tmp_path: Path) -> None:
    for name, parts in LEARNING.items():
        assert train(tmp_path / name, **parts).status == "done"
