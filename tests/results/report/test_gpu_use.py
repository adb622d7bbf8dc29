"""The use of GPUs over time, from the sampler to the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from asynckfold import RunStore
from asynckfold.jobs.placement import Gpu, Load
from asynckfold.results.report.inline import inline
from asynckfold.results.report.page import render
from asynckfold.results.report.summary import Summary, summarize
from asynckfold.sweep.single_task import Sampler
from tests.synthetic import FakeClockStore, Synthetic, write_run

RUN = Synthetic(
    models=("A",), lr_schedules=("x",), folds=2, baseline=None, status=lambda job: "pending"
)


def sampled(root: Path, device: str, phase: str = "packed") -> Summary:
    """Sample two GPUs, of which this run is not allowed the one between them."""
    write_run(root, RUN)
    with FakeClockStore.hold(root) as store:
        assert isinstance(store, FakeClockStore)
        store.set_software(RUN.software)
        before = len(store.reader.samples())
        for at, use in enumerate((0.0, 0.5, 1.0)):
            store.clock = 10.0 + at
            gpus = (Gpu(0, 1, 1, use=use), Gpu(2, 1, 1, use=0.25))
            load = Load((0,), (0,), 1, gpus=gpus, use=(0.75,), own=0.5)
            Sampler(store, phase).look(load, at_end=True)
        # What other programs used is read from these alone.
        assert [item.cores for item in store.reader.samples()[before:]] == [(0.75,)] * 3
        store.start_attempt(store.reader.plan.jobs[0].id, (0,), 1, device, 2.0)
    with RunStore.read(root) as store:
        return summarize(store)


def test_each_gpu_has_its_share_of_the_time(root: Path) -> None:
    summary = sampled(root, "cuda:2")
    assert [use.index for use in summary.gpu_use] == [0, 2]
    first, second = summary.gpu_use
    assert (first.seconds, first.used) == ((0.0, 1.0, 2.0), (0.0, 0.5, 1.0))
    assert (first.mean, second.mean) == (pytest.approx(0.75), pytest.approx(0.25))
    drawn = inline(summary)["gpu_usage"]
    assert "GPU 0: busy 75.0 % of the time" in drawn
    assert "after 2.0 s: GPU 2 busy 25.0 % of the time" in drawn
    assert 'id="figure-gpu_usage"' in render(summary)


def test_the_serial_loop_samples_no_gpu(root: Path) -> None:
    assert sampled(root, "cuda:0", "serial").gpu_use == ()
