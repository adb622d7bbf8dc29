"""Running jobs take cores that became free, and give them back: only where it was asked for."""

from __future__ import annotations

import json
import os
import queue
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asynckfold import AsyncKFold, InputError
from asynckfold.cli import main
from asynckfold.engines import pool as pools
from asynckfold.engines.engine import Answer
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import ProcessEngine
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.cost import Cost
from asynckfold.jobs.messages import JobEnded, Progress, Resized, Started, Task
from asynckfold.jobs.placement import Load, Placement, Request
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.reproducibility import ELASTIC, claim
from asynckfold.jobs.result import DIVERGED, DONE, Result
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.planning.thread_search import TIE
from asynckfold.results.compare import compare_runs
from asynckfold.results.report.charts.timeline import _lanes
from asynckfold.results.report.sentences import ran_on
from asynckfold.results.report.summary import summarize
from asynckfold.results.utilization import packing_of
from asynckfold.scheduling.elastic import Elastic, steps_of, stretched, worth
from asynckfold.store import RunReader, RunStore
from asynckfold.store.records import HELD, held_text
from asynckfold.sweep.loop import Sweep
from asynckfold.system.file_descriptors import nameless_file
from asynckfold.system.heartbeat import Pulse, Pulses
from asynckfold.system.hysteresis import MOST_CHANGES
from asynckfold.system.limits import allowed_cores
from asynckfold.system.machine import Machine
from asynckfold.training.worker import main as workers
from tests.results.test_utilization import CHOICE, FOLDS, PLAN, TARGETS
from tests.scheduling.test_preemption import (
    Slow,
    affinities,
    look,
    needs_two_cores,
    wait_for,
)
from tests.sweep.test_fusion_groups import ALONE, GROUP
from tests.sweep.test_fusion_groups import store as group_store
from tests.sweep.test_loop import Recording, done, open_store, store
from tests.synthetic import FakeClockStore, Synthetic, write_run
from tests.toy import Tiny, adam, samples, task, toy_bundle

__all__ = ["group_store", "store"]  # fixtures

CORES = 6

# The rule


@st.composite
def step_seconds(draw: st.DrawFn) -> list[float]:
    """Seconds of a step with 1 to so many threads: any that a probe may find."""
    return draw(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=CORES))


@st.composite
def machines(draw: st.DrawFn) -> tuple[dict[str, Elastic], Load, list[int], list[int]]:
    """Jobs on cores of their own, idle cores, those of them that are free, and wanted ones."""
    order, at = draw(st.permutations(range(CORES))), 0
    running: dict[str, Elastic] = {}
    for name in "abcd"[: draw(st.integers(0, 4))]:
        width = draw(st.integers(1, 3))
        if at + width > CORES:
            break
        cores = tuple(order[at : at + width])
        threads = draw(st.integers(1, width))
        settled, slower = draw(st.booleans()), draw(st.integers(0, 3)) == 0
        running[name] = Elastic(cores, threads, draw(step_seconds()), settled, slower)
        at += width
    idle = draw(st.permutations(range(CORES)))[: draw(st.integers(0, CORES))]
    free = [core for core in idle if core in order[at:]]
    lent = [core for job in running.values() for core in job.cores[job.threads :]]
    wanted = draw(st.lists(st.sampled_from(lent), unique=True)) if lent else []
    return running, Load(tuple(range(CORES)), tuple(idle), 1), free, wanted


def changed(
    running: Mapping[str, Elastic], changes: Mapping[str, tuple[int, ...]]
) -> dict[str, Elastic]:
    return {name: replace(job, cores=changes.get(name, job.cores)) for name, job in running.items()}


@given(machines())
def test_laws_of_stretching(
    machine: tuple[dict[str, Elastic], Load, list[int], list[int]],
) -> None:
    running, load, free, wanted = machine
    changes = stretched(running, load, free, wanted)
    after = changed(running, changes)
    held = [core for job in after.values() for core in job.cores]
    # No core twice, and none that was neither held by the job nor free.
    assert len(set(held)) == len(held)
    assert all({*after[name].cores} <= {*job.cores, *free} for name, job in running.items())
    assert changes.keys() == {name for name, job in running.items() if after[name] != job}
    good = {*load.idle} - {*wanted}
    for name, job in running.items():
        now = after[name].cores
        # Never fewer threads than planned; others and what is wanted get their cores.
        assert len(now) >= job.threads
        assert good.issuperset(now[job.threads :])
        assert len(now) == job.threads or not job.slower
        # What grows pays; what is disturbed or settled does not grow.
        if len(now) > len(job.cores):
            assert good.issuperset(job.cores)
            assert not job.settled
            assert not job.slower
            assert job.steps[len(now) - 1] * TIE < job.steps[len(job.cores) - 1]
            assert now[: len(job.cores)] == job.cores
    # It settles: what was given back is wanted or used by others, and not taken again.
    rest = [core for core in free if core not in held]
    again = stretched(after, load, rest, wanted)
    assert not {name for name in again if name not in changes} or changes
    final = changed(after, again)
    taken = [core for job in final.values() for core in job.cores]
    rest = [core for core in free if core not in taken]
    assert stretched(final, load, rest, wanted) == {}


