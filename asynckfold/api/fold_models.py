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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from asynckfold.data.arrays import Given, column_problems
from asynckfold.data.batches import Batches, one_by_one
from asynckfold.data.dataset import Opened, open_inputs
from asynckfold.data.given import as_given
from asynckfold.data.materialize import Here, check_samples, with_facts
from asynckfold.data.range_reader import SampleCheck, SampleFacts
from asynckfold.data.transforms import Array, Misfit, Step, kind_of, kinds_text, layout_in
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.folds import Fold, Indices
from asynckfold.jobs.objective import Transform
from asynckfold.jobs.plan import Job
from asynckfold.jobs.recipe import Recipe
from asynckfold.results.cv_results import CVResults
from asynckfold.results.ensemble import Outputs
from asynckfold.training import preprocessing, seeding, setup
from asynckfold.training.isolation.guard import isolated
from asynckfold.training.precision import outputs_of

CHECKED = 8
"""Held-out samples of each fold that are compared with what was recorded."""

FINE, COARSE = 1e-3, 1e-2
"""Largest difference there, as a share of the outputs' size: batches of other sizes and other
threads round otherwise, in bfloat16, and on GPUs that compute in TF32, to some thousandths."""


_ARTICLES = {
    "image": "a PIL image",
    "tensor": "a tensor",
    "array": "an array",
    "number": "a number",
    "tree": "a tuple, list or dict of tensors",
    "other": "an object",
}


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
    """

    results: CVResults
    recipe: Recipe
    dataset: Any
    train_transform: Any
    eval_transform: Any
    targets: Callable[[], Array]
    facts: SampleFacts | None = None
    transform: Transform | None = None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

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

    def predictor(self, jobs: Sequence[Job]) -> RebuiltModels:
        """Return a function that runs the models of these jobs."""
        return RebuiltModels(self, jobs)

    @cached_property
    def given(self) -> Given:
        """The run's data set and transforms."""
        return as_given(
            self.dataset,
            self.train_transform,
            self.eval_transform,
            preprocessed=self.recipe.preprocess is not None,
        )

    @cached_property
    def samples(self) -> tuple[Opened, tuple[Step, ...]]:
        """The run's samples, and the transforms of its eval view."""
        given = self.given
        check = SampleCheck(given.dataset, given.train_transform, given.eval_transform)
        seen = check_samples(check, Here()) if self.facts is None else with_facts(check, self.facts)
        source, views = seen.source, seen.views
        refuse(views.problems)
        if len(source) != self.results.n_samples:
            rule = f"the data set must have the run's {self.results.n_samples} samples"
            refuse([Problem(rule, str(len(source)), "Pass the data set of the run.")])
        return source, views.eval.pipeline


