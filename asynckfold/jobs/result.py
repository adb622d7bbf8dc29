"""What one job returns, and the serial baseline."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from asynckfold.jobs.plan import Job, Plan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Outputs: TypeAlias = npt.NDArray[np.float32]
else:
    Outputs = Any  # what records need to know of them without an import of NumPy

DONE, FAILED, DIVERGED, CANCELLED = "done", "failed", "diverged", "cancelled"
ENDED = (DONE, FAILED, DIVERGED, CANCELLED)

BEST_EPOCH = "best_epoch"
"""Column of the table of epochs: the epoch whose weights are the best so far."""


@dataclass(frozen=True)
class Epoch:
    """One epoch of one job.

    Parameters
    ----------
    number : int
        From 1.
    train_loss, valid_loss : float
        Mean over the samples of the training fold, while training; and over the held-out fold, also
        where the criterion sums. With weights of classes or an ``ignore_index``, samples count as
        they do in the criterion's mean.
    accuracy : float or None
        Share of held-out samples whose class is right; None for regression.
    lr : float
        Learning rate of the first parameter group at the start of the epoch.
    seconds : float
        Wall time, evaluation included.
    logged : Mapping of str to float
        By name: means over the epoch of what the user's `training_step` logged.
    """

    number: int
    train_loss: float
    valid_loss: float
    accuracy: float | None
    lr: float
    seconds: float
    logged: Mapping[str, float] = field(default_factory=dict, hash=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; without `logged` if it is empty."""
        return {name: value for name, value in vars(self).items() if value != {}}


@dataclass(frozen=True)
class StageEpoch:
    """One epoch of a stage before the training, such as the pretraining of a layer."""

    stage: str  # the model's name for it, such as ``"layer 1"``
    number: int  # from 1
    measures: Mapping[str, float]  # by name
    seconds: float  # since the previous epoch, or since the stage began


@dataclass(frozen=True)
class AveragingSummary:
    """What parameter averaging did in one job."""

    rounds: int  # averages of the processes' models
    samples: tuple[int, ...]  # samples × epochs of each process


@dataclass(frozen=True, eq=False)
class Result:
    """The end of one job.

    Parameters
    ----------
    job_id : str
        ``"LeNet/cosine/fold-0"``.
    attempt : int
        The attempt that ended, from 1.
    status : {"done", "failed", "diverged", "cancelled"}
        How it ended. What racing left out is cancelled, and whatever it returned is dropped; its
        `attempt` is 0 if it never started.
    scores : Mapping of str to float
        By metric, on the held-out fold, by the model of the last epoch; greater is better.
    epochs : tuple of Epoch
        What was recorded on the way.
    outputs : ndarray of float32, shape (n_valid, n_outputs), or None
        What the model says of the held-out samples, in the fold's order.
    weights : str
        SHA-256 of the trained parameters and buffers.
    fit_seconds, score_seconds : float
        Wall time of the training with its evaluations, until its end or until it failed, over all
        attempts and sessions that led to it, pauses left out; and of the last evaluation. Jobs that
        are trained as one have equal parts of their training's. Of a job whose worker died, the
        wall time of all its attempts.
    peak_memory : int
        Largest resident set of the worker during the job, bytes.
    pid, cores, threads, device, node : int, tuple of int, int, str, str
        Where it ran; `node` is empty outside a cluster.
    started, ended : float
        Run seconds: wall time of the run's sessions up to then.
    error, traceback : str
        One line, and the whole story; empty when done.
    pretraining : tuple of StageEpoch
        What a stage before the first epoch reported; empty for a model that has none.
    averaged : Averaged or None
        What parameter averaging did, also before a continuation; None for any other trainer, and
        where the job failed.
    peak_gpu_memory : int
        Most bytes that the worker held on its GPU for tensors during the job, beside its context;
        0 for jobs on cores.
    """

    job_id: str
    attempt: int
    status: str
    scores: Mapping[str, float] = field(default_factory=dict)
    epochs: tuple[Epoch, ...] = ()
    outputs: Outputs | None = None
    weights: str = ""
    fit_seconds: float = 0.0
    score_seconds: float = 0.0
    peak_memory: int = 0
    pid: int = 0
    cores: tuple[int, ...] = ()
    threads: int = 1
    device: str = "cpu"
    started: float = 0.0
    ended: float = 0.0
    error: str = ""
    traceback: str = ""
    pretraining: tuple[StageEpoch, ...] = ()
    averaged: AveragingSummary | None = None
    peak_gpu_memory: int = 0
    node: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether it has no score, other than because racing left it out."""
        return self.status not in (DONE, CANCELLED)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over what must never change: weights, outputs, metrics; no time, no place."""
        canonical: dict[str, Any] = {
            "job": self.job_id,
            "status": self.status,
            "weights": self.weights,
            "outputs": "" if self.outputs is None else _array_digest(self.outputs),
            "scores": _hexadecimal(self.scores),
            "epochs": [
                [
                    item.number,
                    *(
                        None if value is None else float(value).hex()
                        for value in (item.train_loss, item.valid_loss, item.accuracy, item.lr)
                    ),
                    *([_hexadecimal(item.logged)] if item.logged else []),
                ]
                for item in self.epochs
            ],
        }
        if self.pretraining:
            canonical["pretraining"] = [
                [item.stage, item.number, _hexadecimal(item.measures)] for item in self.pretraining
            ]
        return hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()


def _hexadecimal(values: Mapping[str, float]) -> dict[str, str]:
    return {name: float(value).hex() for name, value in sorted(values.items())}


