"""A LightningModule moved over unchanged: the bits of a plain loop, or refused by name."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, InputError, RunStore
from tests.plain import epoch_order, one_thread, seed_all, stream
from tests.toy import Tiny as Network
from tests.toy import adam, samples

PACKAGE = next(
    (name for name in ("pytorch_lightning", "lightning") if importlib.util.find_spec(name)), ""
)
needs_lightning = pytest.mark.skipif(not PACKAGE, reason="needs the extra lightning")
EPOCHS = 3


def module(interval: str = "epoch", **changes: Any) -> Callable[..., Any]:
    """A class as users write it; `changes` are further attributes of it."""
    lightning = importlib.import_module("lightning.pytorch" if PACKAGE == "lightning" else PACKAGE)

    class Net(lightning.LightningModule):
        def __init__(self, lr: float = 0.05) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Network()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, targets = batch
            loss = nn.functional.cross_entropy(self(inputs), targets, label_smoothing=0.1)
            self.log("train_loss", loss)
            self.log_dict({"index": batch_idx, "epoch_seen": self.current_epoch}, prog_bar=True)
            return {"loss": loss, "unused": inputs}

        def validation_step(self, batch: Any) -> None:
            inputs, targets = batch
            self.log("val_acc", (self(inputs).argmax(1) == targets).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), self.hparams.lr, fused=True)
            warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
            rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], [2])
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": interval},
            }

    for name, value in changes.items():
        setattr(Net, name, value)
    return Net


def kfold(root: Path, **settings: Any) -> AsyncKFold:
    given = {"engine": "serial", "verbose": 0, "threads_per_job": 1, "report": False, **settings}
    return AsyncKFold(3, samples(), root, nn.CrossEntropyLoss(), 10, **given)


def plain_loop(results: Any, job: Any, interval: str) -> Any:
    """The same training, by torch alone."""
    inputs, targets = map(torch.from_numpy, samples())
    train, lr = results.folds[job.fold].train, float(job.model.rpartition("=")[2])
    torch.set_num_threads(results.plan.threads_per_job)
    seed_all(job.seed)
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr, fused=True)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], [2])
    for epoch in range(EPOCHS):
        seed_all(stream(job.seed, epoch + 1))
        for rows in torch.from_numpy(epoch_order(train, job.seed, epoch)).split(10):
            outputs = model.train()(inputs[rows])
            loss = nn.functional.cross_entropy(outputs, targets[rows], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if interval == "step":
                schedule.step()
        if interval == "epoch":
            schedule.step()
    return {f"net.{name}": value for name, value in model.state_dict().items()}


@pytest.mark.nightly
@needs_lightning
@pytest.mark.parametrize(("interval", "engine"), [("epoch", "process"), ("step", "serial")])
def test_a_module_has_the_bits_of_a_plain_loop(tmp_path: Path, interval: str, engine: str) -> None:
    # A worker imports Lightning anew: one pool is enough.
    words = {"scoring": ["accuracy", "val_acc"], "refit": engine == "serial"}
    results = kfold(tmp_path, engine=engine, n_jobs=1, **words)(
        {"net": module(interval)}, trainer_params={"epochs": EPOCHS}, params={"lr": [0.05, 0.02]}
    )
    assert [row.name for row in results.candidates] == [
        f"net/configure_optimizers/lr={lr}" for lr in (0.05, 0.02)
    ]
    for job in results.plan.jobs:
        with one_thread():
            expected = plain_loop(results, job, interval)
        state = results.state_dict(job.candidate, job.fold)
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert engine == "process" or results.refitted.results
    rows = results.to_frame("epoch")
    assert rows["epoch_seen"].tolist()[:3] == [0, 1, 2]
    assert rows["val_acc"].tolist() == pytest.approx(rows["accuracy"].tolist())
    assert results.best_score_ == pytest.approx(results.to_frame()["mean_val_acc"].max())
    assert rows["logged_train_loss"].tolist() == pytest.approx(rows["train_loss"].tolist())


def hook(*given: Any) -> None: ...


def two(self: Any) -> Any:
    parts = (self.net.layers[0], self.net.layers[4])
    return [torch.optim.SGD(part.parameters(), 0.1) for part in parts]


def plateau(self: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_acc"}


def every_other(self: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return [optimizer], [{"scheduler": schedule, "frequency": 2}]


def too_long(self: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=99)]


def manual(self: Any, batch: Any) -> Any:
    optimizer = self.optimizers()
    optimizer.zero_grad()


def summed(self: Any, batch: Any) -> Any:
    loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
    self.log("total", loss, reduce_fx="sum")
    return loss


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a hook": ({"on_train_batch_start": hook}, {}, r"model net with on_train_batch_start\. Remove"),
    "callbacks": ({"configure_callbacks": hook}, {}, "model net with configure_callbacks"),
    "loaders": (
        {"train_dataloader": hook, "val_dataloader": hook},
        {},
        "net with train_dataloader, val_dataloader",
    ),
    "manual": ({"automatic_optimization": False}, {}, "automatic_optimization=False in model net"),
    "several optimizers": ({"configure_optimizers": two}, {}, "2 optimizers, of model net"),
    "no optimizer": (
        {"configure_optimizers": hook},
        {},
        "must return one torch.optim.Optimizer: received None, of model net",
    ),
    "plateau": ({"configure_optimizers": plateau}, {}, "received ReduceLROnPlateau, of model net"),
    "frequency": ({"configure_optimizers": every_other}, {}, r"frequency=2, of model net\. Leave"),
    "too long": ({"configure_optimizers": too_long}, {}, r"received OneCycleLR\(total_steps=99\)"),
    "the trainer": ({"training_step": manual}, {}, "received self.trainer.strategy"),
    "a sum": ({"training_step": summed}, {}, r"what is logged is averaged.*reduce_fx='sum'"),
    "another lr_step": ({}, {"lr_step": "batch"}, r"received lr_step='batch', interval='epoch'"),
}


@pytest.mark.nightly
@needs_lightning
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_here_is_refused_by_name(tmp_path: Path, name: str) -> None:
    changes, params, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        kfold(tmp_path / "run")({"net": module(**changes)}, trainer_params=params)
    assert not (tmp_path / "run" / "run.db").exists()


@pytest.mark.nightly
@needs_lightning
def test_the_steps_of_a_module_are_its_own_and_a_part_of_the_plan(tmp_path: Path) -> None:
    def another(self: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    net = {"net": module()}
    with pytest.raises(InputError, match="training_step= and no opt_fn"):
        kfold(tmp_path, training_step=hook)(net)
    with pytest.raises(InputError, match="for LightningModules only: received model Tiny"):
        kfold(tmp_path)([*net.values(), Network])
    kfold(tmp_path / "run")(net)
    assert kfold(tmp_path / "run")(net).counts["pending"] == 0
    with pytest.raises(InputError, match=r"model 'net': training_step\(\) changed"):
        kfold(tmp_path / "run")({"net": module(training_step=another)})
    # With an optimizer and an LR schedule, it is a module like any other, and the log says so.
    as_module = kfold(tmp_path / "other")(net, ["cosine"], adam)
    assert "val_acc" not in as_module.to_frame("epoch")
    with RunStore.read(tmp_path / "other") as store:
        assert [item for item in store.events() if "leave schedulers and opt_fn out" in item.text]


@pytest.mark.nightly
@needs_lightning
def test_a_batch_is_what_the_samples_are(tmp_path: Path) -> None:
    inputs, targets = samples()

    def forward(self: Any, left: torch.Tensor, right: torch.Tensor) -> Any:
        return self.net(torch.cat([left, right], 1))

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        assert sorted(batch) == ["labels", "left", "right"]
        return nn.functional.cross_entropy(self(batch["left"], batch["right"]), batch["labels"])

    made = module(forward=forward, training_step=step, validation_step=step)()
    items = [
        {"left": row[:3], "right": row[3:], "labels": int(label)}
        for row, label in zip(inputs, targets, strict=True)
    ]
    given = {"engine": "serial", "verbose": 0, "threads_per_job": 1, "report": False}

    def called(root: Path, **settings: Any) -> Any:
        run = AsyncKFold(3, items, root, nn.CrossEntropyLoss(), 10, **given, **settings)
        return run([made], trainer_params={"epochs": 1})

    with pytest.raises(InputError, match="validation_step must measure something"):
        called(tmp_path / "nothing", target_key="labels")
    type(made).validation_step = lambda self, batch, batch_idx: self.log("one", 1.0)
    results = called(tmp_path / "with", target_key="labels")
    assert results.to_frame("epoch")["one"].tolist() == [1.0] * 3


def test_schedules_and_optimizer_may_be_left_out_for_lightning_modules_only(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"opt_fn must be a function|LightningModules only"):
        kfold(tmp_path)([functools.partial(Network)])
