"""A sweep over several nodes: where jobs start, what is recorded of it, and who shows it."""

from __future__ import annotations

import json
import math
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asynckfold import RunStore
from asynckfold.api.progress import SweepProgress, cores_in_use
from asynckfold.cli.status import lines, state_of
from asynckfold.engines.engine import Answer
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.messages import JobStart, Task
from asynckfold.jobs.placement import Gpu, Load, Placement
from asynckfold.results.tables import fold_rows
from tests.sweep.test_loop import done, driven, open_store, store

__all__ = ["store"]  # fixtures


def node(name: str, cores: int = 2, **changes: Any) -> Load:
    numbers = tuple(range(cores))
    found = Load(numbers, numbers, 1 << 40, use=(0.5,) * cores, own=0.5, node=name)
    return replace(found, **changes)


@dataclass
class Nodes:
    """An engine of several nodes that ends nothing by itself."""

    runs_in_submit, batch_seconds = False, None

    nodes: list[Load]
    inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    running: dict[Future[Answer], tuple[Placement, Sequence[Task]]] = field(default_factory=dict)
    shifts: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    now: float = 0.0

    def clock(self) -> float:
        return self.now

    def load(self, running: Sequence[Placement]) -> Load:
        return replace(self.nodes[0], peers=tuple(self.nodes[1:]))

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        future: Future[Answer] = Future()
        self.running[future] = (placement, tasks)
        self.inbox.put(JobStart(tasks[0].job.id, tasks[0].attempt, 7))
        return future

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        self.shifts.append((self.running[future][0].node, tuple(cores)))

    def where(self) -> list[tuple[str, tuple[int, ...]]]:
        return sorted((placement.node, placement.cores) for placement, _ in self.running.values())

    def end(self, name: str, error: Exception | None = None) -> None:
        """End what runs on a node."""
        for future in [key for key, (item, _) in self.running.items() if item.node == name]:
            _, tasks = self.running.pop(future)
            if error is None:
                future.set_result(Answer([done(task) for task in tasks], pid=1))
            else:
                future.set_exception(error)

    def close(self, grace_s: float = 0.0) -> None:
        for future, (_, tasks) in self.running.items():
            future.set_result(Answer([None] * len(tasks), pid=1))


def test_a_late_node_gets_work_at_the_next_tick_and_a_lost_one_frees_nothing(
    store: RunStore,
) -> None:
    engine = Nodes([node("x", 1), node("y", 1)])
    made, _ = driven(store, engine)
    made.step(0.0)
    assert engine.where() == [("x", (0,)), ("y", (0,))]
    engine.nodes.append(node("late", 2))
    made.step(0.0)
    assert engine.where() == [("late", (0,)), ("late", (1,)), ("x", (0,)), ("y", (0,))]
    lost = engine.nodes.pop(1)
    made.step(0.0)
    assert len(engine.running) == 4
    engine.end("y", WorkerDiedError(0, "node y is gone"))
    made.step(0.0)
    engine.now += 60
    made.step(0.0)
    assert "y" not in dict(engine.where())
    engine.nodes.append(lost)
    made.step(0.0)
    assert ("y", (0,)) in engine.where()
    while made.unfinished:
        for name in ("x", "y", "late"):
            engine.end(name)
        made.step(0.0)
    assert store.reader.counts()["done"] == 6
    (died,) = [event.text for event in store.reader.events() if event.kind == "died"]
    assert died.startswith("attempt 1 on y: ")


