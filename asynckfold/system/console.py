"""Tables and animations on the terminal: rich's console, with cleaned text."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from asynckfold.system.plain_text import plain
from asynckfold.system.terminal import steady


class _CleanConsole(Console):
    """A console without control characters other than those it writes itself."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Draw, with text cleaned."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def console(*, stderr: bool = False, stream: TextIO | None = None, **options: Any) -> Console:
    """Return a console to standard output or error, or to another stream."""
    chosen = stream or (sys.stderr if stderr else sys.stdout)
    fixed = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
    if options.get("width") is None and steady(chosen).isatty() and not animates(stream=chosen):
        # rich takes such a terminal to have 80 columns.
        options["width"], options["height"] = shutil.get_terminal_size()
    return _CleanConsole(file=steady(chosen), **{**fixed, **options})


def hung(line: str, place: Console) -> Text:
    """Return a line as wide as its place; what continues an indented one is indented further."""
    words = line.lstrip(" ")
    indent = len(line) - len(words)
    if not indent:
        return Text(line)
    first, *others = Text(words).wrap(place, max(20, place.width - indent - 2))
    lines = [" " * indent + first.plain, *(" " * (indent + 2) + part.plain for part in others)]
    return Text("\n".join(line.rstrip() for line in lines))


def animates(*, stderr: bool = False, stream: TextIO | None = None) -> bool:
    """Whether a stream is a terminal on which the cursor moves, whatever ``FORCE_COLOR`` says."""
    chosen = stream or (sys.stderr if stderr else sys.stdout)
    return steady(chosen).isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def spinner(shown_on: Console) -> str:
    """Return the name of rich's spinner that a terminal can draw."""
    return "dots" if shown_on.encoding.startswith("utf") else "line"
