"""The verb ``completion``: print the script with which a shell completes the command."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping

from asynckfold.cli.flags import flags
from asynckfold.cli.output import Output
from asynckfold.cli.parser import make_parser, verbs_of
from asynckfold.errors import refuse
from asynckfold.system import terminal

FOLDERS = ("A", "B", "DIR")
"""Placeholders that stand for a folder."""

FILES = ("FILE", "SWEEP.py")
"""Placeholders that stand for a file."""


def completion(parsed: argparse.Namespace, out: Output) -> int:
    """Print the script for one shell."""
    refuse(parsed.problems)
    script = script_for(parsed.shell)
    out.data({"shell": parsed.shell, "script": script})
    if not out.json:
        terminal.write(f"{script}\n")
    return 0


def script_for(shell: str) -> str:
    """Return the script for a shell, with all verbs, flags and the words that they take."""
    import shtab

    parser, words = make_parser(), _words()
    places = dict.fromkeys(FOLDERS, shtab.DIRECTORY) | dict.fromkeys(FILES, shtab.FILE)
    for verb in verbs_of(parser).values():
        verb.shows_all = True
        verb.add_own_flags()
        # fish shows it whole beside each offer.
        verb.description = (verb.description or "").partition(". ")[0].rstrip(".")
        for action in verb._actions:
            if action.metavar in places:
                action.complete = places[action.metavar]  # type: ignore[attr-defined]
            elif not action.choices and (offered := words.get(action.dest)):
                # shtab leaves colons as they are, which mean something to zsh.
                is_zsh = shell == "zsh"
                action.choices = [word.replace(":", r"\:") if is_zsh else word for word in offered]
    return shtab.complete(parser, shell)


def _words() -> Mapping[str, Iterable[str] | None]:
    """Return the words that flags and positions take, by the name of their value."""
    from asynckfold.data.sources import SOURCES
    from asynckfold.jobs.recipe import LR_SCHEDULES
    from asynckfold.models import ARCHITECTURES
    from asynckfold.training.optimizers import OPTIMIZERS

    sources = {name.removesuffix("PATH") for name in SOURCES}
    named = {
        "data": sources,
        "source": sources,
        "models": ARCHITECTURES,
        "schedulers": LR_SCHEDULES,
        "optimizer": OPTIMIZERS,
    }
    declared = {dest: item.words or None for dest, item in flags().items()}
    return {**declared, **{dest: sorted(words) for dest, words in named.items()}}
