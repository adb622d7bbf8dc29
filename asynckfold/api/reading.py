"""Reads the data of a call: once, shared with all workers, divided into folds."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynckfold.api import score_checks
from asynckfold.api.arguments import Settings
from asynckfold.engines.pool import WorkerPool
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.argument import one_line
from asynckfold.jobs.folds import (
    Fold,
    are_dicts,
    inner_folds,
    make_folds,
    outer_folds,
    with_inner_valid,
)
from asynckfold.jobs.objective import MULTILABEL
from asynckfold.sweep.reading import WorkerReaders
from asynckfold.system.machine import resolve_n_jobs

if TYPE_CHECKING:
    from asynckfold.api.context import Call
    from asynckfold.data.dataset import SampleSource
    from asynckfold.data.labels import Labels
    from asynckfold.data.prepare import PreparedData
    from asynckfold.engines.ray_cluster import RayCluster


QUANTILES = 10
"""Bins of ``stratify="quantile"``, or as many as the folds leave samples for."""

Strata = tuple[npt.NDArray[Any], tuple[str, ...]]


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


def _readers_of(call: Call, take_pool: Callable[[], WorkerPool]) -> WorkerReaders | None:
    """Return the workers that read the data; None if this process reads them."""
    settings, machine = call.settings, call.machine
    if settings.engine not in ("auto", "process", "ray"):
        return None
    most = len(machine.unreserved())
    root, stall = settings.root.absolute(), settings.stall_timeout
    count = min(most, resolve_n_jobs(settings.n_jobs, machine.max_cores) or most)
    doing = call.display.doing
    is_main = threading.current_thread() is threading.main_thread()
    return WorkerReaders(
        *(take_pool, machine, count, stall, root, call.signals, doing),
        may_be_here=settings.engine == "auto" and stall == "auto" and is_main,
    )


@contextmanager
def prepared(call: Call, take_pool: Callable[[], WorkerPool]) -> Iterator[PreparedData]:
    """Read the data into shared arrays, which live as long as the context.

    The samples are read by workers of this machine, whoever trains.
    """
    from asynckfold.data.arrays import NOT_FINITE, as_given, by_position
    from asynckfold.data.prepare import prepare
    from asynckfold.data.table_codes import names_columns

    settings = call.settings
    given = as_given(
        settings.dataset,
        settings.train_transform,
        settings.eval_transform,
        preprocessed=settings.preprocess is not None,
        by_name=names_columns(settings.preprocess),
    )
    data = prepare(
        given.dataset,
        train_transform=given.train_transform,
        eval_transform=given.eval_transform,
        targets=by_position(settings.targets, "targets"),
        criterion=settings.known_criterion,
        task=settings.task,
        memory_budget=call.machine.free_memory({}) // 2,
        folder=settings.root if settings.root.is_dir() else None,
        random_samples=settings.random_samples,
        readers=_readers_of(call, take_pool),
        collate_fn=settings.collate_fn,
    )
    try:
        if settings.preprocess is not None:
            refuse(data.preprocess_problems())
        if settings.target_transform is not None:
            refuse(data.target_transform_problems())
        data = data.with_sample_weight(settings.sample_weight)
        # A transformer may fill in missing values.
        at = "" if settings.preprocess is None else " before preprocess"
        notes = [note + at if note.endswith(NOT_FINITE) else note for note in data.notes]
        notes = [*given.notes, *notes]
        data = data.with_codes(given.codes)
        yield replace(data, notes=tuple(notes), last_is_target=given.last_is_target)
    finally:
        data.close()


def folds_of(settings: Settings, data: PreparedData) -> tuple[Fold, ...]:
    """Divide the samples; refuse unknown scores."""
    folds = divided(settings, data.n_samples, data.labels, data.checked.source)
    refuse(_weight_problems(data.sample_weight, folds))
    score_checks.refuse_early(settings, data)
    return folds


def _weight_problems(
    weights: npt.NDArray[np.float64] | None, folds: Sequence[Fold]
) -> Iterator[Problem]:
    """Yield the first fold of which a part has no weight."""
    if weights is None:
        return
    for fold in folds:
        parts = ("training", fold.fitted), ("held-out", fold.valid), ("inner", fold.inner_valid)
        for name, rows in parts:
            if rows.size and not weights[rows].any():
                rule = "each part of a fold must have a sample whose sample_weight is not 0"
                received = f"all {len(rows)} {name} samples of fold {fold.index} weigh 0"
                yield Problem(rule, received, "Leave such samples out, or divide them otherwise.")
                return


def with_leaks_noted(
    settings: Settings, data: PreparedData, folds: tuple[Fold, ...]
) -> PreparedData:
    """Return the data with what validation samples that copy or vary training samples say."""
    from asynckfold.data.duplicates import NOT_LOOKED, LeakCheck, copies, random_note, standardized

    notes, checks = [random_note(data.notes)], dict[str, LeakCheck]()
    # Scoring training samples is intended here, and the report says so.
    if not settings.about.get("scored"):
        handle = data.handle()
        stored = handle.open(handle.fds).stored
        # Most kinds of `preprocess` scale columns again, by each training part.
        checks = {
            "duplicates": copies(stored, outer_folds(folds)),
            "standardized": standardized(stored) if settings.preprocess is None else LeakCheck(),
            "groups": LeakCheck(why_not="groups= was not passed" * (settings.groups is None)),
        }
        notes += [checks["duplicates"].note or (NOT_LOOKED if stored is None else "")]
    return replace(data, notes=(*data.notes, *filter(None, notes)), leak_checks=checks)


def divided(
    settings: Settings, n_samples: int, labels: Labels, source: SampleSource
) -> tuple[Fold, ...]:
    """Divide samples into folds, stratified and grouped as the settings say."""
    given = (settings.kfolds, settings.cv, settings.n_splits)
    cv = _with_positions(next((value for value in given if value is not None), 5), source)
    given_strata = strata_of(settings.stratify, labels, cv if isinstance(cv, int) else 2)
    classes = labels.targets if labels.strata is None else labels.strata
    strata, names = (classes, labels.classes) if given_strata is None else given_strata
    ways: dict[str, Any] = {
        "stratify": given_strata is not None,
        "groups": settings.groups,
        "random_state": settings.random_state,
        "classes": names,
    }
    folds = make_folds(n_samples, strata, cv, n_repeats=settings.n_repeats, **ways)
    if settings.nested is not None:
        if aside := sum(fold.inner_valid.size for fold in folds):
            rule = "folds that are divided by nested must not name inner_valid"
            remedy = "Pass inner_valid=0.1, which sets samples of inner folds aside, too."
            raise InputError.one(rule, f"{aside} samples in inner_valid", remedy)
        folds += inner_folds(folds, settings.nested, strata, **ways)
    if settings.inner_valid is None:
        return folds
    watched = None if given_strata is None else strata
    return with_inner_valid(
        folds, settings.inner_valid, watched, settings.groups, settings.random_state
    )


def _with_positions(cv: Any, source: SampleSource) -> Any:
    """Return folds of a file, or listed as dicts, with positions in place of names of samples."""
    if isinstance(cv, (str, os.PathLike)):
        rule = "a file of folds must be JSON: a list of {train: [...], valid: [...]}"
        try:
            cv = json.loads(Path(cv).read_bytes())
        except (OSError, ValueError) as error:
            raise InputError.one(rule, str(error), "Check the path and the file.") from error
        if not are_dicts(cv):
            raise InputError.one(rule, one_line(cv, 80), "Write one dict for each fold.")
    parts = [part for item in cv for part in item.values()] if are_dicts(cv) else []
    entries = [name for part in parts if isinstance(part, list) for name in part]
    if not any(isinstance(name, str) for name in entries):
        return cv
    from asynckfold.data.dataset import sample_names

    names = sample_names(source)
    numbers = {name: number for number, name in enumerate(names)}
    unknown = [name for name in entries if str(name) not in numbers]
    if unknown or len(numbers) < len(names):
        twice = [name for name, count in Counter(names).items() if count > 1]
        known = f"names of samples such as {names[0]!r}" if names else "a data set without names"
        raise InputError.one(
            "folds may name samples where the data set has a name for each: `names`, or its files",
            f"two samples {twice[0]!r}" if twice else f"{one_line(unknown[0])}, and {known}",
            "Write positions from 0 instead, or correct the names.",
        )
    return [
        {
            key: [numbers[str(name)] for name in part] if isinstance(part, list) else part
            for key, part in item.items()
        }
        for item in cv
    ]


def strata_of(stratify: Any, labels: Labels, n_splits: int) -> Strata | None:
    """Return the stratum of each sample by number, and the names of strata; None without any.

    Where a sample has several labels, its row of 0 and 1 comes back, and no names.
    """
    if stratify is False:
        return None
    if stratify is True:
        if labels.objective.kind == MULTILABEL and labels.targets.ndim == 2:
            return labels.objective.codes(labels.targets), ()
        return None if labels.strata is None else (labels.strata, labels.classes)
    if isinstance(stratify, (str, int)):
        return _quantiles(stratify, labels, n_splits)
    strata = np.asarray(stratify)
    count = len(labels.targets)
    if strata.ndim == 2 and len(strata) == count and np.isin(strata, (0, 1)).all():
        return strata.astype(np.int64), ()
    missing = strata.dtype.kind == "f" and not np.isfinite(strata).all()
    if strata.shape != (count,) or strata.dtype.kind not in "biufUO" or missing:
        raise InputError.one(
            f"stratify must hold one label, or a row of 0 and 1, for each of the {count} samples",
            f"an array of {strata.dtype} of shape {strata.shape}" + ", with NaN" * missing,
            "Pass an array of that length, True, False, 'quantile', or a number of bins.",
        )
    if strata.dtype.kind == "O":
        strata = strata.astype(str)
    names, codes = np.unique(strata, return_inverse=True)
    return codes, tuple(map(str, names.tolist()))


def _quantiles(stratify: str | int, labels: Labels, n_splits: int) -> Strata:
    targets = labels.targets
    is_number = labels.objective.kind == "regression" and targets.size == len(targets)
    missing = not np.isfinite(targets).all()
    if not is_number or missing or (stratify != "quantile" and not isinstance(stratify, int)):
        rule = "stratify by quantiles needs one number per sample as its target"
        of = f"targets of shape {targets.shape}" + ", with NaN" * missing
        received = f"stratify={stratify!r} and {of}"
        remedy = "Pass stratify='quantile' or a number of bins for a regression, else an array."
        raise InputError.one(rule, received, remedy)
    bins = stratify if isinstance(stratify, int) else min(QUANTILES, len(targets) // n_splits)
    if bins < 2:
        rule = "stratify by quantiles needs at least 2 bins"
        raise InputError.one(rule, f"{bins} bins", "Pass more bins or fewer folds.")
    numbers = targets.reshape(-1)
    edges = np.unique(np.quantile(numbers, np.arange(1, bins) / bins))
    names, codes = np.unique(np.searchsorted(edges, numbers, "right"), return_inverse=True)
    return codes, tuple(f"quantile {name + 1}" for name in names.tolist())
