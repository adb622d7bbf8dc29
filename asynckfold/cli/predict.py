"""The verbs ``predict`` and ``export``: what the models of a run predict, and the models as files.

Neither trusts a run's folder to name code: what makes the models comes from the command line.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynckfold.api.arguments import Settings
from asynckfold.api.stored_results import load_results, with_models
from asynckfold.cli.flags import imports_user_code, with_defaults
from asynckfold.cli.output import Output
from asynckfold.cli.parser import make_parser, parse_stored
from asynckfold.cli.sweep_file import predicting_parts
from asynckfold.errors import InputError, Problem, refuse
from asynckfold.jobs.criteria import MARGINS, PROBABILITIES, VALUES
from asynckfold.jobs.digests import changes
from asynckfold.jobs.digests.changes import WEIGHTS
from asynckfold.jobs.digests.run import of_run
from asynckfold.jobs.objective import MULTICLASS, REGRESSION, Objective
from asynckfold.jobs.plan import Plan
from asynckfold.jobs.recipe import Recipe
from asynckfold.results.cv_results import CVResults, single
from asynckfold.results.report.sentences import plural
from asynckfold.results.scoring import resolve
from asynckfold.store import RunReader, open_run
from asynckfold.system.files import write_whole

if TYPE_CHECKING:
    from asynckfold.data.sources import Samples, Source

SHOWN = 12
"""Features, or classes, that are named."""


def predict(parsed: argparse.Namespace, out: Output) -> int:
    """Write predictions of samples; an existing file is never replaced."""
    path = Path(parsed.to)
    problems = new_file_problems(path)
    if path.suffix not in (".csv", ".npz"):
        rule = "--to must be a .csv or .npz file"
        problems.append(Problem(rule, str(path), "Name it predictions.csv."))
    with open_run(parsed.directory, "DIR", [*parsed.problems, *problems]) as store:
        return _predict(parsed, path, store, out)


def _predict(parsed: argparse.Namespace, path: Path, store: RunReader, out: Output) -> int:
    from asynckfold.data.sources import load_samples

    stored, full = load_results(store), with_defaults(parsed)
    name = parsed.candidate or best(stored)
    live, source = live_results(command_of(parsed, store), stored, name)
    ensemble = (live.on_all_samples(name) if parsed.refit else live).ensemble(name)
    samples = load_samples(
        parsed.data,
        source,
        data_root=Path(full.data_root),
        download=full.download,
        target=parsed.target,
        header=full.header,
    )
    for note in samples.notes:
        out.error(note)
    objective = ensemble.objective
    if not objective.is_classes or objective.scale == MARGINS:
        classes: tuple[str, ...] = ()
        predicted: npt.NDArray[Any] = ensemble.predict(samples.dataset)
    else:
        predicted = ensemble.predict_proba(samples.dataset)
        extra = range(len(ensemble.classes), predicted.shape[1])
        classes = (*ensemble.classes, *map(str, extra))
    write_whole(path, _content(path, samples, predicted, classes))
    scores, why = _score(samples, predicted, classes, objective)
    count = len(predicted)
    summary = {"candidate": name, "models": ensemble.size, "samples": count, "to": str(path)}
    out.data({**summary, "score": scores})
    out.say(f"{name}, {plural(ensemble.size, 'model')}: {plural(count, 'sample')} in {path}")
    for metric, value in scores.items():
        out.say(f"{metric} {value:.4f}")
    if scores and source is not None and _place(parsed.data) == _place(source.name):
        row = next(row for row in stored.candidates if row.name == name)
        metric = stored.plan.scoring[0]
        out.error(
            "this score is no estimate: the run trained on these samples; "
            f"out of fold, {metric} is {row.scores[metric].mean():.4f}"
        )
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
    """Return the name of the best candidate."""
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
    """Return results that can rebuild a candidate's models, and the data source of the run."""
    models = {job.candidate: job.model for job in stored.plan.jobs}
    model = models.get(name, name.partition("/")[0])
    settings, recipe, source = predicting_parts(command, model)
    if model not in recipe.models:
        rule = f"the models must be those of the run, with {model}"
        refuse([Problem(rule, ", ".join(recipe.models), "Name them as the run does.")])
    refuse(code_problems(stored.plan, model, recipe, settings))
    return with_models(stored, settings, recipe), source


