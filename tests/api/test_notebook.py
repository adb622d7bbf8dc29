"""What a cell of a notebook shows: one output, whose last state stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asynckfold import JobsFailedWarning
from tests.api.test_display import called
from tests.toy import Moody, Slow


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
