"""Check labels and bring them into one form: class indices, 0 and 1, or numbers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from asynckfold.data.transforms.trees import Array, TreeArrays
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.criteria import CLASSES, NUMBERS, ODDS, SIGNS, UNKNOWN, Criterion
from asynckfold.jobs.objective import (
    BINARY,
    CUSTOM,
    MASKS,
    MULTICLASS,
    MULTILABEL,
    RECONSTRUCTION,
    REGRESSION,
    SEGMENTATION,
    Objective,
    natural_scale,
    ordinary,
    task_of,
)
from asynckfold.jobs.schema import Schema, UnfitTree

MOST_CLASSES = 1 << 20
"""Whole numbers from here on are names of classes, and no numbers of outputs."""

MOST_OFF = 1e-2
"""How far the sum of a row of probabilities may be from 1: half precision rounds to 1e-3."""


PARTS_RULE = "targets of several parts must be numbers, the same parts of each sample"


@dataclass(frozen=True, eq=False)
class Labels:
    """Targets as jobs use them."""

    # int64 class indices (n, ...), or float32 (n, ...): regression targets or binary codes
    targets: Array
    # names by index up to the greatest possible; empty for numbers and multilabel
    classes: tuple[str, ...]
    classification: bool  # targets are class indices
    notes: tuple[str, ...] = ()
    # as far as it is known before a model ran
    objective: Objective = field(default_factory=lambda: ordinary(True))
    ignore_index: int = -100

    @property
    def strata(self) -> Array | None:
        """The class of each sample; None for numbers and multilabel."""
        return self.objective.codes(self.targets) if self.objective.is_classes else None

    @property
    def highest(self) -> int:
        """The greatest class index; -1 for numbers."""
        if self.objective.kind == SEGMENTATION:
            return len(self.classes) - 1
        return int(self.targets.max()) if self.classification else -1

    @property
    def may_be_numbered(self) -> bool:
        """Whether class indices have gaps, so that renumbering would need fewer outputs."""
        if not self.classification or self.objective.labels or self.objective.is_dense:
            return False
        return len(np.unique(self.targets)) <= self.highest

    def numbered(self) -> Labels:
        """Return class indices renumbered by sorted order."""
        values = np.unique(self.targets)
        codes = np.searchsorted(values, self.targets).astype(np.int64)
        names = tuple(self.classes[label] for label in values.tolist())
        labels = values.tolist()
        refuse(_ignored_problems(np.arange(len(values)), self.ignore_index, "numbered labels"))
        return replace(
            self,
            targets=codes,
            classes=names,
            notes=(*self.notes, _numbering(labels)),
            objective=replace(self.objective, labels=tuple(labels)),
        )


def resolve_labels(
    values: Any,
    names: Sequence[str] = (),
    criterion: Criterion | None = None,
    task: str | None = None,
) -> Labels:
    """Check labels and bring them into one form.

    Non-negative integers are class indices as they are, so pretrained heads, class weights and
    `ignore_index` keep their meaning. Strings and negative integers are numbered by sorted order.
    Numbers with a fraction are regression targets. `criterion` decides; without one, `task` or the
    labels' type does. Raises `InputError` with all problems, each
    naming the first bad index and value.

    >>> labels = resolve_labels(["dog", "cat", "dog"])
    >>> labels.targets.tolist(), labels.classes
    ([1, 0, 1], ('cat', 'dog'))
    >>> resolve_labels([0, 3, 1]).targets.tolist()
    [0, 3, 1]
    """
    if _are_trees(values):
        return _of_parts(values, criterion, task)
    array = label_array(values)
    if task is None:
        return _resolved(array, names, criterion)
    if task == CUSTOM:
        return _resolved_or_unchanged(array, names, criterion)
    labels = _resolved_as(task, array, names, criterion)
    kind = task_of(labels.objective.kind)
    is_of_two = task == BINARY and kind == MULTICLASS and len(np.unique(labels.targets)) <= 2
    if task == kind or is_of_two or (task, kind) == (RECONSTRUCTION, REGRESSION):
        return labels
    by = "no criterion of torch" if criterion is None else criterion.name
    raise InputError.one(
        f"task={task!r} must be what criterion and targets say",
        f"{by} and targets {array.dtype} of shape {array.shape}, which are {kind}",
        f"Pass task={kind!r}, or another criterion or targets.",
    )


def _are_trees(values: Any) -> bool:
    """Whether targets have several parts; numbers in tuples of one length are rows, as always."""
    if isinstance(values, TreeArrays):
        return True
    if isinstance(values, (Tensor, np.ndarray)) or not len(values):
        return False
    first = values[0]
    if isinstance(first, Mapping):
        return True
    if not isinstance(first, tuple):
        return False
    return len({np.shape(part) for part in first}) > 1 or any(
        isinstance(part, (Mapping, tuple)) for part in first
    )


def _of_parts(values: Any, criterion: Criterion | None, task: str | None) -> Labels:
    """Resolve targets of several parts, which only the user's criterion can take."""
    try:
        if isinstance(values, TreeArrays):
            schema, rows = Schema.of_arrays(values.tree)
        else:
            schema, rows = Schema.of_samples(list(values))
    except UnfitTree as error:
        raise InputError.one(PARTS_RULE, *error.args) from error
    if criterion is not None or task not in (None, CUSTOM):
        name = "none" if criterion is None else criterion.name
        raise InputError.one(
            "targets of several parts need a criterion of your own, and are a task of your own",
            f"criterion {name}, task={task!r}, and targets {schema.text}",
            "Pass a function (outputs, targets) → loss that takes the parts, and leave task out.",
        )
    return _as_numbers(rows, natural_scale(REGRESSION, None), schema)


