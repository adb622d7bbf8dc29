"""Are two runs the same, bit for bit, and where do they first differ?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asynckfold.jobs import reproducibility
from asynckfold.jobs.reproducibility import Claim
from asynckfold.jobs.result import Epoch, Result, StageEpoch
from asynckfold.store import RunReader


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common.

    Parameters
    ----------
    identical : bool
        Whether plans and all results are equal, and neither run is incomplete.
    plan : str
        First difference of the plans; empty when they are equal.
    results : str
        First difference of the results, in the order of the first run's plan; empty when equal.
    equal_jobs, jobs : int
        Jobs with equal results, and jobs that either run plans.
    fingerprints : tuple of str
        Of both runs.
    software : tuple of str
        In what the runs were begun that may give other bits, where it differs.
    claims : tuple of Claim
        Whether each run claims bit-identity.
    """

    identical: bool
    plan: str
    results: str
    equal_jobs: int
    jobs: int
    fingerprints: tuple[str, str]
    software: tuple[str, ...]
    claims: tuple[Claim, Claim]


def compare_runs(first: RunReader, second: RunReader) -> Comparison:
    """Compare canonical results: weights, outputs and metrics; no time, no place.

    Parameters
    ----------
    first, second : RunReader
        Open for reading.

    Returns
    -------
    Comparison
        Also for runs that are incomplete.
    """
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
            reproducibility.claim(first.plan, software[0]),
            reproducibility.claim(second.plan, software[1]),
        ),
    )


def _difference(name: str, one: Result | None, other: Result | None) -> str:
    if one is None or other is None:
        states = [item.status if item else "pending" for item in (one, other)]
        return "" if one is other else f"{name}: {states[0]} there, {states[1]} here"
    if one.digest == other.digest:
        return ""
    if one.status != other.status:
        return f"{name}: {one.status} there, {other.status} here"
    found = (
        _stages(one.pretraining, other.pretraining)
        or _epochs(one.epochs, other.epochs)
        or _ends(one, other)
    )
    return f"{name}: {found}"


def _stages(one: tuple[StageEpoch, ...], other: tuple[StageEpoch, ...]) -> str:
    for mine, theirs in zip(one, other, strict=False):
        there, here = ((item.stage, item.number, dict(item.measures)) for item in (mine, theirs))
        # By their text: NaN is no difference.
        if repr(there) != repr(here):
            return f"pretraining {there} there, {here} here"
    return (
        "" if len(one) == len(other) else f"{len(one)} epochs pretrained there, {len(other)} here"
    )


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
    return "other scores from equal outputs"
