"""A file of flags: ``--print-config`` writes it, ``--config`` reads it.

::

    sweep.yaml ── with_config ──► words of the command line ──► parser      (as if typed)
    parsed line ── config_of ──► sweep.yaml

A config names the flags of a run. A sweep file defines its objects, and a config may name one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from asynckfold.cli.flags import flags, with_defaults
from asynckfold.errors import Problem, nearest
from asynckfold.jobs.argument import one_line

CONFIG = "--config"

NOT_KEPT = ("help", "help_all", "config", "print_config", "json", "verbose", "quiet")
"""Names of values that say how to print, not what to run."""


def with_config(
    words: Sequence[str], verb: argparse.ArgumentParser
) -> tuple[list[str], list[Problem]]:
    """Replace ``--config FILE`` by the words that its keys stand for, and name what is wrong.

    They come first, so that flags of the command line override them.
    """
    path, rest = _split(words)
    if path is None:
        return list(words), []
    at = 1 + next(place for place, word in enumerate(rest) if not word.startswith("-"))
    found, problems = _loaded(Path(path))
    known = _actions(verb)
    problems += _key_problems(Path(path), found, known, verb.prog)
    own = [
        word
        for key, value in found.items()
        if key in known
        for word in _words(known[key], value, verb, drops_defaults=not found.get("file"))
    ]
    return [*rest[:at], *own, *rest[at:]], problems


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the path of the config, and the other words; only the first one is taken."""
    for place, word in enumerate(words):
        following = words[place + 1 : place + 2]
        if word == "--":
            break
        if word.startswith(f"{CONFIG}="):
            return word.partition("=")[2], [*words[:place], *words[place + 1 :]]
        if word == CONFIG and following and not following[0].startswith("-"):
            return following[0], [*words[:place], *words[place + 2 :]]
    return None, [*words]


def _loaded(path: Path) -> tuple[dict[Any, Any], list[Problem]]:
    import yaml

    rule = f"{CONFIG} must name a YAML file of keys and values"
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
        found: Any = None if node is None else yaml.SafeLoader("").construct_document(node)
    except FileNotFoundError:
        siblings = [item.name for item in path.parent.glob("*.y*ml")]
        guess = nearest(path.name, siblings)
        return {}, [Problem("the config must exist", str(path), f"Check the path.{guess}")]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        remedy = "`asynckfold run --data digits --print-config` shows how one looks."
        return {}, [Problem(rule, f"{path}: {one_line(error)}", remedy)]
    if not isinstance(node, yaml.MappingNode):
        remedy = "Write for instance `epochs: 3`, a key and its value on each line."
        return {}, [Problem(rule, f"{path} with {type(found).__name__}", remedy)]
    keys = [str(key.value).replace("-", "_") for key, _ in node.value]
    twice = dict.fromkeys(key for key in keys if keys.count(key) > 1)
    rule = f"{path.name} must have each key once"
    problems = [Problem(rule, f"{key!r} twice", "Drop one of the two.") for key in twice]
    return {str(key).replace("-", "_"): value for key, value in found.items()}, problems


def _key_problems(
    path: Path, found: Mapping[Any, Any], known: Mapping[str, argparse.Action], prog: str
) -> Iterator[Problem]:
    for key, value in found.items():
        if key not in known:
            remedy = f"{nearest(str(key), known).strip()} `{prog} --print-config` shows all keys."
            rule = f"keys of {path.name} must be flags of `{prog}`"
            yield Problem(rule, repr(key), remedy.strip())
        elif known[key].nargs == 0 and not isinstance(value, bool | None):
            rule = f"{key} in {path.name} must be true or false"
            yield Problem(rule, repr(value), f"Write {key}: true.")


def _actions(verb: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return what a config may set, by key."""
    return {item.dest: item for item in verb._actions if item.dest not in NOT_KEPT}


def _words(
    action: argparse.Action, value: Any, verb: argparse.ArgumentParser, *, drops_defaults: bool
) -> list[str]:
    """Return the words that set a value.

    A default is left out: the command that continues the run stays short. Beside a sweep file, it
    overrides what the file sets.
    """
    item, default = flags().get(action.dest), verb.get_default(action.dest)
    if item is not None and default is None:
        default = item.shell_default
    # As text, where nan equals nan, and 1 is not true.
    is_default = repr(value) == repr(default)
    if value is None or (is_default and (drops_defaults or action.nargs == 0)):
        return []
    if action.nargs == 0:
        return [action.option_strings[0]] if isinstance(value, bool) else []
    if not action.option_strings:
        return [str(value)]
    is_off = value is False and item is not None and bool not in item.types
    # YAML reads a bare yes, no, on and off as true and false.
    text = "off" if is_off and "no" not in getattr(item, "words", ()) else _text(value)
    flag = action.option_strings[-1]
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_text(one)}" for key, one in value.items())
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def config_of(parsed: argparse.Namespace, verb: argparse.ArgumentParser) -> dict[str, Any]:
    """Return all values of a parsed line, by key; beside a sweep file, those that were given."""
    values = vars(parsed if parsed.file else with_defaults(parsed))
    found = {key: values[key] for key in _actions(verb)}
    return {
        key: None if value is MISSING else value
        for key, value in found.items()
        if not (parsed.file and (value is None or value == verb.get_default(key)))
    }


def to_yaml(config: Mapping[str, Any], verb: argparse.ArgumentParser) -> str:
    """Return the text of a config, with a heading for each group of flags."""
    import yaml

    parts = []
    for group in verb._action_groups:
        keys = [item.dest for item in group._group_actions if item.dest in config]
        if keys:
            part = {key: config[key] for key in keys}
            text = yaml.safe_dump(part, sort_keys=False, allow_unicode=True, width=100)
            parts.append(f"# {group.title}\n{text}")
    return "\n".join(parts)