def _as_numbers(array: Array, scale: str, schema: Schema | None = None) -> Labels:
    targets = array if schema else _floats(array)
    objective = Objective(REGRESSION, scale, targets=schema)
    return Labels(targets, (), False, _missing_notes(array), objective)


def _missing_notes(array: Array) -> tuple[str, ...]:
    missing = int(np.isnan(array.reshape(len(array), -1)).any(axis=1).sum())
    notes = (f"targets of {missing} samples hold NaN, which the criterion must leave out",)
    return notes * bool(missing)


def _resolved_or_unchanged(
    array: Array, names: Sequence[str], criterion: Criterion | None
) -> Labels:
    """Resolve labels; those of no known form stay what they are, for the user's scores."""
    try:
        return _resolved(array, names, criterion)
    except InputError:
        if array.dtype.kind == "U" or (array.ndim == 1 and array.dtype.kind != "f"):
            raise
    scale = natural_scale(REGRESSION, criterion)
    if array.dtype.kind == "f":
        return _as_numbers(array, scale)
    # As one part of a tree, whose type is kept.
    schema, rows = Schema.of_arrays(array)
    return _as_numbers(rows, scale, schema)


def _resolved_as(
    task: str, array: Array, names: Sequence[str], criterion: Criterion | None
) -> Labels:
    """Resolve labels for a task that the user names, where criterion and type leave it open."""
    asked = None if criterion is None else criterion.targets
    if task == SEGMENTATION and array.ndim > 1 and asked != NUMBERS:
        whole = array.dtype.kind in "biu" and asked != ODDS
        return dense_labels(array, CLASSES if whole else ODDS, tuple(names), criterion)
    if task in (REGRESSION, RECONSTRUCTION) and asked in (None, ODDS):
        return _regression(array, criterion)
    if task in (BINARY, MULTILABEL) and criterion is None and array.ndim > (task == MULTILABEL):
        criterion = Criterion(f"task={task!r}", ODDS, UNKNOWN)
    return _resolved(array, names, criterion, CLASSES if task == MULTICLASS else None)


def _resolved(
    array: Array, names: Sequence[str], criterion: Criterion | None, wanted: str | None = None
) -> Labels:
    """Resolve labels for what the criterion wants, or without one `wanted`."""
    wanted = wanted if criterion is None else criterion.targets
    if array.ndim > 2 and wanted != SIGNS and array.dtype.kind != "U":
        return dense_labels(array, wanted, tuple(names), criterion)
    if wanted in (ODDS, SIGNS):
        assert criterion is not None
        return _two_valued(array, criterion, tuple(names))
    if wanted is None:
        wanted = CLASSES if array.dtype.kind in "biuU" else NUMBERS
    if wanted == NUMBERS:
        return _regression(array, criterion)
    if criterion is not None and criterion.name == "CrossEntropyLoss" and _are_shares(array):
        return _regression(array, criterion)
    notes = []
    if array.ndim == 2 and array.shape[1] == 1:
        notes.append(f"labels of shape {array.shape} were squeezed to ({len(array)},)")
        array = array[:, 0]
    ignored = -100 if criterion is None else criterion.ignore_index
    refuse(_class_problems(array, ignored))
    objective = Objective(MULTICLASS, natural_scale(MULTICLASS, criterion))
    return _classes(array, tuple(names), notes, objective, ignored)


