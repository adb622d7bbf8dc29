"""The verb ``predict``: predictions of other samples by the models of all folds, as a file."""

from __future__ import annotations

import argparse
import io
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynckfold.api.arguments import Settings
from asynckfold.api.stored_results import load_results, with_models
from asynckfold.cli.flags import imports_user_code, value_of
from asynckfold.cli.output import Output
from asynckfold.cli.parser import make_parser, parse_stored
from asynckfold.cli.run_folder import open_run
from asynckfold.cli.sweep_file import predicting_parts
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.criteria import MARGINS, PROBABILITIES, VALUES
from asynckfold.jobs.digests import changes
from asynckfold.jobs.digests.changes import WEIGHTS
from asynckfold.jobs.digests.run import of_run
from asynckfold.jobs.objective import MULTICLASS, REGRESSION, Objective
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.recipe import Recipe
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report.sentences import plural
from asynckfold.results.scoring import resolve
from asynckfold.store import RunReader
from asynckfold.system.files import write_whole

if TYPE_CHECKING:
    from asynckfold.data.sources import Samples, Source


def predict(parsed: argparse.Namespace, out: Output) -> int:
    """Write predictions of samples; an existing file is never replaced."""
    path = Path(parsed.to)
    problems = [*parsed.problems, *new_file_problems(path), *_suffix_problems(path)]
    with open_run(parsed.directory, problems) as store:
        return _predict(parsed, path, store, out)


def _predict(parsed: argparse.Namespace, path: Path, store: RunReader, out: Output) -> int:
    from asynckfold.data.sources import load_samples

    stored = load_results(store)
    name = parsed.candidate or best(stored)
    live, source = live_results(command_of(parsed, store), stored, name)
    ensemble = (live.on_all_samples(name) if parsed.refit else live).ensemble(name)
    samples = load_samples(
        parsed.data,
        source,
        data_root=Path(value_of(parsed, "data_root")),
        download=value_of(parsed, "download"),
        target=parsed.target,
        header=value_of(parsed, "header"),
    )
    for note in samples.notes:
        out.error(note)
    asked = ensemble.objective
    if not asked.is_classes or asked.scale == MARGINS:
        classes: tuple[str, ...] = ()
        found: npt.NDArray[Any] = ensemble.predict(samples.dataset)
    else:
        found = ensemble.predict_proba(samples.dataset)
        extra = range(len(ensemble.classes), found.shape[1])
        classes = (*ensemble.classes, *map(str, extra))
    write_whole(path, _content(path, samples, found, classes))
    score, why = _score(samples, found, classes, asked)
    told = {"candidate": name, "models": ensemble.size, "samples": len(found), "to": str(path)}
    out.data({**told, "score": score})
    out.say(f"{name}, {plural(ensemble.size, 'model')}: {plural(len(found), 'sample')} in {path}")
    for metric, value in score.items():
        out.say(f"{metric} {value:.4f}")
    if score and source is not None and _place(parsed.data) == _place(source.name):
        known = _out_of_fold(stored, name)
        out.error(f"this score is no estimate: the run trained on these samples; {known}")
    if why:
        out.error(why)
    return 0


def new_file_problems(path: Path) -> list[Problem]:
    """Return why a new file cannot be written there."""
    if path.exists():
        return [Problem("--to must be a new file", str(path), "Remove it, or name another.")]
    if not path.absolute().parent.is_dir():
        return [Problem("--to must be in an existing folder", str(path), "Make the folder first.")]
    return []


def best(results: CVResults) -> str:
    """Return the name of the best candidate.

    Raises
    ------
    InputError
        No candidate is best: it must be named.
    """
    try:
        return results.candidates[results.best_index_].name
    except ValueError as error:
        remedy = f"Name one, such as {results.candidates[0].name}."
        raise InputError(
            [Problem("CANDIDATE must be given if none is best", str(error), remedy)]
        ) from error


def live_results(
    command: argparse.Namespace, stored: CVResults, name: str
) -> tuple[CVResults, Source | None]:
    """Return results that can rebuild a candidate's models, and the data source of the run.

    Raises
    ------
    InputError
        The data, the model or the transforms are not those of the run.
    """
    models = {job.candidate: job.model for job in stored.plan.jobs}
    model = models.get(name, name.partition("/")[0])
    settings, recipe, source = predicting_parts(command, model)
    refuse(_model_problems(model, recipe.models))
    refuse(code_problems(stored.plan, model, recipe, settings))
    return with_models(stored, settings, recipe), source


def _suffix_problems(path: Path) -> Iterator[Problem]:
    if path.suffix not in (".csv", ".npz"):
        yield Problem("--to must be a .csv or .npz file", str(path), "Name it predictions.csv.")


