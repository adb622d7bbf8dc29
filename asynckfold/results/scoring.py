"""Scores of held-out outputs, by scikit-learn's scorers or the user's functions.

For a scorer, outputs are wrapped as a fitted scikit-learn estimator whose ``classes_`` are the
labels of the user's data. So the scorer means what it means there: which class is positive, which
of ``predict``, ``predict_proba`` and ``decision_function`` it needs, what it refuses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import Problem, nearest, refuse
from asynckfold.jobs.criteria import (
    LOG_PROBABILITIES,
    LOGITS,
    MARGINS,
    PROBABILITIES,
    TRANSFORMED,
    UNKNOWN,
    VALUES,
)
from asynckfold.jobs.objective import (
    BINARY,
    MULTICLASS,
    MULTILABEL,
    REGRESSION,
    Objective,
    Transform,
    predicted,
    probabilities,
)
from asynckfold.jobs.schema import with_leaves
from asynckfold.results.batch_scores import (
    PIXEL_SCORES,
    accumulated_score,
    accumulates,
    count_pixels,
    metric_problems,
    name_of,
    score_of_counts,
)
from asynckfold.results.direction import direction_problems

Outputs = npt.NDArray[np.float32]
Score = Callable[[npt.NDArray[Any], Outputs], float]

DEFAULTS: Mapping[str, tuple[str, ...]] = {
    MULTICLASS: ("accuracy",),
    BINARY: ("accuracy", "roc_auc"),
    MULTILABEL: ("accuracy", "f1_micro"),
    REGRESSION: ("r2",),
    **{kind: tuple(names) for kind, names in PIXEL_SCORES.items()},
}
"""Scores if the user names none; the first ranks. As in scikit-learn, a multilabel sample counts as
accurate if all of its labels are."""


class ReportedScore:
    """A score that is not computed from outputs: the user's code reports it.

    >>> ReportedScore("fid")([], [])
    Traceback (most recent call last):
    ValueError: 'fid' was never reported
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, labels: Any, outputs: Any) -> float:
        """Raise: there is nothing to compute it from."""
        raise ValueError(f"{self.__name__!r} was never reported")


def resolve(
    scoring: Any, objective: Objective, transform: Transform | None = None
) -> dict[str, Score]:
    """Return scores by name; the first ranks.

    Scores are scikit-learn's names (``"accuracy"``, ``"f1_macro"``), its scorers
    (``make_scorer(fbeta_score, beta=2, average="macro")``), or functions (labels, outputs) → float;
    one, a sequence, or a mapping by name; None means `DEFAULTS`. The functions that are returned
    take encoded targets. Raises `InputError` on an unknown name, two scores of one name, or an
    error passed as a score.

    >>> scores = resolve(["accuracy", "f1_macro"], Objective("multiclass", "logits"))
    >>> scores["accuracy"](np.array([0, 1]), np.array([[2.0, 1.0], [3.0, 0.0]], np.float32))
    0.5
    """
    pairs = named_scores(scoring, objective.kind)
    refuse(_problems(pairs, objective.kind))
    return {str(name): _score(str(name), item, objective, transform) for name, item in pairs}


def named_scores(scoring: Any, kind: str) -> list[tuple[Any, Any]]:
    """Return (name, score) pairs of what the user passed."""
    if scoring is None:
        scoring = DEFAULTS[kind]
    if isinstance(scoring, Mapping):
        return [
            (
                name_of(item, str(name)) if accumulates(item) else name,
                _of_pixels(item, kind),
            )
            for name, item in scoring.items()
        ]
    many = isinstance(scoring, Sequence) and not isinstance(scoring, str)
    return [(_name_of(item), item) for item in (scoring if many else [scoring])]


def _of_pixels(item: Any, kind: str) -> Any:
    """Return the name of a score of pixels that was taken for one which the user reports."""
    is_known = isinstance(item, ReportedScore) and item.__name__ in PIXEL_SCORES.get(kind, ())
    return item.__name__ if is_known else item


def is_custom(item: Any) -> bool:
    """Whether a score is a function (labels, outputs) of the user's, or a metric."""
    return not isinstance(item, str) and not _is_scorer(item)


def is_from_sklearn(item: Any) -> bool:
    """Whether a scorer runs no code of the user's, which may count its calls."""
    module = getattr(getattr(item, "_score_func", None), "__module__", "") or ""
    return isinstance(item, str) or module.startswith("sklearn.")


def _name_of(item: Any) -> str:
    if isinstance(item, str):
        return item
    if accumulates(item):
        return name_of(item)
    function = item._score_func if _is_scorer(item) else item
    return str(getattr(function, "__name__", "score"))


