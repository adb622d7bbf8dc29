"""Scores of held-out outputs, by scikit-learn's scorers or the user's functions.

For a scorer, outputs are wrapped as a fitted scikit-learn estimator whose ``classes_`` are the
labels of the user's data. So the scorer means what it means there: which class is positive, which
of ``predict``, ``predict_proba`` and ``decision_function`` it needs, what it refuses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
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
from asynckfold.jobs.result import MakeAccumulator
from asynckfold.jobs.schema import with_leaves
from asynckfold.results.batch_scores import (
    PIXEL_SCORES,
    BatchScores,
    accumulates,
    batch_score,
    name_of,
    pixel_problems,
)
from asynckfold.results.direction import direction_problems

Outputs = npt.NDArray[np.float32]
Score = Callable[..., float]
"""Targets, outputs, and weights of samples if they have some → float."""

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


def score_of_rows(
    score: Score,
    outputs: Outputs,
    targets: npt.NDArray[Any],
    weights: npt.NDArray[Any] | None,
    rows: npt.NDArray[np.int64],
) -> float:
    """Return a score of the outputs of some rows of the data set."""
    of_rows = () if weights is None else (weights[rows],)
    return float(score(targets[rows], outputs, *of_rows))


def named_scores(scoring: Any, kind: str) -> list[tuple[Any, Any]]:
    """Return (name, score) pairs of what the user passed."""
    if scoring is None:
        scoring = DEFAULTS[kind]
    if not isinstance(scoring, Mapping):
        many = isinstance(scoring, Sequence) and not isinstance(scoring, str)
        return [(_name_of(item), item) for item in (scoring if many else [scoring])]
    pairs = []
    for name, item in scoring.items():
        if isinstance(item, ReportedScore) and item.__name__ in PIXEL_SCORES.get(kind, ()):
            item = item.__name__  # not one that the user reports
        pairs.append((name_of(item, str(name)) if accumulates(item) else name, item))
    return pairs


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
    problems += [
        Problem(
            "a metric must say by higher_is_better whether more of it is better",
            f"{name}, whose higher_is_better is None",
            "Pass a function (targets, outputs) → float, or set higher_is_better on a subclass.",
        )
        for name, item in pairs
        if accumulates(item) and item.higher_is_better is None
    ]
    others = [(name, item) for name, item in pairs if not accumulates(item)]
    return [*problems, *direction_problems(others)]


def _score(name: str, item: Any, objective: Objective, transform: Transform | None) -> Score:
    if accumulates(item) or (objective.is_dense and not is_custom(item)):
        return batch_score(name, item, objective, transform)
    if is_custom(item):
        function = partial(_weighted, item)
        if objective.is_of_trees:
            return lambda targets, outputs, *weights: function(
                objective.originals(with_leaves(np.asarray, objective.as_in_dataset(targets))),
                with_leaves(np.asarray, objective.as_returned(outputs)),
                *weights,
            )
        if not objective.labels:
            return function
        return lambda targets, outputs, *weights: function(
            objective.originals(targets), outputs, *weights
        )
    if item == "accuracy" and objective.kind == MULTICLASS and transform is None:
        return _accuracy
    scorer = _scorer_for(item, objective)

    def score(targets: npt.NDArray[Any], outputs: Outputs, weights: Any = None) -> float:
        if targets.ndim > 2:
            return of_all_numbers(targets, outputs, weights)
        estimator = _estimators()[objective.kind != REGRESSION](objective, outputs, transform)
        truth = _truth(objective, targets, estimator)
        scorer_of_all = _with_labels(scorer, estimator, truth)
        rows = np.arange(len(targets))
        return float(scorer_of_all(estimator, rows, truth, sample_weight=weights))

    def of_all_numbers(targets: npt.NDArray[Any], outputs: Outputs, weights: Any) -> float:
        predictions = predicted(objective, outputs, transform)
        if predictions.shape != targets.shape:
            raise ValueError(
                f"predictions of shape {predictions.shape} for targets {targets.shape}"
            )
        flat = _estimators()[0](Objective(REGRESSION, VALUES), predictions.reshape(-1))
        each = None if weights is None else np.repeat(weights, targets[0].size)
        rows = np.arange(targets.size)
        return float(scorer(flat, rows, targets.reshape(-1), sample_weight=each))

    return score


def _weighted(item: Any, targets: Any, outputs: Any, weights: Any = None) -> float:
    """Return the score of a function of the user's."""
    words = {} if weights is None else {"sample_weight": weights}
    score: float = item(targets, outputs, **words)
    return score


def _accuracy(targets: npt.NDArray[Any], outputs: Outputs, weights: Any = None) -> float:
    """Return scikit-learn's ``"accuracy"`` without its 1 ms of argument checks.

    That would be a fifth of the overhead allowed to a short job.
    """
    return float(np.average(outputs.argmax(axis=1) == targets, weights=weights))


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


def estimator_scorer(item: Any, objective: Objective) -> Callable[..., float]:
    """Return the function (fitted estimator, X, labels, sample_weight) → float of a score."""
    scorer = _scorer_for(item, objective)

    def score(
        estimator: Any, inputs: Any, labels: npt.NDArray[Any], sample_weight: Any = None
    ) -> float:
        scorer_of_all = _with_labels(scorer, estimator, labels)
        return float(scorer_of_all(estimator, inputs, labels, sample_weight=sample_weight))

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


