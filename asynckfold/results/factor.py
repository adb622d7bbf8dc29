"""`Factor`: the models of a sweep, or its LR schedules, compared fold by fold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asynckfold.jobs.folds import Fold
from asynckfold.results.statistics import Difference, Floats, holm, paired_differences


@dataclass(frozen=True)
class Factor:
    """The models that have a score, or the LR schedules; see `compare_levels`."""

    names: tuple[str, ...]
    over: tuple[str, ...]  # levels of the other factor, over which each has its mean
    leader: str  # highest mean, if any is complete of the complete ones; "" if none has a score
    pairs: tuple[Difference, ...]
    unbeaten: tuple[str, ...]

    @property
    def beaten(self) -> tuple[str, ...]:
        """Those that another beats."""
        return tuple(name for name in self.names if name not in self.unbeaten)

    @property
    def duels(self) -> list[Difference]:
        """The leader's comparisons, the closest first."""
        found = [pair for pair in self.pairs if self.leader in (pair.first, pair.second)]
        return sorted(found, key=lambda pair: math.inf if math.isnan(pair.mean) else pair.mean)

    def shown_by(self, shown: Callable[[str], str]) -> Factor:
        """Return this factor under names that are safe to show."""
        names, over, unbeaten = (
            tuple(map(shown, each)) for each in (self.names, self.over, self.unbeaten)
        )
        pairs = (
            replace(pair, first=shown(pair.first), second=shown(pair.second)) for pair in self.pairs
        )
        return Factor(names, over, shown(self.leader), tuple(pairs), unbeaten)


def compare_levels(
    names: Sequence[str],
    others: Sequence[str],
    scores: Floats,
    folds: Sequence[Fold],
    largest: float,
    undecided: int,
) -> Factor:
    """Compare models by their mean over LR schedules, or the other way round.

    Parameters
    ----------
    names, others : sequence of str
        Of the levels, and of those of the other factor.
    scores : ndarray of shape (n_names, n_others, n_folds)
        NaN without a score.
    folds : sequence of Fold
        The last axis of `scores`.
    largest : float
        Largest possible difference.
    undecided : int
        Comparisons of the other factor that `holm` has to count.
    """
    scored = np.asarray((~np.isnan(scores)).any(axis=2))
    known = np.asarray(scored.any(axis=1))
    # Only what all have is averaged: a mean over other levels would compare these as well.
    common = np.asarray(scored[known].all(axis=0))
    if not common.any():
        common = np.asarray(scored.any(axis=0))
    with np.errstate(invalid="ignore"):
        means = scores[known][:, common].mean(axis=1) if known.any() else np.empty((0, len(folds)))
    present = [name for name, is_known in zip(names, known.tolist(), strict=True) if is_known]
    pairs = holm(paired_differences(present, means, folds, largest), undecided)
    beaten = {pair.second for pair in pairs if pair.conclusion == "beats"}
    return Factor(
        tuple(present),
        tuple(name for name, is_common in zip(others, common.tolist(), strict=True) if is_common),
        _leader(present, means),
        pairs,
        tuple(name for name in present if name not in beaten),
    )


def _leader(names: Sequence[str], means: Floats) -> str:
    def order(place: int) -> tuple[bool, float]:
        known = means[place][~np.isnan(means[place])]
        mean = float(known.mean()) if known.size else -math.inf
        return known.size == means.shape[1], mean

    return names[max(range(len(names)), key=order)] if names else ""
