"""The grid of the differential tests, and the same computation by scikit-learn and a plain loop.

A cell says what a user brings: task, criterion, how classes are coded, splitter, preprocessing,
transform, type of the features, fusion. `expected` computes its scores with scikit-learn's
``cross_validate`` over an estimator that trains a linear model in an ordinary loop: nothing of it
comes from asynckfold. Weights begin at zero and a batch holds the whole fold, so that neither seeds
nor the order of samples matter, and both sides must agree to rounding.
"""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, TransformerMixin
from sklearn.decomposition import PCA
from sklearn.feature_selection import SelectKBest, f_classif, f_regression
from sklearn.metrics import get_scorer
from sklearn.model_selection import (
    GroupKFold,
    KFold,
    RepeatedKFold,
    ShuffleSplit,
    StratifiedKFold,
    TimeSeriesSplit,
    cross_validate,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler
from torch import nn

SAMPLES, FEATURES, EPOCHS = 96, 6, 12


@dataclass(frozen=True)
class Cell:
    """What a user brings, by name; see `FACTORS`."""

    task: str
    criterion: str
    coding: str
    splitter: str
    preprocess: str
    transform: str
    features: str
    fuse: str

    def __str__(self) -> str:
        return "-".join(getattr(self, field.name) for field in fields(self))


CLASSES = ("accuracy", "balanced_accuracy", "f1_macro", "f1_weighted", "precision_micro")
MANY = (*CLASSES, "recall_macro", "neg_log_loss", "roc_auc_ovr", "roc_auc_ovo_weighted")
TWO = (*CLASSES, "f1", "precision", "recall", "jaccard", "roc_auc", "average_precision")
TWO = (*TWO, "neg_log_loss", "neg_brier_score", "matthews_corrcoef")
SETS = ("accuracy", "f1_micro", "f1_macro", "f1_samples", "roc_auc", "average_precision")
NUMBERS = ("r2", "neg_mean_squared_error", "neg_mean_absolute_error", "explained_variance")
NUMBERS = (*NUMBERS, "neg_root_mean_squared_error")
ONE_NUMBER = (*NUMBERS, "neg_max_error", "neg_median_absolute_error")

LABELS_ONLY = (*CLASSES, "recall_macro")
"""Scores of predicted labels: all that outputs of `MultiMarginLoss` give."""

SCORERS: Mapping[str, tuple[str, ...]] = {
    "many": MANY,
    "two": TWO,
    "one": TWO,
    "sets": SETS,
    "number": ONE_NUMBER,
    "numbers": NUMBERS,
    "counts": (*ONE_NUMBER, "neg_mean_poisson_deviance"),
}
CRITERIA: Mapping[str, tuple[str, ...]] = {
    "many": ("ce", "nll", "smooth", "margins"),
    "two": ("ce", "nll", "weighted"),
    "one": ("bce", "bce-probabilities"),
    "sets": ("bce", "bce-probabilities", "multilabel"),
    "number": ("mse", "huber"),
    "numbers": ("mse", "smooth-l1"),
    "counts": ("poisson", "poisson-rates"),
}
CODINGS: Mapping[str, tuple[str, ...]] = {
    "many": ("plain", "gap", "words", "from-one", "negative"),
    "two": ("plain", "words", "from-one", "booleans", "signs"),
    "one": ("plain", "words", "from-one", "booleans", "floats"),
    "sets": ("plain", "floats"),
    "number": ("plain",),
    "numbers": ("plain",),
    "counts": ("plain", "floats"),
}
FACTORS: Mapping[str, tuple[str, ...]] = {
    "splitter": ("stratified", "plain", "repeated", "shuffled", "groups", "time", "pairs"),
    "preprocess": ("none", "standard", "minmax", "pca", "best", "pipeline"),
    "transform": ("none", "dataset", "views"),
    "features": ("float32", "float64", "far", "int64"),
    "fuse": ("apart", "fused"),
}


def _possible(cell: Cell) -> bool:
    """Leave out what no user would expect to work."""
    # Far from zero, float32 has no digits left: only preprocessing in float64 makes it usable.
    far = cell.features == "far" and (cell.preprocess == "none" or cell.transform != "none")
    # scikit-learn's own: it selects features and stratifies by one column of targets only.
    rows = cell.task in ("sets", "numbers") and cell.preprocess == "best"
    unstratified = cell.splitter == "stratified" and cell.task not in ("many", "two", "one")
    # Whole numbers stay whole, as embeddings want them: torch refuses them in a linear layer.
    whole = cell.features == "int64" and cell.preprocess == cell.transform == "none"
    return not (far or rows or unstratified or whole)


def cells() -> tuple[Cell, ...]:
    """Return cells in which any two values of any two factors meet, of those that can."""
    drawn = random.Random(0)
    everything: list[Cell] = []
    for task, criteria in CRITERIA.items():
        for values in itertools.product(criteria, CODINGS[task], *FACTORS.values()):
            cell = Cell(task, *values)
            if _possible(cell):
                everything.append(cell)
    drawn.shuffle(everything)
    pairs = _pairs(everything)
    missing = np.zeros(pairs.max() + 1, dtype=bool)
    missing[pairs] = True
    left, found = np.arange(len(everything)), list[Cell]()
    while missing.any():
        some = np.array(drawn.sample(range(len(left)), min(400, len(left))))
        best = left[some[missing[pairs[left[some]]].sum(1).argmax()]]
        if missing[pairs[best]].any():
            missing[pairs[best]] = False
            found.append(everything[best])
        else:
            left = left[missing[pairs[left]].any(1)]
    return tuple(found)


def _pairs(cells: Sequence[Cell]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Number the pairs of values that meet in each cell; a criterion belongs to its task."""
    named = [
        [cell.task, f"{cell.task} {cell.criterion}", f"{cell.task} {cell.coding}"]
        + [getattr(cell, name) for name in FACTORS]
        for cell in cells
    ]
    values = [np.unique(column, return_inverse=True)[1] for column in zip(*named, strict=True)]
    columns, first = list[Any](), 0
    for one, other in itertools.combinations(values, 2):
        columns.append(first + one * (other.max() + 1) + other)
        first = columns[-1].max() + 1
    return np.stack(columns, 1)


# What a user writes


class Head(nn.Module):
    """A linear model that begins at zero, with what its criterion wants at its end."""

    def __init__(self, inputs: int, outputs: int, end: str) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.end = end

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.linear(inputs.flatten(1))
        if self.end == "log_softmax":
            return torch.log_softmax(found, 1)
        if self.end == "sigmoid":
            return torch.sigmoid(found)
        if self.end == "softplus":
            return nn.functional.softplus(found)
        return found


class Squeezed(Head):
    """The same with outputs of shape (n,)."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).squeeze(1)


CRITERION: Mapping[str, Callable[[], nn.Module]] = {
    "ce": nn.CrossEntropyLoss,
    "nll": nn.NLLLoss,
    "smooth": functools.partial(nn.CrossEntropyLoss, label_smoothing=0.1),
    "margins": nn.MultiMarginLoss,
    "weighted": lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])),
    "bce": nn.BCEWithLogitsLoss,
    "bce-probabilities": nn.BCELoss,
    "multilabel": nn.MultiLabelSoftMarginLoss,
    "mse": nn.MSELoss,
    "huber": nn.HuberLoss,
    "smooth-l1": nn.SmoothL1Loss,
    "poisson": nn.PoissonNLLLoss,
    "poisson-rates": functools.partial(nn.PoissonNLLLoss, log_input=False),
}
END = {"nll": "log_softmax", "bce-probabilities": "sigmoid", "poisson-rates": "softplus"}


