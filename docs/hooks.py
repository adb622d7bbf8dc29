"""What mkdocs fills in at build time, so that it cannot go stale.

``{{ flags }}`` becomes what ``asynckfold VERB --help-all`` prints, for each verb.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill a page's placeholder."""
    return markdown.replace("{{ flags }}", flags()) if "{{ flags }}" in markdown else markdown


def flags() -> str:
    """Return a section for each verb of the command."""
    verbs = re.findall(r"^ {4}(\w+) {2,}", _printed("--help"), re.MULTILINE)
    return "\n\n".join(f"## {verb}\n\n```text\n{_help(verb)}\n```" for verb in verbs)


def _help(verb: str) -> str:
    # Verbs with few flags show them all at once.
    text = _printed(verb, "--help-all", okay=(0, 2)) or _printed(verb, "--help")
    # The exit codes have a page of their own.
    return text.partition("\nExit codes:")[0].strip()


def _printed(*words: str, okay: tuple[int, ...] = (0,)) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "asynckfold", *words],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    if ended.returncode not in okay:
        raise RuntimeError(f"asynckfold {' '.join(words)} failed:\n{ended.stderr}")
    return ended.stdout
