"""The benchmarks explain themselves and measure; how fast this machine is, no test asserts."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "loops")


@pytest.fixture
def _in_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import as a script in that folder does."""
    before = {*sys.modules}
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in {*sys.modules} - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.usefixtures("_in_folder")
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_explains_itself(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "--quick" in printed
    assert "?" in printed.split("\n\n")[1]  # the question that it answers


@pytest.mark.usefixtures("_in_folder")
def test_four_terms_are_fitted_to_five_clusters_or_more() -> None:
    nodes = runpy.run_path(str(FOLDER / "nodes.py"))
    seconds = {(n, t): 8 / n / t + (n - 1) / 10 + 1 for n, t in nodes["clusters"](4)}
    model, text = nodes["scaling"](seconds)
    assert model(4, 2) == pytest.approx(2.3)
    assert text.endswith("0 × (tasks − 1) + 1 s, off by at most 0%")
    assert nodes["scaling"]({(1, 1): 8.0, (1, 2): 4.0}) is None


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "script", ["cores", "fusion", "gpu", "nodes", "packing", "rprop", "trainers"]
)
def test_a_quick_run_prints_a_table(script: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / f"{script}.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) > 4
    assert not list(tmp_path.iterdir())