def _are_shares(array: Array) -> bool:
    """Whether rows are probabilities of classes, and not all of them one-hot."""
    if array.dtype.kind != "f" or array.ndim != 2 or array.shape[1] < 2 or array.min() < 0:
        return False
    sums = np.abs(array.sum(axis=1, dtype=np.float64) - 1)
    return bool(sums.max() < MOST_OFF) and not np.isin(array, (0, 1)).all()


def label_array(values: Any) -> Array:
    """Return labels as one array of numbers or strings."""
    array = _stacked(values)
    if array.dtype.kind == "O" and all(isinstance(item, str) for item in array.ravel()):
        array = array.astype(str)
    if array.dtype.kind not in "biufU":
        raise InputError.one(
            "labels must be numbers or strings, all of one shape",
            f"an array of {array.dtype} of shape {array.shape}",
            "Pass targets= with one class index or name per sample.",
        )
    return array


def _stacked(values: Any) -> Array:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    if isinstance(values, np.ndarray):
        return values
    items = [_stacked(item) if isinstance(item, Tensor) else item for item in values]
    shapes = list(dict.fromkeys(map(np.shape, items)))
    if len(shapes) > 1:
        raise InputError.one(
            "labels must be numbers or strings, all of one shape",
            f"shapes {shapes[0]} and {shapes[1]}" + " and others" * (len(shapes) > 2),
            "Pad the labels to one length in the data set, with -100, which CrossEntropyLoss "
            "ignores, and the inputs in collate_fn to the same; pass task='segmentation'. Or pass "
            "targets= with one class index or name per sample.",
        )
    return np.array(items)


# A class or number for each pixel


def dense_labels(
    array: Array, wanted: str | None, names: tuple[str, ...], criterion: Criterion | None
) -> Labels:
    """Return targets (n, ...) with a class, 0 or 1, or a number for each pixel."""
    if wanted is None:
        wanted = CLASSES if array.dtype.kind in "biu" else NUMBERS
    if wanted == CLASSES:
        return _pixel_classes(array, names, criterion)
    if wanted == NUMBERS:
        return _regression(array, criterion)
    _refuse_not_finite(array, "targets of pixels must be finite")
    scale = natural_scale(MASKS, criterion)
    if np.isin(array, (0, 1)).all():
        return Labels(_floats(array), (), False, objective=Objective(MASKS, scale))
    low, high = array.min(), array.max()
    if array.dtype.kind != "f" or low < 0 or high > 1:
        raise InputError.one(
            "masks must hold 0 and 1",
            f"{array.dtype} from {low} to {high}",
            "Divide a mask of 0 and 255 by 255; use CrossEntropyLoss for several classes.",
        )
    # Probabilities themselves: numbers, of outputs on the same scale.
    return _as_numbers(array, scale)


def _pixel_classes(array: Array, names: tuple[str, ...], criterion: Criterion | None) -> Labels:
    if array.dtype.kind == "f":
        refuse(_float_problems(array.reshape(-1)))
    ignored = -100 if criterion is None else criterion.ignore_index
    targets = array.astype(np.int64)
    values = np.unique(targets[targets != ignored])
    if not values.size or values[0] < 0 or values[-1] >= MOST_CLASSES:
        shown = f"{values[0]} to {values[-1]}" if values.size else f"only the ignored {ignored}"
        raise InputError.one(
            "the class of a pixel must be an index from 0",
            shown,
            "Number the classes from 0, and pass ignore_index= to the criterion for pixels without "
            "a class.",
        )
    highest = int(values[-1])
    classes = names if highest < len(names) else tuple(map(str, range(highest + 1)))
    objective = Objective(
        SEGMENTATION, natural_scale(SEGMENTATION, criterion), ignore_index=ignored
    )
    share = float(np.mean(targets == ignored))
    notes = (f"{share:.1%} of the pixels are {ignored} and not scored",) if share else ()
    return Labels(targets, classes, True, notes, objective, ignored)


def _regression(array: Array, criterion: Criterion | None) -> Labels:
    if array.dtype.kind == "U":
        such = f" such as {array.ravel()[0]!s}" if array.size else ""
        raise InputError.one(
            "regression targets must be numbers",
            f"{array.dtype}{such}, shape {array.shape}",
            "Use a class criterion such as CrossEntropyLoss, or pass targets=.",
        )
    # A criterion of the user's may leave out what is missing.
    known = array if criterion is not None else np.where(np.isnan(array), 0, array)
    _refuse_not_finite(known, "regression targets must be finite")
    return _as_numbers(array, natural_scale(REGRESSION, criterion))