@dataclass(frozen=True, eq=False)
class _FoldModel:
    """The model of one fold, and what its training part fitted."""

    model: nn.Module
    fit: Any
    precision: str

    def outputs(self, seen: Any) -> Outputs:
        if self.fit is not None:
            seen = preprocessing.transform(self.fit, seen.numpy())
        with torch.no_grad():
            found: Outputs = outputs_of(self.model, seen, self.precision).float().numpy()
        return found


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

    def __call__(self, inputs: Any) -> Iterator[Outputs]:
        """Yield what each model says of each batch, shape (models, batch, ...)."""
        with seeding.preserved():
            source, steps = self.run.samples
            refuse(_column_problems(self.run.dataset, inputs))
            given = open_inputs(
                inputs,
                undress=bool(source.steps),
                exact=self.run.given.exact,
                several=layout_in(steps) is not None,
            )
            data = one_by_one(given, steps, np.zeros(len(given), np.int64))
            likes, size = self._likes, self._batch_size
        for low in range(0, len(given), size):
            rows = np.arange(low, min(len(given), low + size))
            with seeding.preserved():
                seen = self._seen_by_all(data, rows)
                # Whole numbers or not: what was fitted takes both.
                any_kind = self.run.recipe.preprocess is not None
                refuse(_kind_problems(seen, likes.to(seen.dtype) if any_kind else likes))
                outputs = np.stack([member.outputs(seen) for member in self._members])
            refuse(_nan_problems(outputs, rows))
            yield outputs

    @property
    def _batch_size(self) -> int:
        return self.run.results.plan.params.eval_batch_size

    @cached_property
    def _own(self) -> Batches:
        """The run's samples."""
        return one_by_one(*self.run.samples, self.run.targets())

    @cached_property
    def _likes(self) -> Any:
        """The first sample of the run: every batch must have its shape and type."""
        return self._seen(self._own, np.zeros(1, np.int64))

    def _seen(self, data: Batches, rows: Indices) -> Any:
        """Return the models' inputs, before each model's `preprocess` if there is one."""
        if self.run.recipe.preprocess is not None:
            return torch.from_numpy(data.inputs(rows))
        return data.eval(rows)[0]

    def _seen_by_all(self, data: Batches, rows: Indices) -> Any:
        # The user's own steps see samples that they may not be made for.
        try:
            seen = self._seen(data, rows)
            if self.run.recipe.preprocess is None or not self._likes.is_floating_point():
                return seen
            # What was fitted in one precision computes in another with other digits.
            return seen.to(self._likes.dtype)
        except InputError:
            raise
        except Misfit as error:
            rule = "inputs must have the structure of the run's samples"
            remedy = "Pass the same keys, shapes and types."
            raise InputError.one(rule, str(error), remedy) from error
        except Exception as error:
            rule = "inputs must be samples as the run's data set has them, before its transforms"
            received = f"{type(error).__name__} on samples {rows[0]} to {rows[-1]}: {error}"
            kind = kind_of(self.run.samples[0].read(0)[0])
            remedy = f"Its first is {_ARTICLES[kind.form]} of shape {kind.shape}."
            raise InputError.one(rule, received, remedy) from error

    @cached_property
    def _members(self) -> list[_FoldModel]:
        run, data, preprocess = self.run, self._own, self.run.recipe.preprocess
        folds = {fold.key: fold for fold in run.results.folds}
        rows = None if preprocess is None else data.inputs(np.arange(data.n_samples))
        members = []
        for job in self.jobs:
            fold, fit = folds[job.repeat, job.fold], None
            if rows is not None:
                fit = preprocessing.fit_on(preprocess, rows, data.targets, fold.train)
            member = _FoldModel(run.model(job), fit, run.results.plan.params.precision_on_cores)
            refuse(self._difference(member, job, fold))
            members.append(member)
        return members

    def _difference(self, member: _FoldModel, job: Job, fold: Fold) -> Iterator[Problem]:
        """Yield that a model's outputs for held-out samples are not those that the run recorded."""
        plan, stored = self.run.results.plan, self.run.results.results[job.id].outputs
        assert stored is not None
        exact = plan.params.precision == "fp32" and plan.device_of(job.candidate) == "cpu"
        some = np.unique(np.linspace(0, len(fold.valid) - 1, CHECKED).round().astype(np.int64))
        # The outputs of some models depend on the whole batch: then compare the run's first one.
        for places in (some, np.arange(min(len(fold.valid), self._batch_size))):
            recorded = stored[places]
            outputs = member.outputs(self._seen(self._own, fold.valid[places]))
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


def _column_problems(dataset: Any, inputs: Any) -> Iterator[Problem]:
    own, given = (item[0] if isinstance(item, tuple) else item for item in (dataset, inputs))
    yield from column_problems(own, given, "inputs")


def _kind_problems(seen: Any, likes: Any) -> Iterator[Problem]:
    kinds = [kinds_text(item, samples=True) for item in (likes, seen)]
    if kinds[0] == kinds[1]:
        return
    yield Problem(
        f"each of the inputs must become {kinds[0]} by the run's transforms, as its samples did",
        kinds[1],
        "Pass samples as the run's data set has them, of shape (n, ...).",
    )


def _nan_problems(outputs: Outputs, rows: Indices) -> Iterator[Problem]:
    """Yield that an output is NaN, for which a class would be predicted all the same."""
    found = np.isnan(outputs).any(axis=(0, *range(2, outputs.ndim)))
    if found.any():
        yield Problem(
            "the models must give numbers for each of the inputs",
            f"NaN for sample {rows[found][0]}",
            "Leave such samples out, or fill in what is missing in them.",
        )
