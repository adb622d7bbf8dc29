"""The loop: a result depends on the plan alone, whatever happens on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn, optim
from torch.nn import functional

from asynckfold import StorageError
from tests.training.sweeps import ONE_FOLD, events, in_pieces, log_of, sgd, sweep, train
from tests.training.tiny import CLASSES, FEATURES, Noisy, Plain, Seen, samples, watched

OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "momentum": sgd,
    "amsgrad": lambda model: optim.Adam(model.parameters(), 0.01, amsgrad=True),
    "rmsprop": lambda model: optim.RMSprop(model.parameters(), 0.01, centered=True),
    "rprop": lambda model: optim.Rprop(model.parameters(), 0.01),
    "lbfgs": lambda model: optim.LBFGS(model.parameters(), 0.1, max_iter=3, history_size=2),
    "groups": lambda model: optim.SGD(
        [
            {"params": [item], "lr": 0.1 / (number + 1)}
            for number, item in enumerate(model.parameters())
        ],
        momentum=0.5,
        nesterov=True,
    ),
}


# The plan alone


@pytest.mark.parametrize(
    ("schedule", "optimizer", "step"),
    [
        ("onecycle", "amsgrad", "batch"),
        ("reduce", "momentum", "batch"),
        ("warm", "amsgrad", "epoch"),
    ],
)
def test_a_training_stopped_after_every_batch_ends_alike(
    tmp_path: Path, schedule: str, optimizer: str, step: str
) -> None:
    words: dict[str, Any] = {"params": {"lr_step": step}, "batch_size": 12}
    given = {"noisy": Noisy}, [schedule], OPTIMIZERS[optimizer]
    whole = train(tmp_path / "whole", *given, **words)
    pieces, attempts = in_pieces(tmp_path / "pieces", *given, **words)
    assert whole.status == "done"
    assert pieces.digest == whole.digest
    assert attempts == (8 if schedule != "reduce" else 6)


def test_every_other_optimizer_continues_from_its_checkpoint(tmp_path: Path) -> None:
    params = {"lr_step": "batch", "clip_grad_norm": 1.0}
    words: dict[str, Any] = {"params": params, "batch_size": 40}
    for name in ("rmsprop", "rprop", "lbfgs", "groups"):
        given = {"noisy": Noisy}, ["onecycle"], OPTIMIZERS[name]
        pieces, _ = in_pieces(tmp_path / f"{name} pieces", *given, **words)
        assert pieces.digest == train(tmp_path / f"{name} whole", *given, **words).digest


def test_a_change_of_the_plan_changes_the_result(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"batch_size": 11},
        {"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"models": {"noisy": lambda: Noisy(noisy_evaluation=True)}},
        {"data": samples(seed=1)},
    ]
    digests = {
        train(tmp_path / str(number), **{"models": {"noisy": Noisy}, **change}).digest
        for number, change in enumerate(changes)
    }
    assert len(digests) == len(changes)


# What a checkpoint holds


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.outer.weight = self.inner.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.head(self.outer(torch.relu(self.inner(inputs / 60))))


class Counting(nn.Module):
    """Buffers of several types, one of them not kept, and state of its own."""

    calls: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES - 1, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(CLASSES, dtype=torch.bfloat16))
        self.extra = 0

    def forward(self, inputs: torch.Tensor) -> Any:
        self.calls += 1
        self.extra += 1
        self.scale *= 1.01
        return self.linear(inputs[:, 1:]) * self.scale.float() * (1 + self.calls / (7 + self.extra))

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


class Tracking(nn.Module):
    """A criterion whose weights follow the labels that it sees in training."""

    share: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.ones(CLASSES))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.share += 0.1 * functional.one_hot(targets, CLASSES).sum(0)
        return functional.cross_entropy(outputs, targets, self.share)


def sequence(optimizer: optim.Optimizer) -> Any:
    warm = optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    return optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])


def by_lambda(optimizer: optim.Optimizer) -> Any:
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


@pytest.mark.parametrize(
    "parts",
    [
        {"models": {"tied": Tied}},
        {"models": {"counting": Counting}},
        {"criterion": Tracking()},
        {"schedules": {"own": by_lambda}},
        {"schedules": {"own": sequence}},
        {"preprocess": StandardScaler()},
    ],
    ids=["tied", "buffers", "criterion", "lambda", "sequence", "fit"],
)
def test_a_checkpoint_holds_all_state(tmp_path: Path, parts: dict[str, Any]) -> None:
    words: dict[str, Any] = {"params": {"lr_step": "batch"}, "batch_size": 20, **parts}
    pieces, _ = in_pieces(tmp_path / "pieces", **words)
    assert pieces.digest == train(tmp_path / "whole", **words).digest
    if "criterion" in parts:
        assert torch.equal(parts["criterion"].share, torch.ones(CLASSES)), "it is not copied"


# Damage


@pytest.mark.damages("checkpoints are cut on purpose")
@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_checkpoint_is_reported_and_an_older_one_used(
    tmp_path: Path, damaged: int
) -> None:
    words: dict[str, Any] = {"models": {"noisy": Noisy}, "params": {"epochs": 3}}
    golden = train(tmp_path / "golden", **words).digest
    for _ in range(2):
        train(tmp_path / "run", job_timeout_s=1e-9, **words)
    paths = sorted((tmp_path / "run").rglob("checkpoint-*"), reverse=True)
    assert [path.name[:22] for path in paths] == [f"checkpoint-0000-00000{n}" for n in (2, 1)]
    for path in paths[:damaged]:
        path.write_bytes(path.read_bytes()[:-1])
    result = train(tmp_path / "run", **words)
    notes = events(tmp_path / "run", "damage")
    for note, path in zip(notes, paths[:damaged], strict=True):
        assert f"{path.name} is not used: its SHA-256 differs" in note
    assert result.digest == golden


# Divergence


class Exploding(nn.Module):
    """Gives a bad loss at one call in training, a good one elsewhere."""

    calls: torch.Tensor

    def __init__(self, at: int, value: float) -> None:
        super().__init__()
        self.at, self.value = at, value
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(outputs, targets)
        if self.training:
            self.calls += 1
            if int(self.calls) == self.at:
                return loss * self.value
        return loss


@pytest.mark.parametrize(
    ("at", "where", "value"),
    [(1, "epoch 1, batch 1 ", math.nan), (7, "epoch 2, batch 3 ", math.inf)],
)
def test_divergence_names_epoch_batch_and_learning_rate(
    tmp_path: Path, at: int, where: str, value: float
) -> None:
    result = train(tmp_path, criterion=Exploding(at, value), params={"epochs": 3})
    assert result.status == "diverged"
    assert result.error == f"the loss became {value} at {where}(learning rate 0.1)"
    assert result.outputs is None
    assert len(result.epochs) == (at - 1) // 4
    assert result.error in log_of(tmp_path)


class Blind(Plain):
    """Has no answer for the first of the samples it is evaluated with."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        if not self.training:
            outputs[0] = math.nan
        return outputs