def _refuse_not_finite(array: Array, rule: str) -> None:
    finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
    if not finite.all():
        at = int(np.flatnonzero(~finite)[0])
        raise InputError.one(
            rule,
            f"{array[at]} at index {at}, {int((~finite).sum())} in all",
            "Remove these samples or fill in their targets.",
        )


def _floats(array: Array) -> Array:
    return np.ascontiguousarray(array, dtype=np.float32)


# Two classes, or several labels of a sample, as 0 and 1 or as -1 and 1


def _two_valued(array: Array, criterion: Criterion, names: tuple[str, ...]) -> Labels:
    """Resolve labels for a criterion that compares outputs with codes of two classes."""
    if array.dtype.kind != "U":
        _refuse_not_finite(array, "labels must not be NaN or infinite")
    values = np.unique(array)
    codes = (-1, 1) if criterion.targets == SIGNS else (0, 1)
    is_codes = array.dtype.kind != "U" and set(values.tolist()) <= set(codes)
    several = array.ndim == 2 and array.shape[1] > 1
    scale = natural_scale(BINARY, criterion)
    shares = array.dtype.kind == "f" and codes == (0, 1) and not is_codes
    if array.ndim in (1, 2) and shares and values[0] >= 0 and values[-1] <= 1:
        # Targets that are probabilities themselves: numbers, of outputs on the same scale.
        return _as_numbers(array, scale)
    # One label that is no code tells not which of the two classes it is.
    is_of_two = is_codes or (len(values) == 2 and (not several or array.dtype.kind == "b"))
    if array.ndim not in (1, 2) or not is_of_two:
        some = ", ".join(map(str, values[:5].tolist())) + (", …" if len(values) > 5 else "")
        what = f"rows of {codes[0]} and {codes[1]}" if several else "two classes"
        raise InputError.one(
            f"{criterion.name} needs labels of {what}, of shape (n,), (n, 1) or (n, n_labels)",
            f"{len(values)} values: {some}, of shape {array.shape}",
            "Pass such targets=; use CrossEntropyLoss for more classes, or a criterion such as "
            "MSELoss for numbers.",
        )
    signs = codes == (-1, 1)
    targets = _floats(array if is_codes else np.where(array == values[-1], codes[1], codes[0]))
    if several:
        return Labels(targets, (), False, (), Objective(MULTILABEL, scale, signs=signs))
    notes = [f"all labels are of one class, {values[0]}"] * (len(values) == 1)
    labels: tuple[Any, ...] = codes if signs else ()
    if not is_codes:
        labels = tuple(
            int(value) if isinstance(value, float) and value.is_integer() else value
            for value in values.tolist()
        )
        notes.append(_numbering(labels, codes))
    elif array.dtype.kind == "b":
        labels = (False, True)
    shown = tuple(map(str, labels or codes))
    classes = names if len(names) == 2 and not labels else shown
    return Labels(targets, classes, False, tuple(notes), Objective(BINARY, scale, labels, signs))


# Class indices


def _class_problems(array: Array, ignored: int) -> Iterator[Problem]:
    if array.ndim != 1:
        yield Problem(
            "class labels must be one index per sample",
            f"shape {array.shape}",
            "Pass targets.argmax(axis=1); or task='custom' and functions that score them, if the "
            "criterion takes them as they are.",
        )
    elif array.dtype.kind == "f":
        yield from _float_problems(array)
    elif array.dtype.kind in "iu":
        for index in dict.fromkeys((-100, ignored)):
            yield from _ignored_problems(array, index, "class labels")


def _ignored_problems(array: Array, ignored: int, what: str) -> Iterator[Problem]:
    at = np.flatnonzero(array == ignored)
    if at.size:
        yield Problem(
            f"{what} must not be those that the criterion ignores",
            f"{ignored} at index {at[0]}, {at.size} in all",
            f"Samples to be ignored ({ignored}) cannot be scored: leave them out with Subset, or "
            "pass another ignore_index where they are a class.",
        )


def _float_problems(array: Array) -> Iterator[Problem]:
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        yield Problem(
            "class labels must not be NaN or infinite",
            f"{array[bad[0]]} at index {bad[0]}, {bad.size} in all",
            "Remove these samples or label them.",
        )
        return
    at = int((array != np.floor(array)).argmax())
    yield Problem(
        "labels for a class criterion must be integers",
        f"{array.dtype}, such as {array[at]} at index {at}",
        "For regression use a criterion such as MSELoss; else cast them: targets.long() for a "
        "tensor, targets.astype('int64') for an array, target_transform=int for a dataset.",
    )


