"""The task of a model, and the meaning of its outputs: decided once, and part of the plan.

::

    criterion ─┐
    labels ────┼─► Objective ─► scores, confusion, predictions, epochs' accuracy, report
    outputs ───┤     kind, scale of the outputs, original labels, positive label
    the user ──┘

Jobs train on codes: class indices, 0 and 1, or numbers. Scores and predictions are in the original
labels of the user's data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from asynckfold.errors import Problem
from asynckfold.jobs.criteria import (
    CLASSES,
    LOG_PROBABILITIES,
    LOG_RATE,
    LOGITS,
    MARGINS,
    PROBABILITIES,
    SHARE_LOGITS,
    TRANSFORMED,
    UNKNOWN,
    VALUES,
    Criterion,
)
from asynckfold.jobs.schema import Schema

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]

Transform = Callable[["Array"], "Array"]
"""The user's `output_transform`, of arrays."""

MULTICLASS, BINARY, MULTILABEL, REGRESSION = "multiclass", "binary", "multilabel", "regression"
"""A column for each class; one output for two classes; a column for each of several labels that a
sample may have at once; numbers."""

SEGMENTATION, MASKS = "segmentation", "masks"
"""A class for each pixel, outputs (n, classes, ...); 0 or 1 for each pixel, one output for each."""

RECONSTRUCTION, CUSTOM = "reconstruction", "custom"
"""Further tasks: numbers that are the inputs; whatever the user's scores take."""


def task_of(kind: str) -> str:
    """Return the task of a kind of targets."""
    return SEGMENTATION if kind == MASKS else kind


@dataclass(frozen=True)
class Objective:
    """The task of a model, and the meaning of its outputs."""

    kind: str  # multiclass, binary, multilabel, regression, segmentation, or masks
    scale: str  # of outputs, see `criteria`
    labels: tuple[Any, ...] = ()  # original labels by code; empty: they are the codes
    signs: bool = False  # binary codes are -1 and 1
    pos_label: Any = None  # for scores such as f1; None: scikit-learn's rule, 1
    transform: str = ""  # digest of the user's `output_transform`
    apart: tuple[tuple[str, str], ...] = ()  # (model, scale) of models with another scale
    ignore_index: int | None = None  # pixels of this class are not scored
    targets: Schema | None = None  # of targets that are trees
    outputs: tuple[tuple[str, Schema], ...] = ()  # (model, columns) of outputs that are trees

    def of(self, model: str) -> Objective:
        """Return the objective of one model."""
        if not (self.apart or self.outputs):
            return self
        single = self.of_models([model])
        return replace(single, scale=dict(self.apart).get(model, self.scale), apart=())

    def of_models(self, models: Collection[str]) -> Objective:
        """Return the objective of some models."""
        return replace(
            self,
            apart=tuple(pair for pair in self.apart if pair[0] in models),
            outputs=tuple(pair for pair in self.outputs if pair[0] in models),
        )

    @property
    def columns(self) -> Schema | None:
        """Of the outputs of one model, if these are trees."""
        return self.outputs[0][1] if self.outputs else None

    @property
    def is_of_trees(self) -> bool:
        """Whether targets or outputs are trees, such as those of several heads."""
        return self.targets is not None or bool(self.outputs)

    def as_returned(self, outputs: Any, like: Any = None) -> Any:
        """Return outputs in the form of the model; arrays stay float32, for means and NaN.

        With `like`, outputs of a batch, they have its types.
        """
        if self.columns is None:
            return outputs
        is_array = hasattr(outputs, "__array_interface__")
        return self.columns.split(outputs, cast=not is_array, like=like)

    def as_in_dataset(self, targets: Any) -> Any:
        """Return targets in the form that the data set has."""
        return targets if self.targets is None else self.targets.split(targets)

    @property
    def is_classes(self) -> bool:
        """Whether each sample has one class."""
        return self.kind in (MULTICLASS, BINARY)

    @property
    def is_dense(self) -> bool:
        """Whether each pixel of a sample has a class."""
        return self.kind in (SEGMENTATION, MASKS)

    def codes(self, targets: Array) -> npt.NDArray[np.int64]:
        """Return targets as class indices (n, ...), or rows of 0 and 1 (n, n_labels)."""
        import numpy as np

        if self.kind in (MULTICLASS, SEGMENTATION):
            return np.asarray(targets, np.int64)
        codes = (np.asarray(targets) > (0 if self.signs else 0.5)).astype(np.int64)
        return codes.reshape(len(codes)) if self.kind == BINARY else codes

    def labels_of(self, codes: Array, columns: int) -> Array:
        """Return the original labels of class indices."""
        return self.all_labels(columns)[codes] if self.labels else codes

    def all_labels(self, columns: int) -> Array:
        """Return the original label of each output; unused labels beyond the classes."""
        import numpy as np

        if not self.labels:
            return np.arange(max(2, columns))
        more = range(columns - len(self.labels))
        if isinstance(self.labels[0], str):
            return np.array([*self.labels, *(f"output {len(self.labels) + at}" for at in more)])
        beyond = [int(max(self.labels)) + 1 + at for at in more]
        return np.array([*self.labels, *beyond] if beyond else list(self.labels))

    def originals(self, targets: Array) -> Array:
        """Return targets with original labels instead of class indices."""
        if not self.is_classes or not self.labels:
            return targets
        return self.labels_of(self.codes(targets), len(self.labels))


