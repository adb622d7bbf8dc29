"""The values that a run records. In ``run.db`` each is JSON, see `asynckfold.jobs.decoding`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asynckfold.jobs.placement import Wait
from asynckfold.jobs.result import Epoch


@dataclass(frozen=True)
class Attempt:
    """One attempt at a job: where and when, and how it ended.

    Parameters
    ----------
    job_id : str
        The job.
    attempt, session : int
        Numbers, from 1.
    started, ended : float
        Run seconds; `ended` is None while it runs.
    outcome : str or None
        None while it runs, then ``"ok"``, ``"error"``, ``"diverged"``, ``"died"``, ``"timeout"``,
        ``"cancelled"``, ``"interrupted"``, or ``"lost"`` if the whole run was killed.
    cores, threads, device, memory : tuple of int, int, str, int or None
        Those of its placement; `memory` are the bytes reserved for it.
    pid, expected, error : int, float, str
        Its process, the expected seconds, and why it failed.
    changes : tuple of (float, tuple of int)
        The cores that it was moved to, and when.
    waits : tuple of Wait
        What its job waited for before, the longest first.
    node : str
        The name of its node in a cluster.
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
class WaitReasons:
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
    peers: tuple[WaitReasons, ...] = ()

    @property
    def nodes(self) -> tuple[WaitReasons, ...]:
        """This node and its peers."""
        return (self, *self.peers)


@dataclass(frozen=True)
class Interim:
    """What a sweep that runs knows of itself, recorded every few seconds.

    Parameters
    ----------
    steps_done, steps : int
        Of all jobs.
    seconds_left : float or None
        Expected wall time; None if unknown.
    verdict : tuple of str
        That of the jobs with a result, in sentences.
    best : str
        The candidate that leads so far, with its score.
    running : tuple of str
        A line for each placement that runs.
    epochs : Mapping of str to tuple of Epoch
        Those of running jobs so far, by job id.
    """

    steps_done: int
    steps: int
    seconds_left: float | None
    verdict: tuple[str, ...]
    best: str = ""
    running: tuple[str, ...] = ()
    epochs: Mapping[str, tuple[Epoch, ...]] = field(default_factory=dict)


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
    """Times of a session: its end, and the duration of its packed part.

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
