"""`FoldEnsemble`: the models of all folds of a candidate, which answer together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from asynckfold.errors import Problem, refuse
from asynckfold.jobs.criteria import MARGINS, UNKNOWN
from asynckfold.jobs.objective import (
    MULTILABEL,
    REGRESSION,
    Objective,
    Transform,
    predicted,
    probabilities,
)
from asynckfold.jobs.plan import Job

Outputs = npt.NDArray[np.float32]
Ask = Callable[[Any], Iterator[Outputs]]
"""From samples to batches of what each model says: shapes (models, batch, ...)."""


class FoldModels(Protocol):
    """Makes the trained models of a run again, from the objects that it was started with."""

    @property
    def transform(self) -> Transform | None:
        """The user's `output_transform`, of arrays."""

    def model(self, job: Job) -> Any:
        """Return the module of a job that is done, with its trained weights."""

    def asked(self, jobs: Sequence[Job]) -> Ask:
        """Return what asks the models of these jobs."""


@dataclass(frozen=True, eq=False)
class FoldEnsemble:
    """The models that the folds of one candidate trained, which answer together.

    Every sample of the run's own data set was trained on by all of these models but those of the
    folds that held it out. So how well the ensemble does on these samples is no estimate of how
    well it does on others; the out-of-fold score of the candidate is one, of its models alone.

    Samples are given as the run's data set has them. They pass the run's eval transform and, for
    each model, the `preprocess` that is fitted anew on the training part of its fold; they are
    computed on the CPU in the run's precision. Before the first answer, each model is asked about
    some samples that its fold held out, and must say what the run recorded of them.

    Attributes
    ----------
    candidate : str
        ``"LeNet5/cosine"``.
    classes : tuple of str
        Class names by index; empty for numbers.
    size : int
        How many models answer.
    objective : Objective
        What outputs mean.

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
    _ask: Ask = field(repr=False)
    _transform: Transform | None = field(default=None, repr=False)

    def outputs(self, inputs: Any) -> Outputs:
        """Return the mean of what the models say.

        Parameters
        ----------
        inputs : array, tensor, or map-style Dataset
            Samples as the run's data set has them, before the run's transforms: of shape (n, ...),
            or a data set of samples or of (sample, target). Targets are ignored. A ``transform`` of
            a data set is ignored where the one of the run's data set was taken over.

        Returns
        -------
        ndarray of float32, shape (n, ...)
            In the order of `inputs`.

        Raises
        ------
        InputError
            The samples are not like those of the run; or a model does not say what the run
            recorded of samples that its fold held out, since data set, transforms, `preprocess` or
            the model have changed.
        StoreCorruptError
            Trained weights are gone from the run's folder, or damaged.
        """
        means = [said.mean(axis=0, dtype=np.float64) for said in self._ask(inputs)]
        return np.concatenate(means).astype(np.float32)

    def predict_proba(self, inputs: Any) -> npt.NDArray[np.float64]:
        """Return the mean of the models' probabilities of each class.

        These are the softmax of outputs; the sigmoid of one output, for two classes, or of each,
        for several labels of a sample; outputs that are probabilities; or what the run's
        `output_transform` makes of them. What `inputs` are and what is raised is as in `outputs`.

        Returns
        -------
        ndarray of shape (n, n_classes), or (n, n_labels)
            Rows add up to 1, but for several labels of a sample. Columns are in the order of
            ``results.classes_``.

        Raises
        ------
        InputError
            The run's targets are numbers, or its outputs margins, which are no probabilities.
        """
        if self.objective.kind == REGRESSION:
            rule = "predict_proba needs targets that are classes"
            refuse([Problem(rule, "a run whose targets are numbers", "Use predict or outputs.")])
        if self.objective.scale in (MARGINS, UNKNOWN):
            rule = "predict_proba needs outputs whose probabilities are known"
            remedy = "Use outputs, or make the run with output_transform=."
            refuse([Problem(rule, f"outputs that are {self.objective.scale}", remedy)])
        means = [self._probabilities(said).mean(axis=0) for said in self._ask(inputs)]
        return np.concatenate(means)

    def predict(self, inputs: Any) -> npt.NDArray[Any]:
        """Return the most probable label of each sample, or its number.

        What `inputs` are and what is raised is as in `outputs`.

        Returns
        -------
        ndarray
            Labels as the run's data have them, of shape (n,), as in ``results.classes_``; rows of 0
            and 1, where a sample may have several labels; or mean predictions, of shape (n,) where
            there is one for each sample.
        """
        asked = self.objective
        if asked.kind == REGRESSION:
            parts = [
                np.mean(
                    [predicted(asked, one, self._transform) for one in said],
                    axis=0,
                    dtype=np.float64,
                )
                for said in self._ask(inputs)
            ]
            return np.concatenate(parts).astype(np.float32)
        if asked.scale in (MARGINS, UNKNOWN):
            found = predicted(asked, self.outputs(inputs), self._transform)
            return asked.labels_of(found, found.max(initial=1) + 1)
        shares = self.predict_proba(inputs)
        if asked.kind == MULTILABEL:
            return (shares > 0.5).astype(np.int64)
        return asked.labels_of(np.asarray(shares.argmax(axis=1), np.int64), shares.shape[1])

    def _probabilities(self, said: Outputs) -> npt.NDArray[np.float64]:
        each = [probabilities(self.objective, one, self._transform) for one in said]
        return np.stack(each)
