"""The public door: its names, and that opening it does nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import asynckfold
from tests.house import tomllib

ROOT = Path(__file__).parents[2]

PACKAGES = {
    "PIL": "pillow",
    "iterstrat": "iterative-stratification",
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
}
"""Import names that differ from the package's."""


def test_all_is_sorted_and_importable() -> None:
    assert asynckfold.__all__ == sorted(asynckfold.__all__)
    assert all(hasattr(asynckfold, name) for name in asynckfold.__all__)
    public = {
        name
        for name, value in vars(asynckfold).items()
        if getattr(value, "__module__", "").startswith("asynckfold.") and not name.startswith("_")
    }
    assert public | set(asynckfold._PLACES) == set(asynckfold.__all__)
    assert asynckfold.__version__ == metadata.version("asynckfold")


def test_importing_has_no_side_effects_and_costs_no_torch() -> None:
    script = """
import os, sys, threading, signal
before = dict(os.environ), signal.getsignal(signal.SIGINT), list(sys.path)
import asynckfold, asynckfold.cli
heavy = {"numpy", "torch", "torchvision", "sklearn", "matplotlib", "pandas", "ray"}
heavy &= set(sys.modules)
assert not heavy, heavy
assert threading.active_count() == 1
assert before == (dict(os.environ), signal.getsignal(signal.SIGINT), list(sys.path))
assert not os.listdir(f"/proc/{os.getpid()}/task")[1:]
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"OPENBLAS_NUM_THREADS": "1", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def test_libraries_are_imported_as_far_as_they_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always = {re.split(r"[ <>=;\[]", item)[0] for item in project["dependencies"]}
    # Libraries with an integration are extras.
    extras = ("ray", "skorch", "mlflow", "optuna", "slurm", "wandb", "clearml")
    more = [project["optional-dependencies"][name][0] for name in extras]
    declared = always | {re.split(r"[ <>=;\[]", item)[0] for item in more}
    names = {name for path in (ROOT / "asynckfold").rglob("*.py") for name in imported_by(path)}
    # IPython is the host's: used where it runs this process.
    foreign = names - set(sys.stdlib_module_names) - {"asynckfold", "IPython"}
    imported = {PACKAGES.get(name, name) for name in foreign}
    assert always <= imported <= declared


def test_the_changelog_has_the_version_in_hand() -> None:
    version = metadata.version("asynckfold")
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text or f"## [{version}]" in text
