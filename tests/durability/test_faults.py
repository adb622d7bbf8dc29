"""A kill, and an I/O error, at every system call of a run and of its recovery.

A seeded sample of the points, by night all of them; each test prints what ran.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from asynckfold import RunStore
from asynckfold.jobs.result import ENDED
from asynckfold.system.files import sha256
from tests.durability.tracing import Nursery, Point
from tests.durability.work import PLAN, work
from tests.size import NIGHTLY

SEED = 20
pytestmark = pytest.mark.timeout(1200 if NIGHTLY else 300)

DOCUMENTED = re.compile(
    r"run\.lock|run\.db|splits\.npz|A/cosine/fold-\d/checkpoint-\d{4}-\d{6}-\d+\.safetensors"
    r"|A/cosine/fold-\d/summary\.json"
)


def chosen(points: list[Point], count: int) -> list[Point]:
    """Return all points, or a sample in which each kind of call on each kind of file is."""
    if NIGHTLY or len(points) <= count:
        return points
    shuffled = random.Random(SEED).sample(points, len(points))
    first = list({(point.call, point.subject): point for point in shuffled}.values())
    rest = [point for point in shuffled if point not in first]
    return [*first, *rest[: max(0, count - len(first))]]


def acknowledged(root: Path) -> list[list[str]]:
    """Return what was acknowledged, in order; a torn last line was not."""
    path = Path(f"{root}.acknowledged")
    text = path.read_text() if path.exists() else ""
    return [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]


def check_acknowledged(root: Path) -> None:
    """Everything that was acknowledged is there, whole."""
    told = acknowledged(root)
    if not told:
        return
    with RunStore.read(root) as store:
        results = {name: result.digest for name, result in store.results().items()}
        rows = [ref for job in PLAN.jobs for ref in store.checkpoints(job.id)]
        counts = store.counts()
    assert counts["planned"] == sum(counts[state] for state in (*ENDED, "pending"))
    for kind, *words in told:
        if kind == "result":
            assert results[words[0]] == words[1]
    last = {Path(words[1]).parent: words for words in told if words[0] == "checkpoint"}
    for folder, (_, file, digest) in last.items():
        kept = {ref.file: ref.sha256 for ref in rows if Path(ref.file).parent == folder}
        if file in kept:
            assert kept[file] == digest
        else:
            # Two newer ones, each written just before a kill, may have displaced it.
            assert len(kept) == 2
            assert min(kept) > file
            file = max(kept)
        assert sha256(root / file) == kept[file]


def check_continuation(root: Path, golden: str, point: object) -> None:
    """The same command continues to the same end, and nothing else is left in the folder."""
    with Path(os.devnull).open("wb") as nowhere:
        assert work(root, nowhere.fileno()) == golden, point
    names = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    assert [name for name in names if not DOCUMENTED.fullmatch(name)] == [], point
    with RunStore.read(root) as store:
        rows = {ref.file for job in PLAN.jobs for ref in store.checkpoints(job.id)}
        assert {name for name in names if "checkpoint" in name} == rows, point
        assert store.counts()["done"] == len(PLAN.jobs)


def check_whole(root: Path) -> None:
    """No file under a final name is torn, whether a row names it or not."""
    lengths = {path.stat().st_size for path in root.rglob("*.safetensors")}
    assert lengths <= {6400}


def told(record: Callable[[str, object], None], ran: int, all_points: int) -> None:
    text = f"{ran} of {all_points} points, seed {SEED}"
    record("points", text)
    print(f"\n{text}")


def test_a_kill_at_any_call_loses_no_acknowledged_result(
    traced: Nursery, tmp_path: Path, golden: str, record_property: Callable[[str, object], None]
) -> None:
    every = traced.points(tmp_path / "undisturbed")
    points = chosen(every, 12)
    for number, point in enumerate(points):
        root = tmp_path / str(number)
        code = traced.run(root, f"{point.call}:signal=KILL:when={point.number}")
        assert code == -signal.SIGKILL, point
        check_acknowledged(root)
        check_whole(root)
        check_continuation(root, golden, point)
    told(record_property, len(points), len(every))


@pytest.mark.nightly
def test_killed_in_five_recoveries_in_a_row(
    traced: Nursery, tmp_path: Path, golden: str, record_property: Callable[[str, object], None]
) -> None:
    every = traced.points(tmp_path / "undisturbed")
    generator = random.Random(SEED)
    chains, kills = 40 if NIGHTLY else 4, 0
    for number in range(chains):
        root = tmp_path / str(number)
        hits = []
        for _ in range(5):
            # Mostly early calls: those of the recovery, which is what comes first.
            point = every[min(generator.randrange(len(every)), generator.randrange(len(every)))]
            hits.append(str(point))
            code = traced.run(root, f"{point.call}:signal=KILL:when={point.number}")
            assert code in (0, -signal.SIGKILL), hits
            kills += code != 0
            check_acknowledged(root)
        check_continuation(root, golden, hits)
    text = f"{kills} kills in {chains} chains of five, seed {SEED}"
    record_property("kills", text)
    print(f"\n{text}")
    assert kills > 2 * chains


def test_nothing_is_written_outside_the_folder_of_the_run(traced: Nursery, tmp_path: Path) -> None:
    """No temporary file elsewhere: it is the same where ``TMPDIR`` is, and whether it is there."""
    root, trace = tmp_path / "run", tmp_path / "trace"
    assert traced.run(root, trace=trace) == 0
    opened = re.findall(r'openat\((?:AT_FDCWD|\d+)<([^>]*)>, "([^"]*)", (\S+)', trace.read_text())
    written = [
        Path(folder, name)
        for folder, name, flags in opened
        if re.search("O_CREAT|O_WRONLY|O_RDWR", flags)
    ]
    assert len(written) > 20
    told = {Path(f"{root}.acknowledged"), Path(f"{root}.error")}
    assert [path for path in written if root not in path.parents and path not in told] == []


ERRORS = {"ENOSPC": "No space left", "EIO": "Input/output error", "EROFS": "Read-only file system"}


@pytest.mark.nightly
@pytest.mark.parametrize("error", ERRORS)
def test_an_io_error_at_any_call_ends_resumable(
    traced: Nursery,
    tmp_path: Path,
    golden: str,
    error: str,
    record_property: Callable[[str, object], None],
) -> None:
    every = [point for point in traced.points(tmp_path / "undisturbed") if point.ours]
    points = chosen(every, 6)
    for number, point in enumerate(points):
        root = tmp_path / str(number)
        trace = tmp_path / f"{number}.trace"
        code = traced.run(root, f"{point.call}:error={error}:when={point.number}", trace)
        message = Path(f"{root}.error").read_text()
        assert code in (0, 5), (point, code, message)
        if code == 5:
            assert message.startswith("StorageError"), point
            assert str(root) in message, (point, message)
            assert "run the same command again" in message
        check_acknowledged(root)
        check_whole(root)
        check_no_fsync_again(trace)
        check_continuation(root, golden, point)
    told(record_property, len(points), len(every))


def check_no_fsync_again(trace: Path) -> None:
    """A file whose fsync failed is given up: the kernel may have dropped what it could not write.

    SQLite's own roll-back writes the old pages again before it syncs, and is left to it. A folder
    holds names, which the file system keeps itself.
    """
    failed: set[str] = set()
    for line in trace.read_text().splitlines():
        found = re.search(r"\bf(?:data)?sync\(\d+<([^>]*)>\)\s*= (-?\d+)", line)
        if found and "run.db" not in found[1] and not Path(found[1]).is_dir():
            assert found[1] not in failed, line
            if found[2] != "0":
                failed.add(found[1])
