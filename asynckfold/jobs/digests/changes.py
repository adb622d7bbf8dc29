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
"""Parts that a message names, components of each, and candidates."""

_OF_CANDIDATES = ("model ", "scheduler ")


def changes(there: Code, here: Code) -> dict[str, str]:
    """Return what changed, by part.

    Bytecode is compared only between equal versions of Python: see `incomparable`.

    >>> there, here = ({"model net": {"forward()": text}} for text in ("code:1", "code:2"))
    >>> changes(there, here)
    {'model net': "model 'net': forward() changed"}
    """
    changes = {}
    for part in dict.fromkeys([*there, *here]):
        kind, _, name = part.partition(" ")
        shown = f"{kind} {name!r}" if name else part
        if part not in here or part not in there:
            words = ("one", "none") if part in there else ("none", "one")
            changes[part] = "{}: {} there, {} here".format(shown, *words)
        elif components := list(_components(there[part], here[part])):
            changes[part] = f"{shown}: {', '.join(_first(components))}"
    return changes


def difference(there: Code, here: Code, candidates: Sequence[tuple[str, str]] = ()) -> str | None:
    """Name what changed and which candidates depend on it, or None."""
    changed = changes(there, here)
    if not changed:
        return None
    text = "; ".join(_first(list(changed.values())))
    if len(candidates) < 2:
        return text
    names = [
        candidate_name(model, schedule)
        for model, schedule in candidates
        if not {f"model {model}", f"scheduler {schedule}"}.isdisjoint(changed)
        or not all(part.startswith(_OF_CANDIDATES) for part in changed)
    ]
    shown = ", ".join(_first(names))
    return f"{text} ({len(names)} of {len(candidates)} candidates depend on it: {shown})"


def scores(code: Code, but: Sequence[str]) -> list[str]:
    """Return the parts that are scores, but those with these names."""
    kind = "scorer "
    return [name for name in code if name.startswith(kind) and name[len(kind) :] not in but]


def incomparable(there: Code, here: Code) -> str:
    """Return why bytecode cannot be compared; ``""`` where it can."""
    pairs = ((there[part].get(PYTHON), here[part].get(PYTHON)) for part in there if part in here)
    return next((f"{old}, and this is {new}" for old, new in pairs if old != new), "")


def kept(there: Code, here: Code) -> dict[str, Mapping[str, str]]:
    """Return `here`, with unchanged parts as in `there`."""
    changed = changes(there, here)
    return {
        part: there[part] if part in there and part not in changed else components
        for part, components in here.items()
    }


def common(mine: Code, theirs: Code) -> dict[str, Mapping[str, str]]:
    """Restrict a larger plan's parts to the models and LR schedules of `mine`."""
    return {
        name: value
        for name, value in theirs.items()
        if name in mine or not name.startswith(_OF_CANDIDATES)
    }


def _components(there: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    """Yield what changed in a part; what is new or gone only if nothing else changed."""
    is_same_python = there.get(PYTHON) == here.get(PYTHON)
    differing = [
        (name, there.get(name, ""), here.get(name, ""))
        for name in dict.fromkeys([*there, *here])
        if there.get(name) != here.get(name) and name != PYTHON
    ]
    if not is_same_python:
        of_code = ("code:", "asserted:")
        differing = [item for item in differing if not "".join(item[1:]).startswith(of_code)]
    both = [item for item in differing if item[1] and item[2]]
    for name, old, new in both or differing:
        if not (old and new):
            yield f"{name} is {'gone' if old else 'new'}"
        elif old[0] == new[0] == "=" and len(old) + len(new) < 80:
            yield f"{name} was {old[1:]}, is {new[1:]}"
        else:
            yield f"{name} changed"


def _first(texts: Sequence[str]) -> list[str]:
    more = len(texts) - MOST_NAMED
    return [*texts[:MOST_NAMED], *[f"and {more} more"] * (more > 0)]
