"""Scores of held-out outputs, by scikit-learn's scorers or the user's functions.

For a scorer, outputs are wrapped as a fitted scikit-learn estimator whose ``classes_`` are the
labels of the user's data. So the scorer means what it means there: which class is positive, which
of ``predict``, ``predict_proba`` and ``decision_function`` it needs, what it refuses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import Problem, nearest, refuse
from asynckfold.jobs.columns import with_leaves
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
    MASKS,
    MULTICLASS,
    MULTILABEL,
    REGRESSION,
    SEGMENTATION,
    Objective,
    Transform,
    predicted,
    probabilities,
)
from asynckfold.results import accumulated, pixels
from asynckfold.results.direction import direction_problems

Outputs = npt.NDArray[np.float32]
Score = Callable[[npt.NDArray[Any], Outputs], float]

DEFAULTS: Mapping[str, tuple[str, ...]] = {
    MULTICLASS: ("accuracy",),
    BINARY: ("accuracy", "roc_auc"),
    MULTILABEL: ("accuracy", "f1_micro"),
    REGRESSION: ("r2",),
    **{kind: tuple(names) for kind, names in pixels.SCORES.items()},
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
                accumulated.name_of(item, str(name)) if accumulated.accumulates(item) else name,
                _of_pixels(item, kind),
            )
            for name, item in scoring.items()
        ]
    many = isinstance(scoring, Sequence) and not isinstance(scoring, str)
    return [(_name_of(item), item) for item in (scoring if many else [scoring])]


def _of_pixels(item: Any, kind: str) -> Any:
    """Return the name of a score of pixels that was taken for one which the user reports."""
    is_known = isinstance(item, ReportedScore) and item.__name__ in pixels.SCORES.get(kind, ())
    return item.__name__ if is_known else item


def is_custom(item: Any) -> bool:
    """Whether a score is the user's own function of (labels, outputs), or metric."""
    return not isinstance(item, str) and not _is_scorer(item)


def is_from_sklearn(item: Any) -> bool:
    """Whether a scorer runs no code of the user's, which may count its calls."""
    module = getattr(getattr(item, "_score_func", None), "__module__", "") or ""
    return isinstance(item, str) or module.startswith("sklearn.")


def _name_of(item: Any) -> str:
    if isinstance(item, str):
        return item
    if accumulated.accumulates(item):
        return accumulated.name_of(item)
    function = item._score_func if _is_scorer(item) else item
    return str(getattr(function, "__name__", "score"))


def _is_scorer(item: Any) -> bool:
    """Whether ``make_scorer`` made an object; the class of these is not public."""
    return callable(item) and hasattr(item, "_score_func") and hasattr(item, "_sign")


def _problems(pairs: Sequence[tuple[Any, Any]], kind: str) -> list[Problem]:
    from sklearn.metrics import get_scorer_names

    valid = [*pixels.SCORES.get(kind, ()), *get_scorer_names()]
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
    metrics = [(name, item) for name, item in pairs if accumulated.accumulates(item)]
    for name, item in metrics:
        problems += accumulated.metric_problems(str(name), item)
    others = [(name, item) for name, item in pairs if not accumulated.accumulates(item)]
    return [*problems, *direction_problems(others)]


