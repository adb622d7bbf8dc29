"""The jobs that wait: in the backlog for a placement, or in a pause before a retry."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from asynckfold.jobs.placement import (
    FULL_SHARE,
    GPU_CONTEXT_BYTES,
    Load,
    Placement,
    Request,
    Wait,
    fused,
)
from asynckfold.jobs.plan import Plan
from asynckfold.scheduling.backlog import Backlog
from asynckfold.scheduling.place import place
from asynckfold.scheduling.reservations import Reservations
from asynckfold.scheduling.wait_reasons import Waits

if TYPE_CHECKING:
    from asynckfold.scheduling.retries import Retry


class PendingJobs:
    """The jobs that have no result and do not run.

    Jobs are placed in units: a single job, or a fusion group, named by its first job. With
    `one_at_a_time`, one unit starts at a time, and short jobs form no batches, which otherwise take
    up to `batch_seconds` (None: as on one machine).
    """

    def __init__(
        self,
        plan: Plan,
        finished: Collection[str],
        requests: Mapping[str, Request],
        clock: Callable[[], float],
        *,
        one_at_a_time: bool = False,
        batch_seconds: float | None = None,
    ) -> None:
        self._clock = clock
        self._one_at_a_time = one_at_a_time
        self._shares: dict[str, float] = {}  # measured, of a GPU's time, by model
        self._requests = dict(requests)
        self._groups = {name: group for group in plan.groups for name in group}
        self._models = {job.id: job.model for job in plan.jobs}
        self._left = {job.id: None for job in plan.jobs if job.id not in finished}
        self._backlog = Backlog(batch_seconds=batch_seconds)
        self._waits = Waits()
        # Before a retry: its start and end on the clock, and its reason.
        self._pauses: dict[str, tuple[float, float, str]] = {}
        for unit in dict.fromkeys(map(self._unit, self._left)):
            self._add(unit)

    def __bool__(self) -> bool:
        return bool(self._backlog or self._pauses)

    @property
    def can_start(self) -> bool:
        """Whether any job is in the backlog, not only in pauses."""
        return bool(self._backlog)

    def group_size(self, job_id: str) -> int:
        """Return how many jobs are trained together with a job, itself included."""
        return len(self._groups.get(job_id, (job_id,)))

    def expected_seconds(self, job_id: str) -> float:
        """Return the expected duration of a job, or of its group."""
        return self._request(self._unit(job_id)).seconds

    def place(self, reservations: Reservations, load: Load) -> list[Placement]:
        """Take the jobs that start now out of the backlog, and reserve their placements."""
        units, cores = [], sum(len(node.cores) for node in load.nodes)
        placed = place(self._backlog, reservations, load)
        for placement in placed[:1] if self._one_at_a_time else placed:
            request = self._backlog.remove(self._unit(placement.jobs[0]))
            units.append((request, placement))
        if self._one_at_a_time:
            placed = [placement for _, placement in units]
        else:
            placed = [self._backlog.extend(*pair, cores) for pair in units]
        for placement in placed:
            reservations.add(placement)
        return placed

    def waits_of(self, placement: Placement) -> dict[str, tuple[Wait, ...]]:
        """Return, once, what each job of a placement that starts now has waited for."""
        now = self._clock()
        waits = {unit: self._waits.start(unit, now) for unit in self._units(placement)}
        return {name: waits[self._unit(name)] for name in placement.jobs}

    def obstacles(self, reservations: Reservations, load: Load) -> dict[str, int]:
        """Return the number of waiting jobs by reason."""
        obstacles = self._waits.look(self._backlog, reservations, load, self._clock())
        jobs = {obstacle.text: count for obstacle, count in obstacles.items()}
        for unit, (_, _, reason) in self._pauses.items():
            jobs[reason] = jobs.get(reason, 0) + len(self._left_of(unit))
        return jobs

    def pause(self, job_id: str, retry: Retry, reason: str) -> None:
        """Keep a job, or its group, out of the backlog until its retry is due."""
        request = replace(self._requests[job_id], alone=retry.alone)
        if retry.alone_on_gpu:
            request = replace(request, gpu_share=1.0)
        self._requests[job_id] = request
        now = self._clock()
        self._pauses[self._unit(job_id)] = now, now + retry.after_s, reason

    def measures_gpu(self, job_id: str) -> bool:
        """Whether a job is to measure its share of a GPU's time: none of its model has yet."""
        is_first = self._models[job_id] not in self._shares
        return is_first and self._requests[job_id].measures_gpu and not self._one_at_a_time

    def learn_gpu(self, job_id: str, share: float | None = None, peak: int = 0) -> list[str]:
        """Expect what a job took of a GPU from all jobs of its model, and return these.

        Of a model the first `share` of its time counts; for others, no job is returned. `peak` are
        the bytes of its process; the jobs of a group have equal parts of them.
        """
        model, changed = self._models[job_id], set()
        if share is not None:
            if not self.measures_gpu(job_id):
                return []
            self._shares[model] = share
        size = peak // self.group_size(job_id) + GPU_CONTEXT_BYTES
        # A job that has its GPU alone may take all its memory. So the next ones share it only once
        # that is known; one that ran out of it (1.0) never does.
        least_alone = 1.0 if peak else FULL_SHARE
        # Also of finished jobs, which stay in their group.
        names = [name for name, other in self._models.items() if other == model]
        for name in names:
            request = self._requests[name]
            memory, expected = max(request.gpu_memory, size), request.gpu_share
            if expected < least_alone:
                expected = self._shares.get(model, expected)
            if request.gpu and (memory, expected) != (request.gpu_memory, request.gpu_share):
                self._requests[name] = replace(request, gpu_memory=memory, gpu_share=expected)
                changed.add(self._unit(name))
        for unit in sorted(changed):
            if unit in self._backlog:
                self._backlog.remove(unit)
                self._add(unit, *self._waits.start(unit, self._clock()))
        return names

    def end_pauses(self) -> None:
        """Return the jobs whose retry is due to the backlog."""
        now = self._clock()
        for unit in [unit for unit, (_, due, _) in self._pauses.items() if due <= now]:
            since, _, reason = self._pauses.pop(unit)
            self._add(unit, Wait(now - since, "pause", reason))

    def next_due(self) -> float:
        """Return when the next pause ends, on the clock."""
        return min((due for _, due, _ in self._pauses.values()), default=math.inf)

    def finish(self, job_id: str) -> None:
        """Note that a job has a result."""
        self._left.pop(job_id, None)

    def leave_out(self, job_id: str) -> None:
        """Start a job no more; one that runs goes on, and so do the others of its group."""
        self.finish(job_id)
        unit = self._unit(job_id)
        left = self._left_of(unit)
        if unit in self._backlog:
            self._backlog.remove(unit)
            waits = self._waits.start(unit, self._clock())
            if left:
                self._add(unit, *waits)
        elif not left:
            self._pauses.pop(unit, None)

    def add_again(self, placement: Placement) -> None:
        """Return the jobs of a placement that have no result to the backlog, unless they pause."""
        for unit in self._units(placement):
            if self._left_of(unit) and unit not in self._pauses:
                self._add(unit)

    def _unit(self, job_id: str) -> str:
        return self._groups.get(job_id, (job_id,))[0]

    def _units(self, placement: Placement) -> list[str]:
        """Return the units of a placement, several for a batch of short jobs."""
        return list(dict.fromkeys(map(self._unit, placement.jobs)))

    def _left_of(self, unit: str) -> tuple[str, ...]:
        return tuple(name for name in self._groups.get(unit, (unit,)) if name in self._left)

    def _request(self, unit: str) -> Request:
        if unit not in self._groups:
            return self._requests[unit]
        return fused([self._requests[name] for name in self._groups[unit]], self._left_of(unit))

    def _add(self, unit: str, *before: Wait) -> None:
        request = self._request(unit)
        self._backlog.add(request)
        self._waits.arrive(request, self._clock(), before)