def ordinary(is_classes: bool) -> Objective:
    """Return the usual objective: classes by logits, or numbers."""
    return Objective(MULTICLASS, LOGITS) if is_classes else Objective(REGRESSION, VALUES)


def predicted(objective: Objective, outputs: Array, transform: Transform | None = None) -> Array:
    """Return predictions: class indices (n, ...), rows of 0 and 1, or numbers.

    Raises ValueError where that takes an `output_transform`.
    """
    import numpy as np

    kind, scale = objective.kind, objective.scale
    if kind == REGRESSION:
        return _numbers(objective, outputs, transform)
    if objective.outputs and scale != TRANSFORMED:
        raise ValueError("pass output_transform= with a function from outputs to probabilities")
    if kind in (MULTICLASS, SEGMENTATION) and scale != TRANSFORMED:
        return np.asarray(outputs.argmax(axis=1), np.int64)
    if scale == LOGITS:
        positive = outputs > 0
        return (positive.reshape(len(positive)) if kind == BINARY else positive).astype(np.int64)
    shares = probabilities(objective, outputs, transform)
    if kind in (MULTILABEL, MASKS):
        return (shares > 0.5).astype(np.int64)
    return np.asarray(shares.argmax(axis=1), np.int64)


def probabilities(
    objective: Objective, outputs: Array, transform: Transform | None = None
) -> npt.NDArray[np.float64]:
    """Return float64 probabilities, (n, n_classes) or (n, n_labels), of outputs (..., n, columns).

    Of each pixel they have the shape of the outputs.
    Raises ValueError where outputs are margins, or `output_transform` gives no probabilities.
    """
    import numpy as np
    from scipy.special import expit, softmax

    kind, scale = objective.kind, objective.scale
    if scale == TRANSFORMED and transform is not None and objective.is_dense:
        return transform(objective.as_returned(outputs)).astype(np.float64)
    if scale == TRANSFORMED and transform is not None:
        shares = _of_two(transform(objective.as_returned(outputs)).astype(np.float64), kind)
        return _checked(shares, len(outputs), kind)
    exact = np.asarray(outputs, np.float64)
    if scale == LOGITS:
        axis = {MULTICLASS: -1, SEGMENTATION: 1}.get(kind)
        exact = expit(exact) if axis is None else softmax(exact, axis=axis)
    elif scale == LOG_PROBABILITIES:
        exact = np.exp(exact)
    elif scale != PROBABILITIES:
        raise ValueError(
            f"outputs are {'of an unknown scale' if scale == UNKNOWN else scale}, not "
            "probabilities: pass output_transform= with a function from outputs to probabilities"
        )
    if kind == MULTICLASS and scale != LOGITS:
        # float32 sums up to 1 with 7 digits, bfloat16 with 3; scikit-learn warns below that.
        exact = exact / exact.sum(axis=-1, keepdims=True)
    return _of_two(exact, kind)


def _of_two(shares: Array, kind: str) -> npt.NDArray[np.float64]:
    import numpy as np

    if kind != BINARY:
        return shares
    if shares.ndim == 1 or shares.shape[1] == 1:
        positive = shares.reshape(len(shares))
        return np.stack([1 - positive, positive], axis=1)
    return shares


