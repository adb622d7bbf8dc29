"""Results of a run on disk, and the models and samples that a call adds to them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asynckfold.api.arguments import Settings
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.candidate_names import base_of, values_of
from asynckfold.jobs.plan import Job, Plan
from asynckfold.jobs.recipe import Recipe, named_models
from asynckfold.jobs.result import Result
from asynckfold.results.candidates import Candidate
from asynckfold.results.cv_results import CVResults, read_results
from asynckfold.store import RunReader, RunStore, open_run
from asynckfold.store.layout import refit_folder

if TYPE_CHECKING:
    from asynckfold.api.fold_models import RunModels
    from asynckfold.data.reading import CheckedDataset


def load_results(
    run: str | Path | RunReader, error_score: float = float("nan"), *, models: Any = None
) -> CVResults:
    """Return the results of a run on disk, complete or not.

    Parameters
    ----------
    run : str, Path or RunReader
        The run's folder, or a run that is open. Of a folder whose run is not complete, a warning
        says how many jobs have no result yet, and whether a process works on them.
    error_score : float
        Score of a failed job.
    models : as for `AsyncKFold`, optional
        Models of the run under their names: ``results.model()`` gets their trained weights. With a
        grid they get its values as keywords, as in the call; of a value that has a name, the name.

    Returns
    -------
    CVResults
        Without what a run's folder does not hold: its samples, transforms and code. What predicts
        with these, `CVResults.ensemble`, is had from a call, and saved for later by its ``save``.

    Raises
    ------
    InputError
        The folder holds no run, or not one of these models.
    StoreCorruptError
        Its ``run.db`` was not written by asynckfold, is damaged, or holds no plan yet.
    StorageError
        It cannot be read, such as the run of another user.

    Examples
    --------
    >>> import tempfile, torch
    >>> from asynckfold import AsyncKFold, load_results
    >>> X, y = torch.randn(60, 4), torch.arange(60) % 3
    >>> root = tempfile.mkdtemp()
    >>> kfold = AsyncKFold(2, (X, y), root, torch.nn.CrossEntropyLoss(), 8, parallelize=False,
    ...                    verbose=0, report=False)
    >>> _ = kfold({"linear": lambda: torch.nn.Linear(4, 3)}, ["constant"],
    ...           lambda model: torch.optim.SGD(model.parameters(), 0.1), {"epochs": 1})
    >>> load_results(root).counts["done"]
    2
    """
    if not isinstance(run, RunReader):
        with open_run(run) as store:
            counts, holder = store.counts(), store.holder()
            if counts["pending"]:
                state = "the call that began it continues it"
                if holder:
                    state = f"process {holder['pid']} on {holder['host']} works on them"
                warnings.warn(
                    f"{store.root} is unfinished: {counts['pending']} of {counts['planned']} jobs "
                    f"have no result yet; {state}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return load_results(store, error_score, models=models)
    root, results, named = run.root, read_results(run), dict[str, Callable[[], Any]]()
    if models is not None:
        named = _models_of(results.plan, models)

    def build_report() -> Path:
        from asynckfold.api.display import is_notebook
        from asynckfold.results.report.page import write_report

        with RunStore.read(root) as reader:
            # A cell of a notebook must not stand still while pictures are drawn.
            return write_report(reader, beside=is_notebook())

    def draw(kind: str, ax: Any) -> Any:
        from asynckfold.results.report.charts import plots

        return plots.of_run(root, kind, ax)

    def load_weights(result: Result, part: str) -> dict[str, Any]:
        from asynckfold.training.checkpoint import trained_weights

        with RunStore.read(root) as reader:
            refs = reader.checkpoints(result.job_id)
        return trained_weights(root, refs, result.weights, part)

    def load_refit(candidate: Candidate) -> CVResults | None:
        folder = refit_folder(root, candidate.model, candidate.lr_schedule)
        if not (folder / "run.db").is_file():
            return None
        mine = {name: make for name, make in named.items() if name == base_of(candidate.model)}
        with RunStore.read(folder) as reader:
            return load_results(reader, error_score, models=mine or None)

    results = replace(
        results,
        error_score=error_score,
        _build_report=build_report,
        _draw=draw,
        _load_refit=load_refit,
        _load_weights=load_weights,
    )
    return _with_modules(results, named) if named else results


def _models_of(plan: Plan, models: Any) -> dict[str, Callable[[], Any]]:
    """Return factories of models of a run by their names in it."""
    named, problems, _ = named_models(models)
    names = dict.fromkeys(base_of(model) for model, _ in plan.candidates)
    for name in named.keys() - names.keys():
        rule = "models must have the names that they have in the run"
        problems.append(Problem(rule, repr(name), f"They are {', '.join(names)}."))
    refuse(problems)
    return named


def _with_modules(results: CVResults, models: Mapping[str, Callable[[], Any]]) -> CVResults:
    """Return results that put trained weights into these models."""
    import torch

    bound = {
        model: functools.partial(make, **values) if (values := values_of(model)) else make
        for model in dict.fromkeys(model for model, _ in results.plan.candidates)
        if (make := models.get(base_of(model)))
    }
    recipe = Recipe(bound, {}, len, len)  # nothing is trained
    default_dtype = torch.get_default_dtype()

    def build(job: Job) -> Any:
        from asynckfold.api.fold_models import trained_model

        if job.model not in bound:
            rule = "models must hold the model of the candidate"
            raise InputError.one(rule, ", ".join(models), f"Pass {base_of(job.model)}, too.")
        return trained_model(results, recipe, default_dtype, job)

    return replace(results, _build_model=build)


def with_models(
    results: CVResults, settings: Settings, recipe: Recipe, samples: CheckedDataset | None = None
) -> CVResults:
    """Return results that can rebuild their models and samples.

    `samples` tells how the run took its data set apart, if it did so just now.
    """
    import torch

    default_dtype = torch.get_default_dtype()

    from_disk, known = results._load_refit, dict[str, CVResults]()

    def load_refit(candidate: Candidate) -> CVResults | None:
        refit = from_disk(candidate) if from_disk else None
        if refit is None or not refit.counts["done"]:
            return None
        if candidate.name not in known:
            from asynckfold.api.refit import on_all_samples

            # Once only, since its samples may be a copy.
            alone = on_all_samples(settings, candidate, None)
            known[candidate.name] = with_models(refit, alone, recipe, samples)
        return known[candidate.name]

    @functools.cache
    def load_models() -> RunModels:
        from asynckfold.api.fold_models import RunModels

        facts = None if samples is None else samples.facts
        return RunModels(results, recipe, settings, facts, default_dtype)

    select = None
    if settings.refit:
        from asynckfold.api.refit import selector

        select = selector(settings.refit)
    return replace(results, _load_models=load_models, _load_refit=load_refit, _select=select)