def command_of(parsed: argparse.Namespace, store: RunReader) -> argparse.Namespace:
    """Return the parsed line that makes the run's models and data."""
    words, command = parse_stored(store.about)
    shown = shlex.join(["asynckfold", *words]) if words else "the script that started it"
    rule = "a run's folder is never trusted to name code: it must be given"
    received = f"a run of {shown}"
    if parsed.file:
        if command is not None and not command.file:
            refuse([Problem("--sweep is for runs of a sweep file", received, "Drop it.")])
        command = make_parser().parse_args(["run", parsed.file, "--root", str(store.root)])
    if command is None or (command.file and not parsed.file):
        remedy = "Pass --sweep with the file that defines its dataset and models."
        raise InputError([Problem(rule, received, remedy)])
    command.models = parsed.models or command.models
    if not parsed.models and not parsed.file and imports_user_code(command):
        remedy = f"Pass --models {command.models} to predict, too."
        refuse([Problem(rule, received, remedy)])
    command.root = str(store.root)
    # A text file or arrays are only read; collections of torchvision may hold pickles.
    command.data_root, command.download = parsed.data_root, parsed.download
    word, colon, path = (command.data or "").partition(":")
    if colon:
        command.data = f"{word}:{Path(store.about.get('folder', ''), path).expanduser()}"
    return command


def code_problems(plan: Plan, model: str, recipe: Recipe, settings: Settings) -> Iterator[Problem]:
    """Yield a problem if the model or the transforms changed since the weights were trained."""
    stored, here = plan.recipe.get("code", {}), of_run(recipe, settings).parts
    view = "train_transform" if settings.eval_transform is None else "eval_transform"
    wanted = (f"model {model}", "preprocess", "target_transform", view)
    there, now = (
        {
            # Initial weights do not matter: trained ones replace them.
            part: {key: text for key, text in parts[part].items() if key != WEIGHTS}
            for part in wanted
            if part in parts
        }
        for parts in (stored, here)
    )
    if change := changes.difference(there, now):
        rule = "predictions need the code that the weights were trained with"
        remedy = "Undo the change, or run the sweep again with resume='never'."
        yield Problem(rule, change, remedy)


def _content(
    path: Path, samples: Samples, predicted: npt.NDArray[Any], classes: Sequence[str]
) -> bytes:
    """Return the file: a table, or arrays."""
    names: Sequence[Any] = samples.names or range(len(predicted))
    if path.suffix == ".csv":
        return _table(names, predicted, classes)
    arrays = {"sample": np.array(names), "prediction": predicted}
    if classes:
        arrays |= {"prediction": predicted.argmax(axis=1), "probabilities": predicted}
        arrays["classes"] = np.array(classes)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _table(names: Sequence[Any], predicted: npt.NDArray[Any], classes: Sequence[str]) -> bytes:
    import pandas as pd

    from asynckfold.results.report.files import csv_table

    numbers = predicted if predicted.dtype.kind in "iU" else predicted.astype(float)
    table = pd.DataFrame({"sample": list(names)}, dtype=object)
    if classes:
        table["prediction"] = [classes[at] for at in predicted.argmax(axis=1)]
        table["probability"] = numbers.max(axis=1)
    columns = [f"p_{name}" for name in classes]
    rows = numbers.reshape(len(numbers), -1)
    if not classes:
        every = [f"prediction_{at}" for at in range(rows.shape[1])]
        columns = every if numbers.ndim > 1 else ["prediction"]
    return csv_table(pd.concat([table, pd.DataFrame(rows, columns=columns)], axis=1))


