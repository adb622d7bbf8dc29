"""The reference page of all arguments.

``python docs/list_arguments.py > docs/reference/arguments.md`` renews it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING

from asynckfold.api.arguments import Settings
from asynckfold.cli.flags import NamedObjects
from asynckfold.cli.sweep_file import ELSEWHERE
from asynckfold.jobs.argument import GROUPS, Argument, arguments
from asynckfold.jobs.trainer_params import TrainerParams

_WHERE = {
    Settings: "argument of `AsyncKFold`",
    TrainerParams: "key of `trainer_params`",
    NamedObjects: "command line only",
}
"""The declarations, and where their arguments are given."""


def reference() -> str:
    """Return the page, in Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "# Arguments"
    yield ""
    yield "Written by `python docs/list_arguments.py` from the declarations in the code."
    for group in GROUPS:
        yield f"\n## {group.capitalize()}"
        for name, places in _of_group(group).items():
            yield from _entry(name, places)


def _of_group(group: str) -> dict[str, dict[type, Argument]]:
    """Return the arguments of a group by name, each by its declarations."""
    entries: dict[str, dict[type, Argument]] = {}
    for declaration in _WHERE:
        for name, item in arguments(declaration).items():
            if item.group == group:
                entries.setdefault(name, {})[declaration] = item
    return entries


def _entry(name: str, places: dict[type, Argument]) -> Iterator[str]:
    item = next(iter(places.values()))
    yield f"\n### {name}\n"
    yield f"- {item.typed}" + ("" if item.default is MISSING else f", default `{item.default!r}`")
    in_file = Settings in places and name not in ELSEWHERE
    on_line = places[NamedObjects] if NamedObjects in places and len(places) > 1 else None
    where = [_WHERE[place] for place in places if place is not NamedObjects or not on_line]
    where += ["key of `settings` in a sweep file"] * in_file
    flag = item.flag or (on_line and on_line.flag)
    yield f"- {', '.join(where)}" + (f", flag `--{flag}`" if flag else "")
    if item.is_checked:
        yield f"- must be {item.rule}"
    if item.trainers:
        yield f"- for the trainer {' or '.join(item.trainers)} only"
    yield f"\n{item.text}"
    if on_line:
        yield f"\nThe flag takes a name: {on_line.text[0].lower()}{on_line.text[1:]}"


if __name__ == "__main__":
    print(reference())
