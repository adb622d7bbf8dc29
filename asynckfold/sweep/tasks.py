"""Tasks that are no jobs: one that an engine is asked for, and the dry run of all models.

::

    models ──► one at a time, and one more for each idle core ──► their facts, merged
                  └─ process dies ──► later again, alone ──► dies again: its jobs fail
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

from asynckfold.engines.engine import Answer, Engine
from asynckfold.errors import NoRoomError, Problem, WorkerDiedError, refuse
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import Load, Placement
from asynckfold.scheduling.wait_reasons import blocked_everywhere
from asynckfold.store import RunStore
from asynckfold.system.signals import Interruption

TICK_SECONDS = 0.25
"""Longest interval between readings of the load."""


class Patience:
    """Limits the time during which nothing can start; None: no limit."""

    def __init__(self, max_wait: float | None) -> None:
        self._max_wait = max_wait
        self._since: float | None = None

    def look(self, now: float, obstacle: str) -> bool:
        """Return whether waiting begins now; `obstacle` is empty if something can start.

        Raises
        ------
        NoRoomError
            The time is over.
        """
        begins = self._since is None
        if not obstacle:
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        if self._max_wait is not None and now - self._since >= self._max_wait:
            raise NoRoomError(
                f"nothing could start for {now - self._since:.0f} s (max_wait): {obstacle}; "
                "finished jobs are kept, and the same call continues"
            )
        return begins


def room(engine: Engine, max_wait: float | None, signals: Interruption) -> Load:
    """Wait until something may start, and return the load of a node where it may.

    Raises `NoRoomError` after `max_wait`.
    """
    patience = Patience(max_wait)
    while obstacle := blocked_everywhere(load := engine.load([])):
        patience.look(time.monotonic(), obstacle)
        time.sleep(TICK_SECONDS)
        signals.check()
    return next(node for node in load.nodes if not node.blocked)


class Sampler:
    """Records the use of cores and GPUs in a phase: the longer it is, the less often.

    The phase is ``"packed"`` or ``"serial"``; only the first uses GPUs.
    """

    def __init__(
        self, store: RunStore, phase: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._phase, self._clock = store, phase, clock
        self._started = clock()
        self._next = 0.0

    def look(self, load: Load, *, at_end: bool = False) -> None:
        """Record the use in `load` if a sample is due, or the phase ends."""
        passed = self._clock() - self._started
        use = tuple(chain.from_iterable(node.use for node in load.nodes))
        if use and (at_end or passed >= self._next):
            mine = sum(node.own for node in load.nodes)
            self._store.sample(self._phase, sum(use), mine, use)
            if load.gpus and self._phase == "packed":
                use_of = {gpu.index: gpu.use for gpu in load.gpus}
                by_index = [use_of.get(index, -1.0) for index in range(max(use_of) + 1)]
                self._store.sample("gpu", sum(use_of.values()), 0.0, by_index)
            self._next = passed + max(TICK_SECONDS, passed / 400)


def ask(
    engine: Engine,
    placement: Placement,
    max_wait: float | None,
    signals: Interruption,
    sampler: Sampler | None = None,
) -> Any:
    """Run a placement that belongs to no job (a dry run, a baseline); return its finding.

    Raises
    ------
    WorkerDiedError
        The process ended without an answer.
    NoRoomError
        It could not start within `max_wait` seconds.
    """
    node = room(engine, max_wait, signals)
    if node.node and not placement.node:
        # The cores were chosen for this machine.
        placement = replace(placement, node=node.node, cores=node.cores)
    future = engine.submit(placement, [])
    while not wait([future], timeout=TICK_SECONDS).done:
        signals.check()
        load = engine.load([placement])
        if sampler is not None:
            sampler.look(load)
    if sampler is not None:
        # An engine in this process returned only now.
        sampler.look(engine.load([placement]), at_end=True)
    return future.result().results[0]


CHECK_SECONDS = 0.1
"""Interval between readings of the load."""

ATTEMPTS = 3
"""Dry runs of a model whose process dies, before that counts as the model's fault."""


