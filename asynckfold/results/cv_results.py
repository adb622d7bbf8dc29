"""`CVResults`, what a call returns: the outcome, trained models, figures, the report."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from asynckfold.errors import AbsentError, AsyncKFoldError, InputError
from asynckfold.jobs import reproducibility
from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import Result
from asynckfold.results import tables
from asynckfold.results.candidates import Candidate, done_job, done_jobs, find_job
from asynckfold.results.outcome import Outcome
from asynckfold.store import RunReader

if TYPE_CHECKING:
    from asynckfold.results.ensemble import FoldEnsemble, FoldModels
    from asynckfold.results.estimator_scores import EstimatorComparison


@dataclass(frozen=True, eq=False, repr=False)
class CVResults(Outcome):
    """The results of a sweep, complete or not.

    Parameters
    ----------
    plan : Plan
        All jobs of the sweep.
    folds : tuple of Fold
        Train and held-out samples of each fold.
    n_samples : int
        Samples of the dataset.
    results : Mapping of str to Result
        By job id; jobs without a result are pending.
    seconds : float
        Wall time of the packed run: data, worker start-up, checks and jobs, over all sessions.
    baseline : Baseline or None
        The serial loop to compare with.
    root_dir : Path
        The run on disk.
    error_score : float
        Score of a failed job.
    bit_identity : Reproducibility
        Whether the run is reproducible bit for bit, and if not, why.
    """

    _build_report: Callable[[], Path] | None = None
    _draw: Callable[[str, Any], Any] | None = None
    _load_weights: Callable[[Result, str], dict[str, Any]] | None = None
    _load_refit: Callable[[Candidate], CVResults | None] | None = None
    _load_models: Callable[[], FoldModels] | None = None

    @property
    def refitted(self) -> CVResults | None:
        """Results of training the best candidate on all samples, see ``refit``.

        Its scores are on samples it was trained on. None without such a run, or before its end.
        """
        return refit_of(self, self.candidates[self.best_index_].name) if self.has_best else None

    @property
    def best_estimator_(self) -> Any:
        """The best candidate's module, trained on all samples; needs ``refit``."""
        try:
            return self.model(fold="all")
        except InputError as error:
            raise AbsentError(error.problems) from None

    def state_dict(
        self,
        candidate: str | None = None,
        fold: int | str = 0,
        repeat: int = 0,
        *,
        of: Literal["model", "criterion"] = "model",
    ) -> dict[str, Any]:
        """Return trained weights, for `torch.nn.Module.load_state_dict`.

        Takes the arguments of `model` and raises the same errors, but also works on results that
        were read from the run's folder. What `preprocess` fitted is not included. `of` chooses the
        weights of the model, or those of the job's criterion.

        Returns
        -------
        dict of str to Tensor
            Parameters and buffers after the last epoch, on the CPU.
        """
        if self._load_weights is None:
            raise ValueError("these results have no run on disk to load weights from")
        if of not in ("model", "criterion"):
            rule, remedy = "of must be 'model' or 'criterion'", "Leave it out for the model."
            raise InputError.one(rule, repr(of), remedy)
        if fold == "all":
            return self.on_all_samples(candidate).state_dict(of=of)
        job = done_job(self.plan, self.results, _name_of(self, candidate), fold, repeat)
        return self._load_weights(self.results[job.id], of)

    def model(self, candidate: str | None = None, fold: int | str = 0, repeat: int = 0) -> Any:
        """Return a trained model: built as its job built it, with the job's weights.

        What `preprocess` fitted is not included; see `ensemble`.

        Parameters
        ----------
        candidate : str, optional
            ``"LeNet5/cosine"``; by default the best.
        fold : int or "all"
            The fold, from 0, whose held-out samples the model has not seen; or ``"all"`` for the
            model that ``refit`` trained on all samples.
        repeat : int
            The repeat, from 0.

        Returns
        -------
        torch.nn.Module
            A new one at each call, in evaluation mode, on the CPU.

        Raises
        ------
        InputError
            There is no such job, or it has no trained weights; or these results were read from the
            run's folder, which stores no models.
        ValueError
            No candidate is complete, so none is best.
        StoreCorruptError
            The weights are missing from the run's folder, or damaged.
        """
        models = _live_models(self)
        if fold == "all":
            return self.on_all_samples(candidate).model()
        name = _name_of(self, candidate)
        return models.model(done_job(self.plan, self.results, name, fold, repeat))

    def ensemble(self, candidate: str | None = None) -> FoldEnsemble:
        """Return the models of all folds and repeats of a candidate as one predictor.

        Takes a candidate and raises errors as `model` does; all of its folds must be done.

        Returns
        -------
        FoldEnsemble
            Builds its models at the first prediction.
        """
        _live_models(self)
        return _ensemble_of(self, done_jobs(self.plan, self.results, _name_of(self, candidate)))

    def save_model(
        self,
        path: str | Path,
        candidate: str | None = None,
        fold: int | str = 0,
        repeat: int = 0,
        *,
        overwrite: bool = False,
    ) -> None:
        """Write one trained model with all that it predicts with, for `asynckfold.load_model`.

        Takes the arguments of `model` after the path, and writes and raises what
        `FoldEnsemble.save` does: ``results.ensemble().save(path)`` writes the models of all folds.
        """
        single(self, candidate, fold, repeat).save(path, overwrite=overwrite)

    def export_onnx(
        self,
        path: str | Path,
        candidate: str | None = None,
        fold: int | str = 0,
        repeat: int = 0,
        *,
        overwrite: bool = False,
    ) -> None:
        """Write one trained module as ONNX, by `torch.onnx`; needs ``asynckfold[onnx]``.

        Takes the arguments of `model` after the path. The ONNX model is that module alone: it takes
        batches of any size, named ``inputs``, after the eval transform and ``preprocess``, and
        gives ``outputs``, without `output_transform`.

        Raises
        ------
        InputError
            The file exists, a package is missing, or torch cannot export the module.
        """
        single(self, candidate, fold, repeat).export_onnx(path, overwrite=overwrite)

    def compare_with(self, estimators: Any) -> EstimatorComparison:
        """Fit scikit-learn estimators on the run's folds, and compare them with its candidates.

        Does a network beat gradient boosting, or a guess? A clone of each estimator is fitted in
        this process, on the training part of each fold, and scored on the rest by the run's scores:
        the same samples, after the eval transform and `preprocess`, flattened, with the original
        labels. Estimators without a ``random_state`` draw the same numbers at each call.

        Parameters
        ----------
        estimators : estimator, list of estimators, or dict of name to estimator
            Such as ``[HistGradientBoostingClassifier(), DummyClassifier()]``.

        Returns
        -------
        EstimatorComparison
            Print it; ``to_frame()`` and ``compare()`` are tables. What failed is in ``errors``.

        Raises
        ------
        InputError
            Something is no estimator, a classifier for numbers or the like, or the run is scored by
            a function of your own; or these results were read from the run's folder.
        """
        return _live_models(self).compare_with(estimators)

    def on_all_samples(self, candidate: str | None = None) -> CVResults:
        """Return the results of training a candidate on all samples, by default the best.

        Raises
        ------
        InputError
            ``refit`` did not train it, or is not done.
        """
        name = _name_of(self, candidate)
        find_job(self.plan, name)
        refit = refit_of(self, name)
        if refit is None:
            rule = "fold='all' needs a candidate that was trained on all samples"
            remedy = (
                f"Make the call with refit={name!r}; refit=True (--refit) takes the best candidate."
            )
            raise InputError.one(rule, name, remedy)
        return refit

    def report(self) -> Path:
        """Write the HTML report, its figures and tables; return the path of the page."""
        if self._build_report is None:
            raise ValueError("these results have no run on disk; use `asynckfold report DIR`")
        return self._build_report()

    def plot(self, kind: str, ax: Any = None) -> Any:
        """Draw one figure of the report; `asynckfold.plots` draws some of them from arrays, too.

        Parameters
        ----------
        kind : str
            ``"scores"``, ``"curves"``, ``"loss_vs_time"``, ``"class_accuracy"``, ``"confusion"``,
            ``"probabilities"``, ``"predictions"``, ``"cpu_usage"``, ``"timeline"`` or
            ``"speedup"``.
        ax : matplotlib.axes.Axes, optional
            Draw on these axes: scores, curves, confusion and timeline do. Curves then shows the
            validation loss; a sequence of axes takes all of its panels.

        Returns
        -------
        matplotlib.figure.Figure
            The figure of `ax`, or a new one, which notebooks show and
            ``results.plot("scores").savefig("scores.pdf")`` writes.

        Raises
        ------
        InputError
            There is no such figure, or the run has no numbers for it, or `ax` does not fit.
        """
        if self._draw is None:
            raise ValueError("these results have no run on disk; use `asynckfold report DIR`")
        return self._draw(kind, ax)

    def _repr_html_(self) -> str:
        page = tables.link_html(self.root_dir / "report" / "index.html")
        return super()._repr_html_() + tables.image_html(_scores_svg(self)) + page


