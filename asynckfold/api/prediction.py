"""Predict samples with trained models, of a live run or of a file.

::

    samples ─ eval transform ─┬─ preprocess of fold 0 ─ model 0 ─┐
                              └─ preprocess of fold 1 ─ model 1 ─┴─► outputs (models, batch, ...)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from asynckfold.data.arrays import column_problems
from asynckfold.data.batches import Batches, one_by_one
from asynckfold.data.collation import Collation, structure
from asynckfold.data.dataset import open_inputs
from asynckfold.data.transforms.samples import Misfit
from asynckfold.data.transforms.steps import Step
from asynckfold.data.transforms.trees import kinds_text
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.folds import Indices
from asynckfold.jobs.schema import Schema
from asynckfold.results.ensemble import Outputs
from asynckfold.results.out_of_fold import wide
from asynckfold.training import preprocessing, seeding
from asynckfold.training.calls import outputs_of


@dataclass(frozen=True)
class InputForm:
    """What samples must be, as the data set of the run holds them. Plain values."""

    form: str  # of a sample, see `transforms.Kind`
    raw_shape: tuple[int, ...]  # of a sample
    shape: tuple[int, ...]  # after the eval transform, before `preprocess`
    dtype: str  # likewise
    columns: tuple[str | int, ...] | None  # of a pandas table
    undressed: bool  # the ``transform`` of a data set is replaced
    exact: bool  # float64 arrays stay as they are
    preprocessed: bool
    batch_size: int
    several: str = ""  # structure, shapes and types of several inputs; instead of shape and dtype


@dataclass(frozen=True, eq=False)
class Member:
    """A trained model, and what its training part fitted."""

    model: nn.Module
    fit: Any  # of `preprocess`; None without one
    precision: str
    columns: Schema | None = None  # of outputs that are trees

    def outputs(self, seen: Any) -> Outputs:
        """Return the outputs of samples after the eval transform."""
        if self.fit is not None:
            seen = preprocessing.transform(self.fit, seen.numpy())
        with torch.no_grad():
            outputs = outputs_of(self.model, seen, self.precision)
        rows: Outputs
        joined = outputs if self.columns is None else self.columns.join(outputs)
        rows = joined.float().numpy()
        return rows


@dataclass(frozen=True, eq=False)
class PredictionModels:
    """All that predicts: form of the samples, eval transform, models.

    Parameters
    ----------
    form, steps, members
        What samples must be, their transform, and the models.
    channels_last : tuple of bool
        Memory format by model.
    default_dtype : torch.dtype
        That of the run.
    output_transform : callable, optional
        The user's, of tensors.
    about : Mapping
        Jobs, and fingerprints of the run.
    table : object
        A data set whose columns the inputs must have.
    collation : Collation, optional
        Makes batches, if the user's `collate_fn` does; `target` is then that of one sample.
    """

    form: InputForm
    steps: tuple[Step, ...]
    members: Sequence[Member]
    channels_last: tuple[bool, ...]
    default_dtype: torch.dtype
    output_transform: Any = None
    about: Mapping[str, Any] = field(default_factory=dict)
    table: Any = None
    collation: Collation | None = None
    target: Any = None

    def outputs(self, inputs: Any) -> Iterator[Outputs]:
        """Yield what each model says of each batch, shape (models, batch, ...)."""
        form, collates = self.form, self.collation is not None
        with seeding.preserved():
            refuse(_column_problems(self.table, inputs))
            samples = open_inputs(
                inputs,
                undress=form.undressed,
                exact=form.exact,
                several=form.form == "tree" if collates else bool(form.several),
                lists=collates,
            )
            count = len(samples)
            targets = np.zeros(count, np.int64)
            if collates:
                targets = np.zeros((count, *self.target.shape[1:]), self.target.dtype)
            data = one_by_one(samples, self.steps, targets, self.collation)
        for low in range(0, count, form.batch_size):
            rows = np.arange(low, min(count, low + form.batch_size))
            with seeding.preserved():
                batch = _as_the_run_saw_it(form, data, rows)
                refuse(_kind_problems(form, batch, collated=collates))
                each, columns = (
                    [one.outputs(batch) for one in self.members],
                    self.members[0].columns,
                )
                is_ragged = columns is not None and columns.ragged
                outputs = np.stack(wide(*each) if is_ragged else each)
            refuse(_nan_problems(outputs, rows))
            yield outputs


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


def _column_problems(dataset: Any, inputs: Any) -> Iterator[Problem]:
    expected, received = (
        item[0] if isinstance(item, tuple) else item for item in (dataset, inputs)
    )
    yield from column_problems(expected, received, "inputs")


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
