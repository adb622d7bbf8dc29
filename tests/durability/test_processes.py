"""The run among other processes: one holder, readers, copies, moves, forks, stopped workers."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from asynckfold import RunHeldError, RunStore, StorageError, StoreCorruptError
from tests.records import FIRST, MANY, begin, finish, first_line, make_result, other_process
from tests.records import PLAN as SMALL
from tests.size import NIGHTLY

PACED = """
import time
store = begin(root, MANY)
print('up', flush=True)
longest = 0.0
for job in MANY.jobs[:{jobs}]:
    store.sample('packed', 1.0, 1.0, (1.0,))
    finish(store, job.id, outputs=np.full(({rows}, 2), len(job.id), np.float32))
    started = time.perf_counter()
    store.flush()
    longest = max(longest, time.perf_counter() - started)
    time.sleep({pause})
store.close()
print(f'{{longest:.4f}}')
"""


@contextmanager
def running(
    root: Path, jobs: int, rows: int = 4, pause: float = 0.0
) -> Iterator[subprocess.Popen[str]]:
    """A process that records results, one after another."""
    body = PACED.format(jobs=jobs, rows=rows, pause=pause)
    with other_process(root, body) as writer:
        try:
            assert first_line(writer) == "up"
            yield writer
        finally:
            writer.kill()


# One holder


CONTEST = """
import os, sys, time
from pathlib import Path
from asynckfold.errors import RunHeldError
from asynckfold.store import RunStore
root, count = Path(sys.argv[1]), int(sys.argv[2])
start_read, start_write = os.pipe()
over_read, over_write = os.pipe()
for number in range(count):
    if os.fork() == 0:
        os.close(start_write)
        os.close(over_write)
        os.read(start_read, 1)
        try:
            store = RunStore.hold(root)
        except RunHeldError as error:
            os.write(1, f"lost {error.exit_code} {error}\\n".encode())
            os._exit(0)
        os.write(1, f"won {os.getpid()}\\n".encode())
        os.read(over_read, 1)
        store.close()
        os._exit(0)
os.close(start_write)
for _ in range(count - 1):
    os.wait()
os.close(over_write)
os.wait()
"""


@pytest.mark.nightly
def test_one_of_twenty_concurrent_holders_wins(tmp_path: Path) -> None:
    for attempt in range(10 if NIGHTLY else 3):
        root = tmp_path / str(attempt)
        done = subprocess.run(
            [sys.executable, "-c", CONTEST, root, "20"], capture_output=True, text=True, timeout=100
        )
        assert done.stderr == ""
        lines = done.stdout.splitlines()
        (won,) = (line for line in lines if line.startswith("won"))
        lost = [line for line in lines if line.startswith("lost 3")]
        assert len(lost) == 19
        pid = won.split()[1]
        for line in lost:
            assert f"{root} is held by process {pid} on {os.uname().nodename} since 20" in line


def test_a_stale_lock_file_is_taken_over(root: Path) -> None:
    root.mkdir()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        (root / "run.lock").write_text(f'{{"pid": {stranger.pid}, "host": "x", "started": "y"}}')
        with RunStore.hold(root) as store:
            assert (store.reader.holder() or {})["pid"] == os.getpid()
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize("text", ["", "not json", "[1]", '{"pid": null}', "\0" * 5000])
def test_a_held_run_is_refused_whatever_its_lock_file_contains(root: Path, text: str) -> None:
    with RunStore.hold(root):
        (root / "run.lock").write_text(text)
        with pytest.raises(RunHeldError, match="is held by"):
            RunStore.hold(root)


def test_a_file_system_without_locks_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(StorageError, match=r"Operation not supported.*; move it to a local disk"):
        RunStore.hold(root)


# Readers


@pytest.mark.nightly
def test_a_running_run_can_be_read_all_the_time(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each snapshot is complete and of one moment; none blocks the writer."""
    looks, last, seen = 0, 0, set()
    with running(root, 300, 1000, 0.02) as writer:
        while writer.poll() is None or looks < (1000 if NIGHTLY else 100):
            with RunStore.read(root) as reader:
                results, counts = reader.results(), reader.counts()
                ends = [item for item in reader.attempts() if item.outcome == "ok"]
            assert len(results) == counts["done"] == len(ends)
            assert last <= len(results)
            last, looks = len(results), looks + 1
            seen.add(last)
        assert writer.returncode == 0
        longest = writer.stdout.read().strip() if writer.stdout else "?"
    # The last look may have begun before the writer's end.
    with RunStore.read(root) as reader:
        assert len(reader.results()) == 300
    assert len(seen) > 3
    with capsys.disabled():
        size = (root / "run.db").stat().st_size / 1e6
        print(f"\n{looks} looks at a run of up to {size:.0f} MB; longest commit {longest} s")


def test_outputs_are_read_on_demand_from_a_running_run(root: Path) -> None:
    outputs = np.arange(20_000, dtype=np.float32).reshape(10_000, 2)
    failed, done, later = (job.id for job in SMALL.jobs[:3])
    with begin(root) as store:
        finish(store, failed, status="failed", outputs=None)
        finish(store, done, outputs=outputs)
    with RunStore.read(root) as old, begin(root) as store:
        with RunStore.read(root) as new:
            assert finish(store, later, outputs=2 * outputs)
            np.testing.assert_array_equal(new.results()[done].outputs, outputs)
            assert set(new.results()) == {done}
        assert old.finished() == {failed: "failed", done: "done"}


