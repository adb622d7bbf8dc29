from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("script", "models"), [("mnist", ["LeNet5", "AlexNet"]), ("cifar10", ["MobileNet", "VGG"])]
)
def test_an_example_runs_by_itself(script: str, models: list[str], root: Path) -> None:
    command = [sys.executable, EXAMPLES / f"{script}.py", "--quick", "--root-dir", root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.splitlines()[-1])
    assert page.name == "index.html"
    assert all(model in page.read_text() for model in models)
