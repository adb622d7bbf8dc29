"""Reads the data of a call: once, shared with all workers, divided into folds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from asynckfold.api import score_checks
from asynckfold.api.arguments import Settings
from asynckfold.api.display import Display
from asynckfold.api.strata import absent_note
from asynckfold.engines import warm_pool
from asynckfold.engines.pool import WorkerPool
from asynckfold.errors import refuse
from asynckfold.jobs.folds import Fold
from asynckfold.sweep.reading import WorkerReaders
from asynckfold.system.machine import Machine, resolve_n_jobs
from asynckfold.system.signals import Interruption, listening

if TYPE_CHECKING:
    from asynckfold.api.context import Call
    from asynckfold.data.prepare import Prepared
    from asynckfold.engines.ray_cluster import RayCluster


def cluster_of(call: Call) -> AbstractContextManager[RayCluster]:
    """Return the cluster, or the Ray of this machine, that the call asks for."""
    from asynckfold.engines.ray_cluster import ray_cluster
    from asynckfold.engines.ray_node import NodeSettings

    settings, machine = call.settings, call.machine
    n_jobs: int | str | None = settings.n_jobs
    if n_jobs is None:
        n_jobs = resolve_n_jobs(None, machine.max_cores) or "auto"
    of_nodes = NodeSettings(
        settings.sharing().machine, n_jobs, settings.nice, settings.stall_timeout, tuple(sys.argv)
    )
    return ray_cluster(
        settings.ray_address,
        settings.ray_runtime_env,
        settings.connect_timeout_s,
        of_nodes,
        len(machine.cores),
    )


def readers_of(
    settings: Settings,
    machine: Machine,
    take_pool: Callable[[], WorkerPool],
    signals: Interruption,
    display: Display,
) -> WorkerReaders | None:
    """Return the workers that read the data; None if this process reads them."""
    if settings.engine not in ("process", "ray"):
        return None
    most = len(machine.unreserved())
    root, stall = settings.root.absolute(), settings.stall_timeout
    count = resolve_n_jobs(settings.n_jobs, machine.max_cores)
    return WorkerReaders(
        take_pool, machine, min(most, count or most), stall, root, signals, display.doing
    )


@contextmanager
def prepared(
    settings: Settings, machine: Machine, readers: WorkerReaders | None
) -> Iterator[Prepared]:
    """Read the data into shared arrays, which live as long as the context."""
    from asynckfold.data.arrays import NOT_FINITE, as_given, by_position
    from asynckfold.data.prepare import prepare

    given = as_given(
        settings.dataset,
        settings.train_transform,
        settings.eval_transform,
        preprocessed=settings.preprocess is not None,
    )
    data = prepare(
        given.dataset,
        train_transform=given.train_transform,
        eval_transform=given.eval_transform,
        targets=by_position(settings.targets, "targets"),
        criterion=settings.known_criterion,
        task=settings.task,
        memory_budget=machine.free_memory({}) // 2,
        folder=settings.root if settings.root.is_dir() else None,
        random_samples=settings.random_samples,
        readers=readers,
        collate_fn=settings.collate_fn,
    )
    try:
        if settings.preprocess is not None:
            refuse(data.preprocess_problems())
        # A transformer may fill in missing values.
        at = "" if settings.preprocess is None else " before preprocess"
        notes = [note + at if note.endswith(NOT_FINITE) else note for note in data.notes]
        notes = [*given.notes, *notes]
        yield replace(data, notes=tuple(notes), last_is_target=given.last_is_target)
    finally:
        data.close()


@contextmanager
def read_alone(settings: Settings, machine: Machine) -> Iterator[Prepared]:
    """Read the data for a plan that is not carried out; no worker starts unless one must read."""
    with ExitStack() as stack:
        signals = stack.enter_context(listening())
        pool = functools.cache(lambda: stack.enter_context(warm_pool.lent(settings.nice)))
        readers = readers_of(settings, machine, pool, signals, Display(0))
        yield stack.enter_context(prepared(settings, machine, readers))


def folds_of(settings: Settings, data: Prepared) -> tuple[Fold, ...]:
    """Divide the samples; refuse unknown scores."""
    folds = settings.divided(data.n_samples, data.labels)
    score_checks.refuse_early(settings, data, folds)
    return folds


def with_leaks_noted(settings: Settings, data: Prepared, folds: tuple[Fold, ...]) -> Prepared:
    """Return the data with notes about validation samples that copy or vary training samples."""
    from asynckfold.data.duplicates import copies_note, random_note, records_note

    notes = [random_note(data.notes), absent_note(data.labels, folds)]
    # Scoring training samples is intended here, and the report says so.
    if not settings.about.get("scored"):
        handle = data.handle()
        opened = handle.open(handle.fds)
        records = opened.ragged_samples
        notes.append(
            copies_note(opened.stored, folds) if records is None else records_note(records, folds)
        )
    return replace(data, notes=(*data.notes, *filter(None, notes)))