def _checked(shares: Array, count: int, kind: str) -> npt.NDArray[np.float64]:
    """Return the result of `output_transform`, normalised to sum to 1."""
    import numpy as np

    if shares.ndim != 2 or len(shares) != count:
        raise ValueError(f"output_transform gave shape {shares.shape} of {count} samples")
    if np.nanmin(shares, initial=0) < 0 or np.nanmax(shares, initial=0) > 1 + 1e-6:
        raise ValueError("output_transform must give probabilities, from 0 to 1")
    if kind == MULTILABEL:
        return shares
    total = shares.sum(axis=1, keepdims=True)
    if np.abs(total - 1).max(initial=0) > 1e-2:
        raise ValueError("output_transform must give probabilities that add up to 1")
    return np.asarray(shares / total)


def _numbers(objective: Objective, outputs: Array, transform: Transform | None) -> Array:
    import numpy as np
    from scipy.special import expit, softmax

    if objective.scale == UNKNOWN:
        raise ValueError("pass output_transform= with a function from outputs to predictions")
    scales = {LOG_RATE: np.exp, LOGITS: expit, SHARE_LOGITS: functools.partial(softmax, axis=1)}
    if objective.scale == TRANSFORMED and transform is not None:
        outputs = transform(objective.as_returned(outputs))
    elif of_exact := scales.get(objective.scale):
        outputs = of_exact(outputs.astype(np.float64))
    return outputs.squeeze(-1) if outputs.shape[1:] == (1,) else outputs


# What the dry run saw


@dataclass(frozen=True, eq=False)
class OutputSample:
    """Outputs of one model, as the dry run saw them."""

    rows: Array  # float32, (k, ...): outputs of some samples
    last: str = ""  # ``"Sigmoid"``, ``"Softmax"`` or ``"LogSoftmax"`` if the model ends in it
    tree: Schema | None = None  # of outputs that are trees

    @property
    def columns(self) -> int:
        """Outputs per sample."""
        import numpy as np

        return int(np.prod(self.rows.shape[1:]))

    @property
    def is_distribution(self) -> bool:
        """Whether rows are non-negative and sum to 1."""
        import numpy as np

        rows = self.rows
        if rows.ndim != 2 or rows.shape[1] < 2 or not np.isfinite(rows).all():
            return False
        return bool(rows.min() >= 0 and np.abs(rows.sum(axis=1) - 1).max() < 1e-2)

    @property
    def is_log_distribution(self) -> bool:
        """Whether rows are logarithms of distributions."""
        import numpy as np

        return (
            bool(self.rows.max(initial=0) <= 1e-2)
            and OutputSample(np.exp(self.rows)).is_distribution
        )

    @property
    def is_share(self) -> bool:
        """Whether a sigmoid or a softmax made them."""
        return self.last in ("Sigmoid", "Softmax") or (self.rows.ndim == 2 and self.is_distribution)


def scale_of(kind: str, criterion: Criterion | None, sample: OutputSample) -> str:
    """Return the scale of a model's outputs, by its criterion and by what was seen of them."""
    if sample.tree is not None:
        return UNKNOWN
    expected = natural_scale(kind, criterion)
    if kind == REGRESSION:
        is_share = (expected, sample.last) in ((LOGITS, "Sigmoid"), (SHARE_LOGITS, "Softmax"))
        return PROBABILITIES if is_share else expected
    if kind == SEGMENTATION:
        shares = {"Softmax": PROBABILITIES, "LogSoftmax": LOG_PROBABILITIES}
        return expected if expected != LOGITS else shares.get(sample.last, expected)
    if kind == MULTICLASS:
        if sample.is_distribution:
            return PROBABILITIES
        if sample.is_log_distribution and expected != LOGITS:
            return LOG_PROBABILITIES
        return MARGINS if expected == LOG_PROBABILITIES else expected
    if (
        expected in (LOGITS, UNKNOWN)
        and sample.is_share
        and (kind in (MULTILABEL, MASKS) or sample.columns == 1)
    ):
        return PROBABILITIES
    return expected


def natural_scale(kind: str, criterion: Criterion | None) -> str:
    """Return the scale that a criterion expects."""
    if criterion is not None:
        is_of_shares = kind == REGRESSION and criterion.targets == CLASSES
        return SHARE_LOGITS if is_of_shares and criterion.outputs == LOGITS else criterion.outputs
    return {MULTICLASS: LOGITS, SEGMENTATION: LOGITS, REGRESSION: VALUES}.get(kind, UNKNOWN)


