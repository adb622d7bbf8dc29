"""Reading a dataset once, into shared arrays; or the reason why that cannot be."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asynckfold.data.arrays import NOT_FINITE
from asynckfold.data.opened import Opened, unreadable
from asynckfold.data.shared import ArraySpec, SharedArray
from asynckfold.data.views import Views
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.transforms import Array, Kind, Step, apply, copied, same_steps, to_array, varies


@dataclass(frozen=True, eq=False)
class Reading:
    """What reading the dataset gave: arrays, or the reason why there are none."""

    arrays: tuple[SharedArray, ...] = ()
    slots: tuple[int, int] = (0, 0)
    labels: Any = None
    notes: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        """Whether there are arrays."""
        return bool(self.arrays)


def read_all(
    source: Opened, views: Views, memory_budget: int | None, folder: Path | None, need_labels: bool
) -> Reading:
    """Read all samples into shared arrays; where that cannot be, the labels if they are needed."""
    found = _why_not_held(source, views) or _hold(source, views, memory_budget, folder, need_labels)
    if isinstance(found, Reading):
        return found
    labels = [source.read(index)[1] for index in range(len(source))] if need_labels else None
    note = f"samples are read one by one in the workers, as a DataLoader does, since {found}"
    return Reading(labels=labels, notes=(note,))


def _hold(
    source: Opened, views: Views, memory_budget: int | None, folder: Path | None, need_labels: bool
) -> Reading | str:
    """Fill shared arrays, or say why that cannot be."""
    stored = _distinct_prefixes(views)
    specs = [ArraySpec((len(source), *kind.shape), kind.dtype) for _, kind in stored]
    arrays, where = _allocate(specs, memory_budget, folder)
    if not arrays:
        return where
    labels, odd = _fill(source, stored, arrays, need_labels)
    if odd:
        _refuse_odd_sample(views, odd)
        return odd
    notes = (*([where] if where else []), *_feature_notes(arrays))
    return Reading(tuple(arrays), (1, len(arrays)), labels, notes)


def _why_not_held(source: Opened, views: Views) -> str:
    if any(varies(lambda at=index: source.read(at)[0]) for index in source.probes):  # type: ignore[misc]
        return (
            "the dataset is random by itself and has no transform to divide (its randomness is "
            "seeded by job, epoch and sample in training, and by sample in evaluation)"
        )
    if views.train.stored is None or views.eval.stored is None:
        return "they differ in shape or cannot be stored as an array before the random steps"
    return ""


def _distinct_prefixes(views: Views) -> list[tuple[tuple[Step, ...], Kind]]:
    pairs = [
        (view.prefix, view.stored) for view in (views.train, views.eval) if view.stored is not None
    ]
    if len(pairs) == 2 and pairs[0][1] == pairs[1][1] and same_steps(pairs[0][0], pairs[1][0]):
        return pairs[:1]
    return pairs


def _allocate(
    specs: Sequence[ArraySpec], memory_budget: int | None, folder: Path | None
) -> tuple[list[SharedArray], str]:
    """Return the arrays and where they are, or no arrays and why."""
    need = sum(spec.nbytes for spec in specs)
    if memory_budget is None or need <= memory_budget:
        return [SharedArray(spec) for spec in specs], ""
    text = f"{need} bytes are needed, {memory_budget} may be held in memory"
    if folder is None:
        return [], text
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if need <= free:
        try:
            arrays = [SharedArray(spec, folder) for spec in specs]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
        else:
            return arrays, f"{text}: the samples are kept in a file without a name in {folder}"
    return [], f"{text} and {free} are free in {folder}"


def _fill(
    source: Opened,
    stored: Sequence[tuple[tuple[Step, ...], Kind]],
    arrays: Sequence[SharedArray],
    need_labels: bool,
) -> tuple[Any, str]:
    """Fill the arrays; return labels, and what is odd about the first sample that does not fit."""
    outputs = [array.writable() for array in arrays]
    if not need_labels and source.samples is not None and not any(prefix for prefix, _ in stored):
        for output in outputs:
            output[...] = source.samples if source.rows is None else source.samples[source.rows]
        return None, ""
    labels = []
    for index in range(len(source)):
        sample, label = source.read(index)
        labels.append(label)
        for (prefix, _), output in zip(stored, outputs, strict=True):
            given = sample if len(stored) == 1 else copied(sample)
            array = _transformed(prefix, given, index)
            if array.shape != output.shape[1:] or array.dtype != output.dtype:
                found = f"sample {index} is {array.dtype} {array.shape}"
                return None, f"{found} where others are {output.dtype} {output.shape[1:]}"
            output[index] = array
    return labels, ""


def _transformed(prefix: Sequence[Step], sample: Any, index: int) -> Array:
    try:
        return to_array(apply(prefix, sample))
    except Exception as error:
        raise InputError([unreadable(index, error)]) from error


def _refuse_odd_sample(views: Views, odd: str) -> None:
    """Refuse samples of several shapes where no later step could make them equal."""
    if not views.train.steps or not views.eval.steps:
        remedy = "Add Resize and CenterCrop, or padding, to the transform."
        refuse([Problem("all samples must have one shape and type", odd, remedy)])


def _feature_notes(arrays: Sequence[SharedArray]) -> list[str]:
    notes = []
    for shared in arrays:
        if np.dtype(shared.spec.dtype).kind != "f":
            continue
        flat = shared.writable().reshape(shared.spec.shape[0], -1)
        bad = sum(
            int((~np.isfinite(flat[start : start + 4096]).all(axis=1)).sum())
            for start in range(0, len(flat), 4096)
        )
        if bad:
            notes.append(f"{bad} of {len(flat)} samples {NOT_FINITE}")
    return list(dict.fromkeys(notes))