@dataclass(frozen=True, eq=False)
class DryRun:
    """Checks the models of a bundle.

    `make` starts an engine for a bundle; `everywhere` is a placement on all allowed cores. The
    candidates `spared` may break rules: they fail, if any other is left.
    """

    make: Callable[[Any], AbstractContextManager[Engine]]
    everywhere: Placement
    most: int
    max_wait: float | None
    signals: Interruption
    spared: Collection[str] = ()

    def __call__(self, bundle: Any) -> Facts:
        """Return the facts of all models.

        Raises
        ------
        InputError
            All problems that make the sweep impossible.
        """
        jobs = {job.model: job.id for job in reversed(bundle.plan.jobs)}
        placements = {
            name: replace(self.everywhere, jobs=(jobs[name],)) for name in bundle.recipe.models
        }
        with self.make(bundle) as engine:
            by_model = dict(self._side_by_side(engine, placements))
            # The plan must not depend on a process that somebody killed.
            for name in [name for name, facts in by_model.items() if facts is None]:
                by_model[name] = self._alone(engine, name, placements[name])
        facts = merged([item for name in placements if (item := by_model[name]) is not None])
        left = {job.candidate for job in bundle.plan.jobs} - facts.refused.keys()
        if not left or not facts.refused.keys() <= {*self.spared}:
            refuse(Problem(*problem) for problem in facts.problems)
        return replace(facts, failures=facts.failures | facts.refused)

    def _side_by_side(
        self, engine: Engine, placements: Mapping[str, Placement]
    ) -> Iterator[tuple[str, Facts | None]]:
        """Check each model, as many at once as there are idle cores; None if its process died."""
        waiting = list(placements)
        running: dict[Future[Answer], tuple[str, Placement]] = {}
        room(engine, self.max_wait, self.signals)
        while waiting or running:
            self.signals.check()
            placed = [placement for _, placement in running.values()]
            nodes = engine.load(placed).nodes
            load = next((node for node in nodes if not node.blocked), nodes[0])
            free = [core for core in load.idle if (core,) not in [item.cores for item in placed]]
            count = max(1 if not placed else 0, min(self.most, len(load.idle)) - len(placed))
            for name in waiting[:count]:
                placement = replace(placements[name], node=load.node)
                if placed and not engine.runs_in_submit:
                    placement = replace(placement, cores=(free.pop(0),), threads=1)
                elif load.node:
                    placement = replace(placement, cores=load.cores)
                running[engine.submit(placement, [])] = name, placement
                placed.append(placement)
            waiting = waiting[count:]
            for future in wait(running, CHECK_SECONDS, FIRST_COMPLETED).done:
                name, _ = running.pop(future)
                yield name, _facts(name, future)

    def _alone(self, engine: Engine, name: str, placement: Placement) -> Facts:
        for _ in range(ATTEMPTS):
            try:
                facts: Facts = ask(engine, placement, self.max_wait, self.signals)
            except WorkerDiedError as death:
                error = death
            else:
                return facts
            if error.outcome != "died":
                break
        return _died(name, error)


def _facts(name: str, future: Future[Answer]) -> Facts | None:
    try:
        facts: Facts = future.result().results[0]
    except WorkerDiedError as death:
        # Alone it would hang again.
        return _died(name, death) if death.outcome == "hang" else None
    return facts


def _died(name: str, death: WorkerDiedError) -> Facts:
    return Facts({"architecture": {name: None}}, {}, {}, (), {name: str(death)})


def merged(parts: Sequence[Facts]) -> Facts:
    """Merge facts of different models; equal problems are kept once.

    Examples
    --------
    >>> rule = ("a rule", "what was received", "a remedy")
    >>> parts = [Facts({"settings": {name: 1}}, {name: 0.5}, {}, (rule,)) for name in "ab"]
    >>> facts = merged(parts)
    >>> facts.recipe, facts.step_seconds, len(facts.problems)
    ({'settings': {'a': 1, 'b': 1}}, {'a': 0.5, 'b': 0.5}, 1)
    """
    recipe: dict[str, Any] = {}
    for key, value in (pair for part in parts for pair in part.recipe.items()):
        recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value

    def of_all(name: str) -> dict[str, Any]:
        return {key: value for part in parts for key, value in getattr(part, name).items()}

    problems = dict.fromkeys(problem for part in parts for problem in part.problems)
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    of_none = ("recipe", "problems", "notes")
    by_model = {
        field.name: of_all(field.name) for field in fields(Facts) if field.name not in of_none
    }
    return Facts(recipe, problems=tuple(problems), notes=tuple(notes), **by_model)
