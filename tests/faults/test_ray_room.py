"""Nodes whose shared memory and disk are full: for the data, and for what travels between nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from asynckfold.store import RunStore
from tests.engines.ray_start import ended, first_checkpoint, needs_ray, sweep
from tests.faults.test_ray import Nodes, nodes
from tests.faults.test_ray_spans import outcomes, told
from tests.leftovers import until

__all__ = ["nodes"]

pytestmark = [pytest.mark.nightly, needs_ray, pytest.mark.timeout(900)]

# A small node has room for 80 MiB: 100 of data, or 60 and checkpoints of 24.
DATA = {"MORE_COLUMNS": "14588"}
WEIGHTS = {"MORE_COLUMNS": "8752", "WIDTH": "28000", "EPOCHS": "3"}
SMALL = "80"


def places(root: Path) -> list[str]:
    with RunStore.read(root) as store:
        return [item.node for item in store.attempts() if item.outcome == "ok"]


def test_a_node_without_room_for_the_data_is_left_out(
    root: Path, tmp_path: Path, nodes: Nodes
) -> None:
    nodes("add", "one")
    nodes("set", "STORE_MIB", SMALL)
    nodes("add", "two")
    expected = ended(sweep("plain", "process", tmp_path / "process", **DATA))
    process = sweep("plain", "ray", root, nodes.address, N_JOBS="3", **DATA)
    assert ended(process) == expected
    assert told(root).count("node two has no room for the data") == 1
    assert outcomes(root) == ["ok"] * 6
    assert {*places(root)} == {"", "one"}


def test_without_a_node_that_has_room_nothing_starts(root: Path, nodes: Nodes) -> None:
    nodes("set", "STORE_MIB", SMALL)
    nodes("restart", "head")
    nodes("add", "one")
    process = sweep("plain", "ray", root, nodes.address, **DATA)
    out, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "InputError" in out
    text = " ".join(out.split())
    assert "a node of the Ray cluster must have room for the data" in text
    assert "100 MiB of data" in text
    assert "--object-store-memory" in text
    assert not (root / "run.db").exists()


@pytest.mark.parametrize("full", ["one", "head"])
def test_checkpoints_without_room_on_their_way_arrive_in_pieces(
    root: Path, tmp_path: Path, nodes: Nodes, full: str
) -> None:
    if full == "head":
        nodes("set", "STORE_MIB", SMALL)
        nodes("restart", "head")
        nodes("set", "STORE_MIB")
    else:
        nodes("set", "STORE_MIB", SMALL)
    nodes("add", "one")
    expected = ended(sweep("plain", "process", tmp_path / "process", **WEIGHTS))
    process = sweep("plain", "ray", root, nodes.address, N_JOBS="2", **WEIGHTS)
    first_checkpoint(root)
    # What one job has saved there goes to this machine, and from there to where it continues.
    nodes("drain", "one", "600")
    until(lambda: "interrupted" in outcomes(root))
    nodes("add", "late")
    assert ended(process) == expected
    assert "lost" not in told(root)
    assert outcomes(root) == ["interrupted", *["ok"] * 6]
    assert max(path.stat().st_size for path in root.glob("net/*/*/checkpoint*")) > 24 << 20
