"""Faults at system calls of a real process, by strace."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parents[2]

WRITING = ["openat", "mkdir", "mkdirat", "write", "pwrite64", "fsync", "fdatasync", "ftruncate"]
WRITING += ["rename", "renameat", "renameat2", "unlink", "unlinkat"]
"""The calls that change what is on the disk."""


@dataclass(frozen=True)
class Point:
    """The moment before the `number`-th call of one kind, and whether it is about the run.

    `subject` is the kind of file that it is about, such as a checkpoint.
    """

    call: str
    number: int
    ours: bool = True
    subject: str = ""

    def __str__(self) -> str:
        return f"{self.call} {self.number}"


class Nursery:
    """Starts processes that do the work of `tests.durability.work`, under strace."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.durability.work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HOME,
            # The calls of a run must not depend on whether it is the first to import a module.
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        self._traces = itertools.count()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(self, root: Path, inject: str = "", trace: Path | None = None, strings: int = 0) -> int:
        """Work in `root` with a fault; return the exit code, negative for a signal."""
        pid = int(self._ask(str(root)))
        command = ["strace", "-o", str(trace or os.devnull), "-y", "-s", str(strings)]
        command += ["-p", str(pid)]
        command += ["-e", f"trace={','.join(WRITING)}"]
        if inject:
            command += ["-e", f"inject={inject}"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            line = strace.stderr.readline()
            code = int(self._ask("go"))
            strace.stderr.read()
        assert "attached" in line, line
        return code

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def points(self, root: Path) -> list[Point]:
        """Work in `root` undisturbed; return every moment at which it could have been hit."""
        trace = root.with_name(f"{root.name}.trace")
        code = self.run(root, trace=trace)
        assert code == 0, code
        seen: Counter[str] = Counter()
        found = []
        for line in trace.read_text().splitlines():
            if match := re.match(r"(\w+)\(", line):
                seen[match[1]] += 1
                ours = re.search(rf"{re.escape(str(root))}[/>\"]", line) is not None
                subject = re.search(
                    r"checkpoint|summary|run\.db-journal|run\.db|splits|run\.lock", line
                )
                kind = subject[0] if subject else ""
                found.append(Point(match[1], seen[match[1]], ours, kind))
        return found


@contextmanager
def nursery() -> Iterator[Nursery]:
    """A nursery, closed at the end."""
    made = Nursery()
    try:
        yield made
    finally:
        made.close()


def refused() -> str:
    """Why faults cannot be injected here, or ``""``."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    command = ["strace", "-o", os.devnull, "-e", "inject=getppid:signal=KILL:when=1", "sh", "-c"]
    done = subprocess.run([*command, "exit 0"], capture_output=True, text=True, check=False)
    with subprocess.Popen(["sleep", "5"]) as sleeper:
        attach = subprocess.Popen(
            ["strace", "-o", os.devnull, "-p", str(sleeper.pid)], stderr=subprocess.PIPE, text=True
        )
        assert attach.stderr is not None
        line = attach.stderr.readline()
        sleeper.kill()
        attach.communicate()
    if "attached" not in line:
        return f"strace may not attach to a process: {line.strip() or done.stderr.strip()}"
    return ""
