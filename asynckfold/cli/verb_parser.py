"""The parser of one verb: it collects all problems of a line, where argparse stops at the first."""

from __future__ import annotations

import argparse
import difflib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from asynckfold.cli.flags import flags, groups_of
from asynckfold.errors import InputError, Problem

MOST_GUESSES = 3
"""Flags that the problem of an abbreviation names."""


class Verb(argparse.ArgumentParser):
    """The parser of one verb.

    Its flags are added when they are needed. Problems of a line are collected, so that they can be
    reported together with all others. ``--help`` shows the common flags where there is
    ``--help-all``.

    Attributes
    ----------
    adds : callable or None
        Adds the flags, once.
    problems : list of Problem
        What is wrong with the line that was parsed last.
    """

    shows_all = True

    def __init__(self, **words: Any) -> None:
        super().__init__(**words, allow_abbrev=False)
        self.adds: Callable[[Verb], None] | None = None
        self.problems: list[Problem] = []

    def add_own_flags(self) -> None:
        """Add the flags of the verb, if that was not done yet."""
        adds, self.adds = self.adds, None
        if adds is not None:
            adds(self)
            groups_of(self)["output"].add_argument(
                "--json", action="store_true", help="print one JSON object"
            )

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse a line; add ``problems`` to what is returned."""
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
        shown = f"`{self.prog} {'--help' if self.shows_all else '--help-all'}` shows all flags."
        remedy = f"Did you mean {' or '.join(close)}? {shown}" if close else shown
        self._add(f"flags must be those of `{self.prog}`, spelled out", name, remedy)
        return every[close[0]] if close else None

    def number(self, flag: str, kind: type, default: Any) -> Callable[[str], Any]:
        """Return a function that reads the value of a flag as a number."""

        def read(text: str) -> Any:
            try:
                return kind(text)
            except ValueError:
                what = "a whole number" if kind is int else "a number"
                self._add(f"{flag} must be {what}", repr(text), f"Pass {flag} {default}.")
                return default

        return read

    def _add(self, rule: str, received: str, remedy: str) -> None:
        self.problems.append(Problem(rule, received, remedy))

    def error(self, message: str) -> NoReturn:
        """Raise the problems so far, and what argparse found.

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

    def format_help(self) -> str:
        """Return the help."""
        self.add_own_flags()
        if self.shows_all:
            return super().format_help()
        common = {dest for dest, item in flags().items() if item.is_common}
        hidden = {
            action: action.help
            for action in self._actions
            if action.option_strings and action.dest not in (*common, "help", "help_all")
        }
        for action in hidden:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in hidden.items():
                action.help = text


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


class HelpAll(argparse.Action):
    """Print the help with all flags."""

    def __call__(self, parser: Any, *_: Any) -> None:
        """Print it and exit."""
        parser.shows_all = True
        parser.print_help()
        parser.exit()
