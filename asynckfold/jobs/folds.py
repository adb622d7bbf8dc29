"""The folds: made once, shared by every candidate.

Any scikit-learn splitter, an integer, or a list of (train, valid) index pairs becomes a tuple of
`Fold`. An integer means seeded, shuffled folds: stratified by class for integer targets, and never
dividing a group when ``groups`` are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import InputError, Problem, refuse

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Fold:
    """One division of the samples.

    Parameters
    ----------
    repeat, index : int
        Which repetition of the cross-validation, and which fold of it; both from 0.
    train, valid : ndarray of int64, shapes (n_train,) and (n_valid,)
        Sample numbers; disjoint.
    inner_valid : ndarray of int64, shape (n_inner,)
        The part of `train` that is set aside to watch the training; empty by default.
    inner : int or None
        Which inner fold of that fold, from 0; None for a fold of the cross-validation itself.
    """

    repeat: int
    index: int
    train: Indices
    valid: Indices
    inner_valid: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    inner: int | None = field(default=None, kw_only=True)

    @property
    def key(self) -> tuple[int, ...]:
        """``(repeat, index)``, and the number of an inner fold."""
        inner = () if self.inner is None else (self.inner,)
        return (self.repeat, self.index, *inner)

    @property
    def fitted(self) -> Indices:
        """The samples of `train` that are not set aside, in their order."""
        if not self.inner_valid.size:
            return self.train
        return self.train[~np.isin(self.train, self.inner_valid)]


def outer_folds(folds: Sequence[Fold]) -> tuple[Fold, ...]:
    """Return the folds of the cross-validation itself."""
    return tuple(fold for fold in folds if fold.inner is None)


def inner_folds(
    folds: Sequence[Fold],
    count: int,
    targets: npt.NDArray[Any],
    *,
    stratify: bool = True,
    groups: Any = None,
    random_state: int = 0,
    classes: Sequence[str] = (),
) -> tuple[Fold, ...]:
    """Divide the training part of each fold, for nested cross-validation.

    As `make_folds` divides all samples by a number of folds; where the folds are ordered, as by
    ``TimeSeriesSplit``, each inner fold trains on what precedes it.

    Raises
    ------
    InputError
        A training part cannot be divided so.

    Examples
    --------
    >>> targets = np.arange(12) % 2
    >>> inner = inner_folds(make_folds(12, targets, 2), 3, targets)
    >>> [(fold.key, len(fold.train), len(fold.valid)) for fold in inner[:2]]
    [((0, 0, 0), 4, 2), ((0, 0, 1), 4, 2)]
    """
    from sklearn.model_selection import TimeSeriesSplit

    made: list[Fold] = []
    cv: Any = TimeSeriesSplit(count) if is_ordered(folds) else count
    for fold in folds:
        rows = np.sort(fold.train)
        seed = np.random.SeedSequence([random_state, *fold.key, 0, 0, 1]).generate_state(1)[0]
        try:
            parts = make_folds(
                len(rows),
                targets[rows],
                cv,
                stratify=stratify,
                groups=None if groups is None else np.asarray(groups)[rows],
                random_state=int(seed),
                classes=classes,
            )
        except InputError as error:
            refuse(
                replace(
                    problem, rule=f"nested, the training part of {fold_name(*fold.key)}: {rule}"
                )
                for problem in error.problems
                for rule in [problem.rule]
            )
            raise
        made += [
            Fold(fold.repeat, fold.index, rows[part.train], rows[part.valid], inner=part.index)
            for part in parts
        ]
    return tuple(made)


def watched_part(fold: Fold, folds: Sequence[Fold], share: float, seed: int) -> Indices:
    """Return what a job sets aside for an LR schedule that reacts to a loss: drawn, or the last."""
    train, count = fold.train, _count_of(len(fold.train), share)
    if is_ordered(folds):
        return np.sort(train)[len(train) - count :]
    order = np.random.default_rng([seed, 1]).permutation(len(train))
    part: Indices = train[np.sort(order[:count])]
    return part


def is_ordered(folds: Sequence[Fold]) -> bool:
    """Whether folds move on, each training on samples before those that it holds out, as in time.

    One training part does not tell: it also comes first where a test set was appended to it.

    >>> past = [(np.arange(count), np.arange(count, count + 2)) for count in (4, 6)]
    >>> folds = make_folds(8, np.zeros(8), past)
    >>> is_ordered(folds), is_ordered(folds[:1])
    (True, False)
    """
    ends = {int(fold.train.max()) for fold in folds}
    return len(ends) > 1 and all(fold.train.max() < fold.valid.min() for fold in folds)


def _count_of(count: int, share: float) -> int:
    """Return how many of `count` are a share: at least one, and not all."""
    return min(max(1, round(count * share)), count - 1)


def _last_part(rows: Indices, share: float, groups: npt.NDArray[Any] | None) -> Indices:
    """Return the last samples, or those of the groups that end last."""
    units = np.arange(len(rows)) if groups is None else np.unique(groups, return_inverse=True)[1]
    ends = np.zeros(units.max() + 1, np.int64)
    np.maximum.at(ends, units, rows)
    last = np.argsort(ends)[-_count_of(len(ends), share) :]
    part: Indices = rows[np.isin(units, last)]
    return part


def make_folds(
    n_samples: int,
    targets: npt.NDArray[Any],
    cv: Any = 5,
    *,
    stratify: bool = True,
    n_repeats: int = 1,
    groups: Any = None,
    random_state: int = 0,
    classes: Sequence[str] = (),
) -> tuple[Fold, ...]:
    """Divide the samples, once, for the whole sweep.

    `targets` are class indices, rows of 0 and 1 for several labels, or numbers; `cv` is a number of
    folds, a scikit-learn splitter, an OpenML task, pairs of index arrays, or dicts of them. Only
    for a number, folds keep the proportions of classes, or of labels where there are no `groups`,
    and are repeated with another shuffle. Samples of one group are never on both sides. `classes`
    are names for messages.

    Raises
    ------
    InputError
        Too few samples, a class smaller than the number of folds, indices that overlap or do not
        exist.

    Examples
    --------
    >>> folds = make_folds(6, np.array([0, 0, 0, 1, 1, 1]), 3)
    >>> [len(fold.valid) for fold in folds]
    [2, 2, 2]
    """
    group_array = None if groups is None else group_labels(groups, n_samples)
    if isinstance(cv, (int, np.integer)) and not isinstance(cv, bool):
        if stratify and targets.ndim == 1:
            refuse(_class_problems(targets, int(cv), classes))
        kind = targets.ndim if stratify else 0
        more = (np.random.SeedSequence([random_state, repeat]) for repeat in range(1, n_repeats))
        seeds = [random_state, *(int(seed.generate_state(1)[0]) for seed in more)][:n_repeats]
        made = (_splitter(int(cv), kind, group_array is not None, seed) for seed in seeds)
        pairs = _pairs_of(made, n_samples, targets, group_array)
    elif n_repeats != 1:
        raise InputError.one(
            "n_repeats applies to a number of folds only",
            f"n_repeats={n_repeats} with cv={cv!r}"[:80],
            "Use scikit-learn's RepeatedStratifiedKFold as cv, or leave n_repeats out.",
        )
    elif hasattr(cv, "get_train_test_split_indices"):
        pairs = _pairs_of_task(cv)
    elif hasattr(cv, "split") and not isinstance(cv, (str, bytes)):
        pairs = _pairs_of([cv], n_samples, targets, group_array)
    elif are_dicts(cv):
        pairs = _pairs_of_dicts(cv)
    else:
        listed = list(cv) if isinstance(cv, Iterable) and not isinstance(cv, (str, bytes)) else []
        if not listed or any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in listed):
            raise InputError.one(
                "cv must be a number of folds, a scikit-learn splitter, or a list of (train, "
                "valid) index pairs",
                repr(cv)[:80],
                "Pass cv=5, cv=GroupKFold(5), or cv=[(train, valid), ...].",
            )
        pairs = [(0, index, *pair) for index, pair in enumerate(listed)]
    refuse(
        problem
        for repeat, index, *sides in pairs
        for side, array in zip(("train", "valid", "inner_valid"), sides, strict=False)
        for problem in _side_problems(f"{fold_name(repeat, index)}: {side}", array, n_samples)
    )
    folds = tuple(
        Fold(repeat, index, *(_indices(np.asarray(side)) for side in sides))
        for repeat, index, *sides in pairs
    )
    refuse(problem for fold in folds for problem in _leaks(fold, group_array))
    return folds


def are_dicts(cv: Any) -> bool:
    """Whether folds are listed as dicts."""
    return isinstance(cv, (list, tuple)) and {type(item) for item in cv} == {dict}


def _pairs_of_dicts(listed: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Return repeat, index, train, valid, and what is set aside, of folds listed as dicts."""
    names = ("valid", "val", "validation", "test")
    indices, pairs = Counter[int](), list[tuple[Any, ...]]()
    for number, item in enumerate(listed):
        held_out = [name for name in names if name in item]
        repeat = item.get("repeat", 0)
        if "train" not in item or len(held_out) != 1 or type(repeat) is not int or repeat < 0:
            raise InputError.one(
                f"a fold must have train and one of {', '.join(names)}, and may have "
                "inner_valid, and repeat, a whole number",
                f"fold {number} with {', '.join(map(str, item)) or 'nothing'}",
                'Write {"train": [0, 1], "valid": [2]} for each fold.',
            )
        aside = (item["inner_valid"],) if "inner_valid" in item else ()
        pairs.append((repeat, indices[repeat], item["train"], item[held_out[0]], *aside))
        indices[repeat] += 1
    return pairs


