"""What a run may leave behind: nothing. Found by looking at the system, not by asking the code."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asynckfold.engines import warm_pool

PROC = Path("/proc")
MARK = f"ASYNCKFOLD_TESTS_{os.getpid()}"
"""Stands in the environment of every process that this one starts, and of theirs."""

SERVER_DESCRIPTORS, WORKER_DESCRIPTORS = 4, 1
"""What a warm pool holds open: its control socket, a pipe to wake it and the signs of life; a pipe
for each worker."""

helpers: set[int] = set()
"""Processes of the tests, not of a test: they stay. For each, one descriptor is open here."""

rays: list[str] = []
"""The addresses of Rays that tests started from this process."""

KEPT_BY_RAY, KEPT_BY_EACH_RAY = 16, 4
"""What Ray's library keeps open in a process after its end: logs, channels, sockets."""

FONTS = (".ttf", ".ttc", ".otf", ".afm")

SERVER = "kfold-server"
"""What the kernel calls a server that was forked from a nursery, whose words it has."""


def descendants(pid: int | None = None) -> set[int]:
    """Return all living processes below `pid`, this one by default, without the `helpers`."""
    parents = {child: stat[1] for child in processes() if (stat := _stat(child)) and stat[0] != "Z"}
    found: set[int] = set()
    grown = {pid or os.getpid()}
    while grown:
        grown = {child for child, parent in parents.items() if parent in grown} - found
        found |= grown
    return found - helpers


def processes() -> set[int]:
    """Return the numbers of all processes of this machine."""
    return {int(name) for name in os.listdir(PROC) if name.isdigit()}  # noqa: PTH208


def _stat(pid: int) -> tuple[str, int] | None:
    """Return state and parent, or None when there is no such process."""
    try:
        status = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    state, parent = status.rpartition(")")[2].split()[:2]
    return state, int(parent)


def shared_memory(known: Collection[str] = ()) -> set[str]:
    """Return further names in ``/dev/shm``, but for what processes that are not ours have there."""
    names = {entry.name for entry in Path("/dev/shm").iterdir()} - {*known}
    names = {name for name in names if not name.startswith("pytest-of-")}  # of all test runs
    names -= {name for pid, name in joblibs_memory() if pid != os.getpid()}
    return names - _mapped_by_others(names) if names else names


def _mapped_by_others(names: set[str]) -> set[str]:
    """Return those names that are in use in a process neither this one nor below it."""
    found = set()
    for pid in processes() - descendants() - {os.getpid()}:
        with contextlib.suppress(OSError):
            links = (PROC / f"{pid}" / "fd").iterdir()
            text = "\n".join([(PROC / f"{pid}" / "maps").read_text(), *map(_target, links)])
            found |= {name for name in names if f"/dev/shm/{name}" in text}
    return found


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):
        return str(link.readlink())
    return ""


def joblibs_memory() -> set[tuple[int, str]]:
    """Return what joblib keeps in ``/dev/shm``: the process that it is for, and the name."""
    names = [entry.name for entry in Path("/dev/shm").iterdir()]
    found = (re.match(r"(?:sem\.loky-|joblib_memmapping_folder_)(\d+)", name) for name in names)
    return {(int(match[1]), match.string) for match in found if match}


def until(look: Callable[[], Any], seconds: float = 200.0) -> Any:
    """Look until there is something, and return that; fail if it takes too long."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return seen


def gone(pids: set[int], seconds: float = 5.0) -> bool:
    """Whether all these processes end within some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def described(pids: set[int]) -> list[str]:
    """Return what the living ones among these processes are, for a failure's message."""
    found = []
    for pid in sorted(pids):
        try:
            words = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ")
            status = (PROC / str(pid) / "status").read_text()
        except OSError:
            continue
        kept = [line for line in status.splitlines() if line.startswith(("State", "PPid"))]
        if alive(pid):
            found.append(f"{pid} {kept} {words[-200:]!r}")
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z"


