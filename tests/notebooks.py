"""Runs notebooks in a real kernel."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

RUNNER = """
import json, sys
import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, kernel_name="asynckfold-test", timeout=240, allow_errors=True).execute()
print(json.dumps([cell.outputs for cell in notebook.cells]))
"""

Output = dict[str, Any]


def command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the command that reads cells as JSON and prints the outputs of each as JSON."""
    for needed in ("ipykernel", "nbclient"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    kernel = folder / "kernels" / "asynckfold-test"
    kernel.mkdir(parents=True)
    words = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": words, "display_name": "test", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(folder))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    return [sys.executable, "-c", RUNNER]


def is_quiet(outputs: list[Output]) -> bool:
    """Whether a cell shows at most five outputs, and none on standard error."""
    return len(outputs) <= 5 and all(output.get("name") != "stderr" for output in outputs)


def text_of(outputs: list[Output]) -> str:
    """Return what a cell shows as plain text: prints, displays, errors."""
    return "\n".join(
        output.get("text")
        or output.get("data", {}).get("text/plain")
        or "\n".join(output["traceback"])
        for output in outputs
    )
