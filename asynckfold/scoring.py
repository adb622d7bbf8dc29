"""From outputs to scores: scikit-learn's scorers on what a network said of a held-out fold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import Problem, nearest, refuse

Outputs = npt.NDArray[np.float32]
Score = Callable[[npt.NDArray[Any], Outputs], float]


def resolve(scoring: Any, classification: bool) -> dict[str, Score]:
    """Return scores by name; the first ranks.

    Parameters
    ----------
    scoring : None, str, callable, sequence of these, or mapping of name to these
        scikit-learn's names (``"accuracy"``, ``"f1_macro"``, ``"neg_log_loss"``), its scorers
        (``make_scorer(fbeta_score, beta=2, average="macro")``), or functions (targets, outputs) →
        float; greater is better. None means ``"accuracy"`` for classes and ``"r2"`` for numbers.
    classification : bool
        Whether the targets are classes.

    Raises
    ------
    InputError
        A name that scikit-learn does not know, or two scores of one name.

    Examples
    --------
    >>> scores = resolve(["accuracy", "f1_macro"], classification=True)
    >>> scores["accuracy"](np.array([0, 1]), np.array([[2.0, 1.0], [3.0, 0.0]], np.float32))
    0.5
    """
    if scoring is None:
        scoring = "accuracy" if classification else "r2"
    if isinstance(scoring, Mapping):
        pairs = list(scoring.items())
    else:
        many = isinstance(scoring, Sequence) and not isinstance(scoring, str)
        pairs = [(_name_of(item), item) for item in (scoring if many else [scoring])]
    refuse(_problems(pairs))
    return {str(name): _score(item, classification) for name, item in pairs}


def _name_of(item: Any) -> str:
    if isinstance(item, str):
        return item
    function = item._score_func if _is_scorer(item) else item
    return str(getattr(function, "__name__", "score"))


def _is_scorer(item: Any) -> bool:
    """Whether an object comes from scikit-learn's ``make_scorer``, which has no public class."""
    return callable(item) and hasattr(item, "_score_func") and hasattr(item, "_sign")


def _problems(pairs: Sequence[tuple[Any, Any]]) -> list[Problem]:
    from sklearn.metrics import get_scorer_names

    valid = get_scorer_names()
    problems = []
    for _, item in pairs:
        if isinstance(item, str) and item not in valid:
            problems.append(
                Problem(
                    "scoring must name scikit-learn scorers",
                    repr(item),
                    f"{nearest(item, valid)} See sklearn.metrics.get_scorer_names().".strip(),
                )
            )
        elif not isinstance(item, str) and not callable(item):
            problems.append(
                Problem(
                    "scoring must be names or functions (targets, outputs) → float",
                    repr(item)[:80],
                    "Pass for instance scoring=['accuracy', 'f1_macro'].",
                )
            )
    if not pairs:
        problems.append(Problem("there must be a score", "none", "Leave scoring out."))
    names = [str(name) for name, _ in pairs]
    problems += [
        Problem("score names must differ", f"{name!r} twice", "Pass a dict of name → score.")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    return problems


def _score(item: Any, classification: bool) -> Score:
    if not isinstance(item, str) and not _is_scorer(item):
        own: Score = item
        return own
    if item == "accuracy" and classification:
        return _accuracy
    from sklearn.metrics import get_scorer

    scorer = get_scorer(item)

    def score(targets: npt.NDArray[Any], outputs: Outputs) -> float:
        return float(scorer(_trained(outputs, classification), np.arange(len(targets)), targets))

    return score


def _accuracy(targets: npt.NDArray[Any], outputs: Outputs) -> float:
    """Return scikit-learn's ``"accuracy"``, which takes 1 ms to look its arguments over.

    That would be a fifth of what a short job may cost beside its training.
    """
    return float(np.mean(outputs.argmax(axis=1) == targets))


def _trained(outputs: Outputs, classification: bool) -> Any:
    """Dress outputs up as a fitted scikit-learn estimator, whose X is row numbers."""
    return _estimators()[classification](outputs)


@cache
def _estimators() -> tuple[type, type]:
    """Return a regressor and a classifier: made once, as scikit-learn looks long at a new class."""
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

    class Regressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
        def __init__(self, outputs: Outputs) -> None:
            self.outputs = outputs

        def predict(self, rows: npt.NDArray[np.int64]) -> Outputs:
            found = self.outputs[rows]
            return found.squeeze(-1) if found.shape[1:] == (1,) else found

        def __sklearn_is_fitted__(self) -> bool:
            return True

    class Classifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        def __init__(self, outputs: Outputs) -> None:
            self.outputs = outputs
            self.classes_ = np.arange(outputs.shape[1] if outputs.ndim > 1 else 0)

        def predict(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            return np.asarray(self.outputs[rows].argmax(axis=1), np.int64)

        def predict_proba(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
            from scipy.special import softmax

            return np.asarray(softmax(self.outputs[rows].astype(np.float64), axis=1))

        def __sklearn_is_fitted__(self) -> bool:
            return True

    return Regressor, Classifier
