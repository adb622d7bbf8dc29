"""The trained models of a run: rebuilt as its jobs built them, and checked by their outputs.

::

    RunModels ── model(job): seeded, built, trained weights
       └─ predictor(jobs) ── samples ─ eval view ─┬─ preprocess of fold 0 ─ model 0 ─┐
                                               └─ preprocess of fold 1 ─ model 1 ─┴─►

A fitted `preprocess` is not stored: it is fitted again, on the same samples. Each model must give
the outputs that the run recorded for some held-out samples; else the transforms, `preprocess` or
the model changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from asynckfold.api.arguments import Settings
from asynckfold.data.arrays import DataArguments, as_given, is_table
from asynckfold.data.batches import Batches, Collation, one_by_one, structure
from asynckfold.data.dataset import SampleSource, open_inputs
from asynckfold.data.passes import SampleCheck, SampleFacts
from asynckfold.data.reading import CheckedDataset, Here, check_samples, with_facts
from asynckfold.data.table_codes import kinds_of, names_columns, table_like, with_columns
from asynckfold.data.transforms.steps import Step
from asynckfold.data.transforms.trees import Array, Misfit, kind_of, kinds_text
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.folds import Fold, Indices
from asynckfold.jobs.objective import Transform
from asynckfold.jobs.plan import Job
from asynckfold.jobs.recipe import Recipe
from asynckfold.jobs.result import DONE
from asynckfold.jobs.schema import Schema
from asynckfold.results.candidates import candidates
from asynckfold.results.cv_results import CVResults
from asynckfold.results.ensemble import FoldEnsemble, Outputs
from asynckfold.results.estimator_scores import EstimatorComparison
from asynckfold.results.out_of_fold import of_one_width, wide, without_outputs
from asynckfold.results.scoring import reported_names, resolve, score_of_rows
from asynckfold.store import RunStore
from asynckfold.training import preprocessing, seeding, setup
from asynckfold.training.calls import outputs_of
from asynckfold.training.isolation.guard import isolated
from asynckfold.training.target_transform import FittedTargets, fit_targets

CHECKED = 8
"""Held-out samples of each fold that are compared with what was recorded."""

FINE, COARSE = 1e-3, 1e-2
"""Largest difference there, as a share of the outputs' size: batches of other sizes and other
threads round otherwise, in bfloat16, and on GPUs that compute in TF32, to some thousandths."""


# Trained models that predict, of a live run or of a file


@dataclass(frozen=True)
class InputForm:
    """What samples must be, as the data set of the run holds them. Plain values."""

    form: str  # of a sample, see `transforms.Kind`
    raw_shape: tuple[int, ...]  # of a sample
    shape: tuple[int, ...]  # after the eval transform, before `preprocess`
    dtype: str  # likewise
    columns: tuple[str | int, ...] | None  # of a pandas table; inputs are taken by name
    undressed: bool  # the ``transform`` of a data set is replaced
    exact: bool  # float64 arrays stay as they are
    preprocessed: bool
    batch_size: int
    several: str = ""  # structure, shapes and types of several inputs; instead of shape and dtype
    # what each column of a table holds, which `preprocess` gets as a table; `shape` is after it
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Member:
    """A trained model, and what its training part fitted."""

    model: nn.Module
    fit: Any  # of `preprocess`; None without one
    precision: str
    columns: Schema | None = None  # of outputs that are trees
    target: FittedTargets | None = None  # of `target_transform`

    def outputs(self, seen: Any) -> Outputs:
        """Return the outputs of samples after the eval transform."""
        if self.fit is not None:
            rows = seen.numpy() if isinstance(seen, torch.Tensor) else seen
            seen = preprocessing.transform(self.fit, rows)
        with torch.no_grad():
            outputs = outputs_of(self.model, seen, self.precision)
        joined = outputs if self.columns is None else self.columns.join(outputs)
        found: Outputs = joined.float().numpy()
        return found if self.target is None else self.target.inverse(found)


@dataclass(frozen=True, eq=False)
class PredictionModels:
    """All that predicts: form of the samples, eval transform, models."""

    form: InputForm
    steps: tuple[Step, ...]  # of the eval transform
    members: Sequence[Member]
    channels_last: tuple[bool, ...]  # by model
    default_dtype: torch.dtype  # of the run
    output_transform: Any = None  # the user's, of tensors
    about: Mapping[str, Any] = field(default_factory=dict)  # jobs, and fingerprints of the run
    collation: Collation | None = None  # makes batches, if the user's `collate_fn` does
    target: Any = None  # then: that of one sample

    def outputs(self, inputs: Any) -> Iterator[Outputs]:
        """Yield what each model says of each batch, shape (models, batch, ...)."""
        form = self.form
        with seeding.preserved():
            batch_of, count = self._opened(inputs)
        for low in range(0, count, form.batch_size):
            rows = np.arange(low, min(count, low + form.batch_size))
            with seeding.preserved():
                batch = batch_of(rows)
                each, columns = (
                    [one.outputs(batch) for one in self.members],
                    self.members[0].columns,
                )
                is_ragged = columns is not None and columns.ragged
                outputs = np.stack(wide(*each) if is_ragged else each)
            refuse(_nan_problems(outputs, rows))
            yield outputs

    def _opened(self, inputs: Any) -> tuple[Callable[[Indices], Any], int]:
        """Return what makes a batch of some of the samples, and their number."""
        form, collates = self.form, self.collation is not None
        if form.kinds:
            table = table_like(inputs, form.columns or (), form.kinds)
            return table.iloc.__getitem__, len(table)
        samples = open_inputs(
            _by_name(form.columns, inputs),
            undress=form.undressed,
            exact=form.exact,
            several=form.form == "tree" if collates else bool(form.several),
            lists=collates,
        )
        targets = np.zeros(len(samples), np.int64)
        if collates:
            targets = np.zeros((len(samples), *self.target.shape[1:]), self.target.dtype)
        data = one_by_one(samples, self.steps, targets, self.collation)

        def batch_of(rows: Indices) -> Any:
            batch = _as_the_run_saw_it(form, data, rows)
            refuse(_kind_problems(form, batch, collated=collates))
            return batch

        return batch_of, len(samples)


def transformed(data: Batches, rows: Indices, preprocessed: bool) -> Any:
    """Return the models' inputs, before each model's `preprocess` if there is one."""
    return torch.from_numpy(data.inputs(rows)) if preprocessed else data.eval(rows)[0]


def _as_the_run_saw_it(form: InputForm, data: Batches, rows: Indices) -> Any:
    # Steps of the user see samples that they may not be made for.
    try:
        batch = transformed(data, rows, form.preprocessed)
        if not form.preprocessed:
            return batch
        dtype = getattr(torch, form.dtype)
        # What was fitted in one precision computes in another with other digits.
        return batch.to(dtype) if dtype.is_floating_point else batch
    except InputError:
        raise
    except Misfit as error:
        rule = "inputs must have the structure of the run's samples"
        raise InputError.one(rule, str(error), "Pass the same keys, shapes and types.") from error
    except Exception as error:
        rule = "inputs must be samples as the run's data set has them, before its transforms"
        received = f"{type(error).__name__} on samples {rows[0]} to {rows[-1]}: {error}"
        remedy = f"Its first has the form {form.form!r} and the shape {form.raw_shape}."
        raise InputError.one(rule, received, remedy) from error


def columns_of(dataset: Any) -> tuple[Any, ...] | None:
    """Return the columns of a pandas table (X, or X of a pair); None of anything else."""
    table = dataset[0] if isinstance(dataset, tuple) else dataset
    return tuple(table.columns) if hasattr(table, "columns") and hasattr(table, "iloc") else None


def _by_name(columns: Sequence[Any] | None, inputs: Any) -> Any:
    """Return samples with the columns of a table by name, if both are tables."""
    table = inputs[0] if isinstance(inputs, tuple) and inputs else inputs
    if columns is None or not is_table(table):
        return inputs
    table = with_columns(table, columns, "inputs")
    return (table, *inputs[1:]) if isinstance(inputs, tuple) else table


def _kind_problems(form: InputForm, batch: Any, *, collated: bool) -> Iterator[Problem]:
    if form.several:
        received = structure(batch) if collated else kinds_text(batch, samples=True)
        wanted = form.several
        fits = received == wanted
    else:
        dtype, shape = str(batch.dtype)[6:], tuple(batch.shape[1:])
        wanted, received = f"{form.dtype} {form.shape}", f"{dtype} {shape}"
        # Whole numbers or not: what was fitted takes both.
        fits = shape == form.shape and (dtype == form.dtype or form.preprocessed)
    if fits:
        return
    yield Problem(
        f"each of the inputs must become {wanted} by the run's transforms, as its samples did",
        received,
        "Pass samples as the run's data set has them, of shape (n, ...).",
    )


def _nan_problems(outputs: Outputs, rows: Indices) -> Iterator[Problem]:
    """Yield that an output is NaN, for which a class would be predicted all the same."""
    is_missing = np.isnan(outputs).any(axis=(0, *range(2, outputs.ndim)))
    if is_missing.any():
        yield Problem(
            "the models must give numbers for each of the inputs",
            f"NaN for sample {rows[is_missing][0]}",
            "Leave such samples out, or fill in what is missing in them.",
        )


@dataclass(frozen=True, eq=False)
class TrainedModels:
    """Models that predict, and can be saved; none draws on the caller's generators."""

    load: Callable[[], PredictionModels]  # builds them at the first use

    def __reduce__(self) -> tuple[Any, ...]:
        with seeding.preserved():
            return _ready, (self.load(),)

    def __call__(self, inputs: Any) -> Iterator[Outputs]:
        """Yield what each model says of each batch of samples, shape (models, batch, ...)."""
        with seeding.preserved():
            models = self.load()
        yield from models.outputs(inputs)

    @property
    def modules(self) -> list[nn.Module]:
        """The models."""
        with seeding.preserved():
            return [member.model for member in self.load().members]

    def save(self, ensemble: FoldEnsemble, path: Path, *, overwrite: bool) -> None:
        """Write the models to a file, see `save_models`."""
        from asynckfold.api.saved_models import save_models

        with seeding.preserved():
            save_models(ensemble, self.load(), path, overwrite=overwrite)

    def expects(self) -> dict[str, str]:
        """Describe what the first model takes."""
        from asynckfold.api.saved_models import expected_by

        with seeding.preserved():
            return expected_by(self.load())


