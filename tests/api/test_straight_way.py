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

data = torch.randn(60, 4), torch.arange(60) % 3
loss, settings = torch.nn.CrossEntropyLoss(), {"verbose": 0, "engine": "process"}
kfold = asynckfold.AsyncKFold(2, data, sys.argv[1], loss, 8, **settings)
sgd = lambda model: torch.optim.SGD(model.parameters(), 0.1)
kfold({"linear": lambda: torch.nn.Linear(4, 3)}, ["constant"], sgd, {"epochs": 1})
print(*(name for name in sys.modules if name.partition(".")[0] == "asynckfold"))
"""


@pytest.mark.timeout(300)
def test_a_plain_call_imports_little(root: Path) -> None:
    arguments = [sys.executable, "-c", SCRIPT, str(root)]
    made = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=280)
    assert made.returncode == 0, made.stderr
    modules = made.stdout.split()
    assert len(modules) <= MOST_MODULES, modules
    assert not [name for name in modules if name.startswith(OPTIONAL)]


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