def _pairs_of_task(task: Any) -> list[tuple[Any, ...]]:
    """Return repeat, index, train and valid of the folds of an OpenML task."""
    repeats, count, sizes = task.get_split_dimensions()
    if sizes != 1:
        rule = "a task must have one training set for each fold"
        raise InputError.one(rule, str(sizes), "Pass the index pairs of one size.")
    return [
        (repeat, index, *task.get_train_test_split_indices(fold=index, repeat=repeat))
        for repeat in range(repeats)
        for index in range(count)
    ]


def group_labels(groups: Any, n_samples: int) -> npt.NDArray[Any]:
    """Return the group of each sample; refuse another number of them, and missing ones."""
    labels = np.asarray(groups)
    if labels.shape != (n_samples,):
        rule = f"groups must hold one label for each of the {n_samples} samples"
        received = f"an array of shape {labels.shape}"
        raise InputError.one(rule, received, "Pass an array of that length.")
    # NaN alone differs from itself; pandas compares its NA to nothing.
    missing = [
        at
        for at, label in enumerate(labels.tolist())
        if label is None or type(label).__name__ == "NAType" or label != label
    ]
    if missing:
        raise InputError.one(
            "groups must name the group of each sample",
            f"{len(missing)} missing, the first of sample {missing[0]}",
            "Give each sample that is alone a group of its own.",
        )
    return labels


