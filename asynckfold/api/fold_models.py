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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from asynckfold.api.prediction import (
    BatchForm,
    InputForm,
    Member,
    PredictionModels,
    columns_of,
    outputs_by_batch,
    transformed,
)
from asynckfold.api.saved_models import TrainedModels
from asynckfold.data.arrays import DataArguments, as_given
from asynckfold.data.batches import Batches, one_by_one
from asynckfold.data.collation import Collation, structure
from asynckfold.data.dataset import SampleSource
from asynckfold.data.materialize import CheckedDataset, Here, check_samples, with_facts
from asynckfold.data.range_reader import SampleCheck, SampleFacts
from asynckfold.data.transforms.samples import kind_of
from asynckfold.data.transforms.steps import Step
from asynckfold.data.transforms.trees import Array, kinds_text
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.folds import Fold
from asynckfold.jobs.objective import Transform
from asynckfold.jobs.plan import Job
from asynckfold.jobs.recipe import Recipe
from asynckfold.results.candidates import candidates
from asynckfold.results.cv_results import CVResults
from asynckfold.results.ensemble import Outputs
from asynckfold.results.estimator_scores import EstimatorComparison
from asynckfold.results.out_of_fold import wide, without_outputs
from asynckfold.training import preprocessing, seeding, setup
from asynckfold.training.isolation.guard import isolated

CHECKED = 8
"""Held-out samples of each fold that are compared with what was recorded."""

FINE, COARSE = 1e-3, 1e-2
"""Largest difference there, as a share of the outputs' size: batches of other sizes and other
threads round otherwise, in bfloat16, and on GPUs that compute in TF32, to some thousandths."""


@dataclass(frozen=True, eq=False)
class RunModels:
    """Makes the trained models of a run again.

    Parameters
    ----------
    results : CVResults
        Of the run.
    recipe : Recipe
        The live objects that it was started with.
    dataset, train_transform, eval_transform
        As `AsyncKFold` got them.
    targets : callable
        Returns the run's targets.
    facts : SampleFacts or None
        What the run found of its samples; None: some are read again.
    transform : callable, optional
        The user's `output_transform`, of arrays.
    output_transform : callable, optional
        The same, of tensors.
    scoring
        The user's scores.
    collate_fn : callable, optional
        The user's, which makes batches.
    """

    results: CVResults
    recipe: Recipe
    dataset: Any
    train_transform: Any
    eval_transform: Any
    targets: Callable[[], Array]
    facts: SampleFacts | None = None
    transform: Transform | None = None
    output_transform: Any = None
    scoring: Any = None
    collate_fn: Any = None
    default_dtype: torch.dtype = torch.float32

    def model(self, job: Job) -> nn.Module:
        """Return the module of a job that is done, in evaluation mode, on the CPU."""
        weights = self.results.state_dict(job.candidate, job.fold, job.repeat)
        with seeding.preserved(), isolated():
            torch.set_default_dtype(self.default_dtype)
            model = setup.initial_model(self.recipe, self.results.plan, job, torch.device("cpu"))
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            rule = "the model must be the one that was trained"
            remedy = "Pass the model of the run."
            raise InputError.one(rule, f"{job.model}: {error}", remedy) from error
        return model.eval()

    def predictor(self, jobs: Sequence[Job]) -> TrainedModels:
        """Return the models of these jobs, which predict."""
        models = RebuiltModels(self, jobs)
        return TrainedModels(models.prediction, models.outputs)

    def compare_with(self, estimators: Any) -> EstimatorComparison:
        """Fit scikit-learn estimators on the folds of the run, see `CVResults.compare_with`."""
        from asynckfold.integrations import sklearn

        results, pairs = self.results, sklearn.named_estimators(estimators)
        objective = results.plan.objective_of("")
        refuse(sklearn.estimator_problems(pairs, self.scoring, objective))
        with seeding.preserved():
            if self.collate_fn is not None:
                rule = "estimators need samples of one array"
                remedy = "Fit them on (fold.train, fold.valid) of results.folds yourself."
                raise InputError.one(rule, "a collate_fn", remedy)
            data = one_by_one(*self.samples, self.targets())
            first = data.eval(np.zeros(1, np.int64))[0]
            if not isinstance(first, torch.Tensor):
                rule = "estimators need samples of one array"
                remedy = "Fit them on (fold.train, fold.valid) of results.folds yourself."
                raise InputError.one(rule, kinds_text(first, samples=True), remedy)
            rows = data.inputs(np.arange(data.n_samples))
        scores = sklearn.on_folds(
            pairs,
            rows,
            data.targets.numpy(),
            results.folds,
            self.recipe.preprocess,
            self.scoring,
            objective,
        )
        # Without `error_score`, which is not a sample.
        rows_of_run = candidates(results.plan, results.results)
        return EstimatorComparison(results.plan.scoring[0], rows_of_run, scores, results.folds)

    @cached_property
    def given(self) -> DataArguments:
        """The run's data set and transforms."""
        return as_given(
            self.dataset,
            self.train_transform,
            self.eval_transform,
            preprocessed=self.recipe.preprocess is not None,
        )

    @cached_property
    def _checked(self) -> CheckedDataset:
        given = self.given
        check = SampleCheck(
            given.dataset,
            given.train_transform,
            given.eval_transform,
            collates=self.collate_fn is not None,
        )
        return check_samples(check, Here()) if self.facts is None else with_facts(check, self.facts)

    @cached_property
    def collation(self) -> Collation | None:
        """What makes batches of samples, if the user passed it."""
        if self.collate_fn is None:
            return None
        columns = self.results.plan.objective_of("").targets
        return Collation(self.collate_fn, self._checked.facts.form, columns)

    @cached_property
    def samples(self) -> tuple[SampleSource, tuple[Step, ...]]:
        """The run's samples, and the transforms of its eval view."""
        source, views = self._checked.source, self._checked.views
        refuse(views.problems)
        if len(source) != self.results.n_samples:
            rule = f"the data set must have the run's {self.results.n_samples} samples"
            refuse([Problem(rule, str(len(source)), "Pass the data set of the run.")])
        return source, views.eval.pipeline


