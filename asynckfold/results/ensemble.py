"""`FoldEnsemble` and `Blend`: the models of all folds of candidates as one predictor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.errors import Problem, refuse
from asynckfold.jobs.criteria import MARGINS, TRANSFORMED, UNKNOWN
from asynckfold.jobs.objective import (
    MASKS,
    MULTILABEL,
    REGRESSION,
    Objective,
    Transform,
    predicted,
    probabilities,
)
from asynckfold.results.out_of_fold import of_one_width, ragged_problems

Outputs = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class FoldEnsemble:
    """The models of one candidate's folds, whose mean is the prediction.

    Each sample of the run's dataset was in the training part of all but a few of these models,
    so scores on it say nothing about new samples. The candidate's out-of-fold score does, for its
    single models.

    Inputs are samples as the run's dataset holds them. They pass the run's eval transform and, for
    each model, the `preprocess` that is refitted on the samples that it was trained on; outputs
    are computed on the CPU in the run's precision. Before the first prediction, each model must
    reproduce the outputs that the run recorded for some held-out samples.

    Attributes
    ----------
    candidate : str
        ``"LeNet5/cosine"``.
    classes : tuple of str
        Class names by index; empty for regression.
    size : int
        Number of models.
    objective : Objective
        What outputs mean.
    classes_ : ndarray or None
        Labels by column of `predict_proba`, as in ``results.classes_``.

    Examples
    --------
    >>> import tempfile, torch
    >>> from sklearn.datasets import load_digits
    >>> from asynckfold import AsyncKFold
    >>> X, y = load_digits(return_X_y=True)
    >>> kfold = AsyncKFold(3, (X[:300], y[:300]), tempfile.mkdtemp(), torch.nn.CrossEntropyLoss(),
    ...                    32, parallelize=False, verbose=0, baseline=None)
    >>> results = kfold({"linear": lambda: torch.nn.Linear(64, 10)}, ["cosine"],
    ...                 lambda model: torch.optim.Adam(model.parameters(), 1e-2), {"epochs": 5})
    >>> ensemble = results.ensemble()
    >>> ensemble
    FoldEnsemble(candidate='linear/cosine', size=3)
    >>> ensemble.predict_proba(X[300:]).shape
    (1497, 10)
    >>> bool((ensemble.predict(X[300:]) == y[300:]).mean() > 0.7)
    True
    """

    candidate: str
    classes: tuple[str, ...] = field(repr=False)
    size: int
    objective: Objective = field(repr=False)
    _outputs: Any = field(repr=False)  # runs the models, see `api.fold_models`
    _transform: Transform | None = field(default=None, repr=False)
    classes_: npt.NDArray[Any] | None = field(default=None, repr=False)
    _weights: tuple[float, ...] | None = field(default=None, repr=False)  # of models; None: equal

    @property
    def modules(self) -> list[Any]:
        """The `torch.nn.Module` of each fold, in evaluation mode, on the CPU.

        They get samples after the eval transform and ``preprocess``.
        """
        return list(self._outputs.modules)

    @property
    def module(self) -> Any:
        """The only module; `InputError` if there are several."""
        if self.size != 1:
            rule, remedy = "module needs a single model", "Use modules, a list."
            refuse([Problem(rule, f"{self.size} models", remedy)])
        return self.modules[0]

    def expects(self) -> dict[str, str]:
        """Describe what weights alone leave out: what the first module takes, and its classes.

        Returns
        -------
        dict of str to str
            ``eval_transform``: what samples pass first; ``preprocess``: as JSON, the transformer
            that they pass next, with what it fitted, such as ``mean_`` and ``scale_``;
            ``classes``: as JSON, their names by index. Each only where there is such.
        """
        classes = {"classes": json.dumps(self.classes)} if self.classes else {}
        return {**self._outputs.expects(), **classes}

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write all that predicts to one file, for `asynckfold.load_model`.

        The file is of safetensors: weights of all models, what ``preprocess`` fitted, and as JSON
        in its header class names, label coding, eval transform, `output_transform`, software and
        fingerprints of the run. It holds neither code nor samples. It is there whole or not at all.

        Parameters
        ----------
        path : str or Path
            Such as ``"best.safetensors"``.
        overwrite : bool
            Replace a file that exists.

        Raises
        ------
        InputError
            The file exists; or the eval transform is not of torchvision or torch, or `preprocess`
            is no scaler, imputer or PCA of scikit-learn or a ``Pipeline`` of these.
        StorageError
            The disk refused.
        """
        self._outputs.save(self, Path(path), overwrite=overwrite)

    def outputs(self, inputs: Any) -> Any:
        """Return the mean of the models' outputs.

        Parameters
        ----------
        inputs : array, tensor, or map-style Dataset
            Samples as the run's dataset holds them, before the run's transforms: of shape (n, ...),
            or a dataset of samples or of (sample, target). Targets are ignored, and so is a
            dataset's ``transform`` if the run took over the one of its dataset.

        Returns
        -------
        ndarray of float32, shape (n, ...)
            In the order of `inputs`; a dict or tuple of these where the model returns such.

        Raises
        ------
        InputError
            The samples are not like those of the run; or a model does not reproduce the recorded
            outputs, because dataset, transforms, `preprocess` or the model have changed.
        StoreCorruptError
            Trained weights are missing from the run's folder, or damaged.
        """
        return self.objective.as_returned(self._mean_outputs(inputs))

    def _mean_outputs(self, inputs: Any) -> Outputs:
        columns = self.objective.columns
        if columns is not None and columns.ragged:
            refuse(ragged_problems(self.size))
            return of_one_width([batch[0] for batch in self._outputs(inputs)])
        means = [self._mean(batch) for batch in self._outputs(inputs)]
        return np.concatenate(means).astype(np.float32)

    def _mean(self, each: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        if self._weights is None:
            return np.asarray(each.mean(axis=0, dtype=np.float64))
        return np.asarray(np.average(each, axis=0, weights=self._weights))

    def predict_proba(self, inputs: Any) -> npt.NDArray[np.float64]:
        """Return the mean of the models' class probabilities.

        Probabilities are the softmax of the outputs; the sigmoid, for one output or several labels;
        the outputs themselves; or what the run's `output_transform` makes of them. Takes and raises
        the same as `outputs`.

        Returns
        -------
        ndarray of shape (n, n_classes), or (n, n_labels)
            Rows sum to 1, except with several labels per sample. Columns are in the order of
            ``results.classes_``.

        Raises
        ------
        InputError
            The run is a regression, or its outputs are margins, which have no probabilities.
        """
        if self.objective.kind == REGRESSION:
            rule = "predict_proba needs targets that are classes"
            refuse([Problem(rule, "a run whose targets are numbers", "Use predict or outputs.")])
        if self.objective.outputs and self.objective.scale != TRANSFORMED:
            refuse([_several_problem(self.objective, "predict_proba")])
        if self.objective.scale in (MARGINS, UNKNOWN):
            rule = "predict_proba needs outputs whose probabilities are known"
            remedy = "Use outputs, or make the run with output_transform=."
            refuse([Problem(rule, f"outputs that are {self.objective.scale}", remedy)])
        return np.concatenate([self._mean(each) for each in self._values(inputs)])

    def predict(self, inputs: Any) -> npt.NDArray[Any]:
        """Return the most probable label of each sample, or the mean prediction of a regression.

        Takes and raises the same as `outputs`.

        Returns
        -------
        ndarray
            Labels of shape (n,), as in ``results.classes_``; rows of 0 and 1 with several labels
            per sample; the class of each pixel, (n, height, width); or mean predictions, of shape
            (n,) if there is one per sample.
        """
        objective = self.objective
        if objective.outputs and objective.scale != TRANSFORMED:
            refuse([_several_problem(objective, "predict")])
        if objective.kind == REGRESSION:
            means = [self._mean(each) for each in self._values(inputs)]
            return np.concatenate(means).astype(np.float32)
        if objective.scale in (MARGINS, UNKNOWN):
            predictions = predicted(objective, self._mean_outputs(inputs), self._transform)
            return objective.labels_of(predictions, predictions.max(initial=1) + 1)
        shares = self.predict_proba(inputs)
        if objective.kind in (MASKS, MULTILABEL):
            return (shares > 0.5).astype(np.int64)
        return objective.labels_of(np.asarray(shares.argmax(axis=1), np.int64), shares.shape[1])

    def _values(self, inputs: Any) -> Iterator[npt.NDArray[Any]]:
        """Yield the numbers or probabilities of each model, (models, batch, ...)."""
        value = predicted if self.objective.kind == REGRESSION else probabilities
        for batch in self._outputs(inputs):
            yield np.stack([value(self.objective, one, self._transform) for one in batch])


@dataclass(frozen=True, eq=False)
class Blend(FoldEnsemble):
    """The models of several candidates' folds, whose weighted mean is the prediction.

    `CVResults.blend` makes it. It predicts and saves like any `FoldEnsemble`.

    Attributes
    ----------
    weights : dict of str to float
        By candidate; they sum to 1.
    metric : str
        The score by which candidates were selected.
    scores : ndarray of shape (folds,)
        Of each fold, by weights that were chosen on the samples outside of it. As all scores of
        folds, they are of one model for each candidate.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    metric: str = ""
    scores: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0), repr=False)

    @property
    def score(self) -> float:
        """Mean of `scores`, to compare with the candidates' mean scores."""
        return float(self.scores.mean())


def _several_problem(objective: Objective, method: str) -> Problem:
    assert objective.columns is not None
    return Problem(
        f"{method} needs to know which of several outputs it is of",
        objective.columns.text,
        "Use outputs, or make the run with output_transform=.",
    )