def scale_note(model: str, kind: str, criterion: Criterion | None, scale: str) -> str:
    """Note a model whose outputs are not what its criterion expects; ``""`` otherwise."""
    if criterion is None or scale in (natural_scale(kind, criterion), UNKNOWN):
        return ""
    name, wanted = criterion.name, natural_scale(kind, criterion)
    if wanted in (LOGITS, SHARE_LOGITS):
        is_sigmoid = wanted == LOGITS and kind not in (MULTICLASS, SEGMENTATION)
        last = "sigmoid" if is_sigmoid else "softmax"
        return (
            f"model {model} ends in a {last} or the like, and {name} applies another one to its "
            f"outputs; its outputs are scored as probabilities. Remove the model's last layer"
        )
    if wanted == LOG_PROBABILITIES:
        return f"model {model} gives {name} no log-probabilities: end it in LogSoftmax"
    return ""


def decided(
    draft: Objective,
    criterion: Criterion | None,
    output_samples: Mapping[str, OutputSample],
    pos_label: Any,
    transform: str,
) -> tuple[Objective, tuple[str, ...]]:
    """Decide the objective of a sweep; return it with notes.

    `draft` comes from labels and criterion, `output_samples` from the dry run; `pos_label` and the
    digest `transform` of `output_transform` from the user.
    """
    kind = draft.kind
    columns = {2 if sample.tree else sample.columns for sample in output_samples.values()}
    if kind == MULTICLASS and criterion is None and columns == {1}:
        kind = BINARY
    base = TRANSFORMED if transform else natural_scale(kind, criterion)
    trees = tuple(sorted((name, s.tree) for name, s in output_samples.items() if s.tree))
    objective = replace(
        draft, kind=kind, scale=base, pos_label=pos_label, transform=transform, outputs=trees
    )
    if transform:
        return objective, ()
    scales = {model: scale_of(kind, criterion, sample) for model, sample in output_samples.items()}
    notes = [scale_note(model, kind, criterion, scale) for model, scale in scales.items()]
    apart = tuple(sorted((model, scale) for model, scale in scales.items() if scale != base))
    return replace(objective, apart=apart), tuple(filter(None, notes))


def output_problems(
    highest: int, criterion: Criterion | None, output_samples: Mapping[str, OutputSample]
) -> Iterator[Problem]:
    """Yield that some models have enough outputs for the labels as they are, and some do not."""
    widths = {
        model: width(criterion, sample)
        for model, sample in output_samples.items()
        if sample.tree is None
    }
    few = [model for model, count in widths.items() if count <= highest]
    if few and len(few) < len(widths):
        shown = ", ".join(f"{model} has {count}" for model, count in widths.items())
        yield Problem(
            f"all models must have outputs for labels up to {highest}, or none of them, so that "
            "a label means the same for all",
            shown,
            f"Give the last layer of {', '.join(few)} {highest + 1} outputs.",
        )


def must_be_numbered(
    highest: int, criterion: Criterion | None, output_samples: Mapping[str, OutputSample]
) -> bool:
    """Return whether labels up to `highest` exceed the outputs of some model."""
    return any(
        width(criterion, sample) <= highest
        for sample in output_samples.values()
        if sample.tree is None
    )


def width(criterion: Criterion | None, sample: OutputSample) -> int:
    """Return how many classes a model's outputs stand for."""
    return 2 if criterion is None and sample.columns == 1 else sample.columns


def pos_label_of(
    value: Any, objective: Objective, names: Sequence[str]
) -> tuple[Any, list[Problem]]:
    """Return the user's `pos_label` as one of the labels; it may be a class name."""
    import numpy as np

    if value is None:
        return None, []
    value = value.item() if isinstance(value, np.generic) else value
    labels = objective.all_labels(len(objective.labels or names)).tolist()
    if objective.kind not in (MULTICLASS, BINARY):
        rule, received = "pos_label needs targets that are classes", repr(value)
        return None, [Problem(rule, received, "Leave pos_label out.")]
    # True is no 1 here: labels are compared with their type, but for names of classes.
    for label in labels:
        if label == value and isinstance(label, str) == isinstance(value, str):
            return label, []
    if isinstance(value, str) and value in names:
        return labels[names.index(value)], []
    shown = ", ".join(map(repr, labels[:20]))
    rule = "pos_label must be one of the labels"
    return None, [Problem(rule, repr(value), f"Pass one of {shown}.")]