class RebuiltModels:
    """Some models of a run, rebuilt and checked at their first prediction.

    Parameters
    ----------
    run : RunModels
        The run.
    jobs : sequence of Job
        Which trained the models.
    """

    def __init__(self, run: RunModels, jobs: Sequence[Job]) -> None:
        self.run, self.jobs = run, jobs

    def outputs(self, inputs: Any) -> Iterator[Outputs]:
        """Yield what each model says of each batch, shape (models, batch, ...)."""
        with seeding.preserved():
            form, steps = self.form, self.run.samples[1]
            collation = self.run.collation
        batches = None if collation is None else BatchForm(collation, self.run.targets()[:1])
        yield from outputs_by_batch(
            form, steps, self.run.dataset, lambda: self._members, inputs, batches
        )

    def prediction(self) -> PredictionModels:
        """Return the models, built and checked at the first use."""
        run, plan = self.run, self.run.results.plan
        return PredictionModels(
            self.form,
            run.samples[1],
            self._members,
            tuple(map(plan.is_channels_last, self.jobs)),
            run.default_dtype,
            run.output_transform,
            {
                "jobs": [job.id for job in self.jobs],
                "plan": plan.fingerprint,
                "results": run.results.fingerprint,
            },
        )

    @cached_property
    def form(self) -> InputForm:
        """What samples must be: that of the run's first one."""
        source, data = self.run.samples[0], self._own
        kind = kind_of(source.read(0)[0])
        preprocessed = self.run.recipe.preprocess is not None
        first = transformed(data, np.zeros(1, np.int64), preprocessed)
        collates = self.run.collation is not None
        is_one = isinstance(first, torch.Tensor) and not collates
        return InputForm(
            kind.form,
            kind.shape,
            tuple(first.shape[1:]) if is_one else (),
            str(first.dtype)[6:] if is_one else "",
            columns_of(self.run.dataset),
            bool(source.steps),
            self.run.given.exact,
            preprocessed,
            self.run.results.plan.params.eval_batch_size,
            structure(first) if collates else "" if is_one else kinds_text(first, samples=True),
        )

    @cached_property
    def _own(self) -> Batches:
        """The run's samples."""
        return one_by_one(*self.run.samples, self.run.targets(), self.run.collation)

    @cached_property
    def _members(self) -> list[Member]:
        run, data, preprocess = self.run, self._own, self.run.recipe.preprocess
        plan = run.results.plan
        rows = None if preprocess is None else data.inputs(np.arange(data.n_samples))
        members = []
        for job in self.jobs:
            fold, fit = plan.fold_of(job, run.results.folds), None
            if rows is not None:
                fit = preprocessing.fit_on(preprocess, rows, data.targets, fold.fitted)
            columns = plan.objective_of(job.model).columns
            member = Member(run.model(job), fit, plan.params.precision_on_cores, columns)
            refuse(self._difference(member, job, fold))
            members.append(member)
        if without_outputs({job.id: run.results.results[job.id] for job in self.jobs}):
            warnings.warn(
                "the run kept no outputs of held-out samples (see keep_outputs_gib), so nothing "
                "shows that data set, transforms and preprocess are those of the run",
                stacklevel=2,
            )
        return members

    def _difference(self, member: Member, job: Job, fold: Fold) -> Iterator[Problem]:
        """Yield that a model's outputs for held-out samples are not those that the run recorded."""
        plan, stored = self.run.results.plan, self.run.results.results[job.id].outputs
        if stored is None:
            return  # the caller warns of it
        exact = plan.params.precision == "fp32" and plan.device_of(job.candidate) == "cpu"
        some = np.unique(np.linspace(0, len(fold.valid) - 1, CHECKED).round().astype(np.int64))
        # The outputs of some models depend on the whole batch: then compare the run's first one.
        for places in (some, np.arange(min(len(fold.valid), self.form.batch_size))):
            recorded = stored[places]
            rows = fold.valid[places]
            outputs = member.outputs(transformed(self._own, rows, self.form.preprocessed))
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
