"""The dry run of all models before a plan is written, side by side on idle cores.

::

    models ──► one at a time, and one more for each idle core ──► their facts, merged
                  └─ process dies ──► later again, alone ──► dies again: its jobs fail
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any

from asynckfold.engines.engine import Answer, Engine
from asynckfold.errors import Problem, WorkerDiedError, refuse
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.placement import Placement
from asynckfold.sweep.single_task import ask, room
from asynckfold.system.signals import Interruption

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
                if placed:
                    placement = replace(placement, cores=(free.pop(0),))
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
    for part in parts:
        for key, value in part.recipe.items():
            if isinstance(value, dict):
                recipe[key] = {**recipe.get(key, {}), **value}
            else:
                recipe[key] = value

    def of_all(name: str) -> dict[str, Any]:
        return {key: value for part in parts for key, value in getattr(part, name).items()}

    problems = dict.fromkeys(problem for part in parts for problem in part.problems)
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    of_none = ("recipe", "problems", "notes")
    by_model = {
        field.name: of_all(field.name) for field in fields(Facts) if field.name not in of_none
    }
    return Facts(recipe, problems=tuple(problems), notes=tuple(notes), **by_model)
