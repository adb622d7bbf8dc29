"""Running jobs make room for other processes: the rule, and the sweep that applies it."""

from __future__ import annotations

import json
import queue
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckfold import Result, RunStore
from asynckfold.cli import main
from asynckfold.jobs.messages import JobStart
from asynckfold.jobs.placement import Load
from asynckfold.results.report.figures import _lanes
from asynckfold.results.report.summary import summarize
from asynckfold.results.utilization import packing_of
from asynckfold.scheduling.preemption import HeldCores, reassign_cores
from tests.results.test_utilization import CHOICE, FOLDS, PLAN, TARGETS
from tests.scheduling.test_place import NAMES
from tests.size import examples
from tests.sweep.test_loop import Moving, done, driven, store
from tests.synthetic import FakeClockStore

__all__ = ["store"]  # fixtures

# The rule


@st.composite
def machines(draw: st.DrawFn) -> tuple[dict[str, HeldCores], Load, list[int]]:
    """Jobs that hold each core once, cores that are idle now, and cores of jobs about to start."""
    cores = draw(st.permutations(range(8)))
    running, at = {}, 0
    for name in "abcdef"[: draw(st.integers(0, 6))]:
        width = draw(st.integers(1, 3))
        if at + width > len(cores):
            break
        running[name] = HeldCores(tuple(cores[at : at + width]), draw(st.booleans()))
        at += width
    fixed = cores[at : at + draw(st.integers(0, 2))]
    idle = draw(st.permutations(range(8)))[: draw(st.integers(0, 8))]
    return running, Load(tuple(range(8)), tuple(idle), 1), fixed


def after(
    running: Mapping[str, HeldCores], changes: Mapping[str, tuple[int, ...]]
) -> dict[str, HeldCores]:
    return {
        name: replace(held, cores=changes[name] or held.cores, paused=not changes[name])
        if name in changes
        else held
        for name, held in running.items()
    }


@given(machines())
def test_laws_of_making_room(machine: tuple[dict[str, HeldCores], Load, list[int]]) -> None:
    running, load, cores_of_starting = machine
    fixed = [HeldCores((core,)) for core in cores_of_starting]
    changes = reassign_cores(running, load, fixed)
    found = after(running, changes)
    active = [held for held in found.values() if not held.paused]
    # At least one goes on, and nothing that is not disturbed changes.
    assert active or not running
    calm = {
        name for name, held in running.items() if not held.paused and {*held.cores} <= {*load.idle}
    }
    assert not calm & changes.keys()
    # No core twice, as many cores as before, and beside others nobody but the only one.
    cores = [core for held in active for core in held.cores]
    assert len(set(cores)) == len(cores)
    assert all(len(found[name].cores) == len(held.cores) for name, held in running.items())
    assert len(active) == 1 or all({*held.cores} <= {*load.idle} for held in active)
    # What moves does not go to a core that is taken.
    assert (
        not {core for name in changes for core in changes[name]} & {*cores_of_starting}
        or len(active) == 1
    )
    # It settles at once.
    assert reassign_cores(found, load, fixed) == {}


@st.composite
def crowds(draw: st.DrawFn) -> tuple[dict[str, HeldCores], Load]:
    """Jobs on some nodes, of which one is not seen now, and the cores that are idle."""
    running = {}
    for name in NAMES:
        cores = draw(st.permutations(range(4)))
        for number in range(draw(st.integers(0, 2))):
            held = tuple(cores[2 * number : 2 * number + draw(st.integers(1, 2))])
            running[f"{name}{number}"] = HeldCores(held, draw(st.booleans()), name)
    idle = st.sets(st.integers(0, 3)).map(tuple)
    nodes = [Load((0, 1, 2, 3), draw(idle), 1, node=name) for name in NAMES[:2]]
    return running, replace(nodes[0], peers=tuple(nodes[1:]))


@settings(max_examples=examples(500))
@given(crowds())
def test_jobs_move_on_their_node_only_and_one_goes_on_in_the_cluster(
    crowd: tuple[dict[str, HeldCores], Load],
) -> None:
    running, load = crowd
    changes = reassign_cores(running, load)
    found = after(running, changes)
    assert not any(name.startswith("z") for name in changes)
    active = [held for held in found.values() if not held.paused and held.node != "z"]
    assert active or not any(held.node != "z" for held in running.values())
    for seen in load.nodes:
        cores = [core for held in active if held.node == seen.node for core in held.cores]
        assert len(set(cores)) == len(cores)
        assert set(cores) <= set(seen.idle) or len(active) == 1
    assert reassign_cores(found, load) == {}


# The sweep


def test_jobs_move_pause_and_go_on_as_others_come_and_go(store: RunStore) -> None:
    names = [job.id for job in store.reader.plan.jobs][:3]
    engine = Moving(done, queue.SimpleQueue())
    sweep, _ = driven(store, engine, yields=True)

    def see(*idle: int) -> list[tuple[str, tuple[int, ...]]]:
        engine.idle, engine.shifts = idle, []
        sweep.step(0.001)
        return [*engine.shifts]

    engine.idle = (0, 1)
    sweep.step(0.001)
    assert [item.job.id for _, item in engine.waiting] == names[:2]
    assert see(1, 2) == []  # no worker has it in hand yet
    for _, item in engine.waiting:
        engine.inbox.put(JobStart(item.job.id, 1, 7))
    see(0, 1)
    assert see(1, 2) == [(names[0], (2,))]
    assert see(1) == [(names[0], ())]
    assert see() == []  # one goes on beside others
    assert see(0) == [(names[1], (0,))]
    assert len(engine.waiting) == 2  # nothing starts while one pauses
    engine.end(engine.waiting.pop(1))
    assert see() == []  # its end is heard now
    assert see() == [(names[0], (2,))]
    engine.end(engine.waiting.pop(0))
    sweep.step(0.001)
    kinds = [event.kind for event in store.reader.events()]
    assert [kind for kind in kinds if kind in ("moved", "paused", "resumed")] == [
        "moved", "paused", "moved", "resumed",
    ]  # fmt: skip
    assert store.reader.results()[names[0]].cores == (2,)
    assert store.reader.results()[names[1]].cores == (0,)
    sweep.leave()


def test_cores_to_which_a_job_moved_are_reported_counted_and_drawn(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, other = "A/cosine/fold-0", "B/cosine/fold-0"
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        store.begin(PLAN, FOLDS, TARGETS, {"decision": CHOICE})
        store.clock = 1.0
        number = store.start_attempt(name, (0,), 1, "cpu", 5.0)
        store.start_attempt(other, (1,), 1, "cpu", 5.0)
        store.clock = 3.0
        store.end_attempt(other, 1, "died")
        store.moved(name, number, (1,))
        store.flush()
        assert main(["status", str(root), "--json"]) == 0
        (job,) = json.loads(capsys.readouterr().out)["running_jobs"]
        store.clock = 8.0
        store.record(Result(name, number, "done", {"accuracy": 1.0}))
        found = packing_of(store.reader)
        (item,) = [item for item in store.reader.attempts() if item.job_id == name]
        bars = summarize(store.reader).bars
    assert (job["cores"], job["threads"]) == ([1], 1)
    assert item.changes == ((3.0, (1,)),)
    assert (item.cores, item.last_cores) == ((0,), (1,))
    assert found is not None
    assert found.core_seconds == pytest.approx(7 + 2)
    assert {
        label: sorted((piece.start, piece.end) for piece in row) for label, row in _lanes(bars)
    } == {"core 0": [(1, 3)], "core 1": [(1, 3), (3, 8)]}