def careless(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.nan_to_num(), targets)


class Bad(nn.Module):
    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(outputs, targets)
        return loss if self.training else loss * math.inf


def test_what_is_not_finite_on_the_held_out_fold_is_a_divergence(tmp_path: Path) -> None:
    result = train(tmp_path / "blind", {"blind": Blind}, criterion=careless)
    where = "held-out fold became nan at epoch 1 (learning rate 0.1)"
    assert (result.status, result.error) == ("diverged", f"an output on the {where}")
    result = train(tmp_path / "bad", criterion=Bad())
    assert (result.status, result.epochs) == ("diverged", ())
    assert "held-out fold became inf at epoch 1" in result.error


# Batches


@pytest.mark.parametrize(
    ("count", "size", "normalises", "sizes"),
    [(41, 10, True, [10, 10, 10, 11]), (41, 10, False, [10, 10, 10, 10, 1]), (3, 1, True, [1, 2])],
)
def test_with_batch_norm_a_last_batch_of_one_joins_the_one_before(
    tmp_path: Path, count: int, size: int, normalises: bool, sizes: list[int]
) -> None:
    seen = Seen()
    fold = [(np.arange(count), np.arange(count, 60))]
    model = watched(lambda: Flat() if normalises else Plain(), seen)
    train(tmp_path, {"m": model}, cv=fold, batch_size=size, params={"epochs": 1})
    assert [len(batch) for batch in seen.of(training=True)][-len(sizes) :] == sizes


