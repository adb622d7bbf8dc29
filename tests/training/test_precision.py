"""Precision on request: in every trainer, and in the plan only where it was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from asynckfold import Plan, TrainerParams
from asynckfold.jobs.result import DONE
from asynckfold.training import checkpoint
from tests.toy import adam
from tests.training.sweeps import ONE_FOLD, in_pieces, problems, sweep, train
from tests.training.tiny import Plain, Tiny, always, checkpoints

SHORT = {"precision": "bf16"}


def test_what_cores_cannot_do_is_reported_before_the_sweep(tmp_path: Path) -> None:
    ((rule, _, remedy),) = problems(tmp_path / "fp16", params={"precision": "fp16"})
    assert "needs a GPU" in f"{rule} {remedy}"
    several = {"precision": "fp16", "trainer": "averaging", "processes": 2}
    assert "is for the plain trainer" in problems(tmp_path / "several", params=several)[0][0]


class Watched(Plain):
    """Notes the type that its layer computes in, with the mode."""

    seen: set[tuple[bool, torch.dtype]]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        self.seen.add((self.training, outputs.dtype))
        return outputs


def noted(loss: set[torch.dtype]) -> Any:
    def criterion(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss.add(outputs.dtype)
        return nn.functional.cross_entropy(outputs, targets)

    return criterion


@pytest.mark.parametrize(
    ("trainer", "precision"), [("plain", "tf32"), ("plain", "bf16"), ("allreduce", "bf16")]
)
def test_training_and_evaluation_compute_in_bf16_and_the_loss_in_float32(
    tmp_path: Path, precision: str, trainer: str
) -> None:
    seen: set[tuple[bool, torch.dtype]] = set()
    losses: set[torch.dtype] = set()
    model = type("Watched", (Watched,), {"seen": seen})
    params = {"epochs": 1, "trainer": trainer, "precision": precision}
    result = train(tmp_path, {"watched": model}, criterion=noted(losses), params=params)
    assert result.status == "done"
    assert result.outputs is not None
    assert result.outputs.dtype == np.float32
    computed = torch.bfloat16 if precision == "bf16" else torch.float32
    assert seen == {(True, computed), (False, computed)}
    assert losses == {torch.float32}


def test_a_bf16_job_stopped_after_every_batch_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", params=SHORT)
    stopped, attempts = in_pieces(tmp_path / "stopped", params=SHORT)
    assert attempts > 1
    assert stopped.digest == whole.digest
    assert whole.digest != train(tmp_path / "plain").digest


# float16: cores stand in for a GPU

HALF = TrainerParams(epochs=4, precision="fp16", clip_grad_norm=1.0)


class Overflowing(Plain):
    """Has a gradient beyond float16 at the initial loss scale, as large models have."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * 100


def slow_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=0.01)


@pytest.mark.parametrize("opt_fn", [slow_sgd, rmsprop])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_float16_job_stopped_after_every_batch_ends_with_the_same_bits(
    tmp_path: Path, opt_fn: Any
) -> None:
    """With fused kernels and without: the scale is in the checkpoint."""
    models = {"overflowing": Overflowing}
    whole = Tiny(tmp_path / "whole", models, opt_fn=opt_fn, params=HALF).train()
    tiny = Tiny(tmp_path / "stopped", models, opt_fn=opt_fn, params=HALF)
    stopped, attempts = tiny.train_with_stops()
    assert attempts > 1
    assert (whole.status, stopped.digest) == (DONE, whole.digest)
    assert whole.digest != Tiny(tmp_path / "plain", models, opt_fn=opt_fn).train().digest


def test_the_loss_scale_adapts_and_skips_steps(tmp_path: Path) -> None:
    params = replace(HALF, epochs=8)
    tiny = Tiny(tmp_path, {"overflowing": Overflowing}, opt_fn=adam, params=params)
    _, events = tiny.attempt(stop=always)
    (ref,) = checkpoints(events)
    tree = checkpoint.load(tmp_path / ref.file, ref.sha256)
    assert tree["scaler"]["scale"] < GradScaler("cpu").get_scale()
    steps = {float(entry["step"]) for entry in tree["optimizer"]["state"].values()}
    assert steps == {0.0}
    result = tiny.train()
    losses = [epoch.train_loss for epoch in result.epochs]
    assert losses[-1] < losses[0]


# TF32


class Tf32(Plain):
    """Has in its buffer what torch says of TF32 while it is made."""

    def __init__(self) -> None:
        super().__init__()
        allowed = torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
        if not allowed:
            raise RuntimeError("TF32 is off")


@pytest.mark.filterwarnings("ignore:.*jobs failed")
def test_jobs_in_tf32_are_allowed_it_and_leave_it_as_it_was(tmp_path: Path) -> None:
    result = train(tmp_path / "tf32", {"tf32": Tf32}, params={"epochs": 1, "precision": "tf32"})
    assert result.status == "done", result.error
    assert not torch.backends.cuda.matmul.allow_tf32
    assert "TF32 is off" in train(tmp_path / "fp32", {"tf32": Tf32}).error


def test_a_plan_records_the_precision(tmp_path: Path) -> None:
    plan, short = (
        sweep(tmp_path / str(number), cv=ONE_FOLD, params=params).plan
        for number, params in enumerate([{}, SHORT])
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(short.to_json()) == short
    assert short.fingerprint != plan.fingerprint
    assert plan.first_difference(short) == "params.precision: fp32 there, bf16 here"
