"""The progress of a sweep in a notebook: one output of the cell, updated in place.

Only warnings go to standard error, which notebooks show in red. A saved or converted notebook shows
the last state.
"""

from __future__ import annotations

import contextvars
import io
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, cast

from rich.console import Group, RenderableType
from rich.text import Text
from rich.theme import Theme

from asynckfold.system.console import console

COLUMNS = 100
LINES = 200
"""Printed lines shown; older ones are in the log of the run."""

REFRESH_SECONDS = 0.5

HTML, PLAIN = "text/html", "text/plain"
Bundle = dict[str, str]
"""The same content by MIME type."""

_STYLE = (
    "margin:0;line-height:normal;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere;"
    "font-family:Menlo,DejaVu Sans Mono,Consolas,monospace"
)
_LOOK: dict[str, Any] = {
    "width": COLUMNS,
    "force_jupyter": False,
    "force_terminal": True,
    "color_system": "truecolor",
    # On white and on black; those of rich are for black.
    "theme": Theme({"bar.back": "#a0a0a0", "bar.complete": "#0072b2", "bar.finished": "#009e73"}),
}


class Cell(io.TextIOBase):
    """One output of a cell: what was printed, and below it a live part.

    Parameters
    ----------
    live : callable
        Returns the live part.

    Attributes
    ----------
    console : Console
        Prints to the output.
    """

    def __init__(self, live: Callable[[], RenderableType]) -> None:
        self.console = console(stream=cast("TextIO", self), **_LOOK)
        self._live = live
        self._handle: Any = None
        self._lines = deque[str](maxlen=LINES)
        self._shown: Bundle = {}
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> int:
        """Take whole lines, with escape sequences for colours."""
        with self._lock:
            self._lines.extend(text.splitlines())
        return len(text)

    def flush(self) -> None:
        """Show what was written; a running thread does so soon."""
        if self._thread is None:
            self._refresh()

    def start(self) -> None:
        """Keep the live part fresh."""
        self._refresh()
        # In the context of the cell: ipykernel reads there whose output it is.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._keep_fresh,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the last state."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._refresh()

    def _keep_fresh(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            # A job may start or end while its line is drawn.
            with suppress(RuntimeError):
                self._refresh()

    def _refresh(self) -> None:
        with self._lock:
            printed = [Text.from_ansi("\n".join(self._lines))] if self._lines else []
            bundle = _exported(Group(*printed, self._live()))
            if bundle == self._shown:
                return
            self._shown = bundle
            if self._handle is None:
                from IPython import display

                publish: Any = display.display
                self._handle = publish(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)


def _exported(what: RenderableType) -> Bundle:
    recorder = console(stream=io.StringIO(), record=True, **_LOOK)
    recorder.print(what)
    html = recorder.export_html(clear=False, inline_styles=True, code_format="{code}").rstrip("\n")
    text = recorder.export_text().rstrip("\n")
    return {HTML: f"<pre style='{_STYLE}'>{html}</pre>", PLAIN: text}
