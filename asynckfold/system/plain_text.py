"""Makes foreign text safe to show on the terminal, in tables and on the report's page.

No control characters, escape sequences, changes of the writing direction, or surrogates.
"""

from __future__ import annotations

import re
import unicodedata

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


def shorten(name: str, limit: int) -> str:
    """Cut the middle out of a name that is too wide; wide letters count twice.

    >>> shorten("a-very-long-model-name/cosine", 16), shorten("漢字漢字漢字", 9)
    ('a-very-…e/cosine', '漢字…漢字')
    """
    if columns_of(name) <= limit:
        return name
    head, tail = name[: (limit - 1) // 2], name[-(limit // 2) :]
    while columns_of(head) > (limit - 1) // 2:
        head = head[:-1]
    while columns_of(tail) > limit // 2:
        tail = tail[1:]
    return f"{head}…{tail}"


def fitted(name: str, limit: int) -> str:
    """Shorten a name; in one with values of a grid, cut names of parameters before values.

    >>> fitted("lr=0.01, weight_decay=0.001", 24)
    'lr=0.01, weight_d…=0.001'
    """
    parts, keep = name.split(", "), limit
    while len(parts) > 1 and columns_of(name) > limit and keep:
        keep -= 1
        pattern = rf"^([^=]{{{keep}}})[^=]{{2,}}="
        name = ", ".join(re.sub(pattern, r"\1…=", part) for part in parts)
    return shorten(name, limit)


def columns_of(text: str) -> int:
    """Return the width of a text in letters; wide letters count twice.

    >>> columns_of("cosine"), columns_of("漢字")
    (6, 4)
    """
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)