def _pairs_of(
    splitters: Iterable[Any],
    n_samples: int,
    targets: npt.NDArray[Any],
    groups: npt.NDArray[Any] | None,
) -> list[tuple[Any, ...]]:
    """Return repeat, index, train and valid of what splitters make."""
    rows = np.zeros((n_samples, 1))
    try:
        return [
            (repeat, index, train, valid)
            for repeat, splitter in enumerate(splitters)
            for index, (train, valid) in enumerate(splitter.split(rows, targets, groups))
        ]
    except ValueError as error:
        raise InputError.one(
            "cv must be able to divide the samples", str(error).rstrip("."), "Use fewer folds."
        ) from error


def with_inner_valid(
    folds: Sequence[Fold],
    share: float,
    strata: npt.NDArray[Any] | None,
    groups: Any = None,
    random_state: int = 0,
) -> tuple[Fold, ...]:
    """Set a part of each training fold aside, the same one for all candidates.

    Where the folds are ordered, as by ``TimeSeriesSplit``, the last part is set aside. No group is
    divided; `strata` are then kept as well as whole groups allow.

    Raises
    ------
    InputError
        A training fold is too small to be divided so.

    Examples
    --------
    >>> folds = make_folds(12, np.arange(12) % 2, 2)
    >>> [len(fold.inner_valid) for fold in with_inner_valid(folds, 0.34, np.arange(12) % 2)]
    [3, 3]
    """
    group_array = None if groups is None else np.asarray(groups)
    ordered = is_ordered(folds)
    return tuple(
        _divided(fold, share, strata, group_array, random_state, ordered) for fold in folds
    )


