"""A disk that fills up while a run works: exit 5, nothing lost, and on with it once there is room.

The disk is a small tmpfs in a mount namespace of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from asynckfold.cli import main

HOME = Path(__file__).parents[2]

SWEEP = """
import torch
from torch import nn

X = torch.randn({samples}, 8, generator=torch.Generator().manual_seed(0))
y = (X[:, 0] > 0).long()


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, {hidden}), nn.ReLU(), nn.Linear({hidden}, {outputs}))


dataset = (X, y)
criterion = nn.CrossEntropyLoss()
models = {{"net": Net}}
schedulers = ["cosine"]
opt_fn = lambda model: torch.optim.SGD(model.parameters(), 1e-2)
trainer_params = {{"epochs": 2}}
settings = {{"n_splits": 3, "batch_size": 64, "baseline": None, "n_jobs": 1}}
"""

TMPFS = 'mount -t tmpfs -o size={size} none "$ROOT" && exec "$@"'

FIRST_AND_AGAIN = """
import os, resource, subprocess, sys
from asynckfold.cli import main
from asynckfold.engines.warm_pool import close_warm

root = os.environ["ROOT"]
words = ["run", "sweep.py", "--root", root, "--no-report"]

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

if sys.argv[1:]:
    limit(int(sys.argv[1]))
print("first", main(words), flush=True)
main(["status", root, "--json"])
close_warm()
if sys.argv[1:]:
    limit(resource.RLIM_INFINITY)
else:
    subprocess.run(["mount", "-o", "remount,size=64m", root], check=True)
print("second", main([*words, "--json"]), flush=True)
"""
"""In one process; `test_cli` has a disk that fills up between two."""

LARGEST_FILE = 800 * 512
"""Without a small disk: longer files are refused."""


@cache
def unshare() -> tuple[str, ...] | None:
    """The command that gives a mount namespace, as root or as anybody."""
    for command in (("unshare", "-m"), ("unshare", "-rm")):
        try:
            done = subprocess.run(
                [*command, "sh", "-c", "mount -t tmpfs none /mnt"], capture_output=True
            )
        except FileNotFoundError:
            return None
        if done.returncode == 0:
            return command
    return None


@dataclass(frozen=True)
class Filling:
    """A sweep that does not fit its disk, and the file that is then refused."""

    size: str
    samples: int
    hidden: int
    outputs: int
    refused: str


FILLINGS = {
    "checkpoint": Filling("2100k", 120, 20_000, 2, "/net/cosine/fold-"),
    "commit": Filling("1400k", 6000, 8, 40, "/run.db"),
}


pytestmark = pytest.mark.usefixtures("no_worker_stays")


def prepare(folder: Path, filling: Filling, capsys: pytest.CaptureFixture[str]) -> str:
    """Write the sweep, and return the fingerprint of a run that has all the room it needs."""
    path = folder / "sweep.py"
    path.write_text(
        SWEEP.format(samples=filling.samples, hidden=filling.hidden, outputs=filling.outputs)
    )
    (folder / "run").mkdir()
    capsys.readouterr()
    assert main(["run", str(path), "--root", str(folder / "golden"), "--no-report", "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)["fingerprint"])


def run_and_resume(folder: Path, golden: str, *around: str, limit: tuple[str, ...] = ()) -> str:
    """Carry the steps out; check codes, account and end; return what the first run said."""
    done = subprocess.run(
        [*around, sys.executable, "-c", FIRST_AND_AGAIN, *limit],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HOME), "ROOT": str(folder / "run")},
        capture_output=True,
        text=True,
        timeout=250,
    )
    lines = done.stdout.splitlines()
    codes = [line for line in lines if line.startswith(("first", "second"))]
    assert codes == ["first 5", "second 0"], done.stderr
    before, after = (json.loads(line) for line in lines if line.startswith("{"))
    assert before["pending"] > 0
    assert before["planned"] == before["pending"] + before["done"] == 3
    assert after["done"] == 3
    assert after["fingerprint"] == golden
    assert f"continue with: asynckfold run sweep.py --root {folder / 'run'}" in done.stderr
    assert "Traceback" not in done.stderr
    return next(line for line in done.stderr.splitlines() if line.startswith("asynckfold: "))


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FILLINGS)
def test_it_ends_with_5_and_with_room_the_same_command_ends_alike(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = unshare()
    if namespace is None:
        pytest.skip("no mount namespace may be made here")
    filling = FILLINGS[name]
    golden = prepare(tmp_path, filling, capsys)
    disk = TMPFS.format(size=filling.size)
    told = run_and_resume(tmp_path, golden, *namespace, "sh", "-c", disk, "sh")
    assert f"could not write {tmp_path / 'run'}" in told
    assert filling.refused in told
    room = re.search(r"\((?:needs (\d+) bytes, )?(\d+) bytes free at (\S+)\)", told)
    assert room is not None, told
    assert room[3].startswith(str(tmp_path / "run"))
    if name == "checkpoint":
        assert int(room[1]) > int(room[2])


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_file_that_may_not_grow_is_such_a_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = prepare(tmp_path, FILLINGS["checkpoint"], capsys)
    told = run_and_resume(tmp_path, golden, limit=(str(LARGEST_FILE),))
    assert f"could not write {tmp_path / 'run'}" in told
    assert "File too large" in told
