"""What a race saved, and its bound, in a sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from asynckfold.jobs.plan import Plan
from asynckfold.jobs.result import CANCELLED, Result
from asynckfold.results.candidates import candidates
from asynckfold.system.units import duration


def race_sentence(plan: Plan, results: Mapping[str, Result]) -> str:
    """Say what a race saved."""
    spared, used, seconds = 0, 0, list[float]()
    for row in candidates(plan, results):
        jobs = [job for job in plan.jobs if job.candidate == row.name]
        ended = [item for job in jobs if (item := results.get(job.id)) is not None]
        attempts = [item.attempt for item in ended if item.status == CANCELLED]
        spared += attempts.count(0)
        used += len(attempts) - attempts.count(0)
        known = row.fit_seconds[~np.isnan(row.fit_seconds)]
        seconds.append(attempts.count(0) * float(known.mean()) if known.size else 0.0)
    bound = f"The best candidate is lost with a probability of at most {plan.race:.3g}"
    ahead = f"; {used} more had started ahead and are not used" if used else ""
    return (
        f"Racing saved {spared} of {len(plan.jobs)} jobs, about {duration(math.fsum(seconds))} of "
        f"training{ahead}. {bound}, as far as the test holds."
    )
