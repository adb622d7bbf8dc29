"""Whether scores fit what the models return, and how they are computed from it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from asynckfold.errors import Problem, nearest
from asynckfold.jobs.criteria import LOGITS, MARGINS, TRANSFORMED, UNKNOWN
from asynckfold.jobs.objective import (
    BINARY,
    MASKS,
    MULTICLASS,
    MULTILABEL,
    REGRESSION,
    SEGMENTATION,
    Objective,
    Transform,
)
from asynckfold.jobs.result import MakeAccumulator
from asynckfold.results.batch_scores import BatchScores, accumulates, pixel_problems
from asynckfold.results.scoring import (
    DEFAULTS,
    ReportedScore,
    is_custom,
    named_scores,
    takes_pos_label,
)


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
    if objective.targets is not None:
        yield Problem(
            "targets of several parts need scores of your own",
            f"{', '.join(map(str, (name for name, _ in pairs)))}, and targets "
            f"{objective.targets.text}",
            "Pass scoring={'name': function}, of (targets, outputs) → float, which takes a part.",
        )
        return
    objectives = {model: objective.of(model) for model in models} or {"": objective}
    if trees := [model for model, each in objectives.items() if each.outputs]:
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
    elif any(each.scale == UNKNOWN for each in objectives.values()):
        shown = "one number for two classes" if objective.kind == BINARY else "outputs"
        yield Problem(
            "scores need the meaning of outputs, which this criterion does not define",
            f"{', '.join(map(str, (name for name, _ in pairs)))} of {shown} of an unknown scale",
            "Pass output_transform= with a function from outputs to probabilities, such as "
            "torch.sigmoid; or scoring= with a function (labels, outputs) → float.",
        )
    if objective.is_dense:
        yield from pixel_problems(pairs, objective)
        return
    margins = [model for model, each in objectives.items() if each.scale == MARGINS]
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
