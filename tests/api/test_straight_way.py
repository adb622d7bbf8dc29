"""How light a call is: functions and files on its way to the model, and modules that it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import asynckfold
from asynckfold import AsyncKFold
from tests.toy import Tiny, adam, samples

MOST_FRAMES, MOST_FILES = 14, 7
"""Functions and files of ours from `AsyncKFold.__call__` to the model, with the serial engine."""

MOST_MODULES = 150
"""Modules of ours that a plain call imports in the process that makes it, if workers train."""

OPTIONAL = (
    *("asynckfold.engines.ray", "asynckfold.engines.joblib", "asynckfold.training.fusion"),
    *("asynckfold.training.multiprocess", "asynckfold.training.parameter_server"),
    *("asynckfold.integrations", "asynckfold.cli"),
)
"""What is imported where it is used."""

SCRIPT = """
import sys

import asynckfold, torch

def call(engine, root):
    data = torch.randn(60, 4), torch.arange(60) % 3
    loss, settings = torch.nn.CrossEntropyLoss(), {"verbose": 0, "engine": engine}
    kfold = asynckfold.AsyncKFold(2, data, root, loss, 8, **settings)
    adam = lambda model: torch.optim.Adam(model.parameters(), 0.1)
    kfold({"linear": lambda: torch.nn.Linear(4, 3)}, ["constant"], adam, {"epochs": 1})

call("process", sys.argv[1])
print(*(name for name in sys.modules if name.partition(".")[0] == "asynckfold"))
call("serial", sys.argv[1] + "-here")
print("torch._dynamo" in sys.modules, "_dynamo" in vars(torch))
torch.optim.SGD([torch.zeros(1)], 0.1)
print(torch._dynamo.__file__.endswith("_dynamo/__init__.py"))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a new process prints, line by line."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("new") / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


def test_a_plain_call_imports_little(printed: list[str]) -> None:
    modules = printed[0].split()
    assert 0 < len(modules) <= MOST_MODULES, modules
    assert not [name for name in modules if name.startswith(OPTIONAL)]


def test_a_new_process_does_not_wait_for_torchs_compiler_and_keeps_its_own(
    printed: list[str],
) -> None:
    assert printed[1:] == ["False False", "True"]


class Followed(Tiny):
    """Notes the frames of ours that lead to it from a call."""

    ways: list[list[str]] = []  # noqa: RUF012

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        package = str(Path(asynckfold.__file__).parent)
        frame: FrameType | None = sys._getframe(1)
        way: list[str] = []
        while frame is not None and frame.f_code is not inside:
            if frame.f_code.co_filename.startswith(package):
                way.append(f"{frame.f_code.co_filename[len(package) :]}:{frame.f_code.co_name}")
            frame = frame.f_back
        if "/training/loop.py:run" in way:
            self.ways.append(way)
        return super().forward(inputs)


inside = AsyncKFold.__call__.__code__


def test_the_way_to_the_model_is_short(root: Path) -> None:
    kfold = AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 8, verbose=0, engine="serial")
    kfold([Followed], ["constant"], adam, {"epochs": 1})
    way = Followed.ways[0]
    assert len(way) <= MOST_FRAMES, way
    assert len({step.partition(":")[0] for step in way}) <= MOST_FILES, way