def command_of(parsed: argparse.Namespace, store: RunReader) -> argparse.Namespace:
    """Return the parsed line that makes the run's models and data."""
    words, again = parse_stored(store.about)
    shown = shlex.join(["asynckfold", *words]) if words else "the script that started it"
    distrust = "a run's folder is never trusted to name code"
    built_in = again is not None and not again.file
    if parsed.file:
        if built_in:
            refuse(
                [Problem("--sweep is for runs of a sweep file", f"a run of {shown}", "Drop it.")]
            )
        again = make_parser().parse_args(["run", parsed.file, "--root", str(store.root)])
    elif not built_in:
        remedy = "Pass --sweep with the file that defines its dataset and models."
        refuse([Problem(f"{distrust}: it must be given", f"a run of {shown}", remedy)])
    assert again is not None
    again.models = parsed.models or again.models
    if not parsed.models and not parsed.file and imports_user_code(again):
        remedy = f"Pass --models {again.models} to predict, too."
        refuse([Problem(f"{distrust}: it must be given", f"a run of {shown}", remedy)])
    again.root = str(store.root)
    # A text file or arrays are only read; collections of torchvision may hold pickles.
    again.data_root, again.download = parsed.data_root, parsed.download
    word, colon, path = (again.data or "").partition(":")
    if colon:
        again.data = f"{word}:{Path(store.about.get('folder', ''), path).expanduser()}"
    return again


def _model_problems(model: str, models: Any) -> Iterator[Problem]:
    if model not in models:
        rule = f"the models must be those of the run, with {model}"
        yield Problem(rule, ", ".join(models), "Name them as the run does.")


def code_problems(plan: Plan, model: str, recipe: Recipe, settings: Settings) -> Iterator[Problem]:
    """Yield a problem if the model or the transforms changed since the weights were trained."""
    stored, here = plan.recipe.get("code", {}), of_run(recipe, settings).parts
    view = "train_transform" if settings.eval_transform is None else "eval_transform"
    wanted = (f"model {model}", "preprocess", view)
    there, now = (
        {
            # Initial weights do not matter: trained ones replace them.
            part: {key: text for key, text in parts[part].items() if key != WEIGHTS}
            for part in wanted
            if part in parts
        }
        for parts in (stored, here)
    )
    found = changes.difference(there, now)
    if found:
        yield Problem(
            "predictions need the code that the weights were trained with",
            found,
            "Undo the change, or run the sweep again with resume='never'.",
        )


def _content(
    path: Path, samples: Samples, found: npt.NDArray[Any], classes: Sequence[str]
) -> bytes:
    """Return the file: a table, or arrays."""
    names: Sequence[Any] = samples.names or range(len(found))
    if path.suffix == ".csv":
        import pandas as pd

        from asynckfold.results.report.table_files import csv_table

        rows = _rows(names, found, classes)
        return csv_table(pd.DataFrame(rows, columns=_header(found, classes), dtype=object))
    arrays = {"sample": np.array(names), "prediction": found}
    if classes:
        arrays |= {"prediction": found.argmax(axis=1), "probabilities": found}
        arrays["classes"] = np.array(classes)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _header(found: npt.NDArray[Any], classes: Sequence[str]) -> list[str]:
    if classes:
        return ["sample", "prediction", "probability", *(f"p_{name}" for name in classes)]
    if found.ndim == 1:
        return ["sample", "prediction"]
    return ["sample", *(f"prediction_{at}" for at in range(found[0].size))]


def _rows(
    names: Sequence[Any], found: npt.NDArray[Any], classes: Sequence[str]
) -> Iterator[list[Any]]:
    for name, values in zip(names, found, strict=True):
        chosen = [classes[values.argmax()], float(values.max())] if classes else []
        numbers = values if found.dtype.kind in "iU" else np.asarray(values).astype(float)
        yield [name, *chosen, *np.ravel(numbers).tolist()]


def _score(
    samples: Samples, found: npt.NDArray[Any], classes: Sequence[str], asked: Objective
) -> tuple[dict[str, float], str]:
    """Return the score if the samples have labels, or why there is none."""
    from asynckfold.data.sources.text_files import indices_in, number

    if samples.labels is None:
        return {}, ""
    if not classes and asked.kind != REGRESSION:
        return {}, "no score: it needs one probability for each class"
    if classes:
        targets: npt.NDArray[Any] = indices_in(classes, samples.labels)
        unknown = sorted({samples.labels[at] for at in np.flatnonzero(targets < 0)})
    else:
        unknown = sorted({text for text in samples.labels if number(text) is None})
        targets = np.array([] if unknown else [float(text) for text in samples.labels])
    if unknown:
        return {}, f"no score: labels unknown to the run: {', '.join(unknown[:5])}"
    if not classes and found.ndim > 1:
        return {}, "no score: the models predict several numbers for each sample"
    told = Objective(MULTICLASS, PROBABILITIES) if classes else Objective(REGRESSION, VALUES)
    scores = resolve(None, told)
    return {name: float(score(targets, found)) for name, score in scores.items()}, ""


def _place(data: str) -> str:
    word, colon, path = data.partition(":")
    return f"{word}:{Path(path).expanduser().resolve()}" if colon else word


def _out_of_fold(results: CVResults, name: str) -> str:
    """Return the out-of-fold score, which is an estimate."""
    row = next(row for row in results.candidates if row.name == name)
    metric = results.plan.scoring[0]
    return f"out of fold, {metric} is {row.scores[metric].mean():.4f}"