READ_ONLY = """
import sys
from pathlib import Path
from asynckfold.store import RunStore
root = Path(sys.argv[1])
try:
    (root / "x").write_text("")
except OSError as error:
    print(error.errno)
for _ in range(20):
    with RunStore.read(root) as store:
        found = len(store.results())
        store.splits()
        assert store.holder()
print(found > 0)
"""


def mounted_read_only(place: Path) -> list[str]:
    """Return the start of a command that sees a folder read-only, or skip the test."""
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    words = ["unshare", "-rm", "sh", "-c", script, str(place)]
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], check=False).returncode:
        pytest.skip("no mount namespace without privileges here")
    return words


@pytest.mark.nightly
def test_a_running_run_is_read_from_a_read_only_mount(root: Path) -> None:
    with running(root, 200, pause=0.05):
        done = subprocess.run(
            [*mounted_read_only(root), sys.executable, "-c", READ_ONLY, root],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.stdout.split() == ["30", "True"], done.stderr


# Moved, removed, copied


SECOND = SMALL.jobs[1].id


@pytest.mark.parametrize("fate", ["moved", "removed", "replaced"])
@pytest.mark.parametrize("buffered", [False, True])
def test_a_moved_or_removed_folder_is_noticed_at_the_next_commit(
    root: Path, fate: str, buffered: bool
) -> None:
    elsewhere = root.with_name("elsewhere")
    store = begin(root)
    finish(store, FIRST)
    number = store.start_attempt(SECOND, (0,), 1, "cpu", 1.0)
    if buffered:
        store.event("note", "in an open transaction")
    if fate == "removed":
        shutil.rmtree(root)
    else:
        root.rename(elsewhere)
    if fate == "replaced":
        begin(root).close()
    for _ in range(2):
        with pytest.raises(StorageError, match="was moved, replaced or removed"):
            store.record(make_result(SECOND, number))
    store.close()
    if fate == "replaced":
        with RunStore.read(root) as other:
            assert other.results() == {}
    else:
        assert not root.exists(), "half a run was made anew"
    if fate != "removed":
        with begin(elsewhere) as store:
            assert set(store.reader.results()) == {FIRST}
            assert finish(store, SECOND)


@pytest.mark.nightly
@pytest.mark.damages("some copies are torn, and refused")
def test_a_copy_of_a_running_run_opens_or_is_refused(root: Path) -> None:
    """A copy has no other numbers, and all results from before it was started."""
    opened, refused, wanted = 0, 0, 50 if NIGHTLY else 12
    found: list[dict[str, str]] = []
    with running(root, 600, 2000, 0.01) as writer:
        for number in range(wanted):
            with RunStore.read(root) as reader:
                before = set(reader.finished())
            copy = root.with_name(f"copy-{number}")
            subprocess.run(["cp", "-r", root, copy], capture_output=True, check=False)
            try:
                with RunStore.read(copy) as reader:
                    results = {name: item.digest for name, item in reader.results().items()}
                    assert reader.counts()["done"] == len(results)
                    assert before <= set(results)
                with begin(copy, MANY) as store:
                    pending = [job.id for job in MANY.jobs if job.id not in results]
                    assert all(finish(store, job) for job in pending[:1])
            except (StoreCorruptError, StorageError):
                refused += 1
                continue
            opened += 1
            found.append(results)
        writer.kill()
    with begin(root, MANY) as store:
        final = {name: item.digest for name, item in store.reader.results().items()}
    assert all(copied.items() <= final.items() for copied in found)
    print(f"\n{opened} copies opened, {refused} refused")
    assert opened + refused == wanted


# Forks


def in_a_fork(act: str) -> str:
    return f"""
store = begin(root)
finish(store, FIRST)
store.event('note', 'in an open transaction')
pid = os.fork()
if pid == 0:
    {act}
os.waitpid(pid, 0)
assert finish(store, PLAN.jobs[1].id)
store.close()
print('done')
"""


@pytest.mark.nightly(but=["store.close(); sys.exit()", "store.flush()"])
@pytest.mark.parametrize(
    "act",
    [
        "sys.exit()",
        "store.close(); sys.exit()",
        "del store; import gc; gc.collect(); sys.exit()",
        "store.file.connection = None; sys.exit()",
        "store.event('note', 'from the child')",
        "store.flush()",
        "store.reader.results()",
        "finish(store, PLAN.jobs[2].id)",
    ],
)
def test_a_forked_child_cannot_touch_the_run(root: Path, act: str) -> None:
    with other_process(root, in_a_fork(act)) as holder:
        out, _ = holder.communicate(timeout=60)
        assert holder.returncode == 0
    assert "done" in out
    with RunStore.read(root) as store:
        assert len(store.results()) == 2
        assert [event.text for event in store.events()] == ["in an open transaction"]


def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(root: Path) -> None:
    body = (
        "store = begin(root)\nif os.fork() == 0:\n    import time\n    print('up', flush=True)\n"
        "    time.sleep(60)\nos.wait()\n"
    )
    with other_process(root, body) as holder:
        assert first_line(holder) == "up"
        (child,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        holder.kill()
        holder.wait()
        try:
            RunStore.hold(root).close()
        finally:
            os.kill(int(child), signal.SIGKILL)
