"""Numbers near 0 that lose digits: 0 in every job, wherever it is trained."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asynckfold.jobs.placement import Command
from asynckfold.training.isolation.torch_settings import can_flush_denormals, denormals_are_flushed
from tests.training.tiny import Plain, Tiny

SMALLEST = torch.tensor(1, dtype=torch.int32).view(torch.float32)
"""The least positive number there is."""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = denormals_are_flushed()
    yield
    torch.set_flush_denormal(before)


@pytest.mark.parametrize("before", [False, True])
def test_flushing_is_detected_and_restored(before: bool) -> None:
    torch.set_flush_denormal(before)
    assert denormals_are_flushed() is before
    assert can_flush_denormals()
    assert denormals_are_flushed() is before


class Watching(Plain):
    """Fails where a number lost digits, and was not taken for 0."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert float(SMALLEST * 1.0) == 0
        assert not (SMALLEST * 1.0).view(torch.int32)
        return super().forward(inputs)


def test_jobs_have_no_denormals(tmp_path: Path) -> None:
    torch.set_flush_denormal(False)
    tiny = Tiny(tmp_path, {"watching": Watching})
    (result,) = tiny.execute(tiny.jobs[0])
    assert result.error == ""
    assert not denormals_are_flushed()


@pytest.mark.parametrize("command", [Command.MEASURE, Command.ESTIMATE])
def test_the_serial_baseline_has_no_denormals(tmp_path: Path, command: Command) -> None:
    torch.set_flush_denormal(False)
    tiny = Tiny(tmp_path, {"watching": Watching})
    (found,) = tiny.execute(*tiny.jobs, command=command)
    # A job that fails leaves no accuracy behind, and no seconds where they are estimated.
    assert found.accuracy if command is Command.MEASURE else found.seconds > 0
    assert not denormals_are_flushed()


OLD_POOL = """
import torch
torch.set_num_threads(2)
torch.rand(1 << 20).exp()
from asynckfold.training.isolation.torch_settings import *
assert can_flush_denormals(1)
assert not can_flush_denormals(2)
assert not denormals_are_flushed()
from asynckfold.training.software import software
assert software(2)["denormal numbers"] == "taken for 0"
assert software(2, in_workers=False)["denormal numbers"] == "kept"
"""

NEW_POOL = """
import torch
from asynckfold.training.isolation.torch_settings import *
assert can_flush_denormals(2)
assert not denormals_are_flushed()
flush_denormals()
torch.set_num_threads(2)
assert denormals_are_flushed(2 * SHARE)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("code", [OLD_POOL, NEW_POOL], ids=["old pool", "new pool"])
def test_threads_started_earlier_keep_their_mode(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
