"""A step on a real GPU: CUDA graphs, and what it asks of the host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.device_checks import CHECKS

HOME = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU that torch can use"
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_on_the_device(name: str) -> None:
    words = [sys.executable, "-m", "tests.gpu.device_checks", name]
    ended = subprocess.run(words, cwd=HOME, capture_output=True, text=True, timeout=580)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stderr[-4000:]
