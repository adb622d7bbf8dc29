"""A script or a command that continues in this process what another process began.

What another process costs is its start: torch is imported twice for it, by the sweep and by the
server of its workers. Where the point of a test is that a run can be continued, and not by whom,
the workers of this process do that, which are there already.
"""

from __future__ import annotations

import contextlib
import io
import sys
from unittest import mock

from asynckfold.cli import main


def script(code: str, *arguments: object) -> str:
    """Run a script as ``python -c`` does; return what it printed."""
    with (
        mock.patch.object(sys, "argv", ["-c", *map(str, arguments)]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    return printed.getvalue().strip()


def command(*words: object) -> str:
    """Run a command to its good end; return what it printed."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()) as told,
    ):
        code = main([*map(str, words)])
    assert code == 0, told.getvalue()
    return printed.getvalue()
