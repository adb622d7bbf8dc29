"""`CVResults`, what a call returns: scores, trained models, figures, the report."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from asynckfold.errors import AbsentError, AsyncKFoldError, InputError, refuse
from asynckfold.jobs.decoding import uncollected
from asynckfold.jobs.folds import group_labels, outer_folds
from asynckfold.jobs.objective import Objective
from asynckfold.jobs.plan import Job, folds_fingerprint
from asynckfold.jobs.reproducibility import reproducibility_of
from asynckfold.jobs.result import Result
from asynckfold.results import tables
from asynckfold.results.candidates import Candidate, candidates, done_jobs, find_job
from asynckfold.results.out_of_fold import layers_of
from asynckfold.results.run_scores import RunScores
from asynckfold.store import RunReader, RunStore
from asynckfold.store.layout import DATABASE

if TYPE_CHECKING:
    import pandas as pd

    from asynckfold.results.audit import Audit
    from asynckfold.results.cross_fitting import Floats, HeldOutFold
    from asynckfold.results.decisions import Calibrator, Threshold
    from asynckfold.results.ensemble import Blend, FoldEnsemble
    from asynckfold.results.estimator_scores import EstimatorComparison


@dataclass(frozen=True, eq=False, repr=False)
class CVResults(RunScores):
    """The results of a sweep, complete or not.

    Parameters
    ----------
    plan : Plan
        All jobs of the sweep, without those of inner folds, as in folds and results.
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
    _load_models: Callable[[], Any] | None = None
    _build_model: Callable[[Job], Any] | None = None
    _select: Callable[[CVResults], int] | None = None  # of `refit`, see `api.refit`

    @cached_property
    def _trained(self) -> list[Candidate] | None:
        if self._load_models is None or not self._load_models().settings.return_train_score:
            return None
        scores = self._load_models().train_scores()
        found = {name: replace(self.results[name], scores=of) for name, of in scores.items()}
        return candidates(self.plan, {**self.results, **found}, self.error_score)

    @property
    def best_index_(self) -> int:
        """Position of the best complete candidate, or of the one that ``refit`` selects.

        `AbsentError` if no candidate is complete.
        """
        return self._highest if self._select is None or not self.has_best else self._selected

    @cached_property
    def _selected(self) -> int:
        assert self._select is not None
        return self._select(self)

    @property
    def best_score_(self) -> float:
        """Mean score of the best complete candidate, by the first metric.

        `AbsentError` if ``refit`` selected it by another rule, as in scikit-learn.
        """
        if self._select is None:
            return super().best_score_
        rule = "best_score_ is the highest mean, and refit selected by another rule"
        remedy = "Use results.candidates[results.best_index_].mean(metric)."
        raise AbsentError.one(rule, self.candidates[self.best_index_].name, remedy)

    @property
    def refitted(self) -> CVResults | None:
        """Results of training the best candidate on all samples, see ``refit``.

        Its scores are on samples it was trained on. None without such a run, or before its end.
        """
        return refit_of(self, self.candidates[self.best_index_].name) if self.has_best else None

    @property
    def best_estimator_(self) -> Any:
        """The best candidate's module, trained on all samples; needs ``refit``.

        `AbsentError` if there is none, or its weights or its code are broken.
        """
        try:
            return self.model(fold="all")
        except InputError as error:
            raise AbsentError(error.problems) from None
        except Exception as error:  # `hasattr` lets no other through
            rule = "best_estimator_ needs a model that can be built, and its weights"
            remedy = "results.model(fold='all') raises it as it is."
            raise AbsentError.one(rule, f"{type(error).__name__}: {error}", remedy) from error

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
        (job,) = done_jobs(self.plan, self.results, _name_of(self, candidate), fold, repeat)
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
            run's folder, which stores no models, and `load_results` got none.
        ValueError
            No candidate is complete, so none is best.
        StoreCorruptError
            The weights are missing from the run's folder, or damaged.
        """
        build = self._build_model or _live_models(self).model
        if fold == "all":
            return self.on_all_samples(candidate).model()
        name = _name_of(self, candidate)
        return build(*done_jobs(self.plan, self.results, name, fold, repeat))

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

    def estimator(self, candidate: str | None = None) -> Any:
        """Return a candidate as a fitted estimator of scikit-learn; its folds predict together.

        For what takes fitted estimators, such as ``permutation_importance``, or
        ``CalibratedClassifierCV`` of a ``FrozenEstimator``. A clone of it has the arguments of this
        run and its candidate, and trains anew. Takes a candidate and raises errors as `ensemble`.

        Returns
        -------
        AsyncKFoldClassifier or AsyncKFoldRegressor
            Samples are those of the run's dataset, as arrays.

        Raises
        ------
        InputError
            The run has several inputs, outputs or labels per sample.
        """
        return _live_models(self).estimator(self, candidate)

    def blend(
        self, candidates: Sequence[str] | None = None, metric: str | None = None, rounds: int = 20
    ) -> Blend:
        """Return the weighted mean of candidates that scores best on the held-out samples.

        Greedy ensemble selection with replacement (Caruana et al. 2004): each round adds the
        candidate after which the mean of probabilities, or numbers, scores best.

        Parameters
        ----------
        candidates : sequence of str, optional
            Names; by default all that have a score on every fold.
        metric : str, optional
            A score of the run, or the name of a scikit-learn scorer; by default the first.
        rounds : int
            Candidates that are added at most.

        Raises
        ------
        InputError
            There are fewer than two candidates or folds; outputs were not kept, or differ in
            meaning; or the metric is a function of outputs.
        """
        from asynckfold.results.cross_fitting import blend_problems, blended, score_of_values

        live, metric = _live_models(self), metric or self.plan.scoring[0]
        names = [row.name for row in self.candidates if row.ranks_by(self.plan.scoring[0])]
        names = names if candidates is None else list(dict.fromkeys(candidates))
        refuse(blend_problems(names, rounds))
        objective, parts = self._held_out(names)
        score = score_of_values(live.settings.scoring, metric, objective)
        weights, scores = blended(names, parts, score, rounds)
        return _blend_of(self, weights, metric, scores)

    def threshold(self, metric: Any, candidate: str | None = None) -> Threshold:
        """Return the probability of the positive class from which on a decision scores best.

        It is chosen on the held-out samples of all folds; those of a fold are scored by a threshold
        that is chosen on the others.

        Parameters
        ----------
        metric : str, scorer, or function
            Such as ``"f1"``; a function (true, decided) → float gets 0 and 1, 1 for positive.
        candidate : str, optional
            By default the best.
        """
        from asynckfold.results.decisions import threshold_of

        name = _name_of(self, candidate)
        return threshold_of(name, metric, *self._held_out([name]))

    def calibrate(
        self,
        candidate: str | None = None,
        method: Literal["temperature", "isotonic"] = "temperature",
    ) -> Calibrator:
        """Fit what makes probabilities agree with how often they are right.

        It is fitted on the held-out samples of all folds; log loss and calibration error are those
        of folds by what is fitted on the others. The models of single folds are calibrated: their
        mean, `ensemble`, is less sure.

        Parameters
        ----------
        candidate : str, optional
            By default the best.
        method : {"temperature", "isotonic"}
            One number for all logits (Guo et al. 2017), or a rising function for each class
            (Zadrozny and Elkan 2002), which takes some thousand samples.
        """
        from asynckfold.results.decisions import calibrator_of

        name = _name_of(self, candidate)
        return calibrator_of(name, method, *self._held_out([name]))

    def audit(self, groups: Any = None) -> Audit:
        """Look for what makes cross-validation lie; the page "What is checked" lists the codes.

        Trains and reads nothing again: the samples were looked at when the run began.

        Parameters
        ----------
        groups : array-like of shape (n_samples,), optional
            The group of each sample, such as its patient, if the call did not get them.

        Returns
        -------
        Audit
            The findings with their evidence, and what could not be checked.
        """
        from asynckfold.results.audit import make_audit

        labels = None if groups is None else group_labels(groups, self.n_samples)
        if not (self.root_dir / DATABASE).is_file():
            return make_audit(self, None, {}, labels)
        with RunStore.read(self.root_dir) as reader:
            return make_audit(self, reader.splits()[1], reader.about, labels)

    def intervals(self, inputs: Any, candidate: str | None = None, alpha: float = 0.1) -> Any:
        """Return prediction intervals of numbers, or prediction sets of classes, without training.

        Each new sample is compared with the held-out samples, by the models of their folds. Numbers
        by CV+ (Barber, Candès, Ramdas and Tibshirani 2021), classes by cross-conformal prediction
        (Vovk 2015) with the score 1 - probability.

        They hold the truth of a new sample with a probability of about ``1 - alpha``; guaranteed
        is ``1 - 2 * alpha - (2 / n) ** 0.5`` of n held-out samples, for any model, if the samples
        are exchangeable, as those of time series and groups are not, and the candidate was not
        chosen by them. With repeats, the folds of the first one are used: for several
        partitions nothing is guaranteed.

        Parameters
        ----------
        inputs : array, tensor, or map-style Dataset
            Samples as `FoldEnsemble.predict` takes them.
        candidate : str, optional
            By default the best.
        alpha : float
            Share of new samples that may be outside.

        Returns
        -------
        tuple of two ndarrays of shape (n,), or ndarray of bool, shape (n, n_classes)
            Lower and upper bounds, in the units of the data set; or which classes are in each set,
            in the order of `classes_`. Sets may be empty. Of fewer than ``1 / alpha - 1`` held-out
            samples, bounds are infinite, and sets hold all classes.

        Raises
        ------
        InputError
            A sample has several numbers or labels; or as `ensemble` and `calibrate` do.
        """
        from asynckfold.results.intervals import alpha_problems, intervals_of

        refuse(alpha_problems(alpha))
        _live_models(self)
        name = _name_of(self, candidate)
        objective, parts = self._held_out([name])
        jobs = {job.key: job for job in self.plan.jobs if job.candidate == name}
        layers = zip(self.folds, parts, layers_of(self.folds), strict=True)
        first = {jobs[fold.key]: part for fold, part, layer in layers if layer == 0}
        values = _ensemble_of(self, list(first))._values(inputs)
        return intervals_of(objective, list(first.values()), values, alpha)

    def _held_out(self, names: Sequence[str]) -> tuple[Objective, list[HeldOutFold]]:
        from asynckfold.results.cross_fitting import held_out_folds

        with RunStore.read(self.root_dir) as reader:
            targets = reader.splits()[1]
        transform = None if self._load_models is None else self._load_models().transform
        return held_out_folds(self.plan, self.folds, self.results, names, targets, transform)

    def save_splits(self, path: str | Path) -> None:
        """Write the folds as JSON, which ``kfolds=path`` reads: the same folds, and results.

        Each is ``{"train": [...], "valid": [...]}`` of positions; with `inner_valid` where a part
        is set aside, and `repeat` after the first one.
        """
        from asynckfold.system.files import write_whole

        rows = []
        for fold in self.folds:
            row: dict[str, Any] = {"train": fold.train.tolist(), "valid": fold.valid.tolist()}
            row |= {"inner_valid": fold.inner_valid.tolist()} if fold.inner_valid.size else {}
            rows.append(json.dumps(row | ({"repeat": fold.repeat} if fold.repeat else {})))
        write_whole(Path(path), ("[" + ",\n ".join(rows) + "]\n").encode())

    def pooled_scores(self) -> pd.DataFrame:
        """Return scores of all out-of-fold outputs at once, beside the means over folds.

        Scores that compare samples differ: the ROC AUC ranks samples across folds, so that models
        of other scales lower it, and R² takes the mean of all targets instead of that of a fold.

        Returns
        -------
        pandas.DataFrame
            One row per candidate, in the caller's order: ``pooled_roc_auc`` and ``mean_roc_auc``,
            and so on. With repeats, ``pooled_`` is the mean over them. NaN of candidates without a
            score on every fold, and of scores that the user's code reports.

        Raises
        ------
        InputError
            The run kept no outputs; or these results were read from the run's folder, and a score
            is a function, or samples have weights.
        """
        import pandas as pd

        from asynckfold.results.pooled import pooled_rows

        live = None if self._load_models is None else self._load_models()
        if live is None and "sample_weight" in self.plan.recipe:
            rule, received = "scores need sample_weight", "a run's folder, which holds none"
            raise InputError.one(rule, received, "Make the call again, which trains nothing twice.")
        scoring = list(self.plan.scoring) if live is None else live.settings.scoring
        with RunStore.read(self.root_dir) as reader:
            targets = reader.splits()[1]
        transform = None if live is None else live.transform
        arrays = self._kept(), targets, None if live is None else live.weights
        rows = pooled_rows(self.plan, self.folds, self.candidates, *arrays, scoring, transform)
        frame: pd.DataFrame = pd.DataFrame(list(rows))
        return frame

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
        comparison: EstimatorComparison = _live_models(self).compare_with(estimators)
        return comparison

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
        """Write the HTML report, its figures and tables; return the path of the page.

        A cell of a notebook shows a link to it, and does not wait for the PNG files.
        """
        if self._build_report is None:
            raise ValueError("these results have no run on disk; use `asynckfold report DIR`")
        return tables.ReportPath(self._build_report())

    def plot(self, kind: str, ax: Any = None) -> Any:
        """Draw one figure of the report; `asynckfold.plots` draws some of them from arrays, too.

        Parameters
        ----------
        kind : str
            ``"scores"``, ``"curves"``, ``"loss_vs_time"``, ``"class_accuracy"``, ``"confusion"``,
            ``"probabilities"``, ``"predictions"``, ``"cpu_usage"``, ``"timeline"`` or
            ``"speedup"``; of a grid ``"importance"``, ``"effects"``, ``"heatmap"`` or
            ``"parallel"``.
        ax : matplotlib.axes.Axes, optional
            Draw on these axes: scores, curves, confusion, timeline, importance, heatmap and
            parallel do. Curves then shows the validation loss; a sequence of axes takes all of its
            panels.

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
        return tables.as_html(*self._text()) + tables.image_html(_scores_svg(self)) + page