def _classes(
    array: Array, names: tuple[str, ...], notes: list[str], objective: Objective, ignored: int
) -> Labels:
    values = np.unique(array)
    if len(values) == 1:
        notes = [*notes, f"all labels are of one class, {values[0]}"]
    kind, classes = array.dtype.kind, names
    if kind == "b":
        targets = array.astype(np.int64)
        classes = names if len(names) == 2 else ("False", "True")
        objective = replace(objective, labels=(False, True))
        return Labels(targets, classes, True, tuple(notes), objective, ignored)
    if kind in "iu" and values[0] >= 0 and int(values[-1]) < MOST_CLASSES:
        highest = int(values[-1])
        classes = names if highest < len(names) else tuple(map(str, range(highest + 1)))
        return Labels(array.astype(np.int64), classes, True, tuple(notes), objective, ignored)
    labels = values.tolist()
    if kind in "iu":
        refuse(_ignored_problems(np.arange(len(values)), ignored, "numbered labels"))
    objective = replace(objective, labels=tuple(labels))
    targets = np.searchsorted(values, array).astype(np.int64)
    notes = [*notes, _numbering(labels)]
    return Labels(targets, tuple(map(str, labels)), True, tuple(notes), objective, ignored)


def _numbering(labels: Sequence[Any], codes: Sequence[int] | None = None) -> str:
    pairs = list(zip(labels, codes or range(len(labels)), strict=True))
    shown = ", ".join(f"{label} = {code}" for label, code in pairs[:20])
    more = f" and {len(pairs) - 20} more" if len(pairs) > 20 else ""
    return f"labels were numbered by sorted order: {shown}{more}"


# Raw labels of samples that are read again and again


@dataclass(frozen=True, eq=False)
class Encoding:
    """Brings a single raw label into the form of `Labels`."""

    # class index or code by raw label; None: labels are numbers
    indices: Mapping[Hashable, float] | None
    shape: tuple[int, ...]  # of one target
    dtype: str = "float32"
    schema: Schema | None = None  # of targets of several parts

    @classmethod
    def of(cls, values: Any, labels: Labels) -> Encoding:
        """Learn the encoding from raw labels and their targets."""
        shape, dtype = labels.targets.shape[1:], str(labels.targets.dtype)
        if labels.strata is None:
            return cls(None, shape, dtype, labels.objective.targets)
        array = label_array(values).reshape(len(labels.targets))
        targets = labels.targets.reshape(len(array)).tolist()
        indices = dict(zip(array.tolist(), targets, strict=True))
        if labels.classification and all(raw == index for raw, index in indices.items()):
            # Names of classes that no sample had this time.
            indices |= {index: index for index in range(len(labels.classes))}
        return cls(indices, shape, dtype)

    def numbered(self, before: Array, after: Array) -> Encoding:
        """Return this encoding with renumbered classes."""
        if self.indices is None:
            return self
        other = dict(zip(before.tolist(), after.tolist(), strict=True))
        kept = {raw: other[index] for raw, index in self.indices.items() if index in other}
        return replace(self, indices=kept)

    def __call__(self, label: Any, index: int) -> Array:
        """Return the target; raise `InputError` for a class that was not there before."""
        if self.schema is not None:
            return self._row(self.schema, label, index)
        array = label_array([label])[0]
        if self.indices is None:
            return np.asarray(array, self.dtype).reshape(self.shape)
        raw = np.reshape(array, ()).item()
        if raw not in self.indices:
            raise InputError.one(
                f"dataset[{index}] must give a target of one of the {len(self.indices)} classes "
                "that were found when all targets were read",
                repr(raw),
                "Name all classes in the dataset's attribute `classes`.",
            )
        return np.asarray(self.indices[raw], self.dtype).reshape(self.shape)

    def _row(self, schema: Schema, target: Any, index: int) -> Array:
        """Return the row of a target of several parts."""
        try:
            row = schema.row(target)
        except UnfitTree as error:
            received = f"dataset[{index}]: {error.args[0]}"
            raise InputError.one(PARTS_RULE, received, error.args[1]) from error
        if len(row) > self.shape[0]:
            raise InputError.one(
                "a target must not become larger than the largest when all of them were read",
                f"dataset[{index}]: {len(row)} numbers, of {self.shape[0]}",
                "Let no transform add parts, such as boxes.",
            )
        return np.pad(row, (0, self.shape[0] - len(row)))
