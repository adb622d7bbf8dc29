"""The rule of ``engine="auto"``: a sweep that ends before workers could start needs none. Pure.

::

    this process   ├ dry run ┼ job ┼ job ┼ job ┤
    workers        ├ a server imports torch ───────┼ jobs side by side ┤
"""

from __future__ import annotations

MOST_SECONDS = 20.0
"""Longest sweep in the caller's process: a crash of a model, or a hang, ends the caller, too."""


def why_here(here: float, with_workers: float, start: float) -> str:
    """Return why a sweep trains in the process of the caller; empty if it gets workers.

    Parameters
    ----------
    here : float
        Predicted seconds of all jobs, one after another.
    with_workers : float
        Predicted seconds with workers that have started.
    start : float
        Seconds until workers can start.

    Examples
    --------
    >>> why_here(0.4, 0.3, 2.0).partition(";")[0]
    'trains in this process: 0.4 s predicted, and 2.3 s with workers, which start first'
    >>> why_here(0.4, 0.3, 0.0), why_here(600.0, 600.0, 2.0)
    ('', '')
    """
    if here > MOST_SECONDS or here > with_workers + start:
        return ""
    first = ", which start first" if start > 0 else ""
    return (
        f"trains in this process: {here:.2g} s predicted, and {with_workers + start:.2g} s with "
        f"workers{first}; a crash or a hang would end this process, too: engine='process' asks "
        "for workers"
    )


def reads_here(seconds: float, start: float) -> bool:
    """Whether the caller's process reads a dataset, in `seconds`, before workers could `start`."""
    return seconds < min(start, MOST_SECONDS)