def _array_digest(array: npt.NDArray[Any]) -> str:
    import numpy as np

    head = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def fingerprint(digests: Mapping[str, str]) -> str:
    """Return one hash of all results; `digests` maps job id to `Result.digest`."""
    return hashlib.sha256(json.dumps(dict(sorted(digests.items()))).encode()).hexdigest()


_PLACE = re.compile(
    r" \(epoch \d+, (batch \d+ of \d+|end of the epoch)\)|(?<=timed out: )trained [\d.]+ s, [^;]*; "
)


def cause(error: str) -> str:
    """Return an error without epoch and batch, so that equal causes are equal."""
    return _PLACE.sub("", error)


OTHERS_CORES, OTHERS_SHARE = 0.2, 0.1
"""Mean use by other programs above which a timing is called disturbed: cores, and share of them.

One busy core delays a serial loop whose threads wait for each other; a packed run on many cores
only loses its share.
"""


@dataclass(frozen=True)
class Baseline:
    """The ordinary serial loop over the jobs that succeeded, to compare with.

    Parameters
    ----------
    kind : {"measured", "estimated"}
        Whether the whole loop was run, or some batches of each candidate timed and multiplied.
    seconds : float
        All these jobs, one after another.
    threads : int
        Threads of the loop: torch's default.
    by_candidate : Mapping of str to float
        Seconds of each candidate's jobs, of candidates whose jobs were all timed.
    accuracy : Mapping of str to float
        Mean score of each candidate in the baseline's training; empty for an estimate.
    others : float
        Cores' worth of use by other programs while it was timed; NaN if it is not known.
    by_job : Mapping of str to float
        Accuracy of each job in the baseline's training, by its id; empty for an estimate.
    epochs : Mapping of str to tuple of (float, float)
        By job: the seconds that had passed at the end of each epoch, evaluation included, and its
        mean training loss. Empty for an estimate; so is `class_counts`.
    class_counts : Mapping of str to tuple of (int, int)
        By job: of each class, how many held-out samples were recognised, of how many.
    seconds_by_job : Mapping of str to float
        Seconds of each job that the loop trained, by its id.
    packed_others : float
        Cores' worth of use by other programs during the packed run; NaN if it is not known.
    cores : int
        Allowed cores; 0 where that is not known.
    """

    kind: str
    seconds: float
    threads: int
    by_candidate: Mapping[str, float] = field(default_factory=dict)
    accuracy: Mapping[str, float] = field(default_factory=dict)
    others: float = 0.0
    by_job: Mapping[str, float] = field(default_factory=dict)
    epochs: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    class_counts: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    seconds_by_job: Mapping[str, float] = field(default_factory=dict)
    packed_others: float = 0.0
    cores: int = 0

    @property
    def disturbance(self) -> str:
        """Which timing other programs disturbed, or may have; empty for none."""
        if self.is_run_disturbed:
            return f"{self._used(self.packed_others)} during the packed run"
        if self.is_disturbed:
            return f"{self._used(self.others)} while the serial loop was timed"
        return ""

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs may have disturbed the timing of the serial loop."""
        return not self.others <= OTHERS_CORES

    @property
    def is_run_disturbed(self) -> bool:
        """Whether other programs may have disturbed the packed run."""
        return not self.packed_others <= max(OTHERS_CORES, OTHERS_SHARE * self.cores)

    def _used(self, used: float) -> str:
        if math.isnan(used):
            return "the use of the cores by other programs is not known"
        of = f" of {self.cores}" if self.cores else ""
        return f"other programs used {used:.1f}{of} cores"


def job_by_id(plan: Plan) -> dict[str, Job]:
    """Return the plan's jobs by id."""
    return {job.id: job for job in plan.jobs}


def counts_line(counts: Mapping[str, Any], *, is_held: bool = False) -> str:
    """Return the number of finished jobs, and the others by state.

    >>> counts = {"planned": 20, "done": 12, "failed": 1, "diverged": 0, "cancelled": 0}
    >>> counts_line({**counts, "pending": 7, "running": 2}, is_held=True)
    '12 of 20 jobs finished, 1 failed, 2 running, 5 waiting'
    >>> counts_line({**counts, "pending": 7})
    '12 of 20 jobs finished, 1 failed, 7 pending'
    """
    running = counts.get("running", 0)
    numbers = {name: counts[name] for name in ("failed", "diverged")}
    numbers["left out"] = counts["cancelled"]
    numbers["running"] = running
    numbers["waiting" if is_held else "pending"] = max(0, counts["pending"] - running)
    others = "".join(f", {number} {name}" for name, number in numbers.items() if number)
    planned = counts["planned"]
    return f"{counts['done']} of {planned} {'job' if planned == 1 else 'jobs'} finished{others}"


_FOREIGN = re.compile(
    r"[/\\](?:site-packages|dist-packages|python3[.\d]*)[/\\]|<frozen |"
    r"[/\\]asynckfold[/\\](?:api|cli|data|engines|jobs|models|sweep|system|training)[/\\]"
)
"""Files of libraries, and of this package."""


def own_frames(traceback: str) -> str:
    """Return the frames of a traceback that are the user's code; ``""`` if there are none.

    >>> text = 'Traceback:\\n  File "/x/site-packages/torch/nn.py", line 1, in call\\n    go()\\n'
    >>> own_frames(text + '  File "model.py", line 7, in forward\\n    x @ y\\nError: no')
    '  File "model.py", line 7, in forward\\n    x @ y'
    """
    frames = re.findall(r"^  File .*(?:\n    .*)*", traceback, re.MULTILINE)
    return "\n".join(frame for frame in frames if not _FOREIGN.search(frame.partition("\n")[0]))


MakeAccumulator = Callable[[], Any]
"""() → scores of one held-out fold, accumulated batch by batch where its outputs are not held: see
`asynckfold.results.batch_scores`."""