@dataclass(frozen=True, eq=False)
class Brought:
    """The live objects of a cell."""

    X: Any
    y: Any
    groups: Any
    splitter: Any
    preprocess: Any
    transform: Callable[[Any], Any] | None
    model: Callable[[], nn.Module]
    criterion: nn.Module
    scorers: tuple[str, ...]


def affine(sample: Any) -> Any:
    """A transform by sample, without chance: any array or tensor in, float32 out."""
    return torch.as_tensor(sample).to(torch.float32) * 0.5 + 0.25


def brought(cell: Cell) -> Brought:
    """Return what the user of a cell would bring."""
    drawn = np.random.default_rng(7)
    X = drawn.normal(size=(SAMPLES, FEATURES))
    signal = X @ drawn.normal(size=(FEATURES, 4)) + 0.7 * drawn.normal(size=(SAMPLES, 4))
    if cell.features == "int64":
        X = np.round(X * 2).astype(np.int64)
    elif cell.features == "far":
        X = X + 1e9
    else:
        X = X.astype(cell.features)
    width = {"pca": 3, "best": 4}.get(cell.preprocess, FEATURES)
    y, outputs = _targets(cell, signal)
    regression = cell.task in ("number", "numbers", "counts")
    kind = Squeezed if y.ndim == 1 and (regression or cell.task == "one") else Head
    groups = np.arange(SAMPLES) % 8 if cell.splitter == "groups" else None
    return Brought(
        X,
        y,
        groups,
        _splitter(cell.splitter),
        _preprocess(cell.preprocess, regression),
        None if cell.transform == "none" else affine,
        functools.partial(kind, width, outputs, END.get(cell.criterion, "")),
        CRITERION[cell.criterion](),
        scorers_of(cell),
    )


