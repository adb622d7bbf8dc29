"""The rows of ``run.db`` as frozen values, and their conversion both ways."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from asynckfold.jobs.decoding import decoded, finite, parsed
from asynckfold.jobs.placement import Wait
from asynckfold.jobs.result import Averaged, Epoch, Result, StageEpoch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PLACED = "placed"
"""Kind of the event that each attempt starts with."""

HELD = "held"
"""Kind of the event that changes the cores of an attempt."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at a job: where and when (run seconds), and how it ended.

    ``outcome`` is None while it runs, then ``"ok"``, ``"error"``, ``"diverged"``, ``"died"``,
    ``"timeout"``, ``"cancelled"``, or ``"lost"`` if the whole run was killed. ``cores`` and
    ``threads`` are those of its placement, ``changes`` the cores it was moved to, and when.
    ``memory`` are the bytes reserved for it, ``waits`` what its job waited for before, the longest
    first, and ``node`` the name of its node in a cluster.
    """

    job_id: str
    attempt: int
    session: int
    started: float
    ended: float | None
    outcome: str | None
    cores: tuple[int, ...]
    threads: int
    device: str
    pid: int
    expected: float
    error: str
    changes: tuple[tuple[float, tuple[int, ...]], ...] = ()
    memory: int | None = None
    waits: tuple[Wait, ...] = ()
    node: str = ""

    @property
    def last_cores(self) -> tuple[int, ...]:
        """The cores that it has now, or had at its end."""
        return self.changes[-1][1] if self.changes else self.cores


@dataclass(frozen=True)
class Waiting:
    """Why a running sweep starts no further jobs now.

    Parameters
    ----------
    cores : tuple of int
        Cores that the run may use.
    neighbours : tuple of int
        Those of them that other processes use.
    gpus : tuple of int
        GPUs that the run may use.
    jobs : Mapping of str to int
        Number of pending jobs by what they wait for.
    node : str
        Name of the node, in a cluster.
    peers : tuple of Waiting
        The further nodes of the cluster, each without jobs and peers.
    """

    cores: tuple[int, ...]
    neighbours: tuple[int, ...]
    gpus: tuple[int, ...]
    jobs: Mapping[str, int]
    node: str = ""
    peers: tuple[Waiting, ...] = ()

    @property
    def nodes(self) -> tuple[Waiting, ...]:
        """This node and its peers."""
        return (self, *self.peers)

    def to_json(self) -> str:
        """Return it as JSON, for one machine without nodes."""
        of_cluster = ("node", "peers")
        found = asdict(self).items()
        return json.dumps({name: value for name, value in found if value or name not in of_cluster})


@dataclass(frozen=True)
class Interim:
    """What a sweep that runs knows of itself, recorded every few seconds.

    ``verdict`` is that of the jobs with a result. ``seconds_left`` is the expected wall time, None
    if unknown.
    """

    steps_done: int
    steps: int
    seconds_left: float | None
    verdict: tuple[str, ...]


@dataclass(frozen=True)
class Event:
    """A fallback, a retry, a decision."""

    at: float
    kind: str
    job_id: str | None
    text: str


@dataclass(frozen=True)
class Sample:
    """CPU use at one moment, in cores; in the phase ``"gpu"``, the use of GPUs.

    Parameters
    ----------
    at : float
        Run seconds.
    phase : {"packed", "serial", "gpu"}
        Whether the sweep or the serial baseline was running.
    used, own : float
        Use of the allowed cores by all processes, and by this run.
    cores : tuple of float
        Use of each allowed core, 0 to 1; of each GPU by its index, -1 if it is not allowed.
    """

    at: float
    phase: str
    used: float
    own: float
    cores: tuple[float, ...]


@dataclass(frozen=True)
class SessionTimes:
    """When a session ended, and how long it packed jobs.

    Parameters
    ----------
    session : int
        Its number, from 1.
    end : float
        Run seconds of its last commit.
    packed_seconds : float
        Wall time of its packed part: without preparation and the serial baseline.
    """

    session: int
    end: float
    packed_seconds: float


def attempt_of(
    row: Sequence[Any],
    changes: Sequence[tuple[float, tuple[int, ...]]] = (),
    memory: int | None = None,
    waits: tuple[Wait, ...] = (),
    node: str = "",
) -> Attempt:
    """Return an attempt from a row of ``attempts``, and from its events."""
    job_id, attempt, session, started, ended, outcome, cores, threads, device, *rest = row
    pid, expected, error = rest
    where = cores_of(cores), threads, device, pid, math.nan if expected is None else expected
    found = Attempt(job_id, attempt, session, started, ended, outcome, *where, error)
    changed = tuple(changes)
    return replace(found, changes=changed, memory=memory, waits=waits, node=node)


def placed_text(attempt: int, memory: int, waits: Sequence[Wait], node: str = "") -> str:
    """Return the text of the event that an attempt starts with; nodes are named in a cluster."""
    found = [[round(wait.seconds, 3), wait.kind, wait.text] for wait in waits]
    where = {"node": node} if node else {}
    return json.dumps({"attempt": attempt, "memory": memory, "waits": found, **where})


def placed_of(text: str) -> tuple[int, int, tuple[Wait, ...], str]:
    """Return attempt, memory, waits and node from the text of an event."""
    attempt, memory, waits, node = _parts(
        text, attempt=int, memory=int, waits=_Waits, node=str | None
    )
    finite({"memory": memory})
    finite({f"wait {at}": item[0] for at, item in enumerate(waits)})
    return attempt, memory, tuple(Wait(*item) for item in waits), node or ""


_Waits: Any = tuple[tuple[float, str, str], ...]


def _parts(text: str, **kinds: Any) -> list[Any]:
    """Return the values of a JSON object by their names, checked by their types."""
    raw = decoded(dict[str, Any], parsed(text), "event")
    return [decoded(kind, raw.get(name), name) for name, kind in kinds.items()]


def held_text(attempt: int, cores: Sequence[int]) -> str:
    """Return the text of the event that changes the cores of an attempt."""
    return json.dumps({"attempt": attempt, "cores": list(cores)})


def held_of(text: str) -> tuple[int, tuple[int, ...]]:
    """Return attempt and cores from the text of an event."""
    attempt, cores = _parts(text, attempt=int, cores=tuple[int, ...])
    return attempt, cores


def cores_of(text: str) -> tuple[int, ...]:
    """Return core numbers from their JSON."""
    return decoded(tuple[int, ...], parsed(text), "cores")


def epochs_text(result: Result) -> str:
    """Return the epochs of a result as JSON.

    Lists are epochs, with what they logged as a last object; objects are epochs of pretraining; an
    object with ``rounds`` is `Averaged`, and one with ``gpu`` holds the peak of the GPU's memory.
    """
    stages = [asdict(item) for item in result.pretraining]
    averaged = [asdict(result.averaged)] if result.averaged else []
    gpu = [{"gpu": result.peak_gpu_memory}] if result.peak_gpu_memory else []
    return json.dumps([*gpu, *averaged, *stages, *map(_epoch_list, result.epochs)])


def _epoch_list(item: Epoch) -> list[Any]:
    return list(item.to_dict().values())


def result_row(result: Result) -> tuple[Any, ...]:
    """Return a result as a row of ``results``, with the digest of what is stored."""
    outputs = result.outputs
    if outputs is not None:
        import numpy as np

        outputs = np.ascontiguousarray(outputs, np.float32)
        result = replace(result, outputs=outputs)
    return (
        result.job_id,
        result.attempt,
        result.status,
        json.dumps({name: float(value) for name, value in result.scores.items()}),
        epochs_text(result),
        None if outputs is None else outputs.tobytes(),
        None if outputs is None else json.dumps(outputs.shape),
        result.weights,
        result.fit_seconds,
        result.score_seconds,
        result.peak_memory,
        result.pid,
        json.dumps(list(result.cores)),
        result.threads,
        result.device,
        result.started,
        result.ended,
        result.error,
        result.traceback,
        result.digest,
    )


def result_of(row: Sequence[Any]) -> Result:
    """Return a result from a row of ``results`` without its digest."""
    (job_id, attempt, status, scores, epochs, outputs, shape, weights, *rest) = row
    fit, score, memory, pid, cores, threads, device, started, ended, error, trace = rest
    items = decoded(list[Any], parsed(epochs), "epochs")
    objects = [item for item in items if isinstance(item, dict)]
    gpu = [item for item in objects if "gpu" in item]
    averaged = [item for item in objects if "rounds" in item]
    stages = [item for item in objects if item not in [*gpu, *averaged]]
    return Result(
        job_id,
        attempt,
        status,
        decoded(dict[str, float], parsed(scores), "scores"),
        tuple(Epoch(*_epoch(item)) for item in items if not isinstance(item, dict)),
        None if outputs is None else _outputs(outputs, shape),
        weights,
        fit,
        score,
        memory,
        pid,
        cores_of(cores),
        threads,
        device,
        started,
        ended,
        error,
        trace,
        tuple(decoded(StageEpoch, item, "stage") for item in stages),
        decoded(Averaged, averaged[0], "averaged") if averaged else None,
        decoded(dict[str, int], gpu[0], "peak")["gpu"] if gpu else 0,
    )


_EpochRow: Any = tuple[int, float, float, float | None, float, float]


def _epoch(item: Any) -> tuple[Any, ...]:
    if not isinstance(item, list) or len(item) < 7:
        found: tuple[Any, ...] = decoded(_EpochRow, item, "epoch")
        return found
    *numbers, logged = item
    return (
        *decoded(_EpochRow, numbers, "epoch"),
        decoded(dict[str, float], logged, "logged"),
    )


def _outputs(data: bytes, shape: str) -> npt.NDArray[np.float32]:
    import numpy as np

    sizes = decoded(tuple[int, ...], parsed(shape), "shape")
    if min(sizes, default=0) < 0:
        raise ValueError("the shape of outputs is negative")
    return np.frombuffer(data, np.float32).reshape(sizes)


def epoch_of(number: int, *values: float | None) -> Epoch:
    """Return an epoch from its row; SQLite stores NaN as NULL."""
    train_loss, valid_loss, lr, seconds = (
        float("nan") if value is None else value for value in (*values[:2], *values[3:])
    )
    return Epoch(number, train_loss, valid_loss, values[2], lr, seconds)