def _score(name: str, item: Any, objective: Objective, transform: Transform | None) -> Score:
    if accumulated.accumulates(item):
        return lambda targets, outputs: accumulated.score_of(
            name, item, objective, transform, targets, outputs
        )
    if is_custom(item):
        if objective.is_of_trees:
            return lambda targets, outputs: item(
                objective.originals(with_leaves(np.asarray, objective.asked(targets))),
                with_leaves(np.asarray, objective.given(outputs)),
            )
        if not objective.labels:
            own: Score = item
            return own
        return lambda targets, outputs: item(objective.originals(targets), outputs)
    if item == "accuracy" and objective.kind == MULTICLASS and transform is None:
        return _accuracy
    if objective.is_dense:
        return lambda targets, outputs: pixels.score_of_counts(
            item, objective.kind, pixels.count_pixels(objective, targets, outputs, transform)
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
        found = predicted(objective, outputs, transform)
        if found.shape != targets.shape:
            raise ValueError(f"predictions of shape {found.shape} for targets {targets.shape}")
        flat = _estimators()[0](Objective(REGRESSION, VALUES), found.reshape(-1))
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

    class Fixed(BaseEstimator):  # type: ignore[misc]
        def __init__(self, objective: Any, outputs: Any, transform: Any = None) -> None:
            self.objective = objective
            self.outputs = outputs
            self.transform = transform

        def __sklearn_is_fitted__(self) -> bool:
            return True

    class Regressor(RegressorMixin, Fixed):  # type: ignore[misc]
        def predict(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
            return predicted(self.objective, self.outputs[rows], self.transform)

    class Classifier(ClassifierMixin, Fixed):  # type: ignore[misc]
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
            found = self.outputs[rows].astype(np.float64)
            if self.objective.kind == BINARY:
                return np.asarray(found.reshape(len(found)))
            two = self.objective.kind == MULTICLASS and found.shape[1] == 2
            return np.asarray(found[:, 1] - found[:, 0] if two else found)

    return Regressor, Classifier


def _is_ranking(objective: Objective) -> bool:
    """Whether samples can be ranked by outputs, other than by class probabilities."""
    return objective.scale in (LOGITS, LOG_PROBABILITIES, MARGINS) or (
        objective.kind != MULTICLASS and objective.scale == PROBABILITIES
    )


# Whether scores fit the outputs


def fit_problems(scoring: Any, objective: Objective, models: Sequence[str]) -> Iterator[Problem]:
    """Yield why scikit-learn's scores cannot be computed from models' outputs."""
    pairs = [
        (name, item) for name, item in named_scores(scoring, objective.kind) if not is_custom(item)
    ]
    if not pairs:
        return
    if objective.targets is not None:
        yield Problem(
            "targets of several parts need scores of your own",
            f"{', '.join(map(str, (name for name, _ in pairs)))}, and targets "
            f"{objective.targets.text}",
            "Pass scoring={'name': function}, of (targets, outputs) → float, which takes a part.",
        )
        return
    objectives = {model: objective.of(model) for model in models} or {"": objective}
    if trees := [model for model, found in objectives.items() if found.outputs]:
        if objective.scale != TRANSFORMED:
            columns = objectives[trees[0]].columns
            assert columns is not None
            yield Problem(
                "scores need to know which of several outputs they are of",
                f"{', '.join(map(str, (name for name, _ in pairs)))}, and model {trees[0]}, which "
                f"returns {columns.text}",
                "Pass output_transform= with a function from outputs to probabilities or numbers, "
                "or scoring={'name': function}, of (targets, outputs) → float.",
            )
            return
    elif any(found.scale == UNKNOWN for found in objectives.values()):
        shown = "one number for two classes" if objective.kind == BINARY else "outputs"
        yield Problem(
            "scores need the meaning of outputs, which this criterion does not define",
            f"{', '.join(map(str, (name for name, _ in pairs)))} of {shown} of an unknown scale",
            "Pass output_transform= with a function from outputs to probabilities, such as "
            "torch.sigmoid; or scoring= with a function (labels, outputs) → float.",
        )
    if objective.is_dense:
        yield from pixels.pixel_problems(pairs, objective)
        return
    margins = [model for model, found in objectives.items() if found.scale == MARGINS]
    for name, item in pairs if margins else []:
        if _needs_probabilities(item):
            yield Problem(
                "scores of probabilities need probabilities or logits as outputs",
                f"{name!r} of margins, the outputs of {', '.join(margins)}",
                "Pass output_transform= with a function from outputs to probabilities, such as "
                "lambda outputs: outputs.softmax(1), or another scoring=.",
            )
    two = objective.kind == MULTICLASS and len(objective.labels) == 2
    if objective.kind == BINARY or two:
        yield from _positive_problems(pairs, objective)


def _needs_probabilities(item: Any) -> bool:
    from sklearn.metrics import get_scorer

    return bool(getattr(get_scorer(item), "_response_method", "predict") == "predict_proba")


def _positive_problems(pairs: Sequence[tuple[Any, Any]], objective: Objective) -> Iterator[Problem]:
    """Yield that a score needs a positive class and no label is 1."""
    labels = objective.all_labels(2).tolist()
    if objective.pos_label is not None or 1 in labels:
        return
    names = [str(name) for name, item in pairs if takes_pos_label(item)]
    if names:
        shown = " and ".join(map(repr, labels))
        yield Problem(
            f"{', '.join(names)} needs to know which class is positive: scikit-learn takes 1",
            f"labels {shown}",
            f"Pass pos_label={labels[-1]!r}, or a score such as 'f1_macro'.",
        )


def score_notes(
    scoring: Any, objective: Objective, models: Sequence[str], is_known: bool = True
) -> Iterator[str]:
    """Yield what scores are computed from, if neither user nor criterion (`is_known`) said it."""
    if scoring is not None:
        pairs = [item for _, item in named_scores(scoring, objective.kind) if not is_custom(item)]
        logits = [model for model in models if objective.of(model).scale == LOGITS]
        assumed = objective.kind == MULTICLASS and logits and not is_known
        if assumed and any(map(_needs_probabilities, pairs)):
            yield (
                f"probabilities are taken to be the softmax of outputs of {', '.join(logits)}, "
                "since this criterion does not define it; output_transform= overrides this"
            )
        return
    names = " and ".join(DEFAULTS[objective.kind])
    scales = dict.fromkeys(objective.of(model).scale for model in models or [""])
    shown = " or ".join(scales)
    what = {
        MULTICLASS: "the class with the greatest output",
        BINARY: f"one output for two classes ({shown})",
        MULTILABEL: f"several labels of a sample ({shown})",
        REGRESSION: f"numbers ({shown})",
        SEGMENTATION: "the class with the greatest output, over all pixels of a fold",
        MASKS: f"one output for each pixel ({shown}), over all pixels of a fold",
    }[objective.kind]
    yield f"scored by {names} of {what}"