def weight_problems(scoring: Any, objective: Objective) -> Iterator[Problem]:
    """Yield the scores that take no weights of samples."""
    from sklearn.metrics import get_scorer

    for name, item in named_scores(scoring, objective.kind):
        scorer = item if is_custom(item) else get_scorer(item)
        if objective.is_dense or accumulates(item) or not _accepts(scorer, "sample_weight"):
            yield Problem(
                "scores must take the sample_weight of held-out samples, of which each has one "
                "target or row of targets",
                f"{name}, which takes none",
                "Choose a score of scikit-learn whose metric has the parameter sample_weight, or "
                "pass scoring={'name': function}, of (targets, outputs, sample_weight) → float.",
            )


def _accepts(scorer: Any, keyword: str) -> bool:
    with suppress(TypeError, ValueError):
        return keyword in inspect.signature(getattr(scorer, "_score_func", scorer)).parameters
    return False


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


# Whether scores fit what the models return


def why_not_by_batch(scoring: Any, objective: Objective, measured: Collection[str] = ()) -> str:
    """Return which scores need all outputs of a fold at once; ``""`` if none.

    `measured` are the scores that a `validation_step` computes.

    Examples
    --------
    >>> why_not_by_batch(["dice", "f1_macro"], Objective("segmentation", "logits"))
    ''
    >>> why_not_by_batch(["accuracy", "roc_auc"], Objective("binary", "logits"), {"accuracy"})
    'roc_auc'
    """
    return ", ".join(
        str(name)
        for name, item in named_scores(scoring, objective.kind)
        if name not in measured
        and not accumulates(item)
        and (is_custom(item) or not objective.is_dense)
    )


def accumulator_of(
    scoring: Any,
    objective: Objective,
    transform: Transform | None = None,
    measured: Collection[str] = (),
) -> MakeAccumulator:
    """Return what makes the accumulators of the jobs of a model; parameters as in `resolve`."""
    pairs = [
        (str(name), item)
        for name, item in named_scores(scoring, objective.kind)
        if name not in measured
    ]
    return partial(BatchScores, pairs, objective, transform)


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
    unknown = {item for _, item in pairs if isinstance(item, str) and not nearest(item, known)}
    if not unknown or len({str(name) for name, _ in pairs}) < len(pairs):
        return scoring
    return {name: ReportedScore(item) if item in unknown else item for name, item in pairs}


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


def fit_problems(scoring: Any, objective: Objective, models: Sequence[str]) -> Iterator[Problem]:
    """Yield why scikit-learn's scores cannot be computed from models' outputs."""
    pairs = [
        (name, item) for name, item in named_scores(scoring, objective.kind) if not is_custom(item)
    ]
    if not pairs:
        return
    names = ", ".join(str(name) for name, _ in pairs)
    function = "scoring={'name': function}, of (targets, outputs) → float"
    remedy = (
        "Pass output_transform= with a function from outputs to probabilities or numbers, such as "
        f"torch.sigmoid; or {function}."
    )
    if objective.targets is not None:
        rule = "targets of several parts need scores of your own"
        yield Problem(rule, f"{names}, and targets {objective.targets.text}", f"Pass {function}.")
        return
    objectives = {model: objective.of(model) for model in models} or {"": objective}
    trees = {model: each.columns for model, each in objectives.items() if each.columns is not None}
    if trees and objective.scale != TRANSFORMED:
        model, columns = next(iter(trees.items()))
        rule = "scores need to know which of several outputs they are of"
        yield Problem(rule, f"{names}, and model {model}, which returns {columns.text}", remedy)
        return
    if not trees and any(each.scale == UNKNOWN for each in objectives.values()):
        rule = "scores need the meaning of outputs, which this criterion does not define"
        yield Problem(rule, f"{names} of outputs of an unknown scale", remedy)
    if objective.is_dense:
        yield from pixel_problems(pairs, objective)
    is_two = objective.kind == BINARY or len(objective.labels) == 2
    labels = objective.all_labels(2).tolist() if is_two else [1]
    unclear = [str(name) for name, item in pairs if 1 not in labels and takes_pos_label(item)]
    if unclear and objective.pos_label is None:
        yield Problem(
            f"{', '.join(unclear)} needs to know which class is positive: scikit-learn takes 1",
            f"labels {' and '.join(map(repr, labels))}",
            f"Pass pos_label={labels[-1]!r}, or a score such as 'f1_macro'.",
        )


def score_notes(
    scoring: Any, objective: Objective, models: Sequence[str], is_known: bool = True
) -> Iterator[str]:
    """Yield what probabilities are computed from, if the criterion (`is_known`) did not say it."""
    from sklearn.metrics import get_scorer

    logits = [model for model in models if objective.of(model).scale == LOGITS]
    if scoring is None or is_known or objective.kind != MULTICLASS or not logits:
        return
    items = [item for _, item in named_scores(scoring, objective.kind) if not is_custom(item)]
    if any(getattr(get_scorer(item), "_response_method", "") == "predict_proba" for item in items):
        yield (
            f"probabilities are taken to be the softmax of outputs of {', '.join(logits)}, "
            "since this criterion does not define it; output_transform= overrides this"
        )
