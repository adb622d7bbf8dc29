"""How much a test tries: a sample at every change, everything with ``pytest --nightly``."""

from __future__ import annotations

NIGHTLY = False
"""Whether this is the nightly run; set before the first test is imported."""