@given(machines())
def test_what_is_lent_is_given_back_whole_where_all_of_it_is_wanted(
    machine: tuple[dict[str, Elastic], Load, list[int], list[int]],
) -> None:
    running, load, _, _ = machine
    lent = [core for job in running.values() for core in job.cores[job.threads :]]
    changes = stretched(running, load, [], lent)
    assert all(len(cores) == running[name].threads for name, cores in changes.items())
    assert {name for name, job in running.items() if len(job.cores) > job.threads} == set(changes)


@given(step_seconds(), st.integers(1, CORES), st.integers(1, CORES))
def test_no_more_threads_than_pay(steps: list[float], threads: int, most: int) -> None:
    count = worth(steps, threads, most)
    assert count == threads or threads < count <= min(most, len(steps))
    ways = steps[threads - 1 : max(threads, most)]
    assert not ways or steps[count - 1] <= TIE * min(ways)
    assert all(step > TIE * min(ways) for step in steps[threads - 1 : count - 1])


def test_free_cores_are_shared_equally_and_the_last_to_end_has_the_larger_share() -> None:
    linear = [1 / count for count in range(1, 9)]
    load = Load(tuple(range(8)), tuple(range(8)), 1)
    jobs = {"a": Elastic((0,), 1, linear), "b": Elastic((1,), 1, linear)}
    assert stretched(jobs, load, [2, 3, 4]) == {"a": (0, 2, 3), "b": (1, 4)}
    # One that gains nothing leaves its share to the other.
    jobs["b"] = Elastic((1,), 1, [1.0] * 8)
    assert stretched(jobs, load, [2, 3, 4]) == {"a": (0, 2, 3, 4)}
    # Shares that bring nothing by themselves go to one.
    steps = [1.0, 1.0, 0.5]
    jobs = {"a": Elastic((0,), 1, steps), "b": Elastic((1,), 1, steps)}
    assert stretched(jobs, load, [2, 3]) == {"a": (0, 2, 3)}


# The sweep


@pytest.fixture(autouse=True)
def paces_are_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynckfold.scheduling.elastic.PACE_SECONDS", 0.0)


@dataclass
class Job:
    """What runs in the fake world: its cores, its threads, and what it was asked for."""

    placement: Placement
    task: Task
    cores: set[int]
    threads: int
    asks: int = 0
    asked: int = 0
    obeyed: int = 0
    batches: float = 0.0
    paused: bool = False


@dataclass
class World:
    """An engine that objects where a core is given twice, or threads are more than cores."""

    cores: int = CORES
    idle: tuple[int, ...] = tuple(range(CORES))
    memory: int = 1 << 40
    now: float = 0.0
    inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    running: dict[Future[Answer], Job] = field(default_factory=dict)
    most_threads: int = 0
    speed: float = 1.0
    others: tuple[int, ...] = ()

    def clock(self) -> float:
        return self.now

    def load(self, running: Sequence[Placement]) -> Load:
        self.now += 0.1
        for job in self.running.values():
            if not job.paused:
                # One batch for each thread, or as slow as it is told to be.
                job.batches += 1 if job.threads == 1 else self.speed * job.threads
                name, attempt = job.task.job.id, job.task.attempt
                self.inbox.put(Progress(name, attempt, 1, 1, int(job.batches), 10**6, 0.5))
        # What ended, it hears of later.
        told = {core for item in running for core in item.cores}
        assert told >= {core for job in self.running.values() for core in job.cores}
        return Load(tuple(range(self.cores)), self.idle, self.memory, others=self.others)

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        future: Future[Answer] = Future()
        job = Job(placement, tasks[0], {*placement.cores}, placement.threads)
        self.running[future] = job
        self.check()
        self.inbox.put(Started(tasks[0].job.id, tasks[0].attempt, 7))
        return future

    def shift(
        self, future: Future[Answer], cores: Sequence[int], threads: int | None = None
    ) -> None:
        if future not in self.running:
            return  # it ended just now
        job = self.running[future]
        job.paused = not cores
        job.cores = {*cores} or job.cores
        if threads is not None:
            assert len(job.cores) >= threads
            job.asks, job.asked = job.asks + 1, threads

    def check(self) -> None:
        """No core is held twice, and nobody has more threads than cores."""
        held = [core for job in self.running.values() for core in job.cores if not job.paused]
        assert len(set(held)) == len(held)
        for job in self.running.values():
            assert job.placement.threads <= job.threads <= max(len(job.cores), 1)
            self.most_threads = max(self.most_threads, job.threads)

    def obey(self, job: Job) -> None:
        """The worker reaches the end of a batch."""
        if job.obeyed < job.asks and not job.paused:
            job.threads, job.obeyed = job.asked, job.asks
            self.inbox.put(Resized(job.task.job.id, job.task.attempt, job.asked, job.asks))

    def end(self, future: Future[Answer], found: Any = None) -> None:
        job = self.running.pop(future)
        if found is None:
            future.set_result(Answer([done(job.task)], pid=1))
        else:
            future.set_exception(found)

    def close(self, grace_s: float = 0.0) -> None:
        for future in list(self.running):
            job = self.running.pop(future)
            future.set_result(Answer([None for _ in job.placement.jobs], pid=1))


