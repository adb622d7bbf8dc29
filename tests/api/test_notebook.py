"""What a cell of a notebook shows: one output, its last state, no word on standard error."""

from __future__ import annotations

import contextvars
import functools
import json
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from rich.text import Text

from asynckfold.api import display, notebook
from asynckfold.api.display import Display
from asynckfold.api.notebook import HTML, LINES, PLAIN, REFRESH_SECONDS, Bundle, Cell
from tests import notebooks
from tests.api.test_display import drive, make_plan


class Output:
    """An output of a cell that remembers all of its states."""

    def __init__(self) -> None:
        self.count = 0
        self.states: list[Bundle] = []

    def show(self, bundle: Bundle) -> Output:
        self.count += 1
        self.states.append(bundle)
        return self

    def update(self, bundle: Bundle, *, raw: bool) -> None:
        assert raw
        sys.stderr.flush()  # as ipykernel does
        self.states.append(bundle)

    @property
    def text(self) -> str:
        return self.states[-1][PLAIN]


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Output:
    """The output of a cell in which `Display` finds itself."""
    found = Output()
    monkeypatch.setattr(display, "is_notebook", lambda: True)
    monkeypatch.setattr(notebook, "Cell", functools.partial(Cell, show=found.show))
    return found


def test_a_sweep_is_one_output_even_with_forced_colours(
    output: Output, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    drive(Display(1), make_plan())
    assert capfd.readouterr() == ("", "")
    assert output.count == 1
    lines = output.text.splitlines()
    assert lines[0] == "labels were numbered"
    assert sum("ValueError: no" in line for line in lines) == 2
    assert re.search("4.* 2 failed", output.text)
    assert "reading the data" not in output.text


def test_notes_and_warnings_after_the_end_join_the_output(
    output: Output, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = Display(1)
    with shown:
        pass
    shown.note("now A/step on all samples")
    with pytest.warns(UserWarning, match="2 of 6"):
        shown.warn("2 of 6 jobs failed", UserWarning)
    assert "2 of 6" not in output.text  # whoever records warnings gets them
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # As Python does it where nobody records warnings, as pytest does.
        warnings.showwarning = lambda text, kind, *_: print(kind.__name__, text, file=sys.stderr)
        shown.warn("2 of 6 jobs failed", UserWarning)
    assert output.count == 1
    assert "now A/step on all samples" in output.text
    assert "UserWarning 2 of 6 jobs failed" in output.text
    assert capfd.readouterr().err == ""


def test_names_are_inert(output: Output) -> None:
    drive(Display(2), make_plan(models=("<script>x<script>",)))
    assert "<script>x<script>/step/fold-0" in output.text
    assert "<script>" not in output.states[-1][HTML]
    assert "&lt;script&gt;" in output.states[-1][HTML]


def test_the_output_stays_small() -> None:
    output = Output()
    cell = Cell(lambda: Text("live"), output.show)
    for number in range(LINES + 50):
        cell.console.print(f"line {number}")
    lines = output.text.splitlines()
    assert lines[0] == "line 50"
    assert lines[-2:] == [f"line {LINES + 49}", "live"]


def test_the_live_part_is_kept_fresh_in_the_context_of_its_cell() -> None:
    where = contextvars.ContextVar("where", default="elsewhere")
    where.set("this cell")
    seen = []

    def live() -> Text:
        seen.append(where.get())
        if len(seen) == 2:
            raise RuntimeError("dictionary changed size during iteration")
        return Text(f"{len(seen)}")

    output = Output()
    cell = Cell(live, output.show)
    cell.start()
    time.sleep(3.5 * REFRESH_SECONDS)
    cell.stop()
    assert len(seen) >= 4
    assert set(seen) == {"this cell"}
    assert output.count == 1
    assert output.text == f"{len(seen)}"


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
    assert all(map(notebooks.is_quiet, outputs))
    _, some, results, failed, wrong, unknown, figure = map(notebooks.text_of, outputs)
    assert "JobsFailedWarning: 2 of 6 jobs failed" in some
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
