"""Estimators of scikit-learn: `AsyncKFold` behind ``fit`` and ``predict``.

::

    fit(X, y) ── checks of scikit-learn ── AsyncKFold ── results_ ─┬─ ensemble=True:  all folds
                                                                   └─ ensemble=False: all samples
    results.estimator(name) ── the same, fitted
"""

from __future__ import annotations

import functools
import inspect
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin, clone
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn, optim

from asynckfold.api.arguments import Settings
from asynckfold.api.kfold import AsyncKFold
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.argument import one_line
from asynckfold.jobs.candidate_names import base_of
from asynckfold.jobs.objective import BINARY, MULTICLASS, REGRESSION, task_of
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.models import MLP
from asynckfold.results.cv_results import CVResults
from asynckfold.results.ensemble import FoldEnsemble

if TYPE_CHECKING:
    from asynckfold.api.fold_models import RunModels

SAME = ("batch_size", "n_jobs", "random_state", "verbose")
"""Arguments of `AsyncKFold` that are parameters here, with other defaults at most."""

ELSEWHERE = {
    **dict.fromkeys(("dataset", "targets", "target_key"), "X and y of fit"),
    **{name: f"{name} of fit" for name in ("groups", "sample_weight")},
    **dict.fromkeys(("kfolds", "n_splits", "cv"), "cv"),
    "refit": "ensemble=False",
    **{name: name for name in ("root_dir", "criterion", *SAME)},
}
"""Arguments of `AsyncKFold` that are something of the estimator."""

OF_ONE_RUN = ("about", "parallelize", "plan_from", "report", "resume")
"""Arguments of a run that say nothing about its candidates."""


