"""What differs between the live objects of two plans, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from asynckfold.jobs.candidate_names import candidate_name

Code = Mapping[str, Mapping[str, str]]
"""By part, its components by name, and of which Python its bytecode is under `PYTHON`."""

PYTHON = "Python"
WEIGHTS = "the initial weights"
"""The component of the weights of a model that is given as an instance."""

MOST_NAMED = 3
"""Parts that a message names, and components of each."""

_WHOLE = ("it", "its class", "self: its class", "its steps")
"""Components that say what a part is: where these differ, nothing else tells more."""

_DERIVED = ("its arguments", "its keys", "its method", "the bases of ", "self")
_NAMED = ("model", "scheduler", "scorer")


def changes(there: Code, here: Code) -> dict[str, str]:
    """Return what changed, by part.

    Bytecode is compared only between equal versions of Python: see `incomparable`.

    >>> there, here = ({"model net": {"forward()": text}} for text in ("code:1", "code:2"))
    >>> changes(there, here)
    {'model net': "model 'net': forward() changed"}
    """
    changes = {}
    for part in dict.fromkeys([*there, *here]):
        if part not in here or part not in there:
            words = ("one", "none") if part in there else ("none", "one")
            changes[part] = "{}: {} there, {} here".format(_shown(part), *words)
            continue
        old, new = there[part], here[part]
        code = old.get(PYTHON) == new.get(PYTHON)
        components = list(_components(_comparable(old, code), _comparable(new, code)))
        if components:
            changes[part] = f"{_shown(part)}: {', '.join(_first(components))}"
    return changes


def difference(there: Code, here: Code, candidates: Sequence[tuple[str, str]] = ()) -> str | None:
    """Name what changed and which candidates depend on it, or None."""
    changed = changes(there, here)
    if not changed:
        return None
    return "; ".join(_first(list(changed.values()))) + _affected_text(list(changed), candidates)


def _affected_text(parts: Sequence[str], candidates: Sequence[tuple[str, str]]) -> str:
    if len(candidates) < 2:
        return ""
    dependent = affected(parts, candidates)
    names = [candidate_name(*pair) for pair in dependent]
    if len(dependent) == len(candidates):
        return f" (all {len(dependent)} candidates depend on it)"
    shown = ", ".join([*names[:MOST_NAMED], *["…"] * (len(names) > MOST_NAMED)])
    return f" ({len(dependent)} of {len(candidates)} candidates depend on it: {shown})"


def incomparable(there: Code, here: Code) -> str:
    """Return why bytecode cannot be compared; ``""`` where it can."""
    pairs = ((there[part].get(PYTHON), here[part].get(PYTHON)) for part in there if part in here)
    reasons = [f"{old}, and this is {new}" for old, new in pairs if old != new]
    return reasons[0] if reasons else ""


def kept(there: Code, here: Code) -> dict[str, Mapping[str, str]]:
    """Return `here`, with unchanged parts as in `there`."""
    changed = changes(there, here)
    return {
        part: there[part] if part in there and part not in changed else components
        for part, components in here.items()
    }


def affected(
    parts: Sequence[str], candidates: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """Return the candidates whose results depend on one of these parts.

    >>> affected(["model A"], [("A", "step"), ("B", "step")])
    (('A', 'step'),)
    >>> len(affected(["criterion"], [("A", "step"), ("B", "step")]))
    2
    """
    return tuple(
        (model, schedule)
        for model, schedule in candidates
        if any(
            part in (f"model {model}", f"scheduler {schedule}")
            or not part.startswith(("model ", "scheduler "))
            for part in parts
        )
    )


def common(mine: Code, theirs: Code) -> dict[str, Mapping[str, str]]:
    """Restrict a larger plan's parts to the models and LR schedules of `mine`."""
    return {
        name: value
        for name, value in theirs.items()
        if name in mine or not name.startswith(("model ", "scheduler "))
    }


def _comparable(components: Mapping[str, str], code: bool) -> dict[str, str]:
    return {
        name: text
        for name, text in components.items()
        if name != PYTHON and (code or not text.startswith(("code:", "asserted:")))
    }


def _components(there: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    """Yield what changed in a part, the most telling first."""
    differing = [
        name for name in dict.fromkeys([*there, *here]) if there.get(name) != here.get(name)
    ]
    for name in _WHOLE:
        if name in differing and name in there and name in here:
            yield _change(name, there[name], here[name])
            return
    both = [name for name in differing if name in there and name in here]
    plain = [name for name in both if not name.startswith(_DERIVED)]
    if plain or both:
        for name in plain or both:
            yield _change(name, there[name], here[name])
        return
    for name in differing:
        yield f"{name} {'is gone' if name in there else 'is new'}"


def _change(name: str, there: str, here: str) -> str:
    if there.startswith("=") and here.startswith("=") and len(there) + len(here) < 80:
        return f"{name} was {there[1:]}, is {here[1:]}"
    return f"{name} changed"


def _first(texts: Sequence[str]) -> list[str]:
    more = len(texts) - MOST_NAMED
    return [*texts[:MOST_NAMED], *[f"and {more} more"] * (more > 0)]


def _shown(part: str) -> str:
    kind, _, name = part.partition(" ")
    return f"{kind} {name!r}" if kind in _NAMED and name else part
