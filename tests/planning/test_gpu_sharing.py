"""How many jobs share a GPU, and where the data are: by fake devices, figures and timings."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynckfold.cli import main
from asynckfold.data.prepare import prepare
from asynckfold.engines.engine import Answer
from asynckfold.engines.pool import WorkerPool
from asynckfold.engines.process import ProcessEngine
from asynckfold.errors import WorkerDiedError
from asynckfold.jobs.cost import Cost, Timing
from asynckfold.jobs.messages import Noted, Started, Task
from asynckfold.jobs.placement import GPU_CONTEXT_BYTES, Gpu, Load, Placement, Request
from asynckfold.jobs.result import DONE, Result
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.planning.gpu_sharing import CROWD_GAIN, CROWDS, jobs_per_gpu, memory_share
from asynckfold.planning.thread_choice import chosen
from asynckfold.planning.workload import Choice, Workload, requests
from asynckfold.scheduling.place import place
from asynckfold.store import RunStore
from asynckfold.sweep.probe import Prober
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.system.signals import Interruption
from asynckfold.training import loop, probe, setup
from asynckfold.training.worker import execute
from tests.planning import test_thread_choice as test_choice
from tests.results.test_utilization import FOLDS, PLAN, TARGETS
from tests.sweep.test_paused_jobs import look
from tests.toy import samples, toy_bundle
from tests.training.tiny import Tiny, never

GIB = 1 << 30


# The rule


@given(st.floats(1e-5, 10), st.floats(1e-5, 10))
def test_two_share_a_gpu_only_where_that_pays_by_the_margin(alone: float, pair: float) -> None:
    count, why = jobs_per_gpu(Cost({1: alone}, {1: alone}, pair_seconds=pair))
    # Together they take two steps in `pair` seconds, one after another in twice `alone`.
    assert count == (2 if alone >= CROWD_GAIN * (pair / 2) else 1)
    assert f"{1000 * alone:.3g} ms" in why
    assert f"{500 * pair:.3g} ms" in why


def test_what_could_not_be_timed_shares_no_gpu() -> None:
    assert jobs_per_gpu(Cost({1: 1.0}, {1: 1.0}))[0] == 1


@given(st.lists(st.floats(1e-4, 1), min_size=4, max_size=4))
def test_each_doubling_of_the_jobs_on_a_gpu_pays_by_the_margin(steps: list[float]) -> None:
    """`steps`: seconds per step of all jobs together, with 1, 2, 4 and 8 of them."""
    each = dict(zip((1, *CROWDS), steps, strict=True))
    cost = Cost(
        {1: each[1]},
        {1: each[1]},
        pair_seconds=2 * each[2],
        crowd_seconds={4: 4 * each[4], 8: 8 * each[8]},
    )
    assert Cost.from_dict(json.loads(json.dumps(cost.to_dict()))) == cost
    count, _ = jobs_per_gpu(cost)
    tried = [number for number in each if number <= count]
    shared = {number: seconds / number for number, seconds in cost.sharing.items()} | {1: each[1]}
    pairs = list(itertools.pairwise(tried))
    assert all(shared[few] >= CROWD_GAIN * shared[more] for few, more in pairs)
    if count < 8:
        assert shared[count] < CROWD_GAIN * shared[2 * count]


@given(
    st.lists(
        st.tuples(st.integers(0, 9 * GIB), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=9
    ),
    st.integers(1, 80),
)
def test_jobs_on_one_gpu_never_have_more_than_its_memory(
    jobs: list[tuple[int, int]], total: int
) -> None:
    asked = [
        Request(str(number), 1.0, gpu=True, gpu_memory=GPU_CONTEXT_BYTES + size, jobs_per_gpu=most)
        for number, (size, most) in enumerate(jobs)
    ]
    cores = tuple(range(9))
    gpu = Gpu(0, total * GIB, total * GIB)
    found = place(asked, [], Load(cores, cores, 1 << 50, (gpu,)))
    if len(found) > 1:
        assert sum(item.gpu_memory for item in found) <= gpu.total
        shares = [memory_share(gpu.total, item.jobs_per_gpu) for item in found]
        held = len(found) * GPU_CONTEXT_BYTES + sum(share * gpu.total for share in shares)
        assert held <= gpu.total or all(share == 0 for share in shares)


# The choice


@dataclass
class FakeGpu:
    """A GPU on which a step takes so long alone, and so long for each of two."""

    alone: float = 0.010
    pair: float = 0.011
    more: Mapping[int, float] = field(default_factory=dict)
    bad: str = ""
    crowded: str = ""
    asked: list[tuple[str, int, int]] = field(default_factory=list)

    def __call__(self, model: str, threads: int, copies: int) -> Sequence[Timing]:
        self.asked.append((model, threads, copies))
        if model == self.bad:
            return [Timing(failure="Traceback\nBoom: on purpose")]
        if copies == 1:
            return [Timing(self.alone, self.alone / 2, 70, 3 * GIB)]
        if copies > 2:
            return [Timing(self.more[copies], 0.1, 70, GIB)] * copies if copies in self.more else []
        if self.crowded:
            return [Timing(self.pair, self.pair, 70, GIB), Timing(failure=self.crowded)]
        return [Timing(self.pair, self.pair, 70, GIB), Timing(self.pair / 2, 0.1, 70, GIB)]


def workload(epochs: int = 1000, **flops: int) -> Workload:
    return replace(test_choice.workload(epochs, device="cuda", **flops), gpus=1)


def choose(
    work: Workload, gpu: Any, asked: int | None = None, before: Choice | None = None,
    place: Path | None = None,
) -> Choice:  # fmt: skip
    return chosen(work, asked, before, None, gpu, place)


def test_two_jobs_share_a_gpu_where_the_probe_says_so() -> None:
    gpu, work = FakeGpu(), workload()
    found = choose(work, gpu)
    assert gpu.asked == [("M", 1, 1), ("M", 1, 2), ("M", 1, 4)]
    assert (found.threads, found.per_gpu) == ({"M": 1}, {"M": 2})
    assert found.why["M"] == (
        "1 thread: the work is done by a GPU; 2 jobs on a GPU beat 1: 5.5 ms against 10 ms per step"
    )
    made = next(iter(requests(found, work).values()))
    assert (made.jobs_per_gpu, made.gpu_memory) == (2, 3 * GIB + GPU_CONTEXT_BYTES)
    assert made.seconds == pytest.approx(1000 * (100 * 0.011 + 0.0055))
    # 12 jobs, two at a time.
    assert found.prediction.makespan == pytest.approx(6 * made.seconds)
    asked = list(requests(found, work).values())
    roomy = Load((0, 1, 2, 3), (0, 1, 2, 3), 1 << 40, (Gpu(0, 9 * GIB, 9 * GIB),))
    assert [item.gpu for item in place(asked, [], roomy)] == [0, 0]
    small = replace(roomy, gpus=(Gpu(0, 6 * GIB, 6 * GIB),))
    assert [item.gpu for item in place(asked, [], small)] == [0]


def test_more_jobs_share_a_gpu_while_they_fit_and_gain() -> None:
    found = choose(workload(), FakeGpu(more={4: 0.016, 8: 0.031}))
    assert found.per_gpu == {"M": 4}
    assert found.why["M"].endswith("4 jobs on a GPU beat 2: 4 ms against 5.5 ms per step")
    assert found.costs["M"].sharing == {2: 0.011, 4: 0.016, 8: 0.031}
    made = next(iter(requests(found, workload()).values()))
    assert made.seconds == pytest.approx(1000 * (100 * 0.016 + 0.008))
    all_of_them = choose(workload(), FakeGpu(more={4: 0.016, 8: 0.020}))
    assert all_of_them.per_gpu == {"M": 8}


def test_one_after_another_where_two_gain_too_little() -> None:
    work = workload()
    found = choose(work, FakeGpu(pair=0.0184))
    assert found.per_gpu == {"M": 1}
    assert "1 job on a GPU: 10 ms per step, 9.2 ms with 2" in found.why["M"]
    made = next(iter(requests(found, work).values()))
    assert made.jobs_per_gpu == 1
    assert made.seconds == pytest.approx(1000 * (100 * 0.010 + 0.005))
    assert found.prediction.makespan == pytest.approx(12 * made.seconds)


def test_two_that_do_not_fit_are_no_failure_of_their_model() -> None:
    found = choose(workload(), FakeGpu(crowded="CUDA out of memory"))
    assert (found.per_gpu, found.failures) == ({"M": 1}, {})
    assert "2 at once could not be timed" in found.why["M"]


def test_a_probe_that_fails_fails_its_model_and_the_others_go_on() -> None:
    found = choose(workload(A=1000, B=1000), FakeGpu(bad="A"))
    assert found.failures == {"A": "Traceback\nBoom: on purpose"}
    assert found.per_gpu == {"A": 1, "B": 2}
    assert "its probe failed" in found.why["A"]


def test_a_short_sweep_and_one_without_workers_are_not_probed() -> None:
    gpu = FakeGpu()
    found = choose(workload(1), gpu)
    assert (gpu.asked, found.per_gpu) == ([], {"M": 1})
    assert found.why["M"].endswith("; 1 job on a GPU: not probed")
    assert choose(workload(), None).per_gpu == {"M": 1}
    # A GPU that is gone by now gives no timing at all.
    assert choose(workload(), lambda model, threads, copies: []).per_gpu == {"M": 1}


def test_a_sweep_on_cpus_knows_nothing_of_it() -> None:
    work = test_choice.workload(1000)
    found = choose(work, test_choice.Fake())
    assert found.per_gpu == {}
    assert {(item.jobs_per_gpu, item.gpu_memory) for item in requests(found, work).values()} == {
        (1, 0)
    }


def test_a_job_with_one_process_on_a_gpu_books_that_and_a_core_for_each() -> None:
    gpu, work = FakeGpu(), workload()
    words = TrainerParams(
        epochs=1000, trainer="averaging", processes=2, partition_size=320, gpu_partition_size=3200
    )
    work = replace(work, plan=replace(work.plan, params=words))
    found = choose(work, gpu)
    assert (gpu.asked, found.threads, found.per_gpu) == ([], {"M": 1}, {"M": 1})
    asked = list(requests(found, work).values())
    assert {(item.threads, item.gpu, item.jobs_per_gpu, item.trainer) for item in asked} == {
        (2, True, 1, "averaging")
    }
    gpus = (Gpu(0, GIB, GIB), Gpu(1, GIB, GIB))
    load = Load(tuple(range(6)), tuple(range(6)), 1 << 40, gpus)
    placed = place(asked, [], load)
    assert [(item.cores, item.gpu) for item in placed] == [((0, 1), 0), ((2, 3), 1)]
    assert all(item.wants_new_worker(has_gpu=False) for item in placed)
    assert len(place(asked, [], replace(load, cores=(0, 1, 2), idle=(0, 1, 2)))) == 1
    # 12 jobs on one GPU, one after another.
    longest = max(item.seconds for item in asked)
    assert found.prediction.makespan == pytest.approx(12 * longest)
    again = choose(work, gpu, before=found)
    assert (again.per_gpu, gpu.asked) == (found.per_gpu, [])


def test_what_was_chosen_stays_and_is_remembered(tmp_path: Path) -> None:
    first = choose(workload(), FakeGpu(), place=tmp_path)
    gone = FakeGpu(pair=0.5)
    assert choose(workload(), gone, before=first) == first
    assert choose(workload(), gone, place=tmp_path).per_gpu == {"M": 2}
    # Also where the threads are asked for again, as the same command does.
    again = choose(workload(), gone, asked=1, before=first)
    assert (again.per_gpu, again.costs) == (first.per_gpu, first.costs)
    assert not gone.asked
    both = choose(workload(A=1000, M=test_choice.LARGE), gone, before=first)
    assert (both.per_gpu, [name for name, *_ in gone.asked]) == ({"M": 2, "A": 1}, ["A", "A"])
    other = replace(workload(), machine={"cpu": "Z80", "gpus": ["another"]})
    assert choose(other, gone, place=tmp_path).per_gpu == {"M": 1}
    assert Choice.from_dict(json.loads(json.dumps(first.to_dict()))) == first


def test_a_choice_of_before_is_read() -> None:
    raw = choose(workload(), FakeGpu()).to_dict()
    del raw["per_gpu"], raw["costs"]["M"]["pair_seconds"]
    found = Choice.from_dict(raw)
    assert (found.per_gpu, found.costs["M"].pair_seconds) == ({}, 0.0)


def test_plan_says_how_many_share_a_gpu(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decided = choose(workload(A=1000, B=1000), FakeGpu())
    about = {"decision": decided.to_dict(), "machine": {"gpus": [{"name": "Fake"}]}}
    with RunStore.hold(root) as store:
        store.begin(
            replace(PLAN.with_threads({"A": 1, "B": 1}), device="cuda"), FOLDS, TARGETS, about
        )
    assert main(["plan", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs_per_gpu"] == {"A": 2, "B": 2}
    assert main(["plan", str(root)]) == 0
    assert "2 jobs on a GPU beat 1: 5.5 ms against 10 ms per step" in capsys.readouterr().out


# The probes


@dataclass
class FakeEngine:
    """Probes that come to their meeting, or end before, as they are told."""

    gpus: tuple[Gpu, ...] = (Gpu(0, 5 * GIB, 10 * GIB), Gpu(1, 8 * GIB, 10 * GIB))
    cores: tuple[int, ...] = (0, 1, 2)
    come: int = 2
    inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    placed: list[Placement] = field(default_factory=list)
    shifts: list[tuple[int, ...]] = field(default_factory=list)
    futures: list[Future[Answer]] = field(default_factory=list)

    def load(self, running: Sequence[Placement]) -> Load:
        return Load(self.cores, self.cores, 1 << 40, self.gpus)

    def submit(self, placement: Placement, tasks: Sequence[Task]) -> Future[Answer]:
        future: Future[Answer] = Future()
        self.placed.append(placement)
        self.futures.append(future)
        if self.come == 0:
            future.set_exception(WorkerDiedError(1, "SIGKILL"))
        elif len(self.placed) == 1 and self.alone:
            future.set_result(Answer([Timing(1.0)], 1))
        return future

    alone: bool = False

    def shift(self, future: Future[Answer], cores: Sequence[int]) -> None:
        self.shifts.append(tuple(cores))
        number = self.futures.index(future)
        if cores and not future.done():
            future.set_result(Answer([Timing(float(number))], 1))
        elif number < self.come:
            self.inbox.put(Noted(None, "workers", "fewer"))
            self.inbox.put(Started(self.placed[number].jobs[0], 0, 100 + number))

    def close(self, grace_s: float = 0.0) -> None:
        pass


def prober(engine: FakeEngine) -> Prober:
    plan = replace(PLAN, device="cuda")
    return Prober(engine, plan, {}, Interruption(), None, engine.inbox)


def test_two_probes_meet_on_the_emptiest_gpu_and_go_on_together() -> None:
    engine = FakeEngine()
    assert prober(engine)("A", 1, 2) == [Timing(0.0), Timing(1.0)]
    assert [(item.cores, item.gpu, item.trainer) for item in engine.placed] == [
        ((0,), 1, "probe"),
        ((1,), 1, "probe"),
    ]
    assert engine.shifts == [(), (), (0,), (1,)]
    # What else was said meanwhile is not lost, and what was said of the meeting does not stay.
    left = [engine.inbox.get_nowait() for _ in range(engine.inbox.qsize())]
    assert left == [Noted(None, "workers", "fewer")] * 2


def test_a_single_probe_does_not_wait() -> None:
    engine = FakeEngine(alone=True)
    assert prober(engine)("A", 1, 1) == [Timing(1.0)]
    assert engine.shifts == []


def test_probes_that_did_not_meet_were_not_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynckfold.sweep.probe.MEETING_SECONDS", 0.1)
    monkeypatch.setattr("asynckfold.sweep.probe.TICK_SECONDS", 0.01)
    assert len(prober(FakeEngine(come=1))("A", 1, 2)) == 1
    dead = prober(FakeEngine(come=0))("A", 1, 2)
    assert [bool(item.failure) for item in dead] == [True]


def test_no_more_probes_share_a_gpu_than_fit() -> None:
    engine = FakeEngine(gpus=(Gpu(0, 9 * GIB, 80 * GIB),), cores=tuple(range(9)), come=8)
    found = prober(engine)
    found.gpu_memory["A"] = 4 * GIB
    assert len(found("A", 1, 8)) == 2


def test_without_a_second_core_or_a_gpu_there_is_no_second_probe() -> None:
    engine = FakeEngine(cores=(0,), alone=True)
    assert len(prober(engine)("A", 1, 2)) == 1
    assert prober(FakeEngine(gpus=()))("A", 1, 2) == []


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.01)


@pytest.mark.usefixtures("hasty")
def test_a_probe_waits_after_its_first_step_where_it_is_asked_to(root: Path) -> None:
    news: list[Any] = []
    heartbeat, come, go = Heartbeat(), threading.Event(), threading.Event()

    def stop() -> bool:
        come.set()
        assert go.wait(60)
        return False

    found: list[Timing] = []
    with toy_bundle(root) as (bundle, data):
        handle = data.handle()
        batches = handle.open(handle.fds)
        job, cpu = bundle.plan.jobs[0], torch.device("cpu")
        usual = probe.measure(bundle, [job], batches, cpu, news.append, stop, heartbeat)
        assert (usual.failure, come.is_set(), news) == ("", False, [])
        heartbeat.ask(True)
        thread = threading.Thread(
            target=lambda: found.append(
                probe.measure(bundle, [job], batches, cpu, news.append, stop, heartbeat)
            )
        )
        thread.start()
        assert come.wait(60)
        assert (news, found) == ([Started(job.id, 0, os.getpid())], [])
        go.set()
        thread.join(60)
    assert found[0].step_seconds > 0


@pytest.mark.nightly
def test_real_workers_meet_for_a_probe(root: Path) -> None:
    """As on a GPU, but for the GPU."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    pool = WorkerPool()
    with toy_bundle(root) as (bundle, data):
        engine = ProcessEngine(bundle, data.handle().fds, look, inbox.put, pool)
        job = bundle.plan.jobs[0]
        placements = [Placement((job.id,), (core,), trainer="probe") for core in (0, 0)]
        futures = [engine.submit(placement, []) for placement in placements]
        found = Prober(engine, bundle.plan, {}, Interruption(), None, inbox)
        assert found._meet(futures, placements)
        timings = [future.result(60).results[0] for future in futures]
        engine.close()
    pool.close()
    assert all(item.step_seconds > 0 for item in timings)
    assert not any(worker.heartbeat.pause_requested for worker in pool.workers)


