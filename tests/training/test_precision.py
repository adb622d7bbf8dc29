"""bfloat16 on request: in every trainer, and in the plan only where it was asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold.api.execution import slow_notes
from asynckfold.jobs.messages import Task
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.reproducibility import CPU as CPU_CLASS
from asynckfold.jobs.result import DONE
from asynckfold.jobs.trainer_params import TRAINERS, TrainerParams
from asynckfold.training.dry_run import preflight
from asynckfold.training.fusion import check_equivalence
from asynckfold.training.multiprocess import train
from asynckfold.training.precision import outputs_of
from tests.training.fusion.test_trainer import MODELS, digests, grouped
from tests.training.fusion.test_zoo import replicas, steps
from tests.training.fusion.zoo import ZOO
from tests.training.tiny import Plain, Tiny, never

SHORT = TrainerParams(epochs=2, precision="bf16")


def test_a_plan_records_precision_only_if_requested(tmp_path: Path) -> None:
    plan = Tiny(tmp_path).bundle.plan
    short = replace(plan, params=replace(plan.params, precision="bf16"))
    assert "precision" not in json.loads(plan.to_json())["params"]
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(short.to_json()) == short
    assert short.fingerprint != plan.fingerprint
    assert plan.first_difference(short) == "params.precision: fp32 there, bf16 here"


def test_slow_bf16_is_reported(tmp_path: Path) -> None:
    plan = Tiny(tmp_path).bundle.plan
    short = replace(plan, params=replace(plan.params, precision="bf16"))
    plain, able = {CPU_CLASS: "x86_64 AVX2 (avx2)"}, {CPU_CLASS: "x86_64 (amx_bf16 avx2)"}
    assert list(slow_notes(plan, plain)) == []
    assert list(slow_notes(short, able)) == []
    assert list(slow_notes(short, {})) == []
    (note,) = slow_notes(short, plain)
    assert "no instructions for bfloat16" in note


class Watched(Plain):
    """Notes the type that its layer computes in, with the mode."""

    seen: set[tuple[bool, torch.dtype]]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = super().forward(inputs)
        self.seen.add((self.training, found.dtype))
        return found


def noted(loss: set[torch.dtype]) -> Any:
    def criterion(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss.add(outputs.dtype)
        return nn.functional.cross_entropy(outputs, targets)

    return criterion


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_training_and_evaluation_compute_in_bf16_and_the_loss_in_float32(
    tmp_path: Path, precision: str, trainer: str
) -> None:
    seen: set[tuple[bool, torch.dtype]] = set()
    losses: set[torch.dtype] = set()
    model = type("Watched", (Watched,), {"seen": seen})
    params = TrainerParams(epochs=1, trainer=trainer, precision=precision)
    tiny = Tiny(tmp_path, {"watched": model}, params=params, criterion=noted(losses))
    if trainer == "plain":
        result = tiny.train()
    else:
        result = train.train(
            tiny.bundle, Task(tiny.jobs[0]), tiny.batches, (), lambda events: None, never
        )
    assert result.status == DONE
    assert result.outputs.dtype == np.float32
    computed = torch.bfloat16 if precision == "bf16" else torch.float32
    assert seen == {(True, computed), (False, computed)}
    assert losses == {torch.float32}


def test_float64_stays_float64() -> None:
    layer = nn.Linear(2, 1).double()
    assert outputs_of(layer, torch.ones(1, 2, dtype=torch.float64), "bf16").dtype is torch.float64


@pytest.mark.parametrize("model", MODELS)
def test_a_group_is_closer_to_its_plain_jobs_than_to_those_in_float32(
    tmp_path: Path, model: str
) -> None:
    ways = {"fused": SHORT, "short": SHORT, "plain": TrainerParams(epochs=2)}
    sweeps = {name: grouped(tmp_path / name, model, params=ways[name]) for name in ways}
    found, _ = sweeps["fused"].group()
    apart = {"short": 0.0, "plain": 0.0}
    for job in sweeps["fused"].jobs:
        for name in apart:
            other = sweeps[name].train(job)
            apart[name] += float(np.abs(found[job.id].outputs - other.outputs).sum())
    assert 0 <= apart["short"] < apart["plain"]


def test_a_bf16_job_stopped_after_every_batch_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = Tiny(tmp_path / "whole", params=SHORT).train()
    stopped, attempts = Tiny(tmp_path / "stopped", params=SHORT).train_with_stops()
    assert attempts > 1
    assert stopped.digest == whole.digest
    assert whole.digest != Tiny(tmp_path / "plain").train().digest
    groups = [grouped(tmp_path / name, params=SHORT).group()[0] for name in ("a", "b")]
    assert digests(groups[0]) == digests(groups[1])


@pytest.mark.parametrize("name", ["lenet5", "residual", "grouped", "transformer", "mlp", "buffers"])
def test_fused_models_round_where_plain_ones_do(name: str) -> None:
    animal = ZOO[name]
    found = check_equivalence(
        replicas(animal),
        nn.CrossEntropyLoss(),
        steps(animal),
        lambda model: torch.optim.SGD(model.parameters(), 1e-2),
        "bf16",
    )
    assert found.refusal is None
    assert found.bfloat16 is not None


class FloatOnly(Plain):
    """Raises with what it computes in bfloat16."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = super().forward(inputs)
        if found.dtype is not torch.float32:
            raise TypeError(f"no kernel for {found.dtype}")
        return found


def test_a_model_that_fails_in_bf16_is_reported_before_the_sweep(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, {"float": FloatOnly}, params=SHORT)
    facts = preflight.check(tiny.bundle, tiny.batches)
    assert list(facts.failures) == ["float/constant"]