def _scores_svg(results: CVResults) -> bytes:
    """Return the figure of the scores; empty if there is none to draw."""
    buffer = io.BytesIO()
    with contextlib.suppress(AsyncKFoldError, OSError):
        if results._draw is not None:
            results._draw("scores", None).savefig(buffer, format="svg")
    return buffer.getvalue()


def _name_of(results: CVResults, candidate: str | None) -> str:
    return results.candidates[results.best_index_].name if candidate is None else candidate


def _live_models(results: CVResults) -> FoldModels:
    if results._load_models is None:
        rule = "models come from results of a call, since a run's folder holds none"
        remedy = "Make the call again, which trains nothing twice; or load state_dict into a model."
        raise InputError.one(rule, f"results read from {results.root_dir}", remedy)
    return results._load_models()


def _ensemble_of(results: CVResults, jobs: Sequence[Job]) -> FoldEnsemble:
    from asynckfold.results.ensemble import FoldEnsemble

    models, objective = _live_models(results), results.plan.objective_of(jobs[0].model)
    return FoldEnsemble(
        jobs[0].candidate,
        results.plan.classes,
        len(jobs),
        objective,
        models.predictor(jobs),
        models.transform,
        results.classes_,
    )


def single(results: CVResults, candidate: str | None, fold: int | str, repeat: int) -> FoldEnsemble:
    """Return one trained model as a predictor."""
    _live_models(results)
    if fold == "all":
        refit = results.on_all_samples(candidate)
        return _ensemble_of(refit, refit.plan.jobs)
    name = _name_of(results, candidate)
    return _ensemble_of(results, [done_job(results.plan, results.results, name, fold, repeat)])


def refit_of(results: CVResults, name: str) -> CVResults | None:
    """Return the results of training a candidate on all samples, if that is done."""
    if results._load_refit is None:
        return None
    refit = results._load_refit(next(row for row in results.candidates if row.name == name))
    return refit if refit is not None and refit.counts["done"] else None


def read_results(store: RunReader) -> CVResults:
    """Return the results of a run on disk, complete or not."""
    folds, targets = store.splits()
    return CVResults(
        plan=store.plan,
        folds=folds,
        n_samples=len(targets),
        results=store.results(),
        seconds=math.fsum(item.packed_seconds for item in store.sessions()),
        baseline=store.baseline,
        root_dir=store.root,
        bit_identity=reproducibility.reproducibility_of(store.plan, store.software()),
    )


def refit_note(store: RunReader) -> str:
    """Return how the refit of the best candidate ended; ``""`` if there was none."""
    return next((item.text for item in reversed(store.events()) if item.kind == "refit"), "")