class _AsyncKFoldEstimator(BaseEstimator):  # type: ignore[misc]
    """What classifier and regressor share; see `AsyncKFoldClassifier`."""

    _loss: type[nn.Module]
    _of_targets: Mapping[str, bool] = {}  # checks of scikit-learn
    classes_: npt.NDArray[Any]
    results_: CVResults
    predictor_: FoldEnsemble

    def __init__(
        self,
        models: Any = None,
        schedulers: Any = "constant",
        opt_fn: Callable[..., Any] | None = None,
        *,
        epochs: int = 10,
        batch_size: int = 32,
        cv: Any = 5,
        criterion: Any = None,
        params: Mapping[str, Any] | None = None,
        ensemble: bool = True,
        root_dir: str | Path | None = None,
        n_jobs: Any = None,
        random_state: int = 0,
        verbose: int = 0,
        dtype: Any = "float32",
        trainer_params: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.models = models
        self.schedulers = schedulers
        self.opt_fn = opt_fn
        self.epochs = epochs
        self.batch_size = batch_size
        self.cv = cv
        self.criterion = criterion
        self.params = params
        self.ensemble = ensemble
        self.root_dir = root_dir
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose
        self.dtype = dtype
        self.trainer_params = trainer_params
        self.settings = settings

    def fit(
        self,
        X: Any,  # noqa: N803
        y: Any,
        sample_weight: Any = None,
        groups: Any = None,
    ) -> Any:
        """Cross-validate all candidates on these samples, and keep the models of the best.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features) or (n_samples, ...)
            Samples.
        y : array-like of shape (n_samples,)
            Labels; or numbers, also of shape (n_samples, n_outputs).
        sample_weight : array-like of shape (n_samples,), optional
            Weight of each sample in losses and scores, see `AsyncKFold`.
        groups : array-like of shape (n_samples,), optional
            Samples of one group are never on both sides of a fold.

        Returns
        -------
        self
            Fitted. An `InputError`, which is a `ValueError`, says that nothing was started.
        """
        refuse(self._problems())
        samples, targets = self._checked(*self._validated(X, y))
        make = functools.partial(
            AsyncKFold,
            kfolds=self.cv,
            dataset=(samples, targets),
            criterion=self._loss() if self.criterion is None else self.criterion,
            groups=groups,
            sample_weight=sample_weight,
            refit=not self.ensemble,
            **{name: getattr(self, name) for name in SAME},
            **{"report": False, **(self.settings or {})},
        )
        rows = samples if hasattr(samples, "iloc") else samples.reshape(len(samples), -1)
        if self._preprocess is not None:
            rows = clone(self._preprocess).fit_transform(rows, np.asarray(y))
        outputs = targets.shape[1] if targets.ndim > 1 else len(self.classes_)
        sizes = {"in_features": rows.shape[1], "out_features": outputs, "num_classes": outputs}
        call = {
            "models": _sized(MLP if self.models is None else self.models, sizes, self.params),
            "schedulers": self.schedulers,
            "opt_fn": _adam if self.opt_fn is None else self.opt_fn,
            "trainer_params": {"epochs": self.epochs, **(self.trainer_params or {})},
            "params": self.params,
        }
        results = self._run(make, call)
        self._keep(results, (results if self.ensemble else results.on_all_samples()).ensemble())
        return self

    def _run(self, make: Callable[..., AsyncKFold], call: dict[str, Any]) -> CVResults:
        """Run in a folder named by the plan; a temporary one goes with the results."""
        is_temporary = self.root_dir is None
        root = Path(self.root_dir or tempfile.mkdtemp(prefix="asynckfold-"))
        try:
            plan, _ = make(root_dir=root).plan(**call)
            kind = plan.objective_of("").kind
            if (kind == REGRESSION) is not (self._loss is nn.MSELoss):
                rule = f"criterion must suit {type(self).__name__}"
                received = f"{one_line(self.criterion)}, for {task_of(kind)}"
                raise InputError.one(rule, received, f"The default is {self._loss.__name__}().")
            results = make(root_dir=root / plan.fingerprint[:12])(**call)
        except BaseException:
            if is_temporary:
                shutil.rmtree(root, ignore_errors=True)
            raise
        if is_temporary:
            weakref.finalize(results, shutil.rmtree, root, ignore_errors=True)
        return results

    def _keep(self, results: CVResults, predictor: FoldEnsemble) -> None:
        self.results_, self.predictor_ = results, predictor
        for name in ("cv_results_", "best_params_", "best_score_"):
            # A `refit` of the run may select by another rule than the score.
            if hasattr(results, name):
                setattr(self, name, getattr(results, name))

    def _problems(self) -> Iterator[Problem]:
        for name, taken in ("settings", ELSEWHERE), ("trainer_params", {"epochs": "epochs"}):
            value = getattr(self, name) or {}
            if not isinstance(value, Mapping):
                yield Problem(f"{name} must be a dict", one_line(value), "Leave it out.")
                return
            for key in [key for key in value if key in taken]:
                rule = f"{name} must not hold what the estimator takes itself"
                yield Problem(rule, repr(key), f"Use {taken[key]}.")

    def _checked(self, samples: Any, targets: Any) -> tuple[Any, Any]:
        """Return samples and targets as `AsyncKFold` takes them."""
        raise NotImplementedError

    def _validated(self, *data: Any, **checks: Any) -> Any:
        """Return data after the checks of scikit-learn; a table stays one without a `dtype`."""
        if self.dtype is None and hasattr(data[0], "iloc"):
            return validate_data(self, *data, skip_check_array=True, **checks)
        if len(data) > 1:
            checks |= {"ensure_min_samples": 2, **self._of_targets}
        return validate_data(
            self,
            *data,
            dtype=None if self.dtype is None else np.dtype(self.dtype),
            allow_nd=True,
            ensure_all_finite=True if self._preprocess is None else "allow-nan",
            **checks,
        )

    def _samples(self, inputs: Any) -> Any:
        """Return checked samples to predict."""
        check_is_fitted(self)
        return self._validated(inputs, reset=False)

    @property
    def _preprocess(self) -> Any:
        """What gets the samples, and may fill in what is missing."""
        return self.settings.get("preprocess") if isinstance(self.settings, Mapping) else None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self._preprocess is not None
        return tags

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `results_`, which read from a folder that may stay behind."""
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name != "results_"}


class AsyncKFoldClassifier(ClassifierMixin, _AsyncKFoldEstimator):  # type: ignore[misc]
    """Networks as a classifier of scikit-learn.

    `fit` cross-validates all candidates, models × LR schedules × `params`. The best one predicts:
    by default the mean of the models of its folds, which are trained already, and which together
    have seen all samples. ``ensemble=False`` trains one model more, on all samples, as
    ``GridSearchCV`` does: it predicts faster, and takes one training of all samples longer.

    Parameters
    ----------
    models : class, callable, module, or list or dict of these, optional
        As in the call of `AsyncKFold`. What has parameters of the names ``in_features``,
        ``out_features`` or ``num_classes`` gets the size of the data: `torch.nn.Linear` is such a
        model. Default: `asynckfold.models.MLP`.
    schedulers : str, callable, or list or dict of these
        LR schedules.
    opt_fn : callable, optional
        Model → optimizer. Default: Adam, whose learning rate ``params={"lr": [...]}`` may set.
    epochs, batch_size, cv, n_jobs, random_state, verbose
        As in `AsyncKFold`; 'cv' may be a number of folds, a splitter, or folds. ``n_jobs=None``
        takes the number of ``joblib.parallel_config``, or else what is idle.
    criterion : callable, optional
        Default: ``CrossEntropyLoss()``, and of a regressor ``MSELoss()``.
    params : dict, optional
        A grid of parameters, as in the call of `AsyncKFold`.
    ensemble : bool
        Predict by the mean of the models of all folds, or by one trained on all samples.
    root_dir : str or Path, optional
        Folder of the runs. Each gets a folder in it that is named by the plan: clones may share it,
        and whoever fits the same estimator on the same data again trains nothing twice, also after
        a kill. None takes a temporary folder, removed with `results_`.
    dtype : numpy dtype or None
        What X is converted to. None leaves it as it is, such as whole numbers of tokens, or a
        DataFrame with text for the `preprocess` in `settings`.
    trainer_params : dict, optional
        Further training parameters.
    settings : dict, optional
        Further arguments of `AsyncKFold`, such as ``{"preprocess": StandardScaler()}``.

    Attributes
    ----------
    classes_ : ndarray
        Labels, in the order of the columns of `predict_proba`.
    results_ : CVResults
        The run. Copies and pickles of the estimator predict, but lack it.
    predictor_ : FoldEnsemble
        What predicts.
    cv_results_, best_params_, best_score_
        Those of `results_`.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from asynckfold import AsyncKFoldClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> estimator = AsyncKFoldClassifier(cv=3, params={"lr": [1e-2, 1e-4]}).fit(X, y)
    >>> estimator.best_params_["lr"], bool(estimator.score(X, y) > 0.9)
    (0.01, True)
    """

    _loss = nn.CrossEntropyLoss

    def predict(self, X: Any) -> npt.NDArray[Any]:  # noqa: N803
        """Return the label of each sample."""
        samples = self._samples(X)
        return np.asarray(self.predictor_.predict(samples), self.classes_.dtype)

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return the probability of each class, of shape (n_samples, n_classes)."""
        samples = self._samples(X)
        return self.predictor_.predict_proba(samples)

    def _checked(self, samples: Any, targets: Any) -> tuple[Any, Any]:
        labels = np.asarray(targets)
        check_classification_targets(labels)
        self.classes_ = np.unique(labels)
        if len(self.classes_) < 2:
            rule, remedy = "y must have at least two classes", "Pass samples of another class, too."
            raise InputError.one(rule, f"1 class, {self.classes_[0]}", remedy)
        if labels.dtype.kind == "O":
            labels = np.array(labels.tolist())
        return samples, labels.astype(np.int64) if labels.dtype.kind == "f" else labels

    def _keep(self, results: CVResults, predictor: FoldEnsemble) -> None:
        super()._keep(results, predictor)
        # A model may have outputs for more classes than these samples.
        kind = self.classes_.dtype if hasattr(self, "classes_") else None
        self.classes_ = np.asarray(predictor.classes_, kind)


class AsyncKFoldRegressor(MultiOutputMixin, RegressorMixin, _AsyncKFoldEstimator):  # type: ignore[misc]
    """Networks as a regressor of scikit-learn.

    Parameters and attributes are those of `AsyncKFoldClassifier`, without ``classes_``. Models
    return an array of shape (n_samples, n_outputs), with one output for a `y` of one axis.

    Examples
    --------
    >>> from sklearn.datasets import make_regression
    >>> from torch import nn
    >>> from asynckfold import AsyncKFoldRegressor
    >>> X, y = make_regression(120, 4, random_state=0)
    >>> estimator = AsyncKFoldRegressor(nn.Linear, cv=3, epochs=30, params={"lr": [1.0]})
    >>> bool(estimator.fit(X, y).score(X, y) > 0.9)
    True
    """

    _loss = nn.MSELoss
    _of_targets: Mapping[str, bool] = {"y_numeric": True, "multi_output": True}

    def predict(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return a number for each sample, or a row of numbers."""
        samples = self._samples(X)
        return self.predictor_.predict(samples).astype(np.float64)

    def _checked(self, samples: Any, targets: Any) -> tuple[Any, Any]:
        numbers = np.asarray(targets, np.float32)
        return samples, numbers.reshape(len(numbers), -1)


def _adam(model: Any, lr: float = 1e-3) -> Any:
    return optim.Adam(model.parameters(), lr)


def _sized(models: Any, sizes: Mapping[str, int], params: Any) -> Any:
    """Return models with the sizes of the data bound where they take these by name."""
    if isinstance(models, Mapping):
        return {name: _sized(model, sizes, params) for name, model in models.items()}
    if isinstance(models, (list, tuple)):
        return [_sized(model, sizes, params) for model in models]
    try:
        parameters = inspect.signature(models).parameters
    except (TypeError, ValueError):
        return models
    taken = {*getattr(models, "keywords", ()), *(params or ())}
    values = {name: size for name, size in sizes.items() if name in {*parameters} - taken}
    return functools.partial(models, **values) if values else models


# The estimator of a run


def fitted(results: CVResults, models: RunModels, candidate: str | None) -> Any:
    """Return a fitted estimator of a candidate, see `CVResults.estimator`."""
    predictor = results.ensemble(candidate)
    settings, recipe, plan = models.settings, models.recipe, results.plan
    refuse(_task_problems(predictor, models))
    job = next(job for job in plan.jobs if job.candidate == predictor.candidate)
    keywords = recipe.optimizers.get(job.lr_schedule)
    is_numbers = predictor.objective.kind == REGRESSION
    estimator = (AsyncKFoldRegressor if is_numbers else AsyncKFoldClassifier)(
        {base_of(job.model): recipe.models[job.model]},
        {base_of(job.lr_schedule): recipe.lr_schedules[job.lr_schedule]},
        functools.partial(recipe.opt_fn, **keywords) if keywords else recipe.opt_fn,
        epochs=plan.params.epochs,
        cv=next(x for x in (settings.kfolds, settings.cv, settings.n_splits) if x is not None),
        criterion=settings.criterion,
        dtype=None,
        trainer_params=_changed(plan.params, ("epochs",)),
        settings=_changed(settings, (*ELSEWHERE, *settings.trainer_params, *OF_ONE_RUN)),
        **{name: getattr(settings, name) for name in SAME},
    )
    rows = settings.dataset[0] if isinstance(settings.dataset, tuple) else None
    if not hasattr(rows, "shape"):
        rows = np.asarray(models.samples[0].read(0)[0])[None]
    # Takes the number of features and their names, and reads nothing.
    validate_data(estimator, rows, skip_check_array=True)
    estimator._keep(results, predictor)
    return estimator


def _task_problems(predictor: FoldEnsemble, models: RunModels) -> Iterator[Problem]:
    objective, remedy = predictor.objective, "Use results.ensemble()."
    if objective.kind not in (BINARY, MULTICLASS, REGRESSION) or objective.outputs:
        rule = "an estimator needs one label or number for each sample"
        yield Problem(rule, task_of(objective.kind), remedy)
        return
    first = models.samples[0].read(0)[0]
    if models.collation or not (isinstance(first, (np.ndarray, Tensor)) and first.ndim):
        received = "a collate_fn" if models.collation else type(first).__name__
        yield Problem("an estimator needs samples of one array", received, remedy)


def _changed(declared: Settings | TrainerParams, left_out: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that differ from their defaults."""
    changed = {}
    for item in fields(declared):
        value, default = getattr(declared, item.name), item.default
        is_default = value is default or (type(value) is type(default) and value == default)
        if item.name not in left_out and not is_default:
            changed[item.name] = value
    return changed
