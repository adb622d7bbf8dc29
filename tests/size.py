"""How much a test tries: a sample at every change, everything with ``pytest --nightly``."""

from __future__ import annotations

NIGHTLY = False
"""Whether this is the nightly run; set before the first test is imported."""


def examples(count: int) -> int:
    """Return how many examples of a law to try: all of them at night, else a tenth, at least 3."""
    return count if NIGHTLY else max(3, count // 10)
