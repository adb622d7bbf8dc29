"""The checks that run after every test see what they are there for."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asynckfold import Result, RunStore
from tests import accounts
from tests.durability.work import FOLDS, PLAN, TARGETS, work
from tests.leftovers import (
    Snapshot,
    alive,
    left_since,
    listening,
    marked,
    processes,
    sockets,
)
from tests.leftovers import temporaries as temporaries_in
from tests.records import write_checksums


@contextmanager
def child() -> Iterator[str]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield f"process {process.pid} "
        process.kill()


@contextmanager
def orphan() -> Iterator[str]:
    """A process whose parent is gone: no descendant of ours any more, but known by its mark."""
    command = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=2).pid)"
    done = subprocess.run([sys.executable, "-c", command], stdout=subprocess.PIPE, check=True)
    pid = int(done.stdout)
    assert marked(pid)
    yield f"process {pid} "
    os.kill(pid, signal.SIGKILL)


@contextmanager
def shared_memory() -> Iterator[str]:
    path = Path("/dev/shm") / f"left-by-a-test-{os.getpid()}"
    path.touch()
    yield str(path)
    path.unlink()


@contextmanager
def descriptor() -> Iterator[str]:
    read, write = os.pipe()
    yield f"{read}: 'pipe:["
    os.close(read)
    os.close(write)


@contextmanager
def port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert sockets() & {*listening()}
        yield f"process {os.getpid()} listens at 0100007F:{server.getsockname()[1]:04X}"


@contextmanager
def thread() -> Iterator[str]:
    end = threading.Event()
    waiting = threading.Thread(target=end.wait, name="waits")
    waiting.start()
    yield "thread waits"
    end.set()
    waiting.join()


@pytest.mark.parametrize("leave", [child, orphan, shared_memory, descriptor, port, thread])
def test_what_is_left_is_told_by_name(leave: Callable[[], Iterator[str]]) -> None:
    before = Snapshot.take()
    with leave() as expected:  # type: ignore[attr-defined]
        assert any(expected in line for line in left_since(before, seconds=0.0))
    assert left_since(before) == []


@pytest.mark.crashes("leaves a temporary file to be found")
def test_temporary_files_are_ours_by_their_names(tmp_path: Path) -> None:
    for name in ("a.npz.17.tmp", "theirs.tmp"):
        (tmp_path / name).touch()
    assert temporaries_in(tmp_path) == ["a.npz.17.tmp"]


@pytest.fixture
def finished(root: Path) -> Path:
    with Path(os.devnull).open("wb") as nowhere:
        work(root, nowhere.fileno())
    return root


JOB = PLAN.jobs[0].id
DIED = (
    "UPDATE attempts SET outcome = 'died', record = replace(record, '\"outcome\":\"ok\"', "
    f"'\"outcome\":\"died\"') WHERE job_id = '{JOB}'"
)
RETRIED = "UPDATE results SET record = replace(record, '\"attempt\":1', '\"attempt\":0')"


@pytest.mark.damages("the accounts are to be found wrong")
def test_a_run_that_does_not_add_up_is_told(finished: Path) -> None:
    assert accounts.wrong_in(finished) == []
    first, second = sorted(finished.rglob("*.safetensors"))[:2]
    first.unlink()
    second.write_bytes(b"other")
    with RunStore.hold(finished) as store:
        store.begin(PLAN, FOLDS, TARGETS)
        store.start_attempt("stranger", (0,), 1, "cpu", 1.0)
        assert store.record(Result("stranger", 1, "done"))
        for change in (DIED, RETRIED):
            with store.file.transaction():
                store.file.execute(change)
                write_checksums(store.file.connection)
    lines = "\n".join(accounts.wrong_in(finished))
    for words in (
        "'stranger'",
        "attempts [] ended well",
        "was tried again",
        f"{first.relative_to(finished)} of {JOB} is gone",
        f"{second.relative_to(finished)} of {JOB} is not what was recorded",
    ):
        assert words in lines


@pytest.mark.damages("the accounts cannot be read")
def test_a_run_that_cannot_be_read_is_told(finished: Path) -> None:
    with sqlite3.connect(finished / "run.db") as db:
        db.execute("UPDATE results SET attempt = 7")
    db.close()
    (line,) = accounts.wrong_in(finished)
    assert line.startswith("StoreCorruptError: ")


def test_this_process_is_alive_and_one_that_never_was_is_not() -> None:
    assert alive(os.getpid())
    assert os.getpid() in processes()
    until = time.monotonic() + 10
    with subprocess.Popen(["true"]) as process:
        while alive(process.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert process.pid in processes(), "not reaped yet"
        assert not alive(process.pid)