# What a worker does on a GPU


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        calls.append(f"use {index}")
        yield
        calls.append(f"leave {index}")

    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda gpu: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda gpu: 5 * GIB)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, gpu: calls.append(f"{share:g} of {gpu}"),
    )
    return calls


def test_a_worker_keeps_nothing_of_a_gpu_after_a_job(fake_cuda: list[str]) -> None:
    placement = Placement(("a",), (0,))
    with execute._device(replace(placement, gpu=1, jobs_per_gpu=4)) as found:
        assert found == torch.device("cuda", 1)
        made = loop.with_gpu_memory(Result("a", 1, DONE), found)
        assert made.peak_gpu_memory == 5 * GIB
        assert loop.with_gpu_memory(None, found) is None
    with pytest.raises(ZeroDivisionError), execute._device(replace(placement, gpu=0)):
        raise ZeroDivisionError
    with execute._device(placement) as found:
        assert found == torch.device("cpu")
        assert loop.with_gpu_memory(made, found) is made
    shared, whole = ["init", "use 1", "0.1875 of 1", "empty", "leave 1"], ["init", "use 0"]
    assert fake_cuda == [*shared, *whole, "1 of 0", "empty"]


@pytest.mark.parametrize("trainer", ["measure", "estimate"])
def test_the_serial_baseline_runs_on_the_gpu_of_its_placement_and_frees_it(
    tmp_path: Path, fake_cuda: list[str], monkeypatch: pytest.MonkeyPatch, trainer: str
) -> None:
    monkeypatch.setattr(
        execute.serial_baseline, trainer, lambda bundle, data, stop, device, *_: device
    )
    tiny = Tiny(tmp_path)
    placement = Placement((), (0,), gpu=1, trainer=trainer)
    told: list[Any] = []
    found = execute.execute(tiny.bundle, tiny.batches, placement, [], told.append, never)
    assert found == [torch.device("cuda", 1)]
    assert fake_cuda == ["init", "use 1", "1 of 1", "empty", "leave 1"]


