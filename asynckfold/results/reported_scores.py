"""Scores that the user's own loop reports, by names that scikit-learn does not know."""

from __future__ import annotations

from typing import Any

from asynckfold.errors import nearest
from asynckfold.results.scoring import ReportedScore, named_scores


def with_reported(scoring: Any) -> Any:
    """Return `scoring` with unknown names as reported scores, except near misses of known names.

    >>> with_reported("accuracy"), with_reported("acuracy"), with_reported(None)
    ('accuracy', 'acuracy', None)
    >>> list(with_reported(["accuracy", "inception"]))
    ['accuracy', 'inception']
    """
    from sklearn.metrics import get_scorer_names

    if scoring is None:
        return None
    known = get_scorer_names()
    pairs = named_scores(scoring, "")
    own = {item for _, item in pairs if isinstance(item, str) and not nearest(item, known)}
    if not own or len({str(name) for name, _ in pairs}) < len(pairs):
        return scoring
    return {name: ReportedScore(item) if item in own else item for name, item in pairs}


def reported_names(scoring: Any, kind: str = "") -> list[str]:
    """Return the names of scores that the user's code is to report, for a kind of targets.

    >>> reported_names(with_reported(["accuracy", "inception"])), reported_names("accuracy")
    (['inception'], [])
    """
    if scoring is None:
        return []
    return [
        str(name) for name, item in named_scores(scoring, kind) if isinstance(item, ReportedScore)
    ]