PAYS = {"A": [8.0, 4.0, 2.6, 2.0, 1.6, 1.3], "B": [8.0, 4.1, 3.0, 2.9, 2.9, 2.9]}
NEVER = {"A": [1.0] * CORES, "B": [1.0] * CORES}


Steps = Mapping[str, Sequence[float]]


def sweep_in(store: RunStore, world: World, steps: Steps | None = None, **changes: Any) -> Sweep:
    seconds = {job.id: float(9 - number) for number, job in enumerate(store.reader.plan.jobs)}
    requests = changes.pop("requests", {name: Request(name, seconds[name]) for name in seconds})
    return Sweep(
        store, world, world.inbox, requests, lambda result: result, Recording(), world.clock,
        steps=steps, **changes,
    )  # fmt: skip


def names_of(store: RunStore) -> list[str]:
    return [job.id for job in store.reader.plan.jobs]


def cores_of(world: World) -> dict[str, set[int]]:
    return {job.task.job.id: job.cores for job in world.running.values()}


def kinds_in(store: RunReader) -> list[str]:
    return [event.kind for event in store.events()]


def start_two_of_four(store: RunStore, world: World, sweep: Sweep) -> list[str]:
    """Let two jobs run beside two idle cores, all others being done."""
    names = names_of(store)
    sweep.step(0.001)
    for future, job in list(world.running.items()):
        if job.task.job.id in names[2:]:
            world.end(future)
    sweep.step(0.001)
    return names


def test_jobs_grow_onto_cores_that_became_free_and_give_them_back(store: RunStore) -> None:
    world = World(cores=4, idle=(0, 1, 2, 3))
    sweep = sweep_in(store, world, PAYS)
    names = names_of(store)
    sweep.step(0.001)
    assert cores_of(world) == {name: {core} for core, name in enumerate(names[:4])}
    first, second, third, fourth = list(world.running)
    sweep.step(0.001)
    for future in (second, third, fourth):
        world.end(future)
    sweep.step(0.001)  # it hears of their ends
    sweep.step(0.001)  # two more start, and the fourth core is lent to the one that ends last
    assert cores_of(world)[names[0]] == {0, 3}
    assert world.running[first].threads == 1  # between batches, not before
    world.obey(world.running[first])
    assert world.running[first].threads == 2
    # The death of another gives a core to it, until that is tried again.
    fifth = next(future for future, job in world.running.items() if job.task.job.id == names[4])
    world.end(fifth, WorkerDiedError(9, "SIGKILL"))
    sweep.step(0.001)
    sweep.step(0.001)
    assert sum(map(len, cores_of(world).values())) == 4
    world.now += 5
    sweep.step(0.001)  # the retry is due, and waits for the core that is asked for
    assert names[4] not in cores_of(world)
    assert store.reader.waiting is not None
    assert store.reader.waiting.jobs == {"cores: 4 of 4 busy with own jobs": 1}
    for job in list(world.running.values()):
        world.obey(job)
    sweep.step(0.001)
    sweep.step(0.001)
    assert names[4] in cores_of(world)
    assert {"grown", "shrunk"} <= set(kinds_in(store.reader))
    for future in list(world.running):
        world.end(future)
    sweep.run()
    assert store.reader.counts()["done"] == 6
    attempts = {item.job_id: item for item in store.reader.attempts() if item.attempt == 1}
    assert attempts[names[0]].cores == (0,)
    assert attempts[names[0]].changes[0][1] == (0, 3)
    assert store.reader.results()[names[0]].threads == 1