def scorers_of(cell: Cell) -> tuple[str, ...]:
    """Return the names of the scores that are asked for in a cell.

    Where an output has a class that no sample has, probabilities are not those that
    scikit-learn's areas need, and are refused.
    """
    of_labels = cell.criterion == "margins" or cell.coding == "gap"
    return LABELS_ONLY if of_labels else SCORERS[cell.task]


def _targets(cell: Cell, signal: Any) -> tuple[Any, int]:
    if cell.task == "many":
        codes = {
            "plain": np.arange(3),
            "gap": np.array([0, 1, 3]),
            "words": np.array(["cat", "dog", "ape"]),
            "from-one": np.arange(1, 4),
            "negative": np.array([-1, 0, 1]),
        }[cell.coding]
        return codes[signal[:, :3].argmax(1)], 4 if cell.coding == "gap" else 3
    if cell.task in ("two", "one"):
        codes = {
            "plain": np.arange(2),
            "words": np.array(["no", "yes"]),
            "from-one": np.array([1, 2]),
            "booleans": np.array([False, True]),
            "signs": np.array([-1, 1]),
            "floats": np.array([0.0, 1.0], np.float32),
        }[cell.coding]
        return codes[(signal[:, 0] > 0.3).astype(int)], 2 if cell.task == "two" else 1
    if cell.task == "sets":
        rows = (signal[:, :3] > 0.2).astype(np.int64)
        return rows.astype(np.float32) if cell.coding == "floats" else rows, 3
    if cell.task == "counts":
        counts = np.random.default_rng(3).poisson(np.exp(0.4 * signal[:, 0].clip(-2, 2)))
        return counts.astype(np.float32) if cell.coding == "floats" else counts, 1
    if cell.task == "numbers":
        return signal[:, :2].astype(np.float32), 2
    return signal[:, 0].astype(np.float32), 1


def _splitter(name: str) -> Any:
    if name == "pairs":
        return [(np.arange(30, SAMPLES), np.arange(30)), (np.arange(60), np.arange(60, SAMPLES))]
    return {
        "stratified": StratifiedKFold(3, shuffle=True, random_state=1),
        "plain": KFold(3),
        "repeated": RepeatedKFold(n_splits=2, n_repeats=2, random_state=2),
        "shuffled": ShuffleSplit(2, test_size=0.3, random_state=3),
        "groups": GroupKFold(3),
        "time": TimeSeriesSplit(2, test_size=24),
    }[name]


def _preprocess(name: str, regression: bool) -> Any:
    return {
        "none": None,
        "standard": StandardScaler(),
        "minmax": MinMaxScaler(),
        "pca": make_pipeline(StandardScaler(), PCA(3, svd_solver="full")),
        "best": make_pipeline(
            StandardScaler(), SelectKBest(f_regression if regression else f_classif, k=4)
        ),
        "pipeline": make_pipeline(RobustScaler(), MinMaxScaler((-1, 1))),
    }[name]


# The same by scikit-learn and an ordinary loop


