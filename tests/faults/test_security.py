"""What the code must not do, by its text; what a run must not leave or open, by looking."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import asynckfold
from asynckfold import RunStore
from tests.leftovers import descendants, listening, sockets

PACKAGE = Path(asynckfold.__file__).parent


def files_with(pattern: str) -> set[str]:
    found = (path for path in PACKAGE.rglob("*.py") if re.search(pattern, path.read_text()))
    return {str(path.relative_to(PACKAGE)) for path in found}


@pytest.mark.parametrize(
    "pattern",
    [
        r"torch\.load\(|weights_only=False",
        r"joblib\.load\(|allow_pickle=True",
        r"(?<![\w. ])(?:eval|exec)\(",
        r"yaml\.(?:unsafe_|full_)?load\(",
        r"shell=True|os\.(?:system|popen)\(",
    ],
)
def test_nothing_that_is_read_can_run_code(pattern: str) -> None:
    assert files_with(pattern) == set()


def test_only_own_processes_are_unpickled() -> None:
    """Objects of the sweep, and answers, through the pipes of processes that a run started."""
    rooms = {
        name.partition("/")[0] for name in files_with(r"pickle\.loads?\(|from (?:cloud)?pickle")
    }
    assert rooms <= {"training", "engines", "sweep", "results"}


# A run

RUN = """
import sys, torch
from asynckfold import AsyncKFold
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
kfold = AsyncKFold(
    2, (X, (X[:, 0] > 0).long()), sys.argv[1], torch.nn.CrossEntropyLoss(), 4,
    baseline=None, verbose=0, n_jobs=2, report=False,
)
class Slow(torch.nn.Linear):
    def forward(self, inputs):
        import time
        time.sleep(0.02)
        return super().forward(inputs)
kfold(
    {"A": lambda: Slow(4, 2)}, ["constant"], lambda model: torch.optim.SGD(model.parameters(), 0.1),
    {"epochs": 3},
).report()
"""

DOCUMENTED = re.compile(
    r"run\.(db|lock)|splits\.npz|oof/A-constant\.npz"
    r"|A/constant/fold-\d/(log\.txt|summary\.json|final\.safetensors)"
    r"|A/constant/fold-\d/checkpoint-\d{4}-\d{6}-\d+\.safetensors"
    r"|report/([\w-]+\.(html|png|csv|json|md|tex)|\.figures)"
)


@pytest.mark.nightly
def test_a_run_listens_nowhere_leaves_only_what_is_documented_and_tells_no_secret(
    root: Path,
) -> None:
    looks = 0
    command = [sys.executable, "-c", RUN, root, "--token=canary-argument"]
    secret = {**os.environ, "X_TOKEN": "canary-variable"}
    with subprocess.Popen(command, cwd=PACKAGE.parent, env=secret) as script:
        while script.poll() is None:
            open_ports = listening()
            for pid in [script.pid, *descendants(script.pid)]:
                assert not sockets(pid) & set(open_ports)
            looks += 1
            time.sleep(0.05)
    assert script.returncode == 0
    assert looks > 5
    names = {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}
    assert {name for name in names if not DOCUMENTED.fullmatch(name)} == set()
    files = [path for path in root.rglob("*") if path.is_file()]
    assert [path for path in files if b"canary" in path.read_bytes()] == []
    with RunStore.read(root) as store:
        assert store.about["command"] == ["-c", "..."]
        assert store.counts()["done"] == 2
