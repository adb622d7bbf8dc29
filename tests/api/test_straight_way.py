"""How light a call is: functions and files on its way to the model, and modules that it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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

FRAMES = """
import pathlib, sys

import asynckfold, torch

PACKAGE = str(pathlib.Path(asynckfold.__file__).parent)
ways = []

class Linear(torch.nn.Linear):
    def forward(self, inputs):
        frame, way = sys._getframe(1), []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                way.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        if any(name == "run" and file.endswith("training/loop.py") for file, name in way):
            ways.append(way)
        return super().forward(inputs)
"""

CALL = """
X, y = torch.randn(60, 4), torch.arange(60) % 3
criterion, sgd = torch.nn.CrossEntropyLoss(), lambda model: torch.optim.SGD(model.parameters(), 0.1)
kfold = asynckfold.AsyncKFold(2, (X, y), sys.argv[1], criterion, 8, verbose=0, engine=sys.argv[2])
kfold({"linear": lambda: Linear(4, 3)}, ["constant"], sgd, {"epochs": 1})
"""


def printed(script: str, root: Path, engine: str) -> list[str]:
    arguments = [sys.executable, "-c", script, str(root), engine]
    made = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=300)
    assert made.returncode == 0, made.stderr
    return made.stdout.split()


def test_the_way_to_the_model_is_short(tmp_path: Path) -> None:
    script = f"""{FRAMES}{CALL}
way = ways[0]
begin = next(at for at, (file, name) in enumerate(way) if name == "__call__")
print(*(f"{{file[len(PACKAGE):]}}:{{name}}" for file, name in way[: begin + 1]))
"""
    way = printed(script, tmp_path / "run", "serial")
    assert len(way) <= MOST_FRAMES, way
    assert len({step.partition(":")[0] for step in way}) <= MOST_FILES, way


def test_a_plain_call_imports_few_modules(tmp_path: Path) -> None:
    script = f"""import asynckfold, sys, torch
from torch.nn import Linear
{CALL}
print(*(name for name in sys.modules if name.startswith("asynckfold")))
"""
    modules = printed(script, tmp_path / "run", "process")
    assert len(modules) <= MOST_MODULES, modules
    optional = [name for name in modules if name.startswith(OPTIONAL)]
    assert not optional
