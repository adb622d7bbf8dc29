"""A node whose clock is hours off: order, durations and timeouts are those of a right one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from asynckfold.store import RunStore
from tests.engines.ray_start import ended, needs_ray, sweep
from tests.faults.test_ray import Nodes, nodes
from tests.faults.test_ray_spans import outcomes

__all__ = ["nodes"]

pytestmark = [pytest.mark.nightly, needs_ray, pytest.mark.timeout(900)]

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)

HOURS = 5


@pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed")
@pytest.mark.parametrize("sign", ["+", "-"])
def test_order_and_durations_are_right(root: Path, tmp_path: Path, nodes: Nodes, sign: str) -> None:
    nodes("set", "LD_PRELOAD", str(LIBRARY))
    nodes("set", "FAKETIME", f"{sign}{HOURS}h")
    nodes("set", "FAKETIME_DONT_FAKE_MONOTONIC", "1")
    nodes("add", "one")
    expected = ended(sweep("plain", "process", tmp_path / "process"))
    begun, begun_at = time.monotonic(), time.time()
    assert ended(sweep("plain", "ray", root, nodes.address, N_JOBS="2")) == expected
    passed = time.monotonic() - begun
    assert outcomes(root) == ["ok"] * 6
    with RunStore.read(root) as store:
        attempts, events = [*store.attempts()], [*store.events()]
        results = [*store.results().values()]
        shifted = [
            float((root / item.job_id / "log.txt").read_text().split("the time is ")[1].split()[0])
            for item in attempts
            if item.node == "one"
        ]
    assert shifted
    assert all(abs(item - begun_at) > (HOURS - 1) * 3600 for item in shifted)
    assert all(0 <= item.started <= (item.ended or -1) <= passed for item in attempts)
    assert [item.at for item in events] == sorted(item.at for item in events)
    assert all(0 <= item.at <= passed for item in events)
    assert all(0 < sum(epoch.seconds for epoch in item.epochs) <= passed for item in results)
