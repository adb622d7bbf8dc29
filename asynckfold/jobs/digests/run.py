"""Digest of all live objects of a run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asynckfold.jobs.digests import bytecode, changes
from asynckfold.jobs.digests.changes import PYTHON
from asynckfold.jobs.digests.parts import LargePackageError, PartDigests, sha, short_name


@dataclass(frozen=True)
class Digest:
    """The live objects of a run, by value."""

    parts: Mapping[str, Mapping[str, str]]  # components by name, by part, such as ``"model net"``
    skipped: tuple[str, ...]  # compared by type only, or not at all
    modules: tuple[str, ...] = ()  # the user's modules, which workers import from their files


def digested(parts: Mapping[str, Any], used_here: Iterable[str] = (), data: str = "") -> Digest:
    """Return the digest of live objects; None stands for a missing one.

    `used_here`: parts that this process calls, so that their state may have changed. `data`: the
    part whose arrays and long containers are samples.

    >>> import functools
    >>> digest = digested({"scheduler steps": functools.partial(range, 3)})
    >>> digest.parts["scheduler steps"]["argument 1"]
    '=3'
    """
    components: dict[str, dict[str, str]] = {}
    skipped: dict[str, None] = {}
    modules: set[str] = set()
    used = set(used_here)
    for name, value in parts.items():
        if value is None:
            continue
        part = _taken(value, is_used=name in used, is_data=name == data)
        components[name] = {**dict(sorted(part.components.items())), PYTHON: bytecode.PYTHON}
        skipped.update(dict.fromkeys(f"{name}: {text}" for text in part.skipped))
        modules |= part.modules
    return Digest(components, tuple(skipped), tuple(sorted(modules)))


def digest_of(value: Any) -> str:
    """Return a digest that equal values share in any process, and others do not.

    >>> digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1}), digest_of(1) == digest_of(True)
    (True, False)
    """
    return sha(repr(digested({"": value}).parts))


def _taken(value: Any, *, is_used: bool, is_data: bool) -> PartDigests:
    whole: set[str] = set()
    while True:
        part = PartDigests(whole, is_used=is_used, is_data=is_data)
        try:
            part.take(value)
        except LargePackageError as error:
            whole.add(error.package)
        else:
            return part


def of_run(recipe: Any, settings: Any) -> Digest:
    """Return the digest of all live objects of a call."""
    here = {
        **{f"scorer {name}": item for name, item in _scorers(settings.scoring)},
        "train_transform": settings.train_transform,
        "eval_transform": settings.eval_transform,
        "collate_fn": settings.collate_fn,
        "dataset": None if isinstance(settings.dataset, tuple) else settings.dataset,
    }
    return digested({**_of_jobs(recipe), **here}, here, "dataset")


def imported_otherwise(recipe: Any, sent: Mapping[str, Mapping[str, str]]) -> str:
    """Say how a recipe that was unpacked here differs from what was sent; ``""`` if it does not.

    Module code is not sent; whoever unpacks it imports the files as they are now. Compares code and
    numbers that are known on both sides.
    """
    here: dict[str, dict[str, str]] = {}
    there: dict[str, dict[str, str]] = {}
    for part, mine in digested(_of_jobs(recipe)).parts.items():
        theirs = sent.get(part, {})
        # The number of a name depends on what else was recorded.
        sure = [
            name
            for name in mine.keys() & theirs.keys()
            if name == PYTHON
            or not (
                re.search(r" \(\d+\)", name)
                or _SURE.match(mine[name]) is None
                or _SURE.match(theirs[name]) is None
            )
        ]
        here[part], there[part] = ({name: texts[name] for name in sure} for texts in (mine, theirs))
    return changes.difference(there, here) or ""


_SURE = re.compile(r"code:|=(?:[-(\[\d]|True$|False$|None$)")
"""Code and numbers, which are the same in any process, whatever else it has imported."""


def _of_jobs(recipe: Any) -> dict[str, Any]:
    parts = {f"model {name}": model for name, model in recipe.models.items()}
    for name, schedule in recipe.lr_schedules.items():
        parts[f"scheduler {name}"] = None if isinstance(schedule, str) else schedule
        if keywords := recipe.optimizers.get(name):
            parts[f"scheduler {name}"] = {"scheduler": schedule, "opt_fn": dict(keywords)}
    parts["opt_fn"] = recipe.opt_fn
    parts["criterion"] = recipe.make_criterion or recipe.criterion
    parts["preprocess"] = _unfitted(recipe.preprocess)
    parts["target_transform"] = _unfitted(recipe.target_transform)
    parts["training_step"] = recipe.training_step
    parts["validation_step"] = recipe.validation_step
    parts["fit_fn"] = recipe.fit_fn
    if recipe.callbacks:
        parts["callbacks"] = list(recipe.callbacks)
    parts["sampler"] = recipe.sampler
    return parts


def _unfitted(preprocess: Any) -> Any:
    """Return a copy without what was fitted: each fold fits it anew."""
    if preprocess is not None:
        from sklearn.base import clone

        # What cannot be cloned is refused where it is fitted.
        with contextlib.suppress(TypeError, RuntimeError):
            return clone(preprocess)
    return preprocess


def _scorers(scoring: Any) -> Iterator[tuple[str, Any]]:
    """Yield scores that are functions, or have settings."""
    if isinstance(scoring, Mapping):
        pairs = [(str(name), item) for name, item in scoring.items()]
    else:
        items = scoring if isinstance(scoring, (list, tuple)) else [scoring]
        pairs = [(short_name(getattr(item, "_score_func", item)), item) for item in items]
    yield from ((name, item) for name, item in pairs if item is not None and type(item) is not str)
