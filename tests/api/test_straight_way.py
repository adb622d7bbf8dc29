"""How light a call is: functions and files on its way to the model, and modules that it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MOST_FRAMES, MOST_FILES = 14, 7
"""Functions and files of ours from `AsyncKFold.__call__` to the model, with the serial engine."""

MOST_MODULES = 185
"""Modules of ours that a plain call imports in the process that makes it."""

OPTIONAL = (
    *("asynckfold.engines.ray", "asynckfold.engines.joblib", "asynckfold.training.fusion"),
    *("asynckfold.training.multiprocess", "asynckfold.training.parameter_server"),
    *("asynckfold.integrations", "asynckfold.cli"),
)
"""What is imported where it is used."""

SCRIPT = """
import pathlib, sys

import asynckfold, torch

PACKAGE = str(pathlib.Path(asynckfold.__file__).parent)
X, y = torch.randn(60, 4), torch.arange(60) % 3
criterion, sgd = torch.nn.CrossEntropyLoss(), lambda model: torch.optim.SGD(model.parameters(), 0.1)

def call(engine, model):
    root = pathlib.Path(sys.argv[1], engine)
    kfold = asynckfold.AsyncKFold(2, (X, y), root, criterion, 8, verbose=0, engine=engine)
    kfold({"linear": model}, ["constant"], sgd, {"epochs": 1})

call("process", lambda: torch.nn.Linear(4, 3))
print(*(name for name in sys.modules if name.partition(".")[0] == "asynckfold"))

ways = []

class Linear(torch.nn.Linear):
    def forward(self, inputs):
        frame, way = sys._getframe(1), []
        while frame is not None and frame.f_code is not asynckfold.AsyncKFold.__call__.__code__:
            if frame.f_code.co_filename.startswith(PACKAGE):
                way.append(f"{frame.f_code.co_filename[len(PACKAGE):]}:{frame.f_code.co_name}")
            frame = frame.f_back
        if "/training/loop.py:run" in way:
            ways.append(way)
        return super().forward(inputs)

call("serial", lambda: Linear(4, 3))
print(*ways[0])
"""


@pytest.mark.timeout(300)
def test_the_way_to_the_model_is_short_and_imports_little(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    made = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=280)
    assert made.returncode == 0, made.stderr
    modules, way = (line.split() for line in made.stdout.splitlines())
    assert len(modules) <= MOST_MODULES, modules
    assert not [name for name in modules if name.startswith(OPTIONAL)]
    assert len(way) <= MOST_FRAMES, way
    assert len({step.partition(":")[0] for step in way}) <= MOST_FILES, way
