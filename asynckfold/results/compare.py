"""Compare two runs bit for bit, and find where they first differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asynckfold.jobs import reproducibility
from asynckfold.jobs.reproducibility import Reproducibility
from asynckfold.jobs.result import Epoch, Result, StageEpoch
from asynckfold.store import RunReader


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common."""

    identical: bool  # both complete, with equal plans and results
    plan: str  # first difference of the plans; empty if they are equal
    results: str  # first difference of the results, in the order of the first run's plan
    equal_jobs: int
    jobs: int  # that either run plans
    fingerprints: tuple[str, str]
    software: tuple[str, ...]  # differences at the start that may change bits
    claims: tuple[Reproducibility, Reproducibility]  # of each run; the name is a JSON key


def compare_runs(first: RunReader, second: RunReader) -> Comparison:
    """Compare the weights, outputs and metrics of two runs, complete or not; no time, no place."""
    plan = first.plan.first_difference(second.plan) or ""
    mine, theirs = first.results(), second.results()
    software = first.software(), second.software()
    names = dict.fromkeys(job.id for store in (first, second) for job in store.plan.jobs)
    differences = [
        found for name in names if (found := _difference(name, mine.get(name), theirs.get(name)))
    ]
    missing = any(name not in mine or name not in theirs for name in names)
    return Comparison(
        not plan and not differences and not missing,
        plan,
        differences[0] if differences else "",
        len(names) - len(differences) - sum(n not in mine and n not in theirs for n in names),
        len(names),
        (first.fingerprint(), second.fingerprint()),
        reproducibility.differences(*(next(iter(item), {}) for item in software)),
        (
            reproducibility.reproducibility_of(first.plan, software[0]),
            reproducibility.reproducibility_of(second.plan, software[1]),
        ),
    )


def _difference(name: str, one: Result | None, other: Result | None) -> str:
    states = [item.status if item else "pending" for item in (one, other)]
    if states[0] != states[1]:
        return f"{name}: {states[0]} there, {states[1]} here"
    if one is None or other is None or one.digest == other.digest:
        return ""
    found = (
        _stages(one.pretraining, other.pretraining)
        or _epochs(one.epochs, other.epochs)
        or _ends(one, other)
    )
    return f"{name}: {found}"


def _stages(one: tuple[StageEpoch, ...], other: tuple[StageEpoch, ...]) -> str:
    for mine, theirs in zip(one, other, strict=False):
        there, here = ((item.stage, item.number, dict(item.measures)) for item in (mine, theirs))
        # Compared as text, in which NaN equals NaN.
        if repr(there) != repr(here):
            return f"pretraining {there} there, {here} here"
    counts = len(one), len(other)
    return "" if counts[0] == counts[1] else "{} epochs pretrained there, {} here".format(*counts)


def _epochs(one: tuple[Epoch, ...], other: tuple[Epoch, ...]) -> str:
    for mine, theirs in zip(one, other, strict=False):
        for metric in ("lr", "train_loss", "valid_loss", "accuracy"):
            a, b = getattr(mine, metric), getattr(theirs, metric)
            if a != b and not (a != a and b != b):
                return f"epoch {mine.number}, {metric} {a!r} there, {b!r} here"
    return "" if len(one) == len(other) else f"{len(one)} epochs there, {len(other)} here"


def _ends(one: Result, other: Result) -> str:
    if one.weights != other.weights:
        return "other weights after equal epochs"
    if one.outputs is not None and other.outputs is not None:
        if one.outputs.shape != other.outputs.shape:
            return f"outputs of shape {one.outputs.shape} there, {other.outputs.shape} here"
        rows = np.flatnonzero((one.outputs != other.outputs).reshape(len(one.outputs), -1).any(1))
        if rows.size:
            return f"out-of-fold outputs of {rows.size} samples, first in row {rows[0]}"
    elif one.outputs is not other.outputs:
        return f"outputs kept {'here' if one.outputs is None else 'there'} only"
    return "other scores from equal outputs"
