"""Read results from a run's store."""

from __future__ import annotations

import math

from asynckfold.jobs import reproducibility
from asynckfold.results.cv_results import CVResults
from asynckfold.store import RunReader


def read_results(store: RunReader) -> CVResults:
    """Return the results of a run on disk, complete or not."""
    folds, targets = store.splits()
    return CVResults(
        plan=store.plan,
        folds=folds,
        n_samples=len(targets),
        results=store.results(folds),
        seconds=math.fsum(item.packed_seconds for item in store.sessions()),
        baseline=store.baseline,
        root_dir=store.root,
        bit_identity=reproducibility.reproducibility_of(store.plan, store.software()),
    )


def refit_note(store: RunReader) -> str:
    """Return how the refit of the best candidate ended; ``""`` if there was none."""
    return next((item.text for item in reversed(store.events()) if item.kind == "refit"), "")