@pytest.mark.parametrize("steps", [None, {}, NEVER])
def test_nothing_changes_where_it_was_not_asked_for_or_does_not_pay(
    store: RunStore, steps: Steps | None
) -> None:
    world = World(cores=4, idle=(0, 1, 2, 3))
    sweep = sweep_in(store, world, steps)
    for _ in range(9):
        sweep.step(0.001)
        if world.running:
            world.end(next(iter(world.running)))
    sweep.run()
    assert all(job.asks == 0 for job in world.running.values())
    assert {*kinds_in(store.reader)}.isdisjoint(("grown", "shrunk"))
    assert all(item.changes == () for item in store.reader.attempts())


def test_a_job_gives_back_what_others_came_to(store: RunStore) -> None:
    world = World(cores=4, idle=(0, 1, 2, 3))
    sweep = sweep_in(store, world, PAYS)
    start_two_of_four(store, world, sweep)
    for future in list(world.running)[1:]:
        world.end(future)
    sweep.step(0.001)
    sweep.step(0.001)
    for future in list(world.running)[1:]:
        world.end(future)
    for _ in range(3):
        sweep.step(0.001)
        for job in list(world.running.values()):
            world.obey(job)
    (future,) = list(world.running)[:1]
    job = world.running[future]
    for other in list(world.running)[1:]:
        world.end(other)
    for _ in range(3):
        sweep.step(0.001)
        world.obey(job)
    assert job.cores == {0, 1, 2, 3}
    world.idle = (1, 2, 3)  # others come to the core that it began on
    for _ in range(2):
        sweep.step(0.001)
        world.obey(job)
    sweep.step(0.001)
    assert job.cores == {1, 2, 3}
    assert job.threads == 3
    world.idle = ()
    for _ in range(2):
        sweep.step(0.001)
        world.obey(job)
    sweep.step(0.001)
    assert (len(job.cores), job.threads) == (1, 1)
    # It gave back twice within a minute: only then it takes them again.
    assert kinds_in(store.reader).count("shrunk") == MOST_CHANGES
    world.idle = (0, 1, 2, 3)
    for _ in range(3):
        sweep.step(0.001)
        world.obey(job)
    assert len(job.cores) == 1
    world.now += 60
    sweep.step(0.001)
    assert job.cores == {0, 1, 2, 3}
    world.end(future)
    sweep.run()
    assert store.reader.counts()["done"] == 6


def test_an_answer_to_an_earlier_ask_frees_nothing(store: RunStore) -> None:
    world = World(cores=2, idle=(0, 1))
    sweep = sweep_in(store, world, PAYS)
    names = names_of(store)
    sweep.step(0.001)
    sweep.step(0.001)
    for _ in range(2):
        world.end(list(world.running)[1])
        sweep.step(0.001)
        sweep.step(0.001)
    while len(store.reader.finished()) < 5:
        world.end(list(world.running)[1])
        sweep.step(0.001)
        sweep.step(0.001)
    (job,) = world.running.values()
    assert (job.asks, job.cores) == (1, {0, 1})
    world.idle = (0,)
    sweep.step(0.001)
    assert (job.asks, job.asked) == (2, 1)
    # What its worker said of the first ask arrives only now.
    world.inbox.put(Resized(names[0], 1, 2, 1))
    sweep.step(0.001)
    assert job.cores == {0, 1}
    world.obey(job)
    sweep.step(0.001)
    assert job.cores == {0}
    world.end(next(iter(world.running)))
    sweep.run()


def two_left(store: RunStore, world: World, sweep: Sweep) -> Job:
    """Let all jobs end but the first, on one of two cores; return that."""
    sweep.step(0.001)
    while len(store.reader.finished()) < 5:
        world.end(list(world.running)[1])
        sweep.step(0.001)
        sweep.step(0.001)
    (job,) = world.running.values()
    return job