class _Cast(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    def fit(self, X: Any, y: Any = None) -> _Cast:
        return self

    def transform(self, X: Any) -> Any:
        return np.asarray(X, np.float32)


class _Loop(BaseEstimator):  # type: ignore[misc]
    """A model, trained in an ordinary loop over one batch."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def fit(self, X: Any, y: Any) -> _Loop:
        given = brought(self.cell)
        self.model_ = given.model()
        targets = self._coded(y)
        optimizer = make_optimizer(self.model_)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            given.criterion(self.model_(torch.as_tensor(X)), targets).backward()
            optimizer.step()
        return self

    def _coded(self, y: Any) -> torch.Tensor:
        return torch.as_tensor(np.asarray(y, np.float32))

    def _outputs(self, X: Any) -> Any:
        with torch.no_grad():
            return self.model_(torch.as_tensor(X)).numpy().astype(np.float64)


class _Classifier(ClassifierMixin, _Loop):  # type: ignore[misc]
    """What outputs mean is written out for each criterion, as a user would have to."""

    def _coded(self, y: Any) -> torch.Tensor:
        cell = self.cell
        if cell.task == "sets":
            self.classes_ = [np.array([0, 1])] * y.shape[1]
            return torch.as_tensor(np.asarray(y, np.float32))
        every = np.unique(brought(cell).y)
        # A gap in the middle: the model has an output for the class that no sample has.
        self.all_ = np.arange(4) if cell.coding == "gap" else every
        self.classes_ = every
        codes = np.searchsorted(self.all_, y)
        return torch.as_tensor(codes, dtype=torch.float32 if cell.task == "one" else torch.long)

    def predict_proba(self, X: Any) -> Any:
        found, cell = self._outputs(X), self.cell
        if cell.task in ("one", "sets"):
            if cell.criterion != "bce-probabilities":
                found = 1 / (1 + np.exp(-found))
            if cell.task == "sets":
                return [np.stack([1 - column, column], 1) for column in found.T]
            return np.stack([1 - found, found], 1)
        found = np.exp(found - found.max(1, keepdims=True))
        found /= found.sum(1, keepdims=True)
        kept = np.searchsorted(self.all_, self.classes_)
        return found[:, kept] / found[:, kept].sum(1, keepdims=True)

    def predict(self, X: Any) -> Any:
        if self.cell.task == "sets":
            found = [column[:, 1] > 0.5 for column in self.predict_proba(X)]
            return np.stack(found, 1).astype(int)
        if self.cell.task == "one":
            return self.classes_[(self.predict_proba(X)[:, 1] > 0.5).astype(int)]
        return self.all_[self._outputs(X).argmax(1)]


class _Regressor(RegressorMixin, _Loop):  # type: ignore[misc]
    def predict(self, X: Any) -> Any:
        found = self._outputs(X)
        return np.exp(found) if self.cell.criterion == "poisson" else found


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer function of the grid: steps in proportion to gradients keep rounding small."""
    return torch.optim.SGD(model.parameters(), 0.1)


def expected(cell: Cell) -> dict[str, Any]:
    """Return the scores of a cell by scikit-learn: name → one number for each fold.

    Scores that scikit-learn refuses to compute for a cell are left out. Each score is computed by
    itself: of several at once, scikit-learn 1.9 takes the probabilities of another score's positive
    class, where the two differ.
    """
    given = brought(cell)
    X = given.X
    if given.transform is not None:
        X = np.stack([given.transform(row).numpy() for row in X])
    regression = cell.task in ("number", "numbers", "counts")
    loop = _Regressor(cell) if regression else _Classifier(cell)
    steps = [step for step in (given.preprocess, _Cast(), loop) if step is not None]
    splits = given.splitter
    if not isinstance(splits, list):
        splits = list(splits.split(X, given.y, given.groups))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = cross_validate(make_pipeline(*steps), X, given.y, cv=splits, return_estimator=True)
        scores = {
            name: np.array(
                [
                    _score(name, model, X[valid], given.y[valid])
                    for model, (_, valid) in zip(fitted["estimator"], splits, strict=True)
                ]
            )
            for name in given.scorers
        }
    return {name: values for name, values in scores.items() if np.isfinite(values).all()}


def _score(name: str, model: Any, X: Any, y: Any) -> float:
    try:
        return float(get_scorer(name)(model, X, y))
    except ValueError:
        return float("nan")
