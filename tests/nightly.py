"""Everything, at full size: the parts one after another, and one table of them at the end.

``python -m tests.nightly [PART ...]`` runs the parts whose names contain one of the words, all by
default. It exits with 1 if anything failed, and goes on to the end all the same.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parents[1]
REPORTS = Path("reports", "chaos")
KILLS, KILLS_OF_SEVERAL = 200, 24
SEVERAL = ("hogwild", "allreduce", "averaging", "parameter_server")
CLUSTERS = "tests/faults/test_ray*.py"
LONG = ("--timeout", "3600", "-o", "faulthandler_timeout=3600")
FULL_SIZE = ("--timeout", "600", "-o", "faulthandler_timeout=590")


@dataclass(frozen=True)
class Done:
    """What a part came to.

    Parameters
    ----------
    part : str
        Its name.
    tests, failed : int
        Tests, kills, faults or tools; a part that could not begin has failed once.
    minutes : float
        How long it took.
    """

    part: str
    tests: int
    failed: int
    minutes: float


Part = Callable[[], tuple[int, int]]
"""Runs, and returns how many tests there were and how many of them failed."""


def run(*words: str) -> tuple[int, str]:
    """Run a command from the top of the repository; show what it prints, and return that."""
    print(f"$ {' '.join(words)}", flush=True)
    lines = []
    with subprocess.Popen(
        words,
        cwd=HOME,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def python(*words: str) -> tuple[int, str]:
    """Run a module of Python."""
    return run(sys.executable, "-m", *words)


def run_tests(*words: str, side_by_side: int = 3) -> tuple[int, int]:
    """Run tests at full size; in this process if none are side by side."""
    with tempfile.TemporaryDirectory(prefix="nightly-") as folder:
        record = Path(folder, "junit.xml")
        code, _ = python(
            *("pytest", "-q", "--nightly", "-n", f"{side_by_side}", "--dist", "worksteal"),
            *(f"--junit-xml={record}", *words),
        )
        return counted(record, code)


def counted(record: Path, code: int) -> tuple[int, int]:
    """Return tests and failures of a record of pytest; without one, all of it failed."""
    if not record.exists():
        return 1, 1
    (suite,) = ElementTree.parse(record).getroot().iter("testsuite")
    found = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = found["failures"] + found["errors"]
    return found["tests"] - found["skipped"], failed or int(code != 0)


def check() -> tuple[int, int]:
    """Run the tools that read the code."""
    tools = (
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy",),
        ("lint-imports",),
    )
    folder = Path(sys.executable).parent
    return len(tools), sum(run(f"{folder / tool}", *words)[0] != 0 for tool, *words in tools)


def docs() -> tuple[int, int]:
    """Build the site, with all links checked."""
    code, _ = run("make", "docs")
    return 1, int(code != 0)


def versions(target: str) -> tuple[int, int]:
    """Run the tests in an environment of its own, as ``make lowest`` and ``make newest`` do."""
    code, printed = run("make", target)
    counts = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|errors?)\b", printed)
    }
    failed = sum(counts.values()) - counts.get("passed", 0)
    return max(sum(counts.values()), 1), failed or int(code != 0)


def kills(trainer: str, count: int) -> tuple[int, int]:
    """Kill at random; the tables go to ``reports/chaos``."""
    words = ["--seed", "0", "--kills", f"{count}"]
    if trainer == "plain":
        words += ["--report", f"{REPORTS}"]
    else:
        words += ["--trainer", trainer, "--warm", "--report", f"{REPORTS / trainer}"]
    code, printed = python("tests.chaos", *words)
    # The lines of the table, not those of its progress.
    landed = re.search(r"^- (\d+) kills, ", printed, re.MULTILINE)
    failures = re.search(r"^- (\d+) failures", printed, re.MULTILINE)
    if landed is None or failures is None:
        return 1, 1
    return int(landed[1]), int(failures[1]) or int(code != 0)


def faults() -> tuple[int, int]:
    """Plant the faults."""
    code, printed = python("tests.planted_faults")
    found = re.search(r"(\d+) faults planted, (\d+) not noticed", printed)
    return (1, 1) if found is None else (int(found[1]), int(found[2]) or int(code != 0))


def parts() -> dict[str, Part]:
    """Return all parts by name, in their order."""
    return {
        "lint, types, layers": check,
        "docs": docs,
        "tests": lambda: run_tests(
            *(*FULL_SIZE, "--ignore", "tests/durability", "--ignore-glob", CLUSTERS)
        ),
        # Each starts several nodes and is timed by what is idle: one after another.
        "clusters": lambda: run_tests(
            *(*FULL_SIZE, *sorted(map(str, HOME.glob(CLUSTERS)))), side_by_side=0
        ),
        "lowest versions": lambda: versions("lowest"),
        "newest Python": lambda: versions("newest"),
        "durability": lambda: run_tests(*LONG, "tests/durability"),
        "chaos": lambda: kills("plain", KILLS),
        **{
            f"chaos, {trainer}": lambda trainer=trainer: kills(trainer, KILLS_OF_SEVERAL)  # type: ignore[misc]
            for trainer in SEVERAL
        },
        "planted faults": faults,
    }


def table(done: Sequence[Done]) -> str:
    """Return what all parts came to, as Markdown."""
    total = Done(
        "all",
        sum(item.tests for item in done),
        sum(item.failed for item in done),
        sum(item.minutes for item in done),
    )
    lines = ["| part | tests | passed | failed | minutes |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {item.part} | {item.tests} | {item.tests - item.failed} | {item.failed} "
        f"| {item.minutes:.1f} |"
        for item in (*done, total)
    ]
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    """Run the parts that are asked for; print the table."""
    chosen = {
        name: part
        for name, part in parts().items()
        if not words or any(word in name for word in words)
    }
    if not chosen:
        print(f"no part is called {' or '.join(words)}: there are {', '.join(parts())}")
        return 2
    done = []
    for name, part in chosen.items():
        started = time.monotonic()
        count, failed = part()
        done.append(Done(name, count, failed, (time.monotonic() - started) / 60))
    print(f"\n{table(done)}")
    return 1 if any(item.failed for item in done) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
