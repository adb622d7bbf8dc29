"""What passes between the sweep and its workers: tasks one way, news the other. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asynckfold.jobs.objective import Look
from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import Epoch, Result


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint file that was durable when this was recorded.

    Parameters
    ----------
    job_id, attempt : str, int
        Who wrote it.
    epoch, batch : int
        Whole epochs that it contains, and batches of the next one.
    file : str
        Path relative to the run's folder.
    sha256 : str
        Digest of the file.
    bytes : int
        Its size.
    """

    job_id: str
    attempt: int
    epoch: int
    batch: int
    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Task:
    """One attempt at one job.

    Parameters
    ----------
    job : Job
        What to train.
    attempt : int
        Number of the attempt, from 1; names the files it writes.
    checkpoints : tuple of CheckpointRef
        Where earlier attempts got to, newest first.
    """

    job: Job
    attempt: int = 1
    checkpoints: tuple[CheckpointRef, ...] = ()


@dataclass(frozen=True)
class Started:
    """A worker process has an attempt in hand."""

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
class EpochEnded:
    """An epoch of a job is complete."""

    job_id: str
    attempt: int
    epoch: Epoch


@dataclass(frozen=True)
class CheckpointWritten:
    """A checkpoint is durable under its final name."""

    ref: CheckpointRef


@dataclass(frozen=True)
class JobEnded:
    """One of several jobs of a placement has its result before the others."""

    result: Result


@dataclass(frozen=True)
class Noted:
    """Something for the log of the run."""

    job_id: str | None
    kind: str
    text: str


@dataclass(frozen=True)
class Left:
    """What a job changed in its process and what could not be put back.

    Parameters
    ----------
    job_id : str or None
        The job, or one of those that were trained as one; None of a dry run.
    names : tuple of str
        What it is.
    goes_on : bool
        Whether the process trains further jobs; a worker ends.
    numbers : bool
        Whether those may have other numbers by it.
    """

    job_id: str | None
    names: tuple[str, ...]
    goes_on: bool = True
    numbers: bool = True


RunEvent = Started | Progress | EpochEnded | CheckpointWritten | JobEnded | Noted | Left


@dataclass(frozen=True)
class RetryableFailure:
    """In place of a result: a failure that another attempt may mend.

    Parameters
    ----------
    outcome : {"oom", "died"}
        How the attempt ended, see `asynckfold.scheduling.retries`.
    result : Result
        What the job comes to when it is not tried again.
    """

    outcome: str
    result: Result


@dataclass(frozen=True)
class Facts:
    """What a dry run of the candidates found, before any job starts.

    Parameters
    ----------
    recipe : dict
        What the plan says of the live objects: architectures, optimizer and LR schedule settings.
    step_seconds : dict of str to float
        Seconds of one training step by model name.
    memory : dict of str to int
        Bytes of parameters, gradients and optimizer state by model name.
    problems : tuple of (rule, received, remedy)
        What makes the sweep impossible.
    failures : dict of str to str
        Traceback by candidate whose own code raised; its jobs will fail by themselves.
    flops : dict of str to int
        Floating-point operations of one training step by model name.
    fusible : dict of str to str
        By model name why its jobs are not to be trained as one; empty where they can be. Models
        that could not be checked are not in it.
    fused : dict of str to str
        What a check of fused models found, by the names of those that can be: how far they are from
        plain ones, and how their optimizers step.
    formats : dict of str to str
        The same of training channels last in memory.
    products : dict of str to int
        By model name, among how many products of matrices and convolutions `flops` are divided.
    notes : tuple of str
        What the log must say of LR schedules and scores; it forbids nothing.
    looks : dict of str to Look
        What was seen of the outputs of each model; also of one whose outputs are too few for the
        class indices, and which was looked at no further.
    """

    recipe: dict[str, Any]
    step_seconds: dict[str, float]
    memory: dict[str, int]
    problems: tuple[tuple[str, str, str], ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    fusible: dict[str, str] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    fused: dict[str, str] = field(default_factory=dict)
    products: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    looks: dict[str, Look] = field(default_factory=dict)