def test_what_makes_a_job_slower_is_given_back_for_good(store: RunStore) -> None:
    world = World(cores=2, idle=(0, 1), speed=0.1)
    sweep = sweep_in(store, world, PAYS)
    job = two_left(store, world, sweep)
    for _ in range(99):
        world.obey(job)
        sweep.step(0.001)
    assert kinds_in(store.reader) == ["grown", "shrunk"]
    assert (job.threads, job.cores) == (1, {0})
    assert "with more it was slower" in store.reader.events()[-1].text
    world.end(next(iter(world.running)))
    sweep.run()


def test_a_pace_is_to_be_known_before_a_job_grows(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynckfold.scheduling.elastic.PACE_SECONDS", 60.0)
    world = World(cores=2, idle=(0, 1))
    sweep = sweep_in(store, world, PAYS)
    job = two_left(store, world, sweep)
    assert job.asks == 0
    world.now += 60
    sweep.step(0.001)
    sweep.step(0.001)
    assert job.asks == 1
    world.end(next(iter(world.running)))
    sweep.run()


def test_nobody_grows_onto_a_core_of_others_whatever_was_asked_for(store: RunStore) -> None:
    """Threads wait for each other: for the one beside which somebody else is."""
    world = World(cores=2, idle=(0, 1), others=(1,))
    sweep = sweep_in(store, world, PAYS)
    job = two_left(store, world, sweep)
    for _ in range(5):
        sweep.step(0.001)
    assert job.asks == 0
    world.others = ()
    sweep.step(0.001)
    assert job.asked == 2
    world.obey(job)
    world.others = (0,)
    for _ in range(2):
        sweep.step(0.001)
        world.obey(job)
    sweep.step(0.001)
    assert (job.threads, job.cores) == (1, {1})
    world.end(next(iter(world.running)))
    sweep.run()


def test_a_job_on_a_gpu_and_one_that_was_short_of_memory_do_not_grow(store: RunStore) -> None:
    names = names_of(store)
    requests = {name: Request(name, 1.0, alone=True) for name in names}
    world = World(cores=4, idle=(0, 1, 2, 3))
    sweep = sweep_in(store, world, PAYS, requests=requests)
    for _ in names:
        sweep.step(0.001)
        sweep.step(0.001)
        (future,) = world.running
        assert world.running[future].cores == {0}
        world.end(future)
    sweep.run()
    assert "grown" not in kinds_in(store.reader)


def test_a_group_grows_as_one(group_store: RunStore) -> None:
    world = World(cores=3, idle=(0, 1, 2))
    sweep = sweep_in(group_store, world, {"A": [3.0, 2.0, 1.0]})
    sweep.step(0.001)
    (group, alone) = world.running
    assert world.running[group].placement.jobs == GROUP
    world.inbox.put(JobEnded(Result(GROUP[1], 1, DIVERGED, error="nan", pid=7)))
    world.end(alone)
    for _ in range(3):
        sweep.step(0.001)
        world.obey(world.running[group])
    assert world.running[group].cores == {0, 1, 2}
    assert world.running[group].threads == 3
    held = {item.job_id: item.last_cores for item in group_store.reader.attempts()}
    assert held == {**dict.fromkeys(GROUP, held[GROUP[0]]), ALONE: (1,)}
    assert {*held[GROUP[0]]} == {0, 1, 2}
    sweep.leave()


ACTIONS = st.one_of(
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("die"), st.integers(0, 5)),
    st.tuples(st.just("batch"), st.integers(0, 5)),
    st.tuples(st.just("time"), st.sampled_from([0, 1, 3, 61])),
    st.tuples(st.just("idle"), st.integers(0, 2**CORES - 1)),
    st.tuples(st.just("memory"), st.sampled_from([0, 30, 1 << 40])),
)


@given(
    st.lists(ACTIONS, max_size=60),
    st.lists(st.integers(1, 2), min_size=6, max_size=6),
    st.booleans(),
)
@settings(max_examples=60)
def test_no_core_is_held_twice_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory,
    actions: list[tuple[str, int]],
    threads: list[int],
    yields: bool,
) -> None:
    for opened in open_store(tmp_path_factory.mktemp("run") / "run"):
        happens(opened, actions, threads, yields)


