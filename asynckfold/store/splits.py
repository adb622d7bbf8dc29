"""``splits.npz``: the targets, and of every fold the samples held out; the others if not all."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import StoreCorruptError
from asynckfold.jobs.decoding import FAULTS
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.plan import Plan, folds_fingerprint
from asynckfold.store.layout import SPLITS
from asynckfold.system.files import read_plain, write_whole
from asynckfold.system.plain_text import one_line

_AGAIN = ". The call or command that began the run writes it again"


def packed(folds: Sequence[Fold], targets: npt.NDArray[Any]) -> tuple[bytes, str]:
    """Return the content of the file and its digest."""
    arrays: dict[str, npt.NDArray[Any]] = {"targets": np.asarray(targets)}
    for fold in folds:
        name = _name(fold.key)
        arrays[f"{name}-valid"] = fold.valid
        if not np.array_equal(fold.train, np.delete(np.arange(len(targets)), fold.valid)):
            arrays[f"{name}-train"] = fold.train
        if fold.inner_valid.size:
            arrays[f"{name}-inner-valid"] = fold.inner_valid
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest()


def write(root: Path, content: bytes) -> None:
    """Write the file."""
    write_whole(root / SPLITS, content)


def is_whole(root: Path, digests: str | None) -> bool:
    """Whether the file is one that was written: two `digests` while one replaces the other."""
    try:
        return hashlib.sha256(read_plain(root / SPLITS)).hexdigest() in (digests or "").split()
    except OSError:
        return False


def read(root: Path, plan: Plan, digests: str | None) -> tuple[tuple[Fold, ...], npt.NDArray[Any]]:
    """Return the folds of a plan and the targets.

    Raises
    ------
    StoreCorruptError
        The file is not the one that was written.
    """
    path = root / SPLITS
    try:
        data = read_plain(path)
    except OSError as error:
        raise StoreCorruptError(f"{path} cannot be read: {error.strerror}{_AGAIN}") from error
    if hashlib.sha256(data).hexdigest() not in (digests or "").split():
        raise StoreCorruptError(f"{path} is damaged: it is not what was written{_AGAIN}")
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            # Inner folds come last.
            keys = sorted({job.key for job in plan.jobs}, key=lambda key: (len(key), key))
            targets = arrays["targets"]
            folds = tuple(_fold(arrays, key, len(targets)) for key in keys)
    except (*FAULTS, OSError, EOFError, zipfile.BadZipFile) as error:
        raise StoreCorruptError(f"{path} is damaged: {one_line(str(error))}") from error
    if folds_fingerprint(folds) != plan.folds:
        raise StoreCorruptError(f"{path} holds folds of another plan")
    return folds, targets


def _name(key: tuple[int, ...]) -> str:
    words = ("repeat", "fold", "inner")
    return "-".join(f"{word}{number}" for word, number in zip(words, key, strict=False))


def _fold(arrays: Any, key: tuple[int, ...], count: int) -> Fold:
    name, (repeat, index, *inner_fold) = _name(key), key
    valid = arrays[f"{name}-valid"]
    usual = {"train": np.delete(np.arange(count), valid), "inner-valid": np.empty(0, np.int64)}
    train, inner_valid = (
        arrays[place] if (place := f"{name}-{part}") in arrays else rows
        for part, rows in usual.items()
    )
    return Fold(repeat, index, train, valid, inner_valid, inner=next(iter(inner_fold), None))
