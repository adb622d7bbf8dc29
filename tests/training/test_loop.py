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

from asynckfold import StorageError, TrainerParams
from asynckfold.jobs.messages import EpochEnd, Note
from asynckfold.jobs.recipe import LR_SCHEDULES
from asynckfold.jobs.result import DIVERGED, DONE
from asynckfold.store import job_folder
from asynckfold.training import (
    batches,
    checkpoint,
    preprocessing,
)
from tests.training.tiny import (
    CLASSES,
    FEATURES,
    Noisy,
    Plain,
    Seen,
    Tiny,
    always,
    checkpoints,
    samples,
    sgd,
    watched,
)

OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "sgd": lambda model: optim.SGD(model.parameters(), 0.05),
    "momentum": sgd,
    "adam": lambda model: optim.Adam(model.parameters(), 0.01),
    "amsgrad": lambda model: optim.Adam(model.parameters(), 0.01, amsgrad=True),
    "adamw": lambda model: optim.AdamW(model.parameters(), 0.01, weight_decay=0.1),
    "rmsprop": lambda model: optim.RMSprop(model.parameters(), 0.01, centered=True),
    "adagrad": lambda model: optim.Adagrad(model.parameters(), 0.05),
    "adadelta": lambda model: optim.Adadelta(model.parameters()),
    "adamax": lambda model: optim.Adamax(model.parameters(), 0.01),
    "nadam": lambda model: optim.NAdam(model.parameters(), 0.01),
    "radam": lambda model: optim.RAdam(model.parameters(), 0.01),
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


# ---- the plan alone ----


