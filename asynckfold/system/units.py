"""Sizes in bytes, durations and numbers of cores: parsing and formatting."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

MIB, GIB = 1 << 20, 1 << 30

UNITS = {
    "%": 0.01,
    "b": 1,
    **{f"{name}b": 1000**power for power, name in enumerate("kmgt", 1)},
    **{f"{name}ib": 1024**power for power, name in enumerate("kmgt", 1)},
}
"""Suffixes of a size, in lower case."""


def in_bytes(value: float | str | None, total: int) -> int:
    """Return a size in bytes.

    Parameters
    ----------
    value : float or str
        Up to 1 a share of `total`, else bytes; or a number and a unit: %, B, KB … TB, KiB … TiB.
    total : int
        Bytes of which a share is taken.

    Raises
    ------
    ValueError
        It is no size.

    Examples
    --------
    >>> in_bytes(0.25, 1000), in_bytes(2048, 1000), in_bytes("50 %", 1000), in_bytes("2KiB", 1000)
    (250, 2048, 500, 2048)
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z%]*)\s*", value)
        unit = match[2].lower() if match else "?"
        if match is None or (unit and unit not in UNITS):
            raise ValueError(f"no size: {value!r}")
        number = float(match[1]) * UNITS.get(unit, 1)
        share = unit == "%" or (not unit and number <= 1)
        if share and number > 1:
            raise ValueError(f"no share: {value!r}")
        return int(number * total) if share else int(number)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"no size: {value!r}")
    return int(value * total) if value <= 1 else int(value)


def gibibytes(count: int, digits: int = 1) -> str:
    """Return a size as text, with `digits` decimals of GiB and one less of MiB.

    Examples
    --------
    >>> gibibytes(3 << 30), gibibytes(50 << 20), gibibytes(7)
    ('3.0 GiB', '50 MiB', '7 bytes')
    >>> gibibytes(3 << 30, digits=2), gibibytes(50 << 20, digits=2)
    ('3.00 GiB', '50.0 MiB')
    """
    if count >= GIB:
        return f"{count / GIB:.{digits}f} GiB"
    return f"{count / MIB:.{digits - 1}f} MiB" if count >= MIB else f"{count} bytes"


def named_cores(cores: Sequence[int], most: int = 8) -> str:
    """Return core numbers as text; at most `most` of them are listed.

    >>> named_cores([1]), named_cores([0, 1]), named_cores(range(40))
    ('core 1', 'cores 0, 1', 'cores 0, 1, 2, 3, 4, 5, 6, 7 and 32 more')
    """
    listed = ", ".join(map(str, cores[:most]))
    more = f" and {len(cores) - most} more" if len(cores) > most else ""
    return f"{'core' if len(cores) == 1 else 'cores'} {listed}{more}"


def named_node(name: str) -> str:
    """Return the name of a node as text; the machine of the sweep itself may have none."""
    return name or "this machine"


def duration(seconds: float) -> str:
    """Return a duration for people.

    >>> duration(0.034), duration(38.81), duration(72.4), duration(7322)
    ('0.03 s', '38.8 s', '1 min 12 s', '2 h 02 min')
    """
    if not math.isfinite(seconds):
        return "n/a"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
    )