def happens(
    store: RunStore, actions: Sequence[tuple[str, int]], threads: Sequence[int], yields: bool
) -> None:
    store.file.connection.execute("PRAGMA synchronous=OFF")
    world = World()
    requests = {
        job.id: Request(job.id, float(number), count, memory=10)
        for number, (job, count) in enumerate(zip(store.reader.plan.jobs, threads, strict=True))
    }
    sweep = sweep_in(store, world, PAYS, requests=requests, yields=yields)
    for what, which in actions:
        jobs = list(world.running)
        future = jobs[which % len(jobs)] if jobs else None
        if what == "time":
            world.now += which
        elif what == "idle":
            world.idle = tuple(core for core in range(CORES) if which >> core & 1)
        elif what == "memory":
            world.memory = which
        elif future is not None and what == "batch":
            world.obey(world.running[future])
        elif future is not None:
            world.end(future, WorkerDiedError(9, "SIGKILL") if what == "die" else None)
        if sweep.unfinished:
            sweep.step(0.0)
            world.check()
    world.idle, world.memory = tuple(range(CORES)), 1 << 40
    for _ in range(200):
        if not sweep.unfinished:
            break
        world.now += 3
        for job in list(world.running.values()):
            world.obey(job)
        sweep.step(0.0)
        running = [job for job in world.running.values() if not job.paused]
        assert running or not world.running
        if world.running and all(job.obeyed == job.asks for job in world.running.values()):
            world.end(next(iter(world.running)))
    assert not sweep.unfinished, "it does not end"
    assert store.reader.counts()["pending"] == 0


# Real workers


def test_asks_are_counted_and_begin_anew() -> None:
    file = nameless_file(size=Pulses.SIZE)
    pulses = Pulses(file)
    os.close(file)
    pulse, other = pulses[3], pulses[4]
    assert pulse.asked_threads == (0, 0)
    pulse.ask_threads(4)
    pulse.ask_threads(4)
    assert pulses[3].asked_threads == (2, 4)
    pulse.ask_threads(0)
    assert pulse.asked_threads == (0, 0)
    assert (other.asked_threads, other.value) == ((0, 0), 0)


@pytest.fixture
def threads_stay() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_stay")
def test_a_worker_never_takes_more_threads_than_it_has_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    pulse, affinity = Pulse(), {0}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: affinity)
    found = workers._Worker(type("Pipe", (), {"send": told.append})(), lambda: False, pulse)  # type: ignore[arg-type]
    found.tasks = [task(plan_job())]
    torch.set_num_threads(1)
    found.resize()
    pulse.ask_threads(2)
    found.resize()
    assert (torch.get_num_threads(), told) == (1, [])
    affinity = {0, 1}
    found.resize()
    found.resize()
    assert torch.get_num_threads() == 2
    affinity = set()  # it gives back whatever cores it has
    pulse.ask_threads(1)
    found.resize()
    assert torch.get_num_threads() == 1
    name = plan_job().id
    assert told == [("news", Resized(name, 1, 2, 1)), ("news", Resized(name, 1, 1, 2))]


def plan_job() -> Any:
    return PLAN.jobs[0]


@needs_two_cores
def test_a_real_worker_changes_its_threads_between_two_batches(root: Path) -> None:
    cores, news = sorted(os.sched_getaffinity(0)), []
    pool = WorkerPool()
    with toy_bundle(root, models={"Slow": Slow}, epochs=200) as (bundle, data):
        job = bundle.plan.jobs[0]
        engine = ProcessEngine(bundle, data.handle().fds, look, news.append, pool)
        future = engine.submit(Placement((job.id,), (cores[0],)), [task(job)])
        wait_for(lambda: any(isinstance(item, Started) for item in news))
        engine.shift(future, cores, 2)
        wait_for(lambda: Resized(job.id, 1, 2, 1) in news)
        (worker,) = pool.workers
        assert affinities(worker.pid) == {frozenset(cores)}
        engine.shift(future, cores, 1)
        wait_for(lambda: Resized(job.id, 1, 1, 2) in news)
        engine.shift(future, cores[:1])
        wait_for(lambda: affinities(worker.pid) == {frozenset(cores[:1])})
        engine.close(30)
        assert future.result(1).results == [None]
        # The next placement begins with its own threads, whatever was asked of the last one.
        engine = ProcessEngine(bundle, data.handle().fds, look, news.append, pool)
        again = engine.submit(Placement((job.id,), ()), [replace(task(job), attempt=2)])
        before = worker.pulse.value
        wait_for(lambda: worker.pulse.value > before + 6)
        assert worker.pulse.asked_threads == (0, 0)
        engine.close(30)
        again.result(1)
    pool.close()
    assert [item.ask for item in news if isinstance(item, Resized)] == [1, 2]