def _ready(models: PredictionModels) -> TrainedModels:
    return TrainedModels(lambda: models)


# The models of a run


def trained_model(
    results: CVResults, recipe: Recipe, default_dtype: torch.dtype, job: Job
) -> nn.Module:
    """Return the module of a job that is done, in evaluation mode, on the CPU."""
    weights = results.state_dict(job.candidate, job.fold, job.repeat)
    with seeding.preserved(), isolated():
        torch.set_default_dtype(default_dtype)
        model = setup.initial_model(recipe, results.plan, job, torch.device("cpu"))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        rule = "the model must be the one that was trained"
        remedy = "Pass the model of the run."
        raise InputError.one(rule, f"{job.model}: {error}", remedy) from error
    return model.eval()


@dataclass(frozen=True, eq=False)
class RunModels:
    """Makes the trained models of a run again."""

    results: CVResults
    recipe: Recipe  # the live objects that it was started with
    settings: Settings
    facts: SampleFacts | None  # about the run's samples; without them, some are read again
    default_dtype: torch.dtype  # of the call

    @property
    def transform(self) -> Transform | None:
        """The user's `output_transform`, of arrays."""
        return self.settings.transform

    @cached_property
    def targets(self) -> Array:
        """The run's targets."""
        with RunStore.read(self.results.root_dir) as reader:
            return reader.splits()[1]

    @property
    def weights(self) -> Array | None:
        """Weights of samples, where these differ."""
        weights = self.settings.sample_weight
        return None if weights is None or not np.ptp(weights) else np.asarray(weights, np.float64)

    def model(self, job: Job) -> nn.Module:
        """Return the module of a job that is done, in evaluation mode, on the CPU."""
        return trained_model(self.results, self.recipe, self.default_dtype, job)

    def predictor(self, jobs: Sequence[Job]) -> TrainedModels:
        """Return the models of these jobs, which predict."""
        return TrainedModels(cache(lambda: self._prediction(jobs)))

    def train_scores(self) -> dict[str, dict[str, float]]:
        """Return the scores of each job that is done on its training part, by its id."""
        results, scores = self.results, dict[str, dict[str, float]]()
        plan, scoring = results.plan, self.settings.scoring
        with seeding.preserved():
            source, steps = self.samples
            data = one_by_one(source, steps, self.targets, self.collation)
            form = self._form(source, data)
            for job in plan.jobs:
                result, objective = results.results.get(job.id), plan.objective_of(job.model)
                if result is None or result.status != DONE:
                    continue
                (member,) = self._members([job], data, form)
                train = plan.fold_of(job, results.folds).train
                batches = np.split(train, range(form.batch_size, len(train), form.batch_size))
                parts = [
                    member.outputs(transformed(data, some, form.preprocessed)) for some in batches
                ]
                is_ragged = objective.columns is not None and objective.columns.ragged
                outputs = of_one_width(parts) if is_ragged else np.concatenate(parts)
                computed = resolve(scoring, objective, self.transform)
                for name in reported_names(scoring, objective.kind):
                    del computed[name]
                scores[job.id] = {
                    name: score_of_rows(score, outputs, self.targets, self.weights, train)
                    for name, score in computed.items()
                }
        return scores

    def compare_with(self, estimators: Any) -> EstimatorComparison:
        """Fit scikit-learn estimators on the folds of the run, see `CVResults.compare_with`."""
        from asynckfold.integrations import sklearn

        results, pairs = self.results, sklearn.named_estimators(estimators)
        objective = results.plan.objective_of("")
        refuse(sklearn.estimator_problems(pairs, self.settings.scoring, objective))
        with seeding.preserved():
            data = one_by_one(*self.samples, self.targets)
            first = "a collate_fn" if self.collation else data.eval(np.zeros(1, np.int64))[0]
            if not isinstance(first, torch.Tensor):
                rule = "estimators need samples of one array"
                received = first if self.collation else kinds_text(first, samples=True)
                remedy = "Fit them on (fold.train, fold.valid) of results.folds yourself."
                raise InputError.one(rule, received, remedy)
            rows = data.inputs(np.arange(data.n_samples))
        estimators, errors = sklearn.on_folds(
            pairs,
            rows,
            data.targets.numpy(),
            results.folds,
            self.recipe.preprocess,
            self.settings.scoring,
            objective,
            self.given.codes,
            self.weights,
        )
        # Without `error_score`, which is not a sample.
        rows_of_run = candidates(results.plan, results.results)
        metric, folds = results.plan.scoring[0], results.folds
        return EstimatorComparison(metric, rows_of_run, estimators, folds, errors)

    def estimator(self, results: CVResults, candidate: str | None) -> Any:
        """Return a fitted estimator of scikit-learn, see `CVResults.estimator`."""
        from asynckfold.api.estimator import fitted

        return fitted(results, self, candidate)

    @cached_property
    def given(self) -> DataArguments:
        """The run's data set and transforms."""
        return as_given(
            self.settings.dataset,
            self.settings.train_transform,
            self.settings.eval_transform,
            preprocessed=self.recipe.preprocess is not None,
            by_name=names_columns(self.recipe.preprocess),
        )

    @cached_property
    def _checked(self) -> CheckedDataset:
        given = self.given
        check = SampleCheck(
            given.dataset,
            given.train_transform,
            given.eval_transform,
            collates=self.settings.collate_fn is not None,
        )
        return check_samples(check, Here()) if self.facts is None else with_facts(check, self.facts)

    @cached_property
    def collation(self) -> Collation | None:
        """What makes batches of samples, if the user passed it."""
        if self.settings.collate_fn is None:
            return None
        columns = self.results.plan.objective_of("").targets
        return Collation(self.settings.collate_fn, self._checked.facts.form, columns)

    @cached_property
    def samples(self) -> tuple[SampleSource, tuple[Step, ...]]:
        """The run's samples, and the transforms of its eval view."""
        source, views = self._checked.source, self._checked.views
        refuse(views.problems)
        if len(source) != self.results.n_samples:
            rule = f"the data set must have the run's {self.results.n_samples} samples"
            refuse([Problem(rule, str(len(source)), "Pass the data set of the run.")])
        return source, views.eval.pipeline

    def _prediction(self, jobs: Sequence[Job]) -> PredictionModels:
        """Build the models of some jobs, and check them by their outputs."""
        source, steps = self.samples
        data = one_by_one(source, steps, self.targets, self.collation)
        form, plan = self._form(source, data), self.results.plan
        members = self._members(jobs, data, form)
        if form.kinds:
            seen = preprocessing.transform(members[0].fit, data.inputs(np.zeros(1, np.int64)))
            form = replace(form, shape=tuple(seen.shape[1:]), dtype="float32")
        return PredictionModels(
            form,
            steps,
            members,
            tuple(map(plan.is_channels_last, jobs)),
            self.default_dtype,
            self.settings.output_transform,
            {
                "jobs": [job.id for job in jobs],
                "plan": plan.fingerprint,
                "results": self.results.fingerprint,
            },
            self.collation,
            self.targets[:1],
        )

    def _form(self, source: SampleSource, data: Batches) -> InputForm:
        """Return what samples must be: that of the run's first one."""
        kind = kind_of(source.read(0)[0])
        preprocessed = self.recipe.preprocess is not None
        first = transformed(data, np.zeros(1, np.int64), preprocessed)
        collates = self.collation is not None
        is_one = isinstance(first, torch.Tensor) and not collates
        return InputForm(
            kind.form,
            kind.shape,
            tuple(first.shape[1:]) if is_one else (),
            str(first.dtype)[6:] if is_one else "",
            columns_of(self.settings.dataset),
            bool(source.steps),
            self.given.exact,
            preprocessed,
            self.results.plan.params.eval_batch_size,
            structure(first) if collates else "" if is_one else kinds_text(first, samples=True),
            () if self.given.codes is None else kinds_of(self.given.codes.dtypes),
        )

    def _members(self, jobs: Sequence[Job], data: Batches, form: InputForm) -> list[Member]:
        plan, preprocess = self.results.plan, self.recipe.preprocess
        rows = None if preprocess is None else data.inputs(np.arange(data.n_samples))
        members = []
        for job in jobs:
            fold, fit = plan.fold_of(job, self.results.folds), None
            if rows is not None:
                codes = self.given.codes
                fit = preprocessing.fit_on(preprocess, rows, data.targets, fold.fitted, codes)
            columns, target = plan.objective_of(job.model).columns, self.recipe.target_transform
            if target is not None:
                target = fit_targets(target, data.targets, fold.fitted)
            precision = plan.params.precision_on_cores
            member = Member(self.model(job), fit, precision, columns, target)
            refuse(self._difference(member, job, fold, data, form))
            members.append(member)
        if without_outputs({job.id: self.results.results[job.id] for job in jobs}):
            warnings.warn(
                "the run kept no outputs of held-out samples (see keep_outputs_gib), so nothing "
                "shows that data set, transforms and preprocess are those of the run",
                stacklevel=2,
            )
        return members

    def _difference(
        self, member: Member, job: Job, fold: Fold, data: Batches, form: InputForm
    ) -> Iterator[Problem]:
        """Yield that a model's outputs for held-out samples are not those that the run recorded."""
        plan, stored = self.results.plan, self.results.results[job.id].outputs
        if stored is None:
            return  # the caller warns of it
        exact = plan.params.precision == "fp32" and plan.device_of(job.candidate) == "cpu"
        some = np.unique(np.linspace(0, len(fold.valid) - 1, CHECKED).round().astype(np.int64))
        # The outputs of some models depend on the whole batch: then compare the run's first one.
        for places in (some, np.arange(min(len(fold.valid), form.batch_size))):
            recorded = stored[places]
            rows = fold.valid[places]
            outputs = member.outputs(transformed(data, rows, form.preprocessed))
            if member.columns is not None and member.columns.ragged:
                outputs, recorded = wide(outputs, recorded)
            size = float(np.abs(recorded[np.isfinite(recorded)]).max(initial=0.0))
            near = (FINE if exact else COARSE) * size
            if outputs.shape == recorded.shape and np.allclose(
                outputs, recorded, rtol=0, atol=near
            ):
                return
        difference = "in shape"
        if outputs.shape == recorded.shape:
            with np.errstate(invalid="ignore"):
                difference = f"by up to {np.abs(outputs - recorded).max():.2g} of {size:.2g}"
        yield Problem(
            "the model of a fold must give the outputs that the run recorded for held-out samples",
            f"{job.id}, which differs {difference}",
            "Pass the data set, transforms, preprocess and models of the run. Models that draw "
            "random numbers in evaluation cannot predict again.",
        )
