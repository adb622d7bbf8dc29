"""A stage before the first epoch: what a model does with its training fold by itself.

A model that has a method ``pretrain(inputs, generator, report)`` has such a stage; one whose
parameters have other names is the user's own business, and is not called. A job calls it
once, with all inputs of its training fold (in the eval view, without targets), before its optimizer
is made. All that it draws has to come from the generator, which the job's seed starts. It may call
``report(stage, epoch, measures)`` with the name of a part, the number of an epoch from 1, and
numbers by name: they are in the job's log and checkpoints, and in its result's ``pretraining``. A
job that is killed meanwhile begins the stage again; after it a checkpoint is written.

A stage that differentiates has no place in a job with a process on a GPU, which is forked after it
(`hide_gpus`): the dry run refuses any but that of a `DBN`, which does without.

A stage whose ``pretrain`` has a parameter ``summing``, too, may do in parts what it does: where a
job has several processes, it gets there what divides the work among them (`asynckfold.training.
summing`), and nothing otherwise.
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

from asynckfold.data import Batches
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.result import StageEpoch
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import seeding
from asynckfold.training.bundle import JobLog
from asynckfold.training.process_group.parallel_sum import Summing


class Report(Protocol):
    """What a stage tells with."""

    def __call__(self, stage: str, epoch: int, measures: Mapping[str, float]) -> None:
        """Tell what was measured after an epoch of a part of the stage."""


@dataclass(frozen=True)
class Pretrained:
    """What came of a stage: in one line, and epoch by epoch; nothing where there was none."""

    text: str = ""
    epochs: tuple[StageEpoch, ...] = ()


def wanted(model: nn.Module) -> bool:
    """Whether a model has a stage before its training.

    Examples
    --------
    >>> from asynckfold.models import DBN, MLP
    >>> wanted(DBN()), wanted(MLP())
    (True, False)
    """
    method = getattr(model, "pretrain", None)
    if not inspect.ismethod(method):
        return False
    return {"inputs", "generator", "report"} <= inspect.signature(method).parameters.keys()


def may_differentiate(model: nn.Module) -> bool:
    """Whether a model has such a stage that is not known to do without `backward`.

    Examples
    --------
    >>> from asynckfold.models import DBN, MLP
    >>> may_differentiate(DBN()), may_differentiate(MLP())
    (False, False)
    """
    if not wanted(model):
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
) -> Pretrained:
    """Do a model's stage, where it has one; return what came of it.

    Parameters
    ----------
    model : nn.Module
        Where it will be trained.
    data : Batches
        All samples, on the model's device.
    train : ndarray of int64
        The training fold.
    seed : int
        The job's.
    log : JobLog
        Gets a line for each report.
    heartbeat : Heartbeat
        Shows each report to whoever watches.
    batch_size : int
        Samples that are gathered at once.
    processes : int
        Of the job; a stage that can makes use of them.
    cores : sequence of int
        One for each process; empty for no pinning.
    """
    if not wanted(model):
        return Pretrained()
    started = told = time.perf_counter()
    last: dict[str, str] = {}
    epochs: list[StageEpoch] = []

    def report(stage: str, epoch: int, measures: Mapping[str, float]) -> None:
        nonlocal told
        before, told = told, time.perf_counter()
        values = {str(name): float(value) for name, value in measures.items()}
        epochs.append(StageEpoch(str(stage), int(epoch), values, told - before))
        found = " ".join(f"{name} {value:.4g}" for name, value in values.items())
        last[stage] = f"{stage} after {epoch} epochs {found}"
        log.write(f"pretraining {stage} epoch {epoch} {found}\n")
        heartbeat.aside()

    rows = torch.from_numpy(train)
    inputs = torch.cat([data.eval(part)[0] for part in torch.split(rows, batch_size)])
    generator = torch.Generator(inputs.device)
    # No epoch has the number 0.
    generator.manual_seed(seeding.stream(seed, 0, 1))
    model.train()
    stage: Callable[..., Any] = getattr(model, "pretrain")  # noqa: B009 - modules have no such
    if processes > 1 and "summing" in inspect.signature(stage).parameters:
        stage = partial(stage, summing=Summing(processes, cores))
    stage(inputs, generator, report)
    seconds = time.perf_counter() - started
    text = "; ".join([f"pretrained on {len(train)} samples in {seconds:.2f} s", *last.values()])
    return Pretrained(text, tuple(epochs))