def batches_of(count: int = 60) -> Any:
    return prepare(samples(count), criterion_wants_classes=True)


def test_inputs_reside_on_the_device_where_they_fit() -> None:
    """With a device that holds shapes only."""
    with contextlib.closing(batches_of()) as data:
        handle = data.handle()
        here = handle.open(handle.fds)
        size = 60 * 8 * 4
        meta = torch.device("meta")
        for room, place in ((None, "meta"), (size, "meta"), (size - 1, "cpu"), (0, "cpu")):
            there = here.to(meta, room)
            assert {array.device.type for array in there._train.arrays} == {place}
            assert {array.device.type for array in there._eval.arrays} == {place}
            # Both views are of one array, which is there once.
            assert len({id(view.arrays[0]) for view in (there._train, there._eval)}) == 1
            assert there.targets.device == meta
        # A batch is on the device either way: only where it comes from differs.
        inputs, _ = here.to("cpu", 0).train(np.arange(5), 0, 0)
        assert torch.equal(inputs, here.train(np.arange(5), 0, 0)[0])
        moved = here.to(meta, 0)._train
        assert moved.gather(torch.arange(5), _draw(5)).device == meta
        # What is there already takes no further room.
        assert here.to(meta, size).to(meta, 0)._train.arrays[0].device == meta


def _draw(count: int) -> Any:
    from asynckfold.data.transforms import Draw

    return Draw(0, 0, np.arange(count))


def test_half_of_the_free_memory_is_for_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, int | None]] = []

    class Data:
        def __init__(self) -> None:
            self.moved: dict[Any, Any] = {}

        def bytes_on(self, device: Any) -> int:
            return 0

        def to(self, device: Any, room: int | None = None) -> Data:
            seen.append((device, room))
            return self

    figures: Mapping[int, tuple[int, int]] = {0: (100, 1000), 1: (7, 1000)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: figures[device.index])
    for device in ("cpu", "cuda:0", "cuda:1"):
        setup.to_device(Data(), torch.device(device))  # type: ignore[arg-type]
    assert [room for _, room in seen] == [None, 50, 3]
