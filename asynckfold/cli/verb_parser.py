"""The parser of one verb: it collects all problems of a line, where argparse stops at the first."""

from __future__ import annotations

import argparse
import difflib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from asynckfold.cli.flags import flags, help_of, reading
from asynckfold.errors import InputError, Problem
from asynckfold.jobs.argument import GROUPS

MOST_GUESSES = 3
"""Flags that the problem of an abbreviation names."""


@dataclass(frozen=True)
class VerbWords:
    """What a verb does, and the words that it takes.

    Parameters
    ----------
    does, more : str
        Its line in the list of verbs, and what the help of the verb adds.
    places : Mapping
        Its positions and undeclared flags, with their words for `argparse`; ``group`` is one of
        `GROUPS`.
        The help ``"data"`` stands for that of ``--data``.
    flags : collection of str or None
        The declared flags that it takes, by name; None for all, of which ``--help`` shows the
        common ones.
    helps : Mapping of str to str
        Help that differs for this verb, by name; ``{}`` stands for the declared one.
    without : collection of str
        Flags that it does not take, which stay None.
    required : collection of str
        Flags that must be given.
    defaults : Mapping
        Defaults that differ for this verb.
    """

    does: str
    more: str = ""
    places: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flags: Collection[str] | None = ()
    helps: Mapping[str, str] = field(default_factory=dict)
    without: Collection[str] = ()
    required: Collection[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


class Verb(argparse.ArgumentParser):
    """The parser of one verb.

    Its words are added when they are needed. Problems of a line are collected, so that they can be
    reported together with all others.

    Attributes
    ----------
    shows_all : bool
        Whether the help of ``run`` has more than the common flags; set before words are added.
    words : VerbWords or None
        What is to be added, once.
    problems : list of Problem
        What is wrong with the line that was parsed last.
    """

    shows_all = False

    def __init__(self, **words: Any) -> None:
        super().__init__(**words, allow_abbrev=False)
        self.words: VerbWords | None = None
        self.problems: list[Problem] = []

    def add_own_flags(self) -> None:
        """Add the words of the verb, if that was not done yet."""
        words, self.words = self.words, None
        if words is None:
            return
        groups = {name: self.add_argument_group(name) for name in GROUPS}
        for name, given in words.places.items():
            options = dict(given)
            place: Any = groups.get(options.pop("group", ""), self)
            if "type" in options:
                options["type"] = self._number(name, options["type"], options.get("default") or 0)
            if options["help"] == "data":
                options["help"] = help_of(flags()["data"])
            if name.startswith("-"):
                options["help"] = self._shown(options["help"], words)
            place.add_argument(*name.split(), **options)
        for dest, item in flags().items() if words.flags != () else ():
            if dest in words.without or (words.flags is not None and dest not in words.flags):
                continue
            text = words.helps.get(dest, "{}").replace("{}", help_of(item)).replace("%", "%%")
            text = text if item.is_common else self._shown(text, words)
            options = {"required": True} if dest in words.required else {}
            options |= reading(item, self.problems)
            flag = f"--{item.flag}"
            groups[item.group].add_argument(flag, dest=dest, default=None, help=text, **options)
        if words.flags is None:
            self.add_argument("--help-all", action="help", help="show all flags")
        text = self._shown("print one JSON object", words)
        groups["output"].add_argument("--json", action="store_true", help=text)
        self.set_defaults(**dict.fromkeys(words.without), **words.defaults)

    def _shown(self, text: str, words: VerbWords) -> str:
        """Return the help of an uncommon flag, which ``--help`` leaves out where they are many."""
        return text if self.shows_all or words.flags is not None else argparse.SUPPRESS

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse a line; add ``problems`` to what is returned."""
        self.shows_all |= "--help-all" in (args or ())
        self.add_own_flags()
        self.problems.clear()
        parsed, rest = super().parse_known_args(list(self._readable(args or ())), namespace)
        for word in rest:
            self._add("there must be no further argument", repr(word), "Leave it out.")
        parsed.problems = [*self.problems]
        return parsed, []

    def _readable(self, words: Sequence[str]) -> Iterator[str]:
        """Yield what argparse can read; collect the problems of the rest."""
        rest = deque(words)
        while rest:
            word = rest.popleft()
            if word == "--":
                yield from (word, *rest)
                return
            if not _is_flag(word):
                yield word
                continue
            name, equals, value = word.partition("=")
            # Of letters such as -vq, the first.
            action = self._option_string_actions.get(name if name[:2] == "--" else name[:2])
            if action is None:
                action = self._add_unknown(name)
                if not equals and rest and _takes_value(action) and not _is_flag(rest[0]):
                    rest.popleft()
            elif not _takes_value(action):
                if equals:
                    self._add(f"{name} takes no value", repr(value), f"Pass {name} alone.")
                yield name
            elif equals:
                yield f"{name}={value}"
            elif rest and not _is_flag(rest[0]):
                # One word, so that argparse takes no negative number for a flag.
                yield f"{name}={rest.popleft()}"
            else:
                shown = action.metavar or "VALUE"
                self._add(f"{name} takes a value", "none", f"Pass {name} {shown}.")

    def _add_unknown(self, name: str) -> argparse.Action | None:
        """Add the problem of an unknown flag; return the one that is probably meant."""
        every = self._option_string_actions
        # An abbreviation is closer to what it begins than to what is spelled alike.
        begun = [flag for flag in every if flag.startswith(name)]
        close = begun[:MOST_GUESSES] or difflib.get_close_matches(name, every, n=1)
        shown = (
            f"`{self.prog} {'--help-all' if '--help-all' in every else '--help'}` shows all flags."
        )
        remedy = f"Did you mean {' or '.join(close)}? {shown}" if close else shown
        self._add(f"flags must be those of `{self.prog}`, spelled out", name, remedy)
        return every[close[0]] if close else None

    def _number(self, flag: str, kind: Callable[[str], Any], default: Any) -> Callable[[str], Any]:
        """Return a function that reads the value of a flag as a number."""

        def read(text: str) -> Any:
            try:
                return kind(text)
            except ValueError:
                what = "a number" if kind is float else "a whole number"
                self._add(f"{flag} must be {what}", repr(text), f"Pass {flag} {default}.")
                return default

        return read

    def _add(self, rule: str, received: str, remedy: str) -> None:
        self.problems.append(Problem(rule, received, remedy))

    def error(self, message: str) -> NoReturn:
        """Raise the problems so far, and the error of argparse.

        Raises
        ------
        InputError
            Always.
        """
        needed = message.removeprefix("the following arguments are required: ")
        rule = f"{needed} must be given" if needed != message else "the command must be readable"
        received = "none" if needed != message else message
        self._add(rule, received, f"`{self.prog} --help` shows how.")
        raise InputError(self.problems)


def _is_flag(word: str) -> bool:
    if len(word) < 2 or not word.startswith("-"):
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _takes_value(action: argparse.Action | None) -> bool:
    return action is None or action.nargs != 0