class Watched(Tiny):
    """Writes down its threads and cores; trains slowly until one job had 1, 2 and 1 threads.

    The job that first trained beside another dies once, so that this grows until it is tried again.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.steps, self.company = folder, 0, 0
        self.seen: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        ended = self.folder / "ended"
        if self.training and self.steps > 4 and not ended.exists():
            self.watch(ended)
            time.sleep(0.1)
        return super().forward(inputs)

    def watch(self, ended: Path) -> None:
        threads = torch.get_num_threads()
        assert threads <= len(os.sched_getaffinity(0))
        if self.seen[-1:] != [threads]:
            self.seen.append(threads)
        (self.folder / str(os.getpid())).touch()
        self.company += len([*self.folder.glob("[0-9]*")]) > 1
        if self.company > 20:
            try:
                (self.folder / "victim").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        if self.seen[:3] == [1, 2, 1]:
            ended.write_text(json.dumps(self.seen))


def train(root: Path, folder: Path, **given: Any) -> Any:
    folder.mkdir()
    kfold = AsyncKFold(
        2, samples(60), root, nn.CrossEntropyLoss(), 10,
        baseline=None, verbose=0, threads_per_job=1, n_jobs=2, **given,
    )  # fmt: skip
    return kfold({"model": lambda: Watched(folder)}, ["constant"], adam, {"epochs": 40})


@pytest.fixture
def no_worker_stays() -> Iterator[None]:
    yield
    pools.close_warm()


@needs_two_cores
@pytest.mark.usefixtures("no_worker_stays")
def test_a_real_job_grows_and_shrinks_between_batches_and_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No model that is small enough for a test gains by threads, and others may be here.
    monkeypatch.setattr("asynckfold.api.planner.steps_of", lambda cost, cores: (2.0, 1.0))
    monkeypatch.setattr(Machine, "_left", lambda machine: frozenset())
    root = tmp_path / "run"
    results = train(root, tmp_path / "seen", elastic=True)
    assert json.loads((tmp_path / "seen" / "ended").read_text()) == [1, 2, 1]
    assert {result.status for result in results.results.values()} == {DONE}
    assert not results.bit_identity.claimed
    assert "elastic" in str(results.bit_identity)
    with RunStore.read(root) as store:
        kinds, attempts = kinds_in(store), store.attempts()
        assert packing_of(store) is not None
    assert kinds.index("grown") < kinds.index("shrunk")
    assert {"died"} <= set(kinds)
    (grown,) = [item for item in attempts if len(item.changes) > 1]
    assert [len(cores) for _, cores in grown.changes[:2]] == [2, 1]
    assert (grown.outcome, grown.threads) == ("ok", 1)
    assert main(["status", str(root)]) == 0


@needs_two_cores
@pytest.mark.usefixtures("no_worker_stays")
def test_by_default_no_job_ever_changes_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asynckfold.api.planner.steps_of", lambda cost, cores: (2.0, 1.0))
    monkeypatch.setattr(Pulse, "ask_threads", lambda pulse, threads: forbid(threads))
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "ended").touch()
    kfold = AsyncKFold(
        3, samples(60), tmp_path / "run", nn.CrossEntropyLoss(), 10,
        baseline=None, verbose=0, threads_per_job=1, n_jobs=2,
    )  # fmt: skip
    results = kfold(
        {"model": lambda: Watched(tmp_path / "seen")}, ["constant"], adam, {"epochs": 3}
    )
    assert results.bit_identity.claimed
    with RunStore.read(tmp_path / "run") as store:
        assert all(item.changes == () for item in store.attempts())
        assert {*kinds_in(store)}.isdisjoint(("grown", "shrunk"))


def forbid(threads: int) -> None:
    assert threads == 0, "a job is asked for other threads"


# What is told


def test_cores_that_were_lent_are_counted_and_drawn(root: Path) -> None:
    name, other = "A/cosine/fold-0", "B/cosine/fold-0"
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        store.begin(PLAN, FOLDS, TARGETS, {"decision": CHOICE.to_dict()})
        store.clock = 1.0
        number = store.start_attempt(name, (0,), 1, "cpu", 5.0)
        store.start_attempt(other, (1,), 1, "cpu", 5.0)
        store.clock = 3.0
        store.end_attempt(other, 1, "died")
        store.event(HELD, held_text(number, (0, 1)), name)
        store.clock = 7.0
        store.event(HELD, held_text(number, (1,)), name)
        store.clock = 8.0
        store.record(Result(name, number, DONE, {"accuracy": 1.0}))
        store.set_software({ELASTIC: "yes"})
        assert "held" not in kinds_in(store.reader)
        found = packing_of(store.reader)
        (item,) = [item for item in store.reader.attempts() if item.job_id == name]
        bars = summarize(store.reader).bars
    assert item.changes == ((3.0, (0, 1)), (7.0, (1,)))
    assert (item.cores, item.last_cores) == ((0,), (1,))
    assert found is not None
    assert found.core_seconds == pytest.approx((2 + 2 * 4 + 1) + 2)
    assert found.held == pytest.approx(13 / (2 * 7))
    (bar,) = [bar for bar in bars if bar.job == name]
    assert ran_on(bar) == "core 0, up to 2"
    lanes = {label: [(piece.start, piece.end) for piece in row] for label, row in _lanes(bars)}
    assert lanes == {"core 0": [(1, 3), (3, 7)], "core 1": [(1, 3), (3, 7), (7, 8)]} or lanes == {
        "core 0": [(1, 3), (3, 7)],
        "core 1": [(3, 7), (7, 8), (1, 3)],
    }


def test_status_says_what_a_running_job_holds_now(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunStore.hold(root) as store:
        store.begin(PLAN, FOLDS, TARGETS)
        number = store.start_attempt("A/cosine/fold-0", (0,), 1, "cpu", 5.0)
        store.event(HELD, held_text(number, (0, 1)), "A/cosine/fold-0")
        store.flush()
        assert main(["status", str(root), "--json"]) == 0
        (job,) = json.loads(capsys.readouterr().out)["running_jobs"]
    assert (job["cores"], job["threads"]) == ([0, 1], 2)


def test_the_same_bits_are_not_promised(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan((), TrainerParams(), 32, 1, 0, "cpu", ("accuracy",), "d", "f")
    usual = {"torch": "2.6.0"}
    (reason,) = claim(plan, [{**usual, ELASTIC: "yes"}]).reasons
    assert "threads change bits" in reason
    assert claim(plan, [usual]).claimed
    assert len(claim(plan, [usual, {**usual, ELASTIC: "yes"}]).reasons) == 2
    one = write_run(root, Synthetic(software={**usual, ELASTIC: "yes"}))
    other = write_run(root.parent / "other", Synthetic(software=usual))
    with RunStore.read(one) as first, RunStore.read(other) as second:
        found = compare_runs(first, second)
        assert not summarize(first).bit_identity.claimed
    assert found.software == ("elastic threads: yes there, none here",)
    assert [item.claimed for item in found.claims] == [False, True]
    main(["compare", str(one), str(other)])
    assert "elastic" in capsys.readouterr().out
    main(["status", str(one)])
    assert "bit-identity not claimed: running jobs may take cores" in capsys.readouterr().out


def test_a_run_is_continued_as_elastic_as_it_was_begun(tmp_path: Path) -> None:
    def call(models: dict[str, Any], **given: Any) -> Any:
        kfold = AsyncKFold(
            2, samples(20), tmp_path / "run", nn.CrossEntropyLoss(), 10, baseline=None, verbose=0,
            **given,
        )  # fmt: skip
        return kfold(models, ["constant"], adam, {"epochs": 1})

    assert call({"a": Tiny}).bit_identity.claimed
    both = {"a": Tiny, "b": Tiny}
    with pytest.raises(InputError, match="elastic threads: none there, yes here"):
        call(both, elastic=True)
    assert not call(both, elastic=True, allow_different_software=True).bit_identity.claimed


def test_plan_says_how_far_jobs_grow(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--data", "digits", "--models", "mlp,lenet5", "--folds", "2", "--epochs", "1"]
    words += ["--limit", "60", "--devices", "cpu", "--root", str(root), "--threads-per-job", "1"]
    assert main([*words, "--elastic", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    cores = len(allowed_cores())
    assert found["elastic"] == {
        model: worth(steps_of(Cost.from_dict(cost), cores), 1, cores)
        for model, cost in found["costs"].items()
    }
    assert (found["elastic"]["lenet5"] > 1) == (cores > 1)
    assert main([*words, "--elastic"]) == 0
    told = capsys.readouterr().out
    assert "which changes bits:" in told
    assert f"lenet5: from 1 to {found['elastic']['lenet5']} threads" in told or cores == 1
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["elastic"] is None


@pytest.mark.parametrize(
    ("given_settings", "told"),
    [
        ({"elastic": "always"}, "elastic must be True or False: received 'always'"),
        ({"elastic": 1}, "elastic must be True or False: received 1"),
        ({"elastic": True, "parallelize": False}, "parallelize=False starts none"),
    ],
)
def test_what_cannot_be_elastic_is_refused(
    root: Path, given_settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        AsyncKFold(2, samples(), root, nn.CrossEntropyLoss(), 10, **given_settings)