def _divided(
    fold: Fold,
    share: float,
    strata: npt.NDArray[Any] | None,
    groups: npt.NDArray[Any] | None,
    random_state: int,
    ordered: bool,
) -> Fold:
    seed = int(np.random.SeedSequence([random_state, *fold.key, 1]).generate_state(1)[0])
    rows = fold.train
    labels, members = (None if array is None else array[rows] for array in (strata, groups))
    try:
        if ordered:
            inner = _last_part(rows, share, members)
        else:
            inner = rows[_inner_part(len(rows), share, labels, members, seed)]
        if not 0 < len(inner) < len(rows):
            raise ValueError("it cannot be divided")
    except ValueError as error:
        raise InputError.one(
            f"inner_valid={share:g} must leave samples of each class on both sides",
            f"{fold_name(*fold.key)}, {len(rows)} samples: {error}".rstrip("."),
            "Pass a larger or smaller part, fewer folds, or stratify=False.",
        ) from error
    return replace(fold, inner_valid=np.sort(inner))


def _inner_part(
    count: int,
    share: float,
    strata: npt.NDArray[Any] | None,
    groups: npt.NDArray[Any] | None,
    seed: int,
) -> Indices:
    """Return positions of what is set aside; a `ValueError` if that is impossible."""
    from sklearn import model_selection

    rows = np.zeros((count, 1))
    if strata is not None and strata.ndim == 2:
        if groups is None:
            from iterstrat.ml_stratifiers import MultilabelStratifiedShuffleSplit

            by_labels = MultilabelStratifiedShuffleSplit(1, test_size=share, random_state=seed)
            _, inner = next(iter(by_labels.split(rows, strata)))
            return _indices(inner)
        strata = None
    if groups is not None and strata is not None:
        parts = max(2, round(1 / share)) if share <= 0.5 else max(2, round(1 / (1 - share)))
        splitter = model_selection.StratifiedGroupKFold(parts, shuffle=True, random_state=seed)
        rest, inner = next(iter(splitter.split(rows, strata, groups)))
        return _indices(inner if share <= 0.5 else rest)
    kind = (
        model_selection.GroupShuffleSplit
        if groups is not None
        else model_selection.ShuffleSplit
        if strata is None
        else model_selection.StratifiedShuffleSplit
    )
    _, inner = next(iter(kind(1, test_size=share, random_state=seed).split(rows, strata, groups)))
    return _indices(inner)


def fold_name(repeat: int, index: int, inner: int | None = None) -> str:
    """Return ``"fold 0"``, ``"fold 0 of repeat 1"``, ``"inner fold 2 of fold 0"``."""
    part = "" if inner is None else f"inner fold {inner} of "
    return f"{part}fold {index}" + (f" of repeat {repeat}" if repeat else "")


def shares_of_folds(rows: Mapping[tuple[int, ...], Sequence[int]], folds: Sequence[Fold]) -> str:
    """Return ``"2 of 3 in fold 1"`` for some held-out samples, by key of their fold."""
    sizes, more = {fold.key: len(fold.valid) for fold in folds}, len(rows) - 5
    each = (f"{len(some)} of {sizes[key]} in {fold_name(*key)}" for key, some in rows.items())
    return ", ".join(islice(each, 5)) + f" and more in {more} other folds" * (more > 0)