@pytest.mark.parametrize("step", ["epoch", "batch"])
@pytest.mark.parametrize("schedule", LR_SCHEDULES)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_training_stopped_after_every_batch_ends_alike(
    tmp_path: Path, schedule: str, optimizer: str, step: str
) -> None:
    def make(name: str) -> Tiny:
        return Tiny(
            tmp_path / name,
            {"noisy": Noisy},
            {schedule: schedule},
            OPTIMIZERS[optimizer],
            params=TrainerParams(epochs=2, lr_step=step),
            batch_size=12,
        )

    whole = make("whole").train()
    parts, attempts = make("parts").train_with_stops()
    assert whole.status == DONE
    assert parts.digest == whole.digest
    assert attempts == (8 if schedule != "reduce" else 6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_continues_from_its_checkpoint(tmp_path: Path, optimizer: str) -> None:
    def make(name: str) -> Tiny:
        return Tiny(
            tmp_path / name,
            {"noisy": Noisy},
            {"onecycle": "onecycle"},
            OPTIMIZERS[optimizer],
            params=TrainerParams(epochs=2, lr_step="batch", clip_grad_norm=1.0),
            batch_size=20,
        )

    assert make("parts").train_with_stops()[0].digest == make("whole").train().digest


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 11},
        {"params": TrainerParams(epochs=3)},
        {"opt_fn": OPTIMIZERS["adam"]},
        {"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"models": {"noisy": lambda: Noisy(noisy_evaluation=True)}},
        {"data": samples(seed=1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_change_of_the_plan_changes_the_result(tmp_path: Path, change: dict[str, Any]) -> None:
    one = Tiny(tmp_path / "one", {"noisy": Noisy})
    other = Tiny(tmp_path / "other", **{"models": {"noisy": Noisy}, **change})
    assert one.train().digest != other.train().digest


def test_candidates_start_from_equal_weights_and_see_equal_batches(tmp_path: Path) -> None:
    one, other = Seen(), Seen()
    tiny = Tiny(
        tmp_path,
        {"a": watched(Plain, one), "b": watched(Plain, other)},
        {"constant": "constant", "cosine": "cosine"},
    )
    by_id = {job.id: tiny.train(job) for job in tiny.jobs if job.fold == 0}
    assert one.batches == other.batches
    assert one.batches[: len(one.batches) // 2] == one.batches[len(one.batches) // 2 :]
    assert by_id["a/constant/fold-0"].weights == by_id["b/constant/fold-0"].weights
    assert by_id["a/constant/fold-0"].weights != by_id["a/cosine/fold-0"].weights
    assert len({job.seed for job in tiny.jobs}) == 3


# ---- what a checkpoint holds ----


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


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, FEATURES - 1, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> Any:
        return (inputs[:, 1:].to(torch.complex64) @ self.weight.T).abs()


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


@pytest.mark.parametrize(
    "parts",
    [
        {"models": {"tied": Tied}},
        {"models": {"counting": Counting}},
        {"models": {"complex": Complex}},
        {"models": {"noisy": lambda: Noisy(noisy_evaluation=True)}},
        {"criterion": Tracking()},
        {"lr_schedules": {"own": lambda optimizer: optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}},
        {
            "lr_schedules": {
                "own": lambda optimizer: optim.lr_scheduler.LambdaLR(
                    optimizer, lambda step: 0.9**step
                )
            }
        },
        {
            "lr_schedules": {
                "own": lambda optimizer: optim.lr_scheduler.SequentialLR(
                    optimizer,
                    [
                        optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
                        optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
                    ],
                    [2],
                )
            }
        },
        {"preprocess": StandardScaler()},
    ],
    ids=[
        "tied",
        "buffers",
        "complex",
        "evaluation",
        "criterion",
        "step",
        "lambda",
        "sequence",
        "fit",
    ],
)
def test_a_checkpoint_holds_all_state(tmp_path: Path, parts: dict[str, Any]) -> None:
    def make(name: str) -> Tiny:
        return Tiny(tmp_path / name, **{"params": TrainerParams(2, lr_step="batch"), **parts})

    assert make("parts").train_with_stops()[0].digest == make("whole").train().digest


def test_a_lost_result_is_rebuilt_from_the_last_checkpoint(tmp_path: Path) -> None:
    seen = Seen()
    make = watched(lambda: Noisy(noisy_evaluation=True), seen)
    tiny = Tiny(tmp_path, {"noisy": make})
    first, events = tiny.attempt()
    assert first is not None
    seen.batches.clear()
    second, _ = tiny.attempt(attempt=2, refs=checkpoints(events))
    assert second is not None
    assert second.digest == first.digest
    assert seen.batches == []


def test_a_criterion_is_copied_for_each_job(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, criterion=Tracking())
    first = tiny.train()
    assert tiny.train().digest == first.digest
    assert torch.equal(tiny.criterion.share, torch.ones(CLASSES))  # type: ignore[attr-defined]


def test_the_last_checkpoint_omits_the_optimizer(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path)
    _, early = tiny.attempt(stop=always)
    _, late = tiny.attempt(attempt=2)
    middle, last = (
        checkpoint.load(tmp_path / ref.file, ref.sha256)
        for ref in (*checkpoints(early), *checkpoints(late))
    )
    assert middle["optimizer"]["state"]
    assert last["optimizer"] is None
    assert last["model"].keys() == middle["model"].keys()


@pytest.mark.parametrize(
    ("epochs", "frequency", "expected"),
    [(5, 2, [2, 4, 5]), (4, 2, [2, 4]), (1, 3, [1]), (3, 9, [3])],
)
def test_the_last_epoch_is_always_saved_and_scored(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    epochs: int,
    frequency: int,
    expected: list[int],
) -> None:
    monkeypatch.setattr(checkpoint, "EPOCH_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "SHARE", math.inf)
    params = TrainerParams(epochs, save_checkpoint_frequency=frequency)
    result, events = Tiny(tmp_path, params=params).attempt()
    assert [ref.epoch for ref in reversed(checkpoints(events))] == expected
    assert result is not None
    assert result.outputs is not None
    assert len(result.epochs) == epochs


def test_a_checkpoint_in_the_middle_of_an_epoch_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = Tiny(tmp_path / "golden", {"noisy": Noisy}).train()
    monkeypatch.setattr(checkpoint, "MIDDLE_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "SHARE", math.inf)
    tiny = Tiny(tmp_path / "run", {"noisy": Noisy})
    result, events = tiny.attempt()
    refs = checkpoints(events)
    assert result is not None
    assert result.digest == golden.digest
    assert len([ref for ref in refs if ref.batch > 0]) > 1
    middle = next(ref for ref in refs if ref.batch > 0)
    continued, _ = tiny.attempt(None, 2, [middle])
    assert continued is not None
    assert continued.digest == golden.digest


# ---- damage ----


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[Tiny, list[Any], str]:
    """A job with two checkpoints, of epoch 1 and of epoch 2, and the digest of its result."""
    tiny = Tiny(tmp_path / "run", {"noisy": Noisy}, params=TrainerParams(3))
    refs: list[Any] = []
    for attempt in (1, 2):
        asked = iter(range(100))
        _, events = tiny.attempt(None, attempt, refs, lambda asked=asked: next(asked) == 4)  # type: ignore[misc]
        refs = checkpoints(events) + refs
    assert [(ref.epoch, ref.batch) for ref in refs] == [(2, 0), (1, 0)]
    return (
        tiny,
        refs,
        Tiny(tmp_path / "golden", {"noisy": Noisy}, params=TrainerParams(3)).train().digest,
    )


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_checkpoint_is_reported_and_an_older_one_used(
    stopped: tuple[Tiny, list[Any], str], damaged: int
) -> None:
    tiny, refs, golden = stopped
    for ref in refs[:damaged]:
        path = tiny.root / ref.file
        path.write_bytes(path.read_bytes()[:-1])
    result, events = tiny.attempt(None, 3, refs)
    notes = [item for item in events if isinstance(item, Note)]
    assert [item.kind for item in notes] == ["damage"] * damaged
    endings = ["an older one is used", "the job starts from the beginning"]
    for event, ref, ending in zip(notes, refs, endings, strict=False):
        assert event.text.endswith(ending)
        assert ref.file in event.text
    starts = [item.epoch.number for item in events if isinstance(item, EpochEnd)]
    assert starts == [[3], [2, 3], [1, 2, 3]][damaged]
    assert result is not None
    assert result.digest == golden


def test_a_checkpoint_of_another_job_is_refused(stopped: tuple[Tiny, list[Any], str]) -> None:
    tiny, refs, _ = stopped
    other = tiny.jobs[1]
    expected = tiny.train(other).digest
    result, events = tiny.attempt(other, 2, refs[:1])
    (event,) = [item for item in events if isinstance(item, Note)]
    assert f" is a checkpoint of {tiny.jobs[0].id}, not of {other.id}; " in event.text
    assert result is not None
    assert result.digest == expected


def test_a_checkpoint_of_another_plan_is_refused(stopped: tuple[Tiny, list[Any], str]) -> None:
    tiny, refs, _ = stopped
    longer = Tiny(tiny.root, tiny.models, params=TrainerParams(4))
    result, events = longer.attempt(None, 2, refs[:1])
    (event,) = [item for item in events if isinstance(item, Note)]
    assert "in another plan" in event.text
    assert result is not None
    assert len([item for item in events if isinstance(item, EpochEnd)]) == 4


# ---- divergence ----


class Exploding(nn.Module):
    """Gives a bad loss at one call in training, a good one elsewhere."""

    def __init__(self, at: int, value: float) -> None:
        super().__init__()
        self.at, self.value, self.calls = at, value, 0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(outputs, targets)
        if self.training:
            self.calls += 1
            if self.calls == self.at:
                return loss * self.value
        return loss


@pytest.mark.parametrize(("value", "word"), [(math.nan, "nan"), (math.inf, "inf")])
@pytest.mark.parametrize(("at", "where"), [(1, "epoch 1, batch 1 "), (7, "epoch 2, batch 3 ")])
def test_divergence_names_epoch_batch_and_learning_rate(
    tmp_path: Path, at: int, where: str, value: float, word: str
) -> None:
    tiny = Tiny(tmp_path, criterion=Exploding(at, value), params=TrainerParams(3))
    result = tiny.train()
    assert result.status == DIVERGED
    assert result.error == f"the loss became {word} at {where}(learning rate 0.1)"
    assert result.outputs is None
    assert len(result.epochs) == (at - 1) // 4
    assert result.error in tiny.log()


class Blind(Plain):
    """Has no answer for the first of the samples it is evaluated with."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        if not self.training:
            outputs[0] = math.nan
        return outputs


def test_nan_outputs_are_a_divergence(tmp_path: Path) -> None:
    def careless(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs.nan_to_num(), targets)

    result = Tiny(tmp_path, {"blind": Blind}, criterion=careless).train()
    assert result.status == DIVERGED
    assert result.error == (
        "an output on the held-out fold became nan at epoch 1 (learning rate 0.1)"
    )


def test_a_nan_loss_on_the_held_out_fold_is_a_divergence(tmp_path: Path) -> None:
    class Bad(nn.Module):
        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = functional.cross_entropy(outputs, targets)
            return loss if self.training else loss * math.inf

    result = Tiny(tmp_path, criterion=Bad()).train()
    assert (result.status, result.epochs) == (DIVERGED, ())
    assert "held-out fold became inf at epoch 1" in result.error


# ---- batches ----


@pytest.mark.parametrize(
    ("count", "size", "normalises", "sizes"),
    [
        (41, 10, True, [10, 10, 10, 11]),
        (41, 10, False, [10, 10, 10, 10, 1]),
        (42, 10, True, [10, 10, 10, 10, 2]),
        (40, 10, True, [10] * 4),
        (5, 100, True, [5]),
        (1, 10, True, [1]),
        (3, 1, True, [1, 2]),
        (3, 1, False, [1, 1, 1]),
    ],
)
def test_with_batch_norm_a_last_batch_of_one_joins_the_one_before(
    count: int, size: int, normalises: bool, sizes: list[int]
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3)) if normalises else nn.Sequential(nn.Linear(3, 3))
    bounds = list(batches.bounds(count, size, model))
    assert [high - low for low, high in bounds] == sizes


# ---- numbers ----


def frozen(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 0.0)


def test_losses_and_accuracy_are_those_of_the_model(tmp_path: Path) -> None:
    """With a learning rate of 0 the mean over unequal batches is the loss of the whole fold."""
    model = Plain()
    tiny = Tiny(tmp_path, {"plain": lambda: model}, opt_fn=frozen, batch_size=17)
    result = tiny.train()
    inputs, targets = (torch.from_numpy(part) for part in tiny.data)
    fold = tiny.bundle.folds[0]
    with torch.no_grad():
        outputs = model(inputs)
    for item in result.epochs:
        expected = functional.cross_entropy(outputs[fold.train], targets[fold.train])
        assert item.train_loss == pytest.approx(float(expected), rel=1e-6)
        expected = functional.cross_entropy(outputs[fold.valid], targets[fold.valid])
        assert item.valid_loss == pytest.approx(float(expected), rel=1e-6)
        right = (outputs[fold.valid].argmax(1) == targets[fold.valid]).double().mean()
        assert item.accuracy == pytest.approx(float(right), abs=1e-12)
    assert result.outputs is not None
    np.testing.assert_allclose(result.outputs, outputs[fold.valid], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "step", "epochs", "expected"),
    [
        ("cosine", "epoch", 4, [0.1 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]),
        ("cosine", "batch", 4, [0.1 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]),
        ("constant", "epoch", 3, [0.1] * 3),
        ("constant", "batch", 3, [0.1] * 3),
        ("multistep", "epoch", 4, [0.1, 0.1, 0.01, 0.001]),
        ("step", "batch", 3, [0.1, 0.01, 0.001]),
        ("exponential", "batch", 2, [0.1, 0.01]),
    ],
)
def test_the_learning_rate_follows_its_rule_per_epoch_or_per_batch(
    tmp_path: Path, schedule: str, step: str, epochs: int, expected: list[float]
) -> None:
    params = TrainerParams(epochs, lr_step=step)
    result = Tiny(tmp_path, lr_schedules={schedule: schedule}, params=params).train()
    assert [item.lr for item in result.epochs] == pytest.approx(expected, rel=1e-6)


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

    Tiny(tmp_path, opt_fn=opt_fn, params=TrainerParams(2, clip_grad_norm=clip)).train()
    assert len(seen) == 8
    assert (max(seen) <= 0.0101) is (clip is not None)


# ---- train and eval ----


def test_each_epoch_trains_in_training_mode_and_evaluates_in_evaluation_mode(
    tmp_path: Path,
) -> None:
    seen = Seen()
    params = TrainerParams(2, eval_batch_size=15)
    tiny = Tiny(tmp_path, {"noisy": watched(Noisy, seen)}, params=params)
    tiny.train()
    assert [mode for mode, _ in seen.batches] == [*[True] * 4, *[False] * 2] * 2
    assert [number for batch in seen.of(training=False)[:2] for number in batch] == (
        tiny.bundle.folds[0].valid.tolist()
    )


# ---- the plateau rule ----


def plateau(optimizer: optim.Optimizer) -> Any:
    return optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


@pytest.mark.parametrize("schedule", ["reduce", plateau], ids=["name", "callable"])
@pytest.mark.parametrize("step", ["epoch", "batch"])
def test_reduce_on_plateau_uses_inner_validation_samples_of_the_training_fold(
    tmp_path: Path, schedule: Any, step: str
) -> None:
    seen = Seen()
    tiny = Tiny(
        tmp_path,
        {"plain": watched(Plain, seen)},
        {"rule": schedule},
        params=TrainerParams(2, lr_step=step, inner_val=0.2),
    )
    tiny.train()
    fold = tiny.bundle.folds[0]
    trained, evaluated = seen.numbers(training=True), seen.numbers(training=False)
    steering = evaluated - set(fold.valid)
    assert len(steering) == 8
    assert trained | steering == set(fold.train)
    assert not trained & steering
    assert not trained & set(fold.valid)


# ---- preprocessing ----


def test_preprocessing_is_fitted_on_the_training_fold_only(tmp_path: Path) -> None:
    clean = Tiny(tmp_path / "clean", preprocess=StandardScaler())
    inputs, targets = samples()
    fold = clean.bundle.folds[0]
    inputs[fold.valid] = 1e9
    poisoned = Tiny(tmp_path / "poisoned", preprocess=StandardScaler(), data=(inputs, targets))
    rows = torch.from_numpy(fold.train)
    one, other = (
        preprocessing.fit_transform(tiny.batches, tiny.preprocess, fold.train).train(rows, 0, 0)[0]
        for tiny in (clean, poisoned)
    )
    assert torch.equal(one, other)
    torch.testing.assert_close(one.mean(0), torch.zeros(FEATURES), atol=1e-5, rtol=0)
    pairs = zip(clean.train().epochs, poisoned.train().epochs, strict=True)
    assert all(item.train_loss == poison.train_loss for item, poison in pairs)


# ---- what is told ----


@pytest.mark.parametrize("name", ["folder", "log"])
def test_a_disk_error_is_not_a_failure_of_the_job(tmp_path: Path, name: str) -> None:
    tiny = Tiny(tmp_path)
    folder = job_folder(tmp_path, tiny.jobs[0])
    if name == "folder":
        folder.parent.parent.mkdir()
        folder.parent.write_text("a file where a folder should be")
    else:
        folder.mkdir(parents=True)
        (folder / "log.txt").mkdir()
    with pytest.raises(StorageError, match=r"is a (file|folder) where a (folder|file) of the run"):
        tiny.execute(tiny.jobs[0])
