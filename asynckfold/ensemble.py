"""`FoldEnsemble`: the models of all folds of a candidate, which answer together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from asynckfold.errors import Problem, refuse
from asynckfold.plan import Job

Outputs = npt.NDArray[np.float32]
Ask = Callable[[Any], Iterator[Outputs]]
"""From samples to batches of what each model says: shapes (models, batch, ...)."""

SOFTMAX, SIGMOID, NUMBERS = "softmax", "sigmoid", "numbers"
"""What outputs are: scores of classes, the log-odds of one class, or numbers."""


class FoldModels(Protocol):
    """Makes the trained models of a run again, from the objects that it was started with."""

    @property
    def outputs_are(self) -> str:
        """`SOFTMAX`, `SIGMOID` or `NUMBERS`."""

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
    outputs_are : {"softmax", "sigmoid", "numbers"}
        What makes probabilities of outputs; numbers have none.

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
    outputs_are: str = field(repr=False)
    _ask: Ask = field(repr=False)

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

        These are the softmax of outputs; where one output is trained by ``BCEWithLogitsLoss``,
        those of 0 and 1 by its sigmoid. What `inputs` are and what is raised is as in `outputs`.

        Returns
        -------
        ndarray of shape (n, n_classes)
            Rows add up to 1.

        Raises
        ------
        InputError
            The run's targets are numbers, which have no probabilities.
        """
        if self.outputs_are == NUMBERS:
            rule = "predict_proba needs targets that are classes"
            refuse([Problem(rule, "a run whose targets are numbers", "Use predict or outputs.")])
        means = [self._probabilities(said).mean(axis=0) for said in self._ask(inputs)]
        return np.concatenate(means)

    def predict(self, inputs: Any) -> npt.NDArray[Any]:
        """Return the most probable class of each sample, or its number.

        What `inputs` are and what is raised is as in `outputs`.

        Returns
        -------
        ndarray
            Class indices, int64 of shape (n,), whose names are in `classes`; or the mean outputs,
            of shape (n,) where there is one for each sample.
        """
        if self.outputs_are != NUMBERS:
            return np.asarray(self.predict_proba(inputs).argmax(axis=1), np.int64)
        found = self.outputs(inputs)
        return found[:, 0] if found.shape[1:] == (1,) else found

    def _probabilities(self, said: Outputs) -> npt.NDArray[np.float64]:
        from scipy.special import expit, softmax

        if self.outputs_are == SOFTMAX:
            return np.asarray(softmax(said.astype(np.float64), axis=2))
        flat = said.reshape(*said.shape[:2], -1).astype(np.float64)
        if flat.shape[2] != 1:
            rule = "predict_proba needs one output of each sample, or classes"
            remedy = "Take the sigmoid of outputs."
            refuse([Problem(rule, f"{flat.shape[2]} outputs of BCEWithLogitsLoss", remedy)])
        odds = expit(flat)
        return np.concatenate([1 - odds, odds], axis=2)
