"""Makes foreign text safe to show on the terminal, in tables and on the report's page.

No control characters, escape sequences, changes of the writing direction, or surrogates.
"""

from __future__ import annotations

import re

_SEQUENCE = re.compile(
    # CSI with parameters; OSC, DCS and similar with their text, if terminated.
    r"\x1b\[[0-9:;<=>?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"
)
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    r"\ud800-\udfff\ufdd0-\ufdef\ufeff\ufff9-\ufffb\ufffe\uffff]"
)


def plain(text: str) -> str:
    """Return text without escape sequences, with other control characters replaced.

    Line feeds, tabs, letters of every script, joiners and emoji stay.

    Examples
    --------
    >>> plain("a\\x1b[31mred\\x00 é 漢字"), plain("\\x1b]0;title\\x07name\\u202egnp.exe")
    ('ared\ufffd é 漢字', 'name\ufffdgnp.exe')
    """
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub("\ufffd", _SEQUENCE.sub("", text))


def one_line(text: str) -> str:
    """Return text as one line, so that no name can forge a line.

    >>> one_line("A\\ndone: 100 of 100")
    'A\\\\ndone: 100 of 100'
    """
    return plain(text).replace("\n", "\\n").replace("\t", " ")
