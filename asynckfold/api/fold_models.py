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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from asynckfold.api.arguments import Settings
from asynckfold.api.prediction import (
    InputForm,
    Member,
    PredictionModels,
    columns_of,
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
from asynckfold.results.estimator_scores import EstimatorComparison
from asynckfold.results.out_of_fold import wide, without_outputs
from asynckfold.store import RunStore
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
    settings : Settings
        The arguments of `AsyncKFold`.
    facts : SampleFacts or None
        Facts about the run's samples; None: some are read again.
    default_dtype : torch.dtype
        That of the call.
    """

    results: CVResults
    recipe: Recipe
    settings: Settings
    facts: SampleFacts | None
    default_dtype: torch.dtype

    @property
    def transform(self) -> Transform | None:
        """The user's `output_transform`, of arrays."""
        return self.settings.transform

    @cached_property
    def targets(self) -> Array:
        """The run's targets."""
        with RunStore.read(self.results.root_dir) as reader:
            return reader.splits()[1]

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
        return TrainedModels(cache(lambda: self._prediction(jobs)))

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
        )
        # Without `error_score`, which is not a sample.
        rows_of_run = candidates(results.plan, results.results)
        metric, folds = results.plan.scoring[0], results.folds
        return EstimatorComparison(metric, rows_of_run, estimators, folds, errors)

    @cached_property
    def given(self) -> DataArguments:
        """The run's data set and transforms."""
        return as_given(
            self.settings.dataset,
            self.settings.train_transform,
            self.settings.eval_transform,
            preprocessed=self.recipe.preprocess is not None,
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
        return PredictionModels(
            form,
            steps,
            self._members(jobs, data, form),
            tuple(map(plan.is_channels_last, jobs)),
            self.default_dtype,
            self.settings.output_transform,
            {
                "jobs": [job.id for job in jobs],
                "plan": plan.fingerprint,
                "results": self.results.fingerprint,
            },
            self.settings.dataset,
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
        )

    def _members(self, jobs: Sequence[Job], data: Batches, form: InputForm) -> list[Member]:
        plan, preprocess = self.results.plan, self.recipe.preprocess
        rows = None if preprocess is None else data.inputs(np.arange(data.n_samples))
        members = []
        for job in jobs:
            fold, fit = plan.fold_of(job, self.results.folds), None
            if rows is not None:
                fit = preprocessing.fit_on(preprocess, rows, data.targets, fold.fitted)
            columns = plan.objective_of(job.model).columns
            member = Member(self.model(job), fit, plan.params.precision_on_cores, columns)
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
