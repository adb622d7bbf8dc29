from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.nightly
def test_divided_layers_are_timed_beside_other_ways() -> None:
    words = [sys.executable, "-m", "tests.model_parallel", "--quick", "--turns", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    header, _, row = done.stdout.splitlines()
    assert len(row.split("|")) == len(header.split("|"))
    assert "500-500-2000" in row