def _scores_svg(results: CVResults) -> bytes:
    """Return the figure of the scores; empty if there is none to draw."""
    buffer = io.BytesIO()
    with contextlib.suppress(AsyncKFoldError, OSError):
        if results._draw is not None:
            results._draw("scores", None).savefig(buffer, format="svg")
    return buffer.getvalue()


def _name_of(results: CVResults, candidate: str | None) -> str:
    return results.candidates[results.best_index_].name if candidate is None else candidate


def _live_models(results: CVResults) -> Any:
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


def _blend_of(
    results: CVResults, weights: Mapping[str, float], metric: str, scores: Floats
) -> Blend:
    from asynckfold.results.ensemble import Blend

    by_name = {name: done_jobs(results.plan, results.results, name) for name in weights}
    jobs = [job for each in by_name.values() for job in each]
    plain = _ensemble_of(results, jobs)
    shared = {item.name: getattr(plain, item.name) for item in fields(plain)}
    each = tuple(weights[job.candidate] / len(by_name[job.candidate]) for job in jobs)
    text = " + ".join(f"{weight:.3g} {name}" for name, weight in weights.items())
    changes = {"candidate": text, "_weights": each, "weights": weights}
    return Blend(**{**shared, **changes, "metric": metric, "scores": scores})


def single(results: CVResults, candidate: str | None, fold: int | str, repeat: int) -> FoldEnsemble:
    """Return one trained model as a predictor."""
    _live_models(results)
    if fold == "all":
        refit = results.on_all_samples(candidate)
        return _ensemble_of(refit, refit.plan.jobs)
    name = _name_of(results, candidate)
    return _ensemble_of(results, done_jobs(results.plan, results.results, name, fold, repeat))


def refit_of(results: CVResults, name: str) -> CVResults | None:
    """Return the results of training a candidate on all samples, if that is done."""
    if results._load_refit is None:
        return None
    refit = results._load_refit(next(row for row in results.candidates if row.name == name))
    return refit if refit is not None and refit.counts["done"] else None


@uncollected()
def read_results(store: RunReader) -> CVResults:
    """Return the results of a run on disk, complete or not."""
    folds, targets = store.splits()
    plan, results = store.plan, store.results()
    whole = (plan, results) if plan.nested else None
    if plan.nested:
        folds = outer_folds(folds)
        plan = replace(plan.outer, folds=folds_fingerprint(folds))
        results = {job.id: results[job.id] for job in plan.jobs if job.id in results}
    return CVResults(
        plan=plan,
        folds=folds,
        n_samples=len(targets),
        results=results,
        seconds=math.fsum(item.packed_seconds for item in store.sessions()),
        baseline=store.baseline,
        root_dir=store.root,
        bit_identity=reproducibility_of(store.plan, store.software()),
        _whole=whole,
    )


def refit_note(store: RunReader) -> str:
    """Return how the refit of the best candidate ended; ``""`` if there was none."""
    return next((item.text for item in reversed(store.events()) if item.kind == "refit"), "")
