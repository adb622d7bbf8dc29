"""The plan of a cluster: its threads and groups; and that of one machine, which stays as it was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from asynckfold import Fold, InputError, Plan, TrainerParams
from asynckfold.cli.plan import _lines, _numbers
from asynckfold.errors import refuse
from asynckfold.jobs.decoding import decoded, encoded, parsed
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import NodeSize
from asynckfold.planning.choice import choose, choose_devices
from asynckfold.planning.feasibility import node_problems
from asynckfold.planning.forecast import Forecast, forecast, predicted
from asynckfold.planning.fusion_groups import group
from asynckfold.planning.fusion_rule import Fuse
from asynckfold.planning.workload import Choice, Workload
from tests.toy import make_jobs

SMALL, MEDIUM, LARGE, HUGE = 1_000_000, 100_000_000, 2_000_000_000, 30_000_000_000


@dataclass(frozen=True)
class Shape:
    """A sweep, and what the caller asks for."""

    flops: dict[str, int]
    cores: int
    folds: int = 5
    schedules: int = 1
    epochs: int = 3
    gpus: int = 0
    devices: tuple[str, ...] = ("cpu",)
    threads: int | None = None
    fuse: Fuse = "auto"
    params: tuple[tuple[str, Any], ...] = ()

    def work(self) -> Workload:
        """Return the sweep, undecided."""
        names = list(self.flops)
        folds = tuple(
            Fold(0, index, np.arange(3200), np.arange(100)) for index in range(self.folds)
        )
        jobs = make_jobs(names, [f"s{number}" for number in range(self.schedules)], folds, 0)
        params = TrainerParams(epochs=self.epochs, **dict(self.params))
        plan = Plan(jobs, params, 32, 1, 0, "cpu", ("accuracy",), "d", "f")
        recipe = {"architecture": {name: f"{name} {count}" for name, count in self.flops.items()}}
        steps, memory = dict.fromkeys(names, 0.001), dict.fromkeys(names, 100)
        refusals = {name: "" if count < LARGE else "large" for name, count in self.flops.items()}
        facts = Facts(recipe, steps, memory, flops=self.flops, fusible=refusals)
        return Workload(plan, folds, facts, self.cores, self.gpus)

    def planned(self, work: Workload | None = None, before: Choice | None = None) -> Forecast:
        """Decide all, and predict the sweep."""
        work = work or self.work()
        devices = choose_devices(work, self.devices, None)
        work = replace(work, plan=work.plan.with_devices(devices.kinds))
        choice = choose(work, self.threads, before, None)
        groups = group(work, choice, None, self.fuse, 1 << 40)
        return forecast(work, predicted(work, choice, groups), groups)


SWEEPS = {
    "one core": Shape({"a": SMALL, "b": HUGE}, 1),
    "two cores": Shape({"a": LARGE}, 2),
    "small models in groups": Shape({"a": SMALL, "b": MEDIUM}, 2, 6, 4),
    "small and large": Shape({"a": SMALL, "b": HUGE}, 4, 10, 2),
    "few large jobs": Shape({"a": HUGE}, 16, 3),
    "the last jobs": Shape({"a": HUGE}, 4, 5),
    "an odd number of cores": Shape({"a": MEDIUM, "b": LARGE, "c": HUGE}, 7, 5, 3),
    "many jobs": Shape({"a": MEDIUM, "b": LARGE}, 16, 10, 30),
    "more cores than jobs": Shape({"a": SMALL, "b": MEDIUM}, 49, 10, 2, fuse=True),
    "threads as asked": Shape({"a": SMALL, "b": HUGE}, 12, 10, 3, threads=6, fuse=True),
    "groups as asked": Shape({"a": SMALL}, 8, 10, 2, fuse=4),
    "processes": Shape(
        {"a": MEDIUM}, 4, params=(("trainer", "averaging"), ("processes", 2)), fuse=False
    ),
    "a GPU and cores": Shape({"a": SMALL, "b": HUGE}, 4, 5, 2, gpus=1, devices=("cpu", "cuda")),
    "two GPUs": Shape({"a": LARGE, "b": HUGE}, 6, gpus=2, devices=("cuda",)),
}

DECIDED: dict[str, tuple[dict[str, int], dict[str, int], list[int]]] = {
    "one core": ({"a": 1, "b": 1}, {}, [5]),
    "two cores": ({"a": 1}, {"a/s0/fold-4": 2}, []),
    "small models in groups": ({"a": 1, "b": 1}, {}, [8] * 6),
    "small and large": ({"a": 1, "b": 1}, {}, [5] * 4),
    "few large jobs": ({"a": 5}, {}, []),
    "the last jobs": ({"a": 1}, {"a/s0/fold-4": 4}, []),
    "an odd number of cores": ({"a": 1, "b": 1, "c": 1}, {}, [2, 2, 2, 3, 2, 2, 2]),
    "many jobs": ({"a": 1, "b": 1}, {}, [10] * 30),
    "more cores than jobs": ({"a": 1, "b": 2}, {}, []),
    "threads as asked": ({"a": 6, "b": 6}, {}, [10] * 3),
    "groups as asked": ({"a": 1}, {}, [4] * 5),
    "processes": ({"a": 1}, {}, [2]),
    "a GPU and cores": ({"a": 1, "b": 1}, {}, [2, 3, 3, 2]),
    "two GPUs": ({"a": 1, "b": 1}, {}, []),
}
"""Threads by model, of the last jobs, and widths of the groups: other ones have other bits."""


@pytest.mark.parametrize("name", SWEEPS)
def test_the_same_sweep_has_the_same_threads_and_groups(name: str) -> None:
    made = SWEEPS[name].planned()
    threads, last = made.choice.threads, made.choice.last_threads
    assert (threads, last, widths(made)) == DECIDED[name]


def on(shape: Shape, *nodes: int) -> Forecast:
    """Plan a sweep for nodes with these cores."""
    sizes = tuple(map(NodeSize, nodes))
    return shape.planned(replace(shape.work(), cores=min(nodes), nodes=sizes))


def widths(found: Forecast) -> list[int]:
    return [len(group) for group in found.plan.groups]


def test_groups_are_made_for_all_cores() -> None:
    shape = Shape({"a": SMALL}, 2, folds=6, schedules=4)
    assert widths(shape.planned()) == [8, 8, 8]
    found = on(shape, 2, 2, 2)
    assert widths(found) == [4] * 6
    assert {span.node for span in found.simulation.spans} == {"node-0", "node-1", "node-2"}
    assert found.choice.prediction.makespan < shape.planned().choice.prediction.makespan / 2
    # As many as one machine with as many cores would have, while threads fit on a node.
    assert found.plan.fingerprint == replace(shape, cores=6).planned().plan.fingerprint


@pytest.mark.parametrize("nodes", [(4, 4), (4, 4, 4), (4, 16), (1, 8)])
def test_threads_are_bounded_by_the_smallest_node(nodes: tuple[int, ...]) -> None:
    few = on(Shape({"a": HUGE}, 99, folds=2), *nodes)
    assert few.choice.threads["a"] == nodes[0]
    assert few.choice.cores == sum(nodes)
    assert few.choice.nodes == tuple(map(NodeSize, nodes))
    spans = few.simulation.spans
    assert all(len(span.cores) == nodes[0] and span.start == 0 for span in spans)
    # Many jobs fill all cores with one thread each.
    many = on(Shape({"a": HUGE}, 99, folds=10, schedules=20), *nodes)
    assert many.choice.threads["a"] == 1
    assert many.simulation.lower_bound > 0.9 * many.simulation.makespan


def test_the_last_jobs_get_the_cores_of_all_nodes_but_each_those_of_one() -> None:
    found = on(Shape({"a": HUGE}, 4, folds=10), 4, 4)
    assert found.choice.threads["a"] == 1
    # Eight of ten at once, and then two on two nodes.
    assert [*found.choice.last_threads.values()] == [4, 4]
    assert found.choice.why["a"].endswith("; the last jobs of a, 2, have 4")


def test_gpus_of_all_nodes_are_used_and_a_job_on_cores_has_none() -> None:
    sizes = (NodeSize(4, 1), NodeSize(4, 1))
    shape = Shape({"a": HUGE}, 4, folds=6, gpus=1, devices=("cuda",))
    found = shape.planned(replace(shape.work(), nodes=sizes))
    one = shape.planned()
    assert found.choice.prediction.makespan == pytest.approx(one.choice.prediction.makespan / 2)
    assert {(span.node, span.gpu) for span in found.simulation.spans} == {
        ("node-0", 0),
        ("node-1", 0),
    }
    part = replace(shape.work(), nodes=sizes).on("cpu")
    assert (part.gpus, part.all_gpus, part.all_cores) == (0, 0, 8)


def test_the_nodes_are_stored_with_the_choice_and_kept_for_added_models() -> None:
    shape = Shape({"a": SMALL}, 2, folds=6, schedules=4)
    first = on(shape, 2, 2, 2).choice
    again = decoded(Choice, parsed(encoded(first)))
    assert again == first
    more = replace(shape, flops={"a": SMALL, "b": HUGE})
    # As the caller does it: with the nodes of the choice, wherever the run goes on.
    work = replace(more.work(), nodes=again.nodes)
    found = more.planned(work, again)
    assert found.choice.nodes == first.nodes
    assert found.choice.cores == 6
    assert found.choice.threads["b"] <= 2


def test_a_job_that_no_node_can_hold_is_refused() -> None:
    params = (("trainer", "averaging"), ("processes", 6))
    plan = Shape({"a": SMALL}, 4, params=params).work().plan
    with pytest.raises(InputError) as refused:
        refuse(node_problems(plan, {"": 2, "big": 4, "other": 3}))
    text = str(refused.value)
    assert "each job must fit on one node of the cluster" in text
    assert "processes=6, and the largest node, big, has 4 cores" in text
    assert "Pass processes=4 or less, or add a larger node." in text
    assert not [*node_problems(plan, {"": 2, "big": 6})]
    assert not [*node_problems(plan, {})]
    wide = replace(Shape({"a": SMALL}, 4).work().plan, threads_per_job=3)
    with pytest.raises(InputError, match=r"3 threads, and the largest node, this machine, has 1 c"):
        refuse(node_problems(wide, {"": 1}))


def test_the_verb_plan_names_the_nodes() -> None:
    found = on(Shape({"a": SMALL}, 2, folds=6, schedules=4), 2, 4)
    told = [*_lines(found)]
    assert any("on 6 cores of 2 nodes, if they are idle" in line for line in told)
    lanes = [line.partition("  ")[0] for line in told[-7:-1]]
    cores = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert lanes == [f"node-{node}, core {core}" for node, core in cores]
    numbers = _numbers(found)
    assert numbers["nodes"] == [{"cores": 2, "gpus": 0}, {"cores": 4, "gpus": 0}]
    assert {span["node"] for span in numbers["spans"]} == {"node-0", "node-1"}
    alone = SWEEPS["two cores"].planned()
    assert any("on 2 cores, if they are idle" in line for line in _lines(alone))
    assert _numbers(alone)["nodes"] == []
    assert not any("node" in span for span in _numbers(alone)["spans"])
