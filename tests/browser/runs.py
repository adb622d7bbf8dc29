"""The runs that the page is made for, made up by seed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from asynckfold import Job
from asynckfold.cli import main
from tests.synthetic import PENDING, FakeClockStore, Synthetic, write_run

HOSTILE = (
    "<script>alert(1)</script>",
    "\"quoted\" & 'single'",
    "a_very_long_name_" * 12,
    "שלום עולם",
    "نموذج الشبكة",
    "卷积神经网络与残差连接的大模型",
    "🎉🚀 rocket 👩‍👩‍👧‍👦",
)

CONFUSED = (
    'Traceback (most recent call last):\n  File "/home/user/train.py", line 40, in <module>\n'
)
CONFUSED += (
    '    main()\n  File "/home/user/model.py", line 7, in forward\n    return self.head(x)\n'
)


def _of(status: Callable[[Job], bool], other: str) -> Callable[[Job], str]:
    return lambda job: other if status(job) else "done"


def _mixed(job: Job) -> str:
    states = ("done", "failed", "done", "diverged", "cancelled")
    return states[job.fold % 5] if job.model == "MLP" else "done"


SWEEP = Synthetic(
    models=("LeNet5", "AlexNet", "MLP"),
    lr_schedules=("constant", "cosine"),
    samples=1000,
    epochs=10,
)

RUNS: Mapping[str, Synthetic] = {
    "sweep": SWEEP,
    "regression": Synthetic(
        models=("MLP", "linear"), classes=(), metrics=("r2", "neg_mean_absolute_error")
    ),
    "binary": Synthetic(
        models=("MLP", "linear"), classes=("benign", "malignant"), samples=570, baseline=None
    ),
    "thousand jobs": Synthetic(
        models=tuple(f"Net{letter}" for letter in "ABCDEFGHIJ"),
        lr_schedules=("constant", "cosine", "step", "warm", "cyclic"),
        folds=20,
        samples=400,
        epochs=3,
        cores=16,
        baseline=None,
    ),
    "nothing done": Synthetic(
        status=lambda job: PENDING, baseline=None, cpu_samples=False, events=()
    ),
    "all failed": Synthetic(status=lambda job: "failed", traceback=CONFUSED, baseline=None),
    "half failed": Synthetic(
        status=_of(lambda job: bool(job.fold % 2), "failed"), traceback=CONFUSED, folds=4
    ),
    "one model failed": Synthetic(status=_mixed, traceback=CONFUSED, baseline=None),
    "killed": Synthetic(
        status=_of(lambda job: job.model == "MLP" and job.fold > 1, PENDING), baseline=None
    ),
    "one fold": Synthetic(folds=[(list(range(200)), list(range(200, 300)))], baseline=None),
    "one model": Synthetic(models=("LeNet5",), lr_schedules=("cosine",), baseline="estimated"),
    "repeats": Synthetic(folds=5, n_repeats=10, lr_schedules=("cosine",), baseline=None, epochs=2),
    "disturbed": Synthetic(others=1.7),
    "grid": Synthetic(
        models=tuple(f"net/dropout=0.1,width={width}" for width in (16, 32, 64, 128)),
        lr_schedules=tuple(f"cosine/lr={rate}" for rate in (0.001, 0.003, 0.01, 0.03, 0.1)),
        folds=3,
        epochs=2,
        baseline=None,
    ),
    "hostile names": Synthetic(
        models=HOSTILE,
        lr_schedules=('"><img src=x onerror=alert(1)>',),
        classes=HOSTILE,
        error="ValueError: <b>\u202e" + "x" * 300,
        status=_of(lambda job: job.model == HOSTILE[0] and job.fold == 1, "failed"),
        events=((HOSTILE[0], HOSTILE[1]),),
    ),
}
"""By name; the first is an ordinary sweep."""

THOUSAND = Synthetic(
    models=tuple(f"net/width={width}" for width in range(16, 56)),
    lr_schedules=tuple(f"cosine/lr={0.001 * step}" for step in range(1, 26)),
    epochs=1,
    baseline=None,
)
"""A grid of a thousand candidates and 5,000 jobs."""


def write_page(name: str, folder: Path) -> Path:
    """Write the page of a run, as it stands at the end or where it was killed."""
    root = write_run(folder / name, RUNS.get(name, THOUSAND))
    if name == "killed":
        with FakeClockStore.hold(root) as store:
            assert isinstance(store, FakeClockStore)
            store.clock = store.reader.sessions()[-1].end
            store.begin(store.reader.plan, *store.reader.splits())
            store.set_software(RUNS[name].software)
            left = [job for job in store.reader.plan.jobs if job.id not in store.reader.results()]
            for core, job in enumerate(left[:2]):
                store.start_attempt(job.id, (core,), 1, "cpu", 2.0)
            store.clock += 3.0
    assert main(["report", str(root)]) == 0
    return root / "report" / "index.html"


@functools.cache
def jobs_of(name: str) -> int:
    """Return how many jobs a run has planned."""
    run = RUNS[name]
    folds = run.folds if isinstance(run.folds, int) else len(run.folds)
    return len(run.models) * len(run.lr_schedules) * folds * run.n_repeats
