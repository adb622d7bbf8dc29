"""`.ci/run` on a machine that has no room, and on one whose first installation fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"


def _run(folder: Path, free_kb: int, failing_installs: int) -> subprocess.CompletedProcess[str]:
    """Run the script in a copy of the repository's top, with a `df` and a `make` that are fakes."""
    (folder / ".ci").mkdir()
    (folder / ".ci" / "run").write_text(SCRIPT.read_text())
    programs = folder / "bin"
    programs.mkdir()
    df = f"printf 'Filesystem 1024-blocks Used Available\\n/dev/x 9 9 {free_kb}\\n'"
    make = f"""echo "make $1, cache off: $PIP_NO_CACHE_DIR"
test "$1" != install && exit 0
mkdir -p .venv; test ! -e .venv/half || exit 9; touch .venv/half; echo . >> tries
test "$(wc -l < tries)" -gt {failing_installs}"""
    for name, text in (("df", df), ("make", make)):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    return subprocess.run(
        ["bash", str(folder / ".ci" / "run")],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
    )


def test_too_little_disk_is_refused_in_one_line_before_anything_is_installed(
    tmp_path: Path,
) -> None:
    ended = _run(tmp_path, free_kb=9_000_000, failing_installs=0)
    assert ended.returncode == 1
    assert ended.stdout.startswith("disk: 8 GB free; memory: ")
    assert "make" not in ended.stdout
    assert len(ended.stderr.splitlines()) == 1
    assert "8 GB are free" in ended.stderr


@pytest.mark.parametrize(("failing", "installs", "code"), [(0, 1, 0), (1, 2, 0), (2, 2, 1)])
def test_a_failed_installation_is_tried_once_more_from_the_beginning(
    tmp_path: Path, failing: int, installs: int, code: int
) -> None:
    ended = _run(tmp_path, free_kb=90_000_000, failing_installs=failing)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.count("make install, cache off: 1") == installs
    assert ended.stdout.count("make test, cache off: 1") == (code == 0)