def test_attempts_record_their_node_and_one_machine_writes_what_it_wrote_before(
    tmp_path: Path,
) -> None:
    written = {}
    for name, nodes in {"cluster": [node("x"), node("y")], "machine": [node("", 4)]}.items():
        for held in open_store(tmp_path / name):
            made, _ = driven(held, engine := Nodes(nodes))
            made.step(0.0)
            assert len(engine.running) == 4
            found = {item.job_id: item.node for item in held.reader.attempts()}
            written[name] = found, held.reader.waiting
            for where in {load.node for load in nodes}:
                engine.end(where)
            made.step(0.1)
            made.leave()
        with RunStore.read(tmp_path / name) as reader:
            attempts, results = reader.attempts(), reader.results()
            assert {item.job_id: item.node for item in attempts} == found
            assert {job: item.node for job, item in results.items()} == found
            summaries = (tmp_path / name).glob("*/*/*/summary.json")
            told = [json.loads(path.read_text()).get("node", "") for path in summaries]
            assert sorted(told) == sorted(found.values())
            rows = [*fold_rows(reader.plan, results, None, math.nan)]
            assert [row.get("node", "") for row in rows] == [
                found.get(job.id, "") for job in reader.plan.jobs
            ]
            assert all(("node" in row) is (name == "cluster") for row in rows)
    nodes_of, waiting = written["cluster"]
    assert sorted(nodes_of.values()) == ["x", "x", "y", "y"]
    assert waiting is not None
    assert [item.node for item in waiting.peers] == ["y"]
    assert {*written["machine"][0].values()} == {""}


def test_status_names_the_nodes_where_there_are_several(store: RunStore) -> None:
    lost = node("lost", 0, blocked="node lost is lost")
    engine = Nodes([node("x", 1), node("y", 3, idle=(0,), gpus=(Gpu(0, 9, 9),)), lost])
    made, _ = driven(store, engine)
    made.step(0.0)
    found = state_of(store.reader)
    assert [(item["node"], item["cores"]) for item in found["running_jobs"]] == [
        ("x", (0,)),
        ("y", (0,)),
    ]
    assert found["idle"]["nodes"] == {
        "x": {"cores": [], "gpus": [], "neighbours": []},
        "y": {"cores": [], "gpus": [0], "neighbours": [1, 2]},
    }
    told = list(lines(found))
    (first, second) = [line for line in told if "done, core 0" in line]
    assert "core 0 on x, attempt 1" in first
    assert "core 0 on y, attempt 1" in second
    assert "  x: all cores busy" in told
    assert "  y: idle GPU 0; cores 1, 2 used by other processes" in told
    # Both nodes are full; the larger one tells why.
    assert told[-1] == "  4 jobs wait for other processes on cores 1, 2 (y)"
    made.leave()


def test_jobs_move_on_their_node_and_the_event_names_it(store: RunStore) -> None:
    engine = Nodes([node("x", 2, idle=(0,)), node("y", 2, idle=(0,))])
    made, _ = driven(store, engine, yields=True)
    made.step(0.001)
    engine.nodes[1] = node("y", 2, idle=(1,))
    made.step(0.001)
    assert engine.shifts == [("y", (1,))]
    engine.nodes[1] = node("y", 2, idle=())
    made.step(0.001)
    assert engine.shifts[1:] == [("y", ())]
    engine.nodes[1] = node("y", 2, idle=(0,))
    made.step(0.001)
    told = [event.text for event in store.reader.events()]
    assert told == [
        "from cores 0 to 1 of y",
        "other processes use its cores (1 of y)",
        "from cores 1 to 0 of y",
    ]
    made.leave()


def test_the_use_of_all_nodes_is_sampled_and_shown(store: RunStore) -> None:
    engine = Nodes([node("x", 1), node("y", 3, idle=(0, 1)), node("lost", 0, own=0.0)])
    made, watch = driven(store, engine)
    made.step(0.0)
    (sample,) = store.reader.samples()
    assert (sample.used, sample.own, len(sample.cores)) == (2.0, 1.0, 4)
    progress = SweepProgress(store.reader.plan, {}, [], {})
    for placement in watch.placements:
        progress.placed(placement)
    progress.load = engine.load([])
    assert cores_in_use(progress) == "jobs on 3 of 4 cores on 2 nodes, other programs on 1"
    assert [item.where for item in progress.placements] == [
        "core 0 of y",
        "core 0 of x",
        "core 1 of y",
    ]
    made.leave()


def test_a_job_out_of_memory_is_tried_again_alone_on_a_node(store: RunStore) -> None:
    engine = Nodes([node("x", 1), node("y", 1)])
    made, _ = driven(store, engine)
    made.step(0.0)
    engine.end("y", WorkerDiedError(7, "SIGKILL", "oom"))
    made.step(0.0)
    (told,) = [event.text for event in store.reader.events() if event.kind == "oom_retry"]
    assert told.startswith("attempt 1 on y: ")
    assert told.endswith("; retried alone on a node")
    made.leave()
