"""Messages between the sweep and its workers: tasks one way, events the other. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asynckfold.jobs.objective import OutputSample
from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import Epoch, Result


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint file that was durable when this was recorded."""

    job_id: str
    attempt: int
    epoch: int  # completed epochs
    batch: int  # completed batches of the next epoch
    file: str  # relative to the run's folder
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Task:
    """One attempt at one job."""

    job: Job
    attempt: int = 1  # from 1; names the files it writes
    checkpoints: tuple[CheckpointRef, ...] = ()  # of earlier attempts, newest first
    measures_gpu: bool = False  # whether it reports its `GpuShare`


@dataclass(frozen=True)
class GpuShare:
    """What a job has measured in its first steps: the share of its time in which a GPU computes."""

    job_id: str
    share: float


@dataclass(frozen=True)
class JobStart:
    """A worker process has begun an attempt."""

    job_id: str
    attempt: int
    pid: int


@dataclass(frozen=True)
class Progress:
    """Where a job is: ``batch`` of ``batches`` in epoch ``epoch`` (from 1) of ``epochs``."""

    job_id: str
    attempt: int
    epoch: int
    epochs: int
    batch: int
    batches: int
    loss: float


@dataclass(frozen=True)
class EpochEnd:
    """An epoch of a job is complete."""

    job_id: str
    attempt: int
    epoch: Epoch


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint is durable under its final name."""

    ref: CheckpointRef


@dataclass(frozen=True)
class JobEnd:
    """One of several jobs of a placement has its result before the others."""

    result: Result


@dataclass(frozen=True)
class Note:
    """Something for the log of the run."""

    job_id: str | None
    kind: str
    text: str


@dataclass(frozen=True)
class Leftovers:
    """What a job changed in its process that could not be restored."""

    job_id: str | None  # one of the fused jobs; None for a dry run
    names: tuple[str, ...]
    goes_on: bool = True  # the process trains further jobs; a worker ends
    numbers: bool = True  # their results may differ because of it


RunEvent = GpuShare | JobStart | Progress | EpochEnd | NewCheckpoint | JobEnd | Note | Leftovers


@dataclass(frozen=True)
class RetryableFailure:
    """Sent in place of a result: a failure that another attempt may avoid."""

    outcome: str  # ``"oom"``, ``"gpu_oom"`` or ``"died"``, see `asynckfold.scheduling.retries`
    result: Result  # the job's result if it is not retried


@dataclass(frozen=True)
class Facts:
    """Facts of a dry run of the candidates, before any job starts; dicts are by model name."""

    recipe: dict[str, Any]  # for the plan: architectures, optimizer and LR schedule settings
    step_seconds: dict[str, float]  # of one training step
    memory: dict[str, int]  # bytes of parameters, gradients and optimizer state
    # (rule, received, remedy): what makes the sweep impossible
    problems: tuple[tuple[str, str, str], ...] = ()
    # by candidate: traceback of its code; its jobs will fail
    failures: dict[str, str] = field(default_factory=dict)
    # by candidate: the problem that it has; without any other its jobs must not start
    refused: dict[str, str] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)  # of one training step
    # why jobs cannot be fused on cores; empty: they can; missing: not checked
    fusible: dict[str, str] = field(default_factory=dict)
    gpu_fusible: dict[str, str] = field(default_factory=dict)  # the same on GPUs
    formats: dict[str, str] = field(default_factory=dict)  # the same for channels last
    # result of the check of a fused model: deviation, optimizer steps
    fused: dict[str, str] = field(default_factory=dict)
    # number of matrix products and convolutions that `flops` are divided among
    products: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # on LR schedules and scores, for the log
    # outputs that were seen, also of models with too few outputs for the classes
    output_samples: dict[str, OutputSample] = field(default_factory=dict)
    measured: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by a validation_step
    weights: dict[str, int] = field(default_factory=dict)  # bytes of the parameters
    # by candidate: its LR schedule reacts to a loss
    reacting: dict[str, bool] = field(default_factory=dict)
