"""The notebooks of the documentation run from top to bottom in a real kernel."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import notebooks

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly(but=["first_sweep"])
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_a_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    ended = subprocess.run(
        notebooks.command(tmp_path, monkeypatch), cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        input=json.dumps(["".join(cell["source"]) for cell in cells]), check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_HOME": str(tmp_path)},
    )  # fmt: skip
    for cell in json.loads(ended.stdout):
        assert all(item["output_type"] != "error" for item in cell), notebooks.text_of(cell)
