"""What a cell of a notebook shows: one output, whose last state stays."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from asynckfold import JobsFailedWarning
from tests import notebooks
from tests.api.test_display import Slow, called
from tests.toy import Moody


class Output:
    """An output of a cell that remembers all of its states."""

    def __init__(self) -> None:
        self.count = 0
        self.states: list[dict[str, str]] = []

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Output:
        assert raw
        assert display_id
        self.count += 1
        self.states.append(bundle)
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.states.append(bundle)


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Output:
    """The output of the cell in which a call finds itself."""
    cell = Output()
    monkeypatch.setattr("asynckfold.api.display.is_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", cell.display)
    return cell


def test_a_sweep_is_one_output_even_with_forced_colours(
    root: Path, output: Output, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    models: Any = {"<script>x<script>": Slow, "moody": Moody}
    with pytest.warns(JobsFailedWarning):
        called(root, models, verbose=2)
    assert capfd.readouterr() == ("", "")
    assert output.count == 1
    assert len(output.states) > 3  # kept fresh
    last = output.states[-1]
    assert last["text/plain"].count("failed: ArithmeticError: seven") == 1
    assert "5 of 6 jobs finished, 1 failed" in last["text/plain"]
    assert "reading the data" not in last["text/plain"]
    assert "<script>" not in last["text/html"]
    assert "&lt;script&gt;" in last["text/html"]


BODY = """
import torch
from torch import nn
from asynckfold import AsyncKFold

X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
y = (X[:, 0] > 0).long()

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs):
        if self.training and (inputs[:, 1] > LIMIT).any():
            raise ValueError("too large")
        return self.layer(inputs)

def cross_validate(root, models, **settings):
    kfold = AsyncKFold(3, (X, y), root, nn.CrossEntropyLoss(), 8, n_jobs=1, **settings)
    return kfold(models, ["constant"], lambda model: torch.optim.SGD(model.parameters(), 0.1))
"""


@pytest.mark.nightly
def test_failures_and_a_refit_in_a_real_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [
        BODY,
        # One sample is too large: it is held out once.
        "LIMIT = float(X[:, 1].topk(2).values.mean())\n"
        "plain = lambda: nn.Linear(4, 2)\n"
        "results = cross_validate('some', {'odd': Odd, 'plain': plain}, refit=True)",
        "results",
        "LIMIT = -100.0\ncross_validate('all', [Odd])",
        "results.model('plain/constant', fold=7)",
        "cross_validate('none', [Odd], n_job=1)",
        "import matplotlib.pyplot as plt\nfigure, axes = plt.subplots(1, 2)\n"
        "for ax, kind in zip(axes, ('curves', 'timeline')):\n    results.plot(kind, ax=ax)",
    ]
    command = notebooks.command(tmp_path, monkeypatch)
    done = subprocess.run(
        command, cwd=tmp_path, input=json.dumps(cells), capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)
    # The warning of failed jobs alone is on standard error.
    assert all(map(notebooks.is_quiet, outputs[:1] + outputs[2:]))
    _, some, results, failed, wrong, unknown, figure = map(notebooks.text_of, outputs)
    assert "2 of 6 jobs failed" in some
    assert "on all 200 samples" in some
    assert "incomplete" in results
    failed, wrong, unknown = (
        re.sub("\x1b\\[[0-9;]*m", "", text) for text in (failed, wrong, unknown)
    )
    assert "AllJobsFailedError: 3 of 3 jobs failed" in failed
    assert "in forward" in failed
    assert "training/loop.py" not in failed
    assert "InputError: " in wrong
    assert "cv_results.py" not in wrong
    assert "SignatureError: AsyncKFold got an unexpected keyword argument 'n_job'" in unknown
    assert "in cross_validate" in unknown
    assert "kfold.py" not in unknown
    assert figure.startswith("<Figure")