def _is_scorer(item: Any) -> bool:
    """Whether ``make_scorer`` made an object; the class of these is not public."""
    return callable(item) and hasattr(item, "_score_func") and hasattr(item, "_sign")


def _problems(pairs: Sequence[tuple[Any, Any]], kind: str) -> list[Problem]:
    from sklearn.metrics import get_scorer_names

    valid = [*PIXEL_SCORES.get(kind, ()), *get_scorer_names()]
    problems = []
    for _, item in pairs:
        if isinstance(item, str) and item not in valid:
            rule = "scoring must name scikit-learn scorers"
            remedy = f"{nearest(item, valid)} See sklearn.metrics.get_scorer_names().".strip()
            problems.append(Problem(rule, repr(item), remedy))
        elif not isinstance(item, str) and not callable(item):
            rule = "scoring must be names or functions (targets, outputs) → float"
            remedy = "Pass for instance scoring=['accuracy', 'f1_macro']."
            problems.append(Problem(rule, repr(item)[:80], remedy))
    if not pairs:
        problems.append(Problem("there must be a score", "none", "Leave scoring out."))
    names = [str(name) for name, _ in pairs]
    problems += [
        Problem("score names must differ", f"{name!r} twice", "Pass a dict of name → score.")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    metrics = [(name, item) for name, item in pairs if accumulates(item)]
    for name, item in metrics:
        problems += metric_problems(str(name), item)
    others = [(name, item) for name, item in pairs if not accumulates(item)]
    return [*problems, *direction_problems(others)]


def _score(name: str, item: Any, objective: Objective, transform: Transform | None) -> Score:
    if accumulates(item):
        return lambda targets, outputs: accumulated_score(
            name, item, objective, transform, targets, outputs
        )
    if is_custom(item):
        if objective.is_of_trees:
            return lambda targets, outputs: item(
                objective.originals(with_leaves(np.asarray, objective.as_in_dataset(targets))),
                with_leaves(np.asarray, objective.as_returned(outputs)),
            )
        if not objective.labels:
            function: Score = item
            return function
        return lambda targets, outputs: item(objective.originals(targets), outputs)
    if item == "accuracy" and objective.kind == MULTICLASS and transform is None:
        return _accuracy
    if objective.is_dense:
        return lambda targets, outputs: score_of_counts(
            item, objective.kind, count_pixels(objective, targets, outputs, transform)
        )
    scorer = _scorer_for(item, objective)

    def score(targets: npt.NDArray[Any], outputs: Outputs) -> float:
        if targets.ndim > 2:
            return of_all_numbers(targets, outputs)
        estimator = _estimators()[objective.kind != REGRESSION](objective, outputs, transform)
        truth = _truth(objective, targets, estimator)
        scorer_of_all = _with_labels(scorer, estimator, truth)
        return float(scorer_of_all(estimator, np.arange(len(targets)), truth))

    def of_all_numbers(targets: npt.NDArray[Any], outputs: Outputs) -> float:
        predictions = predicted(objective, outputs, transform)
        if predictions.shape != targets.shape:
            raise ValueError(
                f"predictions of shape {predictions.shape} for targets {targets.shape}"
            )
        flat = _estimators()[0](Objective(REGRESSION, VALUES), predictions.reshape(-1))
        return float(scorer(flat, np.arange(targets.size), targets.reshape(-1)))

    return score


def _accuracy(targets: npt.NDArray[Any], outputs: Outputs) -> float:
    """Return scikit-learn's ``"accuracy"`` without its 1 ms of argument checks.

    That would be a fifth of the overhead allowed to a short job.
    """
    return float(np.mean(outputs.argmax(axis=1) == targets))


def _truth(objective: Objective, targets: npt.NDArray[Any], estimator: Any) -> npt.NDArray[Any]:
    """Return the true labels as scikit-learn compares them."""
    if objective.kind == REGRESSION:
        return targets.squeeze(-1) if targets.shape[1:] == (1,) else targets
    codes = objective.codes(targets)
    return codes if objective.kind == MULTILABEL else np.asarray(estimator.classes_)[codes]


def _scorer_for(item: Any, objective: Objective) -> Any:
    """Return scikit-learn's scorer, with the user's `pos_label` if it takes one."""
    from sklearn.metrics import get_scorer

    scorer = get_scorer(item)
    if objective.pos_label is None or not takes_pos_label(scorer):
        return scorer
    return _with_keywords(scorer, pos_label=objective.pos_label)


def estimator_scorer(item: Any, objective: Objective) -> Callable[[Any, Any, Any], float]:
    """Return the function (fitted estimator, X, labels) → float of a scikit-learn score."""
    scorer = _scorer_for(item, objective)

    def score(estimator: Any, inputs: Any, labels: npt.NDArray[Any]) -> float:
        return float(_with_labels(scorer, estimator, labels)(estimator, inputs, labels))

    return score


def takes_pos_label(item: Any) -> bool:
    """Whether a scorer scores one positive class."""
    from sklearn.metrics import get_scorer

    scorer = get_scorer(item)
    words = getattr(scorer, "_kwargs", {})
    one = words.get("average", "binary") in ("binary", None)
    return one and _accepts(scorer, "pos_label") and "pos_label" not in words


def one_class_scorers(names: Sequence[str]) -> list[str]:
    """Return the names of scikit-learn scorers that score one positive class."""
    from sklearn.metrics import get_scorer_names

    return [name for name in names if name in get_scorer_names() and takes_pos_label(name)]


def _accepts(scorer: Any, keyword: str) -> bool:
    function = getattr(scorer, "_score_func", None)
    return function is not None and keyword in inspect.signature(function).parameters


def _with_keywords(scorer: Any, **keywords: Any) -> Any:
    from sklearn.metrics import make_scorer

    return make_scorer(
        scorer._score_func,
        response_method=scorer._response_method,
        greater_is_better=scorer._sign > 0,
        **{**scorer._kwargs, **keywords},
    )


def _with_labels(scorer: Any, estimator: Any, truth: npt.NDArray[Any]) -> Any:
    """Return the scorer with ``labels=`` of all classes, if a fold lacks some.

    scikit-learn refuses such a fold otherwise, as probabilities have a column for each class.
    ``"roc_auc_ovr"`` and the like stay: they are undefined there.
    """
    response = getattr(scorer, "_response_method", "predict")
    if response == "predict" or not hasattr(estimator, "classes_") or truth.ndim != 1:
        return scorer
    lacking = len(np.unique(truth)) < len(estimator.classes_)
    name = getattr(getattr(scorer, "_score_func", None), "__name__", "")
    if not lacking or name.startswith("roc_auc") or "labels" in scorer._kwargs:
        return scorer
    can = _accepts(scorer, "labels")
    return _with_keywords(scorer, labels=estimator.classes_) if can else scorer


@cache
def _estimators() -> tuple[type, type]:
    """Return a regressor and a classifier whose X is row numbers; cached, new classes are slow."""
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.metaestimators import available_if

    class FixedOutputs(BaseEstimator):  # type: ignore[misc]
        def __init__(self, objective: Any, outputs: Any, transform: Any = None) -> None:
            self.objective = objective
            self.outputs = outputs
            self.transform = transform

        def __sklearn_is_fitted__(self) -> bool:
            return True

    class Regressor(RegressorMixin, FixedOutputs):  # type: ignore[misc]
        def predict(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
            return predicted(self.objective, self.outputs[rows], self.transform)

    class Classifier(ClassifierMixin, FixedOutputs):  # type: ignore[misc]
        @property
        def classes_(self) -> Any:
            columns = self.outputs.shape[1] if self.outputs.ndim > 1 else 1
            if self.objective.scale == TRANSFORMED and self.transform is not None:
                columns = probabilities(self.objective, self.outputs[:1], self.transform).shape[1]
            if self.objective.kind == MULTILABEL:
                return [np.arange(2)] * columns
            return self.objective.all_labels(2 if self.objective.kind == BINARY else columns)

        def predict(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
            codes = predicted(self.objective, self.outputs[rows], self.transform)
            return codes if self.objective.kind == MULTILABEL else np.asarray(self.classes_)[codes]

        @available_if(lambda self: self.objective.scale not in (MARGINS, UNKNOWN))  # type: ignore[untyped-decorator]
        def predict_proba(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
            return probabilities(self.objective, self.outputs[rows], self.transform)

        @available_if(lambda self: _is_ranking(self.objective))  # type: ignore[untyped-decorator]
        def decision_function(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
            values = self.outputs[rows].astype(np.float64)
            if self.objective.kind == BINARY:
                return np.asarray(values.reshape(len(values)))
            two = self.objective.kind == MULTICLASS and values.shape[1] == 2
            return np.asarray(values[:, 1] - values[:, 0] if two else values)

    return Regressor, Classifier


def _is_ranking(objective: Objective) -> bool:
    """Whether samples can be ranked by outputs, other than by class probabilities."""
    return objective.scale in (LOGITS, LOG_PROBABILITIES, MARGINS) or (
        objective.kind != MULTICLASS and objective.scale == PROBABILITIES
    )
