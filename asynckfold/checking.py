"""The dry run of all candidates before a plan is written: side by side, where cores are idle.

::

    models ── a share for each idle core ── a worker each ── facts, joined in the models' order
                                               └ dies ──► each model alone: only its jobs fail
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from asynckfold.asking import ask_all, room
from asynckfold.engines.engine import Engine
from asynckfold.errors import Problem, WorkerDiedError, refuse
from asynckfold.interruption import Interruption
from asynckfold.messages import Facts
from asynckfold.placement import Placement

ATTEMPTS = 3
"""How often a model is checked whose process dies, before it is the model's fault."""


@dataclass(frozen=True, eq=False)
class Checker:
    """Checks the candidates of a bundle.

    Parameters
    ----------
    make : callable
        Starts an engine for a bundle, closed with the context.
    everywhere : Placement
        A dry run on all cores that the sweep may use.
    most : int
        How many processes it may have at once.
    max_wait : float or None
        Seconds to wait where nothing may start.
    signals : Interruption
        Looked at meanwhile.
    """

    make: Callable[[Any], AbstractContextManager[Engine]]
    everywhere: Placement
    most: int
    max_wait: float | None
    signals: Interruption

    def __call__(self, bundle: Any) -> Facts:
        """Return what is found of all candidates.

        Raises
        ------
        InputError
            All that makes the sweep impossible.
        """
        names = list(bundle.recipe.models)
        try:
            facts = self._found(bundle, names)
        except WorkerDiedError:
            facts = joined([self._alone(bundle, name) for name in names])
        refuse(Problem(*problem) for problem in facts.problems)
        return facts

    def _alone(self, bundle: Any, name: str) -> Facts:
        """Check one model; what the plan says of it must not depend on who was killed meanwhile."""
        for _ in range(ATTEMPTS):
            try:
                return self._found(bundle, [name])
            except WorkerDiedError as death:
                error = death
            if error.outcome != "died":
                break
        return Facts({"architecture": {name: None}}, {}, {}, (), {name: str(error)})

    def _found(self, bundle: Any, names: Sequence[str]) -> Facts:
        """Check these models, as many at once as there are idle cores."""
        first = {job.model: job.id for job in reversed(bundle.plan.jobs)}
        with self.make(bundle) as engine:
            idle = room(engine, self.max_wait, self.signals).idle
            count = max(1, min(len(names), self.most, len(idle)))
            shares = [tuple(first[name] for name in part) for part in np.array_split(names, count)]
            placements = [replace(self.everywhere, jobs=share) for share in shares]
            if count > 1:
                placements = [
                    replace(placement, cores=(core,))
                    for placement, core in zip(placements, idle, strict=False)
                ]
            return joined(ask_all(engine, placements, signals=self.signals))


def joined(parts: Sequence[Facts]) -> Facts:
    """Return as one what was found of some models each, problems of several once.

    Examples
    --------
    >>> rule = ("a rule", "what was received", "a remedy")
    >>> parts = [Facts({"settings": {name: 1}}, {name: 0.5}, {}, (rule,)) for name in "ab"]
    >>> found = joined(parts)
    >>> found.recipe, found.step_seconds, len(found.problems)
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
    by_model = (field.name for field in fields(Facts) if field.name not in ("recipe", "problems"))
    return Facts(recipe, problems=tuple(problems), **{name: of_all(name) for name in by_model})