def _score(
    samples: Samples, predicted: npt.NDArray[Any], classes: Sequence[str], objective: Objective
) -> tuple[dict[str, float], str]:
    """Return the scores if the samples have labels, or why there are none."""
    from asynckfold.data.sources.text_files import indices_in, number

    if samples.labels is None:
        return {}, ""
    if not classes and objective.kind != REGRESSION:
        return {}, "no score: it needs one probability for each class"
    if classes:
        targets: npt.NDArray[Any] = indices_in(classes, samples.labels)
        unknown = sorted({samples.labels[at] for at in np.flatnonzero(targets < 0)})
    else:
        unknown = sorted({text for text in samples.labels if number(text) is None})
        targets = np.array([] if unknown else [float(text) for text in samples.labels])
    if unknown:
        return {}, f"no score: labels unknown to the run: {', '.join(unknown[:5])}"
    if not classes and predicted.ndim > 1:
        return {}, "no score: the models predict several numbers for each sample"
    kinds = (MULTICLASS, PROBABILITIES) if classes else (REGRESSION, VALUES)
    scorers = resolve(None, Objective(*kinds))
    return {name: float(score(targets, predicted)) for name, score in scorers.items()}, ""


def _place(data: str) -> str:
    word, colon, path = data.partition(":")
    return f"{word}:{Path(path).expanduser().resolve()}" if colon else word


def export(parsed: argparse.Namespace, out: Output) -> int:
    """Write trained weights, or models; an existing file is never replaced."""
    path = Path(parsed.to)
    with open_run(parsed.directory, "DIR", [*parsed.problems, *new_file_problems(path)]) as store:
        results = load_results(store)
        name = parsed.candidate or best(results)
        fold = 0 if parsed.fold is None and not parsed.model else parsed.fold
        why, expected = "", dict[str, str]()
        try:
            live, source = live_results(command_of(parsed, store), results, name)
            if source and source.features:
                expected["features"] = json.dumps(source.features)
            one = None if fold is None else single(live, name, fold, parsed.repeat)
            ensemble = one or live.ensemble(name)
            expected |= ensemble.expects()
        except InputError as error:
            if parsed.model:
                raise
            why = f"unknown: transforms, and what preprocess fitted: {error}"
            scaler = str(results.plan.recipe.get("preprocess") or "")
            expected = {"preprocess": scaler} if scaler else {}
            if results.plan.classes:
                expected["classes"] = json.dumps(results.plan.classes)
        if not parsed.model:
            return _export_weights(parsed, results, name, fold or 0, expected, why, out)
        ensemble.save(path)
    out.data({"candidate": name, "models": ensemble.size, "to": str(path)})
    out.say(f"{name}: {plural(ensemble.size, 'model')}, with all that predicts, in {path}")
    out.say("in Python: asynckfold.load_model(path, factory).predict(...)")
    return 0


def _export_weights(
    parsed: argparse.Namespace,
    results: CVResults,
    name: str,
    fold: int | str,
    expected: Mapping[str, str],
    why: str,
    out: Output,
) -> int:
    """Write the weights; what they expect goes into the metadata, as far as it is known."""
    import torch
    from safetensors.torch import save

    path = Path(parsed.to)
    state = results.state_dict(name, fold, parsed.repeat)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    about = {"candidate": name, "fold": str(fold), "repeat": str(parsed.repeat), **expected}
    write_whole(path, save(tensors, about))
    numbers = sum(tensor.numel() for tensor in tensors.values())
    out.data({**about, "to": str(path), "tensors": len(tensors), "numbers": numbers})
    what = "all samples" if fold == "all" else f"fold {fold}"
    out.say(f"{name}, {what}: {plural(len(tensors), 'tensor')} in {path}")
    out.say("in Python: model.load_state_dict(safetensors.torch.load_file(...))")
    if left_out := sorted(state.keys() - tensors.keys()):
        out.error(f"left out, not tensors: {', '.join(left_out)}")
    out.error("the weights expect what the metadata of the file say; --model writes all of it")
    for key, text in expected.items():
        out.error(f"{key}: {_short(text)}")
    if why:
        out.error(why)
    return 0


def _short(text: str) -> str:
    """Return what an entry of the metadata says, without numbers.

    >>> _short('["a", "colour=red"]'), _short('{"class": "PCA", "mean_": [0.5]}')
    ('a, colour=red', 'PCA')
    """
    content = json.loads(text) if text.startswith(("[", "{")) else text
    if isinstance(content, list):
        return ", ".join(content[:SHOWN]) + ", …" * (len(content) > SHOWN)
    return str(content["class"] if isinstance(content, dict) else content)
