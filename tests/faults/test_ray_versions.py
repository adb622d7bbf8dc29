"""Another Ray, another Python, no asynckfold in the cluster: one error before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest

from asynckfold.engines.keeper import Keeper
from tests.engines.ray_start import needs_ray, sweep
from tests.faults.test_ray import ENGINES, Nodes, nodes

__all__ = ["nodes"]

pytestmark = [pytest.mark.nightly, needs_ray, pytest.mark.timeout(900)]

OTHER = "2.54.0"


@pytest.fixture
def other_cluster(tmp_path: Path) -> Iterator[str]:
    """Start a head of another Ray, which pip installs into a folder, and yield its address."""
    target = tmp_path / "other"
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"ray=={OTHER}"]
    done = subprocess.run([*words, "--target", str(target)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install Ray {OTHER}: {done.stderr[-200:]}")
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder:
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0"]
        words += [f"--temp-dir={folder}", "--num-cpus=1", "--node-ip-address=127.0.0.3"]
        words += ["--include-dashboard=false", "--disable-usage-stats"]
        given = {**os.environ, "PYTHONPATH": str(target), "TMPDIR": folder}
        with closing(Keeper(Path(folder), words, given)) as keeper:
            code, output = keeper.ended(120.0) or (1, "no answer")
            assert code == 0, output
            yield Path(folder, "ray_current_cluster").read_text().strip()


def refused(root: Path, address: str) -> str:
    """Return the error of a sweep, which begins nothing."""
    process = sweep("plain", "ray", root, address)
    out, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert not root.exists()
    (line,) = [line for line in out.splitlines() if line.startswith("asynckfold.errors.InputError")]
    return line


def test_a_cluster_of_another_ray_is_refused(root: Path, other_cluster: str) -> None:
    told = refused(root, other_cluster)
    assert "same versions of Ray and Python" in told
    assert f"Ray: {OTHER}" in told
    assert f"Ray: {version('ray')}" in told
    assert "Install the cluster's versions here" in told


def test_a_cluster_of_another_python_is_refused(root: Path, nodes: Nodes) -> None:
    """A stand-in for a head of that Python: what the head has noted of itself says so."""
    nodes("claim", "3.99.1")
    told = refused(root, nodes.address)
    assert "Python: 3.99.1" in told
    assert f"Python: {'.'.join(map(str, sys.version_info[:3]))}" in told
    assert "Install the cluster's versions here" in told


def test_a_node_without_asynckfold_is_refused(root: Path, nodes: Nodes) -> None:
    nodes("set", "BEFORE", str(ENGINES / "stand_in_bare"))
    nodes("add", "bare")
    told = refused(root, nodes.address)
    assert "needs asynckfold and torch, in the versions here" in told
    assert "): none and none; here " in told
    assert f"pip install 'asynckfold[ray]=={version('asynckfold')}'" in told
