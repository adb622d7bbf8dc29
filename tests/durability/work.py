"""A small run, without torch: every durable step that a sweep and its workers make, in order.

The state of a job after an epoch is a function of the state before, so that a continuation from a
wrong or torn checkpoint ends with another fingerprint.

As a program it is a nursery: it imports once, and for each line ``ROOT`` forks a process that does
the work when its descriptor is closed, so that whoever traces it sees the work and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import numpy as np

from asynckfold import AsyncKFoldError, Epoch, Fold, Job, Plan, Result, RunStore, TrainerParams
from asynckfold.jobs.messages import CheckpointRef
from asynckfold.store import job_folder
from asynckfold.system.files import remove, sha256, write_whole

EPOCHS = 3
TARGETS = np.array([0, 1] * 3)
FOLDS = (
    Fold(0, 0, np.array([3, 4, 5]), np.array([0, 1, 2])),
    Fold(0, 1, np.array([0, 1, 2]), np.array([3, 4, 5])),
)
PLAN = Plan(
    tuple(Job("A", "cosine", 0, fold, seed=fold) for fold in range(2)),
    TrainerParams(epochs=EPOCHS),
    2,
    1,
    0,
    "cpu",
    ("accuracy",),
    "data",
    "a16209a4d647c63d332d8b5779fe4e836c43c03d418fc967c6c9bf6694ae46c4",  # the SHA-256 of the folds
)


def content(seed: bytes) -> bytes:
    """Return the bytes of a checkpoint, some pages long, that begin with the state."""
    return b"".join(hashlib.sha256(seed + bytes([part])).digest() for part in range(200))


def train(store: RunStore, job: Job, acknowledge: int) -> None:
    """Do one job from its newest good checkpoint."""
    attempt = store.start_attempt(job.id, (0,), 1, "cpu", 1.0)
    epoch, state = restored(store, job)
    while epoch < EPOCHS:
        epoch, state = epoch + 1, content(state)
        name = f"checkpoint-{epoch:04}-000000-{attempt}.safetensors"
        path = job_folder(store.root, job) / name
        write_whole(path, state)
        ref = CheckpointRef(
            job.id,
            attempt,
            epoch,
            0,
            str(path.relative_to(store.root)),
            hashlib.sha256(state).hexdigest(),
            len(state),
        )
        store.epoch(job.id, attempt, Epoch(epoch, 0.5, 0.5, 0.5, 0.1, 0.1))
        outdated = store.checkpoint(ref)
        os.write(acknowledge, f"checkpoint {ref.file} {ref.sha256}\n".encode())
        for file in outdated:
            remove(store.root / file)
    outputs = np.frombuffer(state, np.uint8)[:6].astype(np.float32).reshape(3, 2)
    result = Result(
        job.id,
        attempt,
        "done",
        {"accuracy": float(outputs.mean())},
        (Epoch(epoch, 0.5, 0.5, 0.5, 0.1, 0.1),),
        outputs,
        hashlib.sha256(state).hexdigest(),
    )
    assert store.record(result)
    os.write(acknowledge, f"result {job.id} {result.digest}\n".encode())


def restored(store: RunStore, job: Job) -> tuple[int, bytes]:
    """Return the epoch and the state to continue from, as a worker finds them."""
    for ref in store.reader.checkpoints(job.id):
        path = store.root / ref.file
        if path.exists() and sha256(path) == ref.sha256:
            return ref.epoch, path.read_bytes()
    return 0, job.id.encode()


def work(root: Path, acknowledge: int) -> str:
    """Begin or continue the run to its end; return its fingerprint."""
    with RunStore.hold(root) as store:
        store.begin(PLAN, FOLDS, TARGETS)
        os.write(acknowledge, b"begun\n")
        for job in PLAN.jobs:
            if job.id not in store.reader.finished():
                train(store, job, acknowledge)
        return store.reader.fingerprint()


def child(root: Path, go: int) -> int:
    """Wait, work, and return the exit code that the command would have."""
    os.read(go, 1)
    acknowledged = os.open(f"{root}.acknowledged", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    errors = os.open(f"{root}.error", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    try:
        work(root, acknowledged)
    except AsyncKFoldError as error:
        os.write(errors, f"{type(error).__name__}: {error}".encode())
        return error.exit_code
    except Exception as error:  # noqa: BLE001
        # Anything else would be a defect: told to the test by a code of its own.
        os.write(errors, f"{type(error).__name__}: {error}".encode())
        return 99
    return 0


def nursery() -> None:
    """Fork a worker for each line; say its number, let it go at the next line, say how it ended."""
    for line in sys.stdin:
        go_read, go_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(go_write)
            os._exit(child(Path(line.strip()), go_read))
        os.close(go_read)
        print(pid, flush=True)
        sys.stdin.readline()
        os.close(go_write)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    nursery()