def marked(pid: int, mark: str = MARK) -> bool:
    """Whether a process was started, over any number of others, by whoever set the mark."""
    try:
        return f"{mark}=".encode() in (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False


def is_server(pid: int) -> bool:
    """Whether a process is the clean one that workers are forked from, not a worker."""
    return _serves(pid) and not _serves(parent_of(pid))


def _serves(pid: int) -> bool:
    folder = PROC / str(pid)
    try:
        fresh = b"asynckfold.training.worker.fork_server" in (folder / "cmdline").read_bytes()
        return fresh or (folder / "comm").read_text().strip() == SERVER
    except OSError:
        return False


def parent_of(pid: int) -> int:
    """Return the parent of a process, 0 when there is none."""
    stat = _stat(pid)
    return stat[1] if stat else 0


def temporaries(folder: Path) -> list[str]:
    """Return our temporary files in a folder and below."""
    return [
        str(Path(place, name).relative_to(folder))
        for place, _, names in os.walk(folder)
        for name in names
        if re.fullmatch(r".+\.\d+\.tmp", name)
    ]


def runs(folder: Path) -> list[Path]:
    """Return the folders of the runs in a folder and below."""
    return [Path(place) for place, _, names in os.walk(folder) if "run.db" in names]


def listening() -> dict[str, str]:
    """Return the inodes of listening TCP sockets of this machine, and where they listen."""
    found = {}
    for table in ("tcp", "tcp6"):
        path = PROC / "net" / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A":
                found[fields[9]] = fields[1]
    return found


def descriptors(pid: int | None = None) -> dict[int, str]:
    """Return the open descriptors of a process, this one by default, and what they are.

    Without fonts, which matplotlib keeps open.
    """
    found = {}
    folder = PROC / str(pid or os.getpid()) / "fd"
    try:
        for name in os.listdir(folder):  # noqa: PTH208
            try:
                target = os.readlink(folder / name)  # noqa: PTH115
            except FileNotFoundError:
                continue  # closed just now, such as the one that lists this folder
            if not target.endswith(FONTS):
                found[int(name)] = target
    except OSError:
        pass  # the process ended
    return found


def sockets(pid: int | None = None) -> set[str]:
    """Return the inodes of a process's sockets."""
    targets = descriptors(pid).values()
    return {match[1] for target in targets if (match := re.fullmatch(r"socket:\[(\d+)\]", target))}


@dataclass(frozen=True)
class Snapshot:
    """What was there at one moment.

    Parameters
    ----------
    processes : frozenset of int
        Of the whole machine.
    memory : frozenset of str
        Names in ``/dev/shm``.
    descriptors : dict of int to str
        Open ones of this process.
    threads : frozenset of Thread
        Of this process.
    rays : int
        How many of `rays` there were.
    """

    processes: frozenset[int]
    memory: frozenset[str]
    descriptors: dict[int, str]
    threads: frozenset[threading.Thread]
    rays: int

    @classmethod
    def take(cls) -> Snapshot:
        """Look at the machine."""
        return cls(
            frozenset(processes()),
            frozenset(entry.name for entry in Path("/dev/shm").iterdir()),
            descriptors(),
            frozenset(threading.enumerate()),
            len(rays),
        )


def left_since(before: Snapshot, seconds: float = 5.0) -> list[str]:
    """Return what is there now, some seconds later at most, and was not before; by name.

    The warm pool of this process may stay, and so may workers of a pool that was there before.
    """
    deadline = time.monotonic() + seconds
    while found := list(_left(before)):
        if time.monotonic() > deadline:
            return found
        # What only the collector of garbage closes is closed, late.
        gc.collect()
        time.sleep(0.02)
    return []


def _left(before: Snapshot) -> Iterator[str]:
    mine = {pid for pid in processes() - before.processes if _is_ours(pid)}
    servers, workers = _pools(before) if mine else (set(), set())
    helping = helpers - before.processes
    yield from (f"process {text}" for text in described(mine - servers - workers - helping))
    for name in shared_memory(before.memory):
        if not _is_strangers(name):
            yield f"/dev/shm/{name}"
    now = descriptors()
    fresh = {number: what for number, what in now.items() if before.descriptors.get(number) != what}
    allowed = SERVER_DESCRIPTORS * len(servers) + WORKER_DESCRIPTORS * len(workers) + len(helping)
    if started := len(rays) - before.rays:
        allowed += KEPT_BY_RAY + KEPT_BY_EACH_RAY * started
    if len(now) - len(before.descriptors) > allowed:
        yield f"descriptors, {allowed} of which a pool may keep: {fresh}"
    ports = listening() if fresh or mine else {}
    for pid in {os.getpid(), *mine} if ports else ():
        yield from (f"process {pid} listens at {ports[inode]}" for inode in sockets(pid) & {*ports})
    for thread in {*threading.enumerate()} - before.threads:
        if not _may_stay(thread):
            yield f"thread {thread.name}"


def _pools(before: Snapshot) -> tuple[set[int], set[int]]:
    """Return the servers and workers that came since then and may stay."""
    known = {pid for pid in before.processes if is_server(pid) and _is_ours(pid)}
    warm = warm_pool._warm.kept
    fresh = {warm.server.pid} - known if warm is not None and warm.healthy else set()
    workers = {pid for pid in processes() - before.processes if parent_of(pid) in fresh | known}
    return fresh, workers


def _is_ours(pid: int) -> bool:
    above = pid
    while above > 1:
        above = parent_of(above)
        if above == os.getpid():
            return alive(pid)
    return marked(pid) and alive(pid)


def _is_strangers(name: str) -> bool:
    """Whether a process that is not ours works with what has this name in ``/dev/shm``."""
    path = f"/dev/shm/{name}"
    others = [pid for pid in processes() if pid != os.getpid() and not _is_ours(pid)]
    # The map of a semaphore has another name; those of loky and joblib tell the process.
    if {*map(int, re.findall(r"\d+", name))} & {*others}:
        return True
    return any(path in _mentioned(pid) for pid in others)


def _mentioned(pid: int) -> str:
    """Return the names of files in a process's command, environment, folder, memory and hands."""
    folder, found = PROC / str(pid), [*descriptors(pid).values()]
    for name in ("cmdline", "environ", "maps"):
        with contextlib.suppress(OSError):
            found.append((folder / name).read_text(errors="replace"))
    with contextlib.suppress(OSError):
        found.append(os.readlink(folder / "cwd"))  # noqa: PTH115
    return "\n".join(found)


def _may_stay(thread: threading.Thread) -> bool:
    """Whether a thread listens to a pool, will close the warm one, or watches over this test.

    The progress bars of other libraries start one of tqdm that ends with the process.
    """
    return thread is warm_pool._warm.timer or thread.name.startswith(
        ("asynckfold-listener", "pytest_timeout", "tqdm_monitor")
    )
