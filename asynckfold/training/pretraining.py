"""Unsupervised pretraining of a model on its training fold, before the first epoch.

A model with a method ``pretrain(inputs, generator, report)`` has it; a method with other parameter
names is not called. A job calls it once, before its optimizer is made, with all inputs of the
training fold (eval view, no targets). Random numbers must come from the generator, seeded from the
job's seed. ``report(stage, epoch, measures)``, with the name of a stage, an epoch from 1, and
numbers by name, writes to the log, the checkpoints, and the result's ``pretraining``. A killed job
starts its pretraining again; a checkpoint follows it.

In a job with a process on a GPU, which is forked after it, pretraining must not call backward()
(`spared`): the dry run refuses all but that of a `DBN`.

To parallelise a custom ``pretrain``, accept a fourth argument, ``summing``: a job with several
processes passes a `ParallelSum` (`asynckfold.training.process_group.ranks`) that divides the
work among them.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from asynckfold.data.batches import Batches
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.result import StageEpoch
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import seeding
from asynckfold.training.job_log import JobLog
from asynckfold.training.process_group.ranks import ParallelSum


class Report(Protocol):
    """Reports metrics of the pretraining."""

    def __call__(self, stage: str, epoch: int, measures: Mapping[str, float]) -> None:
        """Report metrics after an epoch of a stage."""


@dataclass(frozen=True)
class PretrainingSummary:
    """Summary and metrics of a pretraining; empty without one."""

    text: str = ""
    epochs: tuple[StageEpoch, ...] = ()


def has_pretraining(model: nn.Module) -> bool:
    """Whether a model has pretraining.

    Examples
    --------
    >>> from asynckfold.models import DBN, MLP
    >>> has_pretraining(DBN()), has_pretraining(MLP())
    (True, False)
    """
    method = getattr(model, "pretrain", None)
    if not inspect.ismethod(method):
        return False
    return {"inputs", "generator", "report"} <= inspect.signature(method).parameters.keys()


def may_differentiate(model: nn.Module) -> bool:
    """Whether a model has pretraining that may call backward()."""
    if not has_pretraining(model):
        return False
    from asynckfold.models import DBN

    return getattr(getattr(model, "pretrain", None), "__func__", None) is not DBN.pretrain


def pretrain(
    model: nn.Module,
    data: Batches,
    train: Indices,
    seed: int,
    log: JobLog,
    heartbeat: Heartbeat,
    batch_size: int,
    processes: int = 1,
    cores: Sequence[int] = (),
) -> PretrainingSummary:
    """Run the pretraining of a model on its device; log each report.

    Parameters
    ----------
    batch_size : int
        Samples to gather at once.
    processes : int
        Processes of the job, for a ``pretrain`` with ``summing``.
    cores : sequence of int
        One for each process; empty for no pinning.
    """
    started = reported = time.perf_counter()
    last: dict[str, str] = {}
    epochs: list[StageEpoch] = []

    def report(stage: str, epoch: int, measures: Mapping[str, float]) -> None:
        nonlocal reported
        before, reported = reported, time.perf_counter()
        values = {str(name): float(value) for name, value in measures.items()}
        epochs.append(StageEpoch(str(stage), int(epoch), values, reported - before))
        measured = " ".join(f"{name} {value:.4g}" for name, value in values.items())
        last[stage] = f"{stage} after {epoch} epochs {measured}"
        log.write(f"pretraining {stage} epoch {epoch} {measured}\n")
        heartbeat.begin_long_phase()

    rows = torch.from_numpy(train)
    inputs = torch.cat([data.eval(part)[0] for part in torch.split(rows, batch_size)])
    generator = torch.Generator(inputs.device)
    # Epochs use streams from 1 on.
    generator.manual_seed(seeding.stream(seed, 0, 1))
    model.train()
    stage: Callable[..., Any] = getattr(model, "pretrain")  # noqa: B009 - modules have no such
    if processes > 1 and "summing" in inspect.signature(stage).parameters:
        stage = partial(stage, summing=ParallelSum(processes, cores))
    stage(inputs, generator, report)
    seconds = time.perf_counter() - started
    text = "; ".join([f"pretrained on {len(train)} samples in {seconds:.2f} s", *last.values()])
    return PretrainingSummary(text, tuple(epochs))
