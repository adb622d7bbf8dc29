"""Whether jobs on a GPU are fused: only where a probe there finds fused steps clearly faster.

Without a timing there are no groups: no rule over operations was measured on GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from asynckfold.jobs.cost import Cost
from asynckfold.planning import cost_cache
from asynckfold.planning.flop_model import OVERTURN
from asynckfold.planning.fusion_groups import GAINING_JOBS, gain_of_many, measured_here
from asynckfold.planning.thread_search import Model
from asynckfold.planning.workload import Probe, Workload, failure_in

NOT_TIMED = "fused steps were not timed on a GPU"


def with_fused_gain(
    workload: Workload, model: Model, cost: Cost, probe: Probe | None, place: Path | None
) -> Cost:
    """Return a measured cost with the gain of fused steps, from the cache or a probe.

    A model that may not be fused, or whose group could not be timed, keeps its cost.
    """
    together = min(GAINING_JOBS, len(model.jobs))
    if together < 2 or not workload.may_fuse(model.name):
        return cost
    key = cost_cache.key_of({"cost": workload.key(model.name), "fused": together})
    known = cost_cache.recall(key, place)
    if known is None and probe is not None:
        timings = probe(model.name, 1, 1, together)
        # What user code raises in a group, it also raises in its jobs; or they do not fit at once.
        if timings and not failure_in(timings):
            found = gain_of_many(cost.step_seconds[1] / timings[0].step_seconds, together)
            known = cost_cache.remember(key, replace(cost, fused_gain=found), place)
    return cost if known is None else replace(cost, fused_gain=known.fused_gain)


def why_not_here(cost: Cost, per_gpu: int) -> str:
    """Return why a cost on a GPU speaks against fusion; empty if fused steps are clearly faster.

    A group has the GPU to itself: it is compared with `per_gpu` separate jobs that share one.

    Examples
    --------
    >>> cost = Cost({1: 0.004}, {1: 0.001}, pair_seconds=0.005, fused_gain=2.0)
    >>> why_not_here(cost, 1), why_not_here(cost, 2)[:58]
    ('', 'measured here: fused steps are 1.25 times faster than sepa')
    >>> why_not_here(replace(cost, fused_gain=0.0), 1)
    'fused steps were not timed on a GPU'
    """
    if not cost.fused_gain:
        return NOT_TIMED
    gain = gain_over_sharing(cost, per_gpu)
    if gain >= OVERTURN:
        return ""
    return f"{measured_here(gain)}, of which {per_gpu} share a GPU; {OVERTURN} times is the least"


def gain_over_sharing(cost: Cost, per_gpu: int) -> float:
    """Return how many times faster fused steps are than those of jobs that share a GPU."""
    separate = cost.shared(per_gpu).step_seconds[1] / per_gpu
    return cost.fused_gain * separate / cost.step_seconds[1]