class Flat(Plain):
    """Has a BatchNorm, which does nothing to a sample alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        return self.norm(outputs) if len(outputs) > 1 else outputs


# Numbers


def frozen(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 0.0)


def test_losses_and_accuracy_are_those_of_the_model(tmp_path: Path) -> None:
    """With a learning rate of 0 the mean over unequal batches is the loss of the whole fold."""
    results = sweep(tmp_path / "run", opt_fn=frozen, batch_size=17, cv=ONE_FOLD)
    model = Plain()
    model.load_state_dict(results.state_dict("plain/constant", fold=0))
    inputs, targets = map(torch.from_numpy, samples())
    with torch.no_grad():
        outputs = model(inputs)
    (fold,), (result,) = results.folds, results.results.values()
    for item in result.epochs:
        expected = functional.cross_entropy(outputs[fold.train], targets[fold.train])
        assert item.train_loss == pytest.approx(float(expected), rel=1e-6)
        expected = functional.cross_entropy(outputs[fold.valid], targets[fold.valid])
        assert item.valid_loss == pytest.approx(float(expected), rel=1e-6)
        right = (outputs[fold.valid].argmax(1) == targets[fold.valid]).double().mean()
        assert item.accuracy == pytest.approx(float(right), abs=1e-12)
    np.testing.assert_allclose(result.outputs, outputs[fold.valid], rtol=1e-5, atol=1e-6)


class Norms(optim.SGD):
    """Notes the norm of the gradient at each step."""

    seen: list[float]

    def step(self, closure: Any = None) -> Any:
        grads = [item.grad for group in self.param_groups for item in group["params"]]
        self.seen.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))
        return super().step(closure)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_gradients_are_clipped(tmp_path: Path, clip: float | None) -> None:
    seen: list[float] = []

    def opt_fn(model: nn.Module) -> optim.Optimizer:
        optimizer = Norms(model.parameters(), 0.1)
        optimizer.seen = seen
        return optimizer

    train(tmp_path, opt_fn=opt_fn, params={"clip_grad_norm": clip})
    # After the steps of the dry run, which clips none.
    assert (max(seen[-8:]) <= 0.0101) is (clip is not None)


def plateau(optimizer: optim.Optimizer) -> Any:
    return optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


@pytest.mark.parametrize(("schedule", "step"), [("reduce", "epoch"), (plateau, "batch")])
def test_reduce_on_plateau_uses_inner_validation_samples_of_the_training_fold(
    tmp_path: Path, schedule: Any, step: str
) -> None:
    seen = Seen()
    params = {"lr_step": step, "inner_val": 0.2}
    train(tmp_path, {"plain": watched(Plain, seen)}, {"rule": schedule}, params=params)
    batches = seen.batches[-2 * (4 + 2) :]
    trained = {number for mode, batch in batches if mode for number in batch}
    steering = {number for mode, batch in batches if not mode for number in batch} - {*range(20)}
    assert len(steering) == 8
    assert trained | steering == {*range(20, 60)}
    assert not trained & steering


@pytest.mark.damages("a file is where a folder should be")
def test_a_disk_error_is_not_a_failure_of_the_job(tmp_path: Path) -> None:
    assert train(tmp_path, job_timeout_s=1e-9).error.startswith("timed out")
    log = tmp_path / "plain/constant/fold-0/log.txt"
    log.unlink()
    log.mkdir()
    with pytest.raises(StorageError, match=r"log.txt is not a regular file"):
        train(tmp_path)


@pytest.mark.parametrize(
    ("schedule", "step", "epochs", "expected"),
    [
        ("cosine", "epoch", 4, [0.1 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]),
        ("cosine", "batch", 4, [0.1 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]),
        ("multistep", "epoch", 4, [0.1, 0.1, 0.01, 0.001]),
        ("step", "batch", 3, [0.1, 0.01, 0.001]),
        ("exponential", "batch", 2, [0.1, 0.01]),
    ],
)
def test_the_learning_rate_follows_its_rule_per_epoch_or_per_batch(
    tmp_path: Path, schedule: str, step: str, epochs: int, expected: list[float]
) -> None:
    result = train(tmp_path, None, [schedule], params={"epochs": epochs, "lr_step": step})
    assert [item.lr for item in result.epochs] == pytest.approx(expected, rel=1e-6)


def test_preprocessing_is_fitted_on_the_training_fold_only(tmp_path: Path) -> None:
    inputs, targets = samples()
    clean = train(tmp_path / "clean", preprocess=StandardScaler())
    inputs[:20] = 1e9
    words = {"preprocess": StandardScaler(), "data": (inputs, targets)}
    poisoned = train(tmp_path / "poisoned", **words)
    pairs = zip(clean.epochs, poisoned.epochs, strict=True)
    assert all(item.train_loss == poison.train_loss for item, poison in pairs)


def test_each_epoch_trains_in_training_mode_and_evaluates_in_evaluation_mode(
    tmp_path: Path,
) -> None:
    seen = Seen()
    train(tmp_path, {"noisy": watched(Noisy, seen)}, params={"eval_batch_size": 15})
    batches = seen.batches[-12:]
    assert [mode for mode, _ in batches] == [*[True] * 4, *[False] * 2] * 2
    assert [number for _, batch in batches[-2:] for number in batch] == [*range(20)]


def test_candidates_start_from_equal_weights_and_see_equal_batches(tmp_path: Path) -> None:
    one, other = Seen(), Seen()
    models = {"a": watched(Plain, one), "b": watched(Plain, other)}
    results = sweep(tmp_path / "run", models, ["constant", "cosine"])
    assert sorted(map(repr, one.batches)) == sorted(map(repr, other.batches))
    weights = {name: item.weights for name, item in results.results.items()}
    assert weights["a/constant/fold-0"] == weights["b/constant/fold-0"]
    assert weights["a/constant/fold-0"] != weights["a/cosine/fold-0"]
    assert len({job.seed for job in results.plan.jobs}) == 3