def _indices(array: npt.NDArray[Any]) -> Indices:
    if array.dtype == bool:
        array = np.flatnonzero(array)
    # pandas gives arrays that may not be written.
    return np.require(array, np.int64, ["C", "W"])


def _class_problems(
    targets: npt.NDArray[Any], n_splits: int, names: Sequence[str]
) -> Iterator[Problem]:
    classes, counts = np.unique(targets, return_counts=True)
    rare = [
        f"class {names[label] if names else label} has {count}"
        for label, count in zip(classes.tolist(), counts.tolist(), strict=True)
        if count < n_splits
    ]
    if rare:
        most = int(counts.min())
        fewer = f"Use at most {most} folds, " if most > 1 else "Collect more samples of them, "
        yield Problem(
            f"each class must have at least {n_splits} members, one for each fold",
            ", ".join(rare[:5]) + (f" and {len(rare) - 5} more" if len(rare) > 5 else ""),
            f"{fewer}merge or drop rare classes, or pass stratify=False.",
        )


def _splitter(n_splits: int, stratified: int, grouped: bool, seed: int) -> Any:
    """Return a splitter that stratifies by nothing (0), by classes (1), or by rows of labels (2).

    Rows of labels: Sechidis, Tsoumakas, Vlahavas, On the Stratification of Multi-Label Data, ECML
    PKDD 2011.
    """
    from sklearn import model_selection

    if stratified == 2 and not grouped:
        from iterstrat.ml_stratifiers import MultilabelStratifiedKFold

        return MultilabelStratifiedKFold(n_splits, shuffle=True, random_state=seed)
    if grouped and stratified == 1:
        return model_selection.StratifiedGroupKFold(n_splits, shuffle=True, random_state=seed)
    if grouped:
        return model_selection.GroupKFold(n_splits, shuffle=True, random_state=seed)
    if stratified:
        return model_selection.StratifiedKFold(n_splits, shuffle=True, random_state=seed)
    return model_selection.KFold(n_splits, shuffle=True, random_state=seed)


def _side_problems(name: str, side: Any, n_samples: int) -> Iterator[Problem]:
    """Yield why an array names no samples; a cast would truncate fractions."""
    array = np.asarray(side)
    received = f"{array.dtype} of shape {array.shape}"
    if array.dtype == bool:
        is_right = array.shape == (n_samples,) and bool(array.any())
    else:
        is_right = array.ndim == 1 and array.dtype.kind in "iu" and array.size > 0
        values, counts = np.unique(array if is_right else [], return_counts=True)
        wrong = values[(counts > 1) | (values < 0) | (values >= n_samples)]
        if wrong.size:
            received = f"{wrong[:5].tolist()}, which are twice there or no samples"
        is_right = is_right and not wrong.size
    if not is_right:
        yield Problem(
            f"{name} must hold positions from 0 to {n_samples - 1}, each at most once, or be a "
            "mask of all samples",
            received,
            "Pass such an array.",
        )


def _leaks(fold: Fold, groups: npt.NDArray[Any] | None) -> Iterator[Problem]:
    name, common = fold_name(*fold.key), np.intersect1d(fold.train, fold.valid)
    if common.size:
        yield Problem(
            f"{name}: train and valid must not share samples",
            f"{common.size} in both, such as {common[:5].tolist()}",
            "Hold each sample out of training where it is scored.",
        )
    elif not np.isin(fold.inner_valid, fold.train).all() or not fold.fitted.size:
        rule = f"{name}: inner_valid must be a part of train"
        received = f"{len(fold.inner_valid)} samples of {len(fold.train)}"
        yield Problem(rule, received, "Name samples of train, and leave some to train on.")
    elif groups is not None:
        shared = np.intersect1d(groups[fold.train], groups[fold.valid])
        if shared.size:
            yield Problem(
                f"{name}: a group must not be on both sides",
                f"{shared.size} groups in both, such as {shared[:5].tolist()}",
                "Use a splitter that respects groups, such as GroupKFold.",
            )
