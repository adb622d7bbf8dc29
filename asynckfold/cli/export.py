"""The verb ``export``: the weights that a job trained, or all that predicts, as a file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from asynckfold.api.stored_results import load_results
from asynckfold.cli.output import Output
from asynckfold.cli.predict import best, command_of, live_results, new_file_problems
from asynckfold.cli.run_folder import open_run
from asynckfold.errors import InputError
from asynckfold.results.cv_results import CVResults, single
from asynckfold.results.report.sentences import plural
from asynckfold.store import RunReader
from asynckfold.system.files import write_whole

if TYPE_CHECKING:
    from asynckfold.data.sources import Source
    from asynckfold.results.ensemble import FoldEnsemble

SHOWN = 12
"""Features, or classes, that are named."""


def export(parsed: argparse.Namespace, out: Output) -> int:
    """Write trained weights, or models; an existing file is never replaced."""
    path = Path(parsed.to)
    with open_run(parsed.directory, [*parsed.problems, *new_file_problems(path)]) as store:
        return _export(parsed, path, store, out)


def _export(parsed: argparse.Namespace, path: Path, store: RunReader, out: Output) -> int:
    results = load_results(store)
    name = parsed.candidate or best(results)
    if parsed.model:
        ensemble, _ = _live(parsed, store, results, name, parsed.fold)
        ensemble.save(path)
        out.data({"candidate": name, "models": ensemble.size, "to": str(path)})
        out.say(f"{name}: {plural(ensemble.size, 'model')}, with all that predicts, in {path}")
        out.say("in Python: asynckfold.load_model(path, factory).predict(...)")
        return 0
    fold = 0 if parsed.fold is None else parsed.fold
    state = results.state_dict(name, fold, parsed.repeat)
    import torch
    from safetensors.torch import save

    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    expected, why = _expected(parsed, store, results, name, fold)
    about = {"candidate": name, "fold": str(fold), "repeat": str(parsed.repeat), **expected}
    write_whole(path, save(tensors, about))
    numbers = sum(tensor.numel() for tensor in tensors.values())
    left_out = sorted(state.keys() - tensors.keys())
    out.data({**about, "to": str(path), "tensors": len(tensors), "numbers": numbers})
    what = "all samples" if fold == "all" else f"fold {fold}"
    out.say(f"{name}, {what}: {plural(len(tensors), 'tensor')} in {path}")
    out.say("in Python: model.load_state_dict(safetensors.torch.load_file(...))")
    if left_out:
        out.error(f"left out, not tensors: {', '.join(left_out)}")
    out.error("the weights expect what the metadata of the file say; --model writes all of it")
    for key, text in expected.items():
        out.error(f"{key}: {_short(text)}")
    if why:
        out.error(why)
    return 0


def _live(
    parsed: argparse.Namespace,
    store: RunReader,
    results: CVResults,
    name: str,
    fold: int | str | None,
) -> tuple[FoldEnsemble, Source | None]:
    """Return the models of all folds (None) or of one, made again, and the run's data source."""
    live, source = live_results(command_of(parsed, store), results, name)
    if fold is None:
        return live.ensemble(name), source
    return single(live, name, fold, parsed.repeat), source


def _expected(
    parsed: argparse.Namespace, store: RunReader, results: CVResults, name: str, fold: int | str
) -> tuple[dict[str, str], str]:
    """Return what weights alone leave out, and why some of it is unknown."""
    try:
        ensemble, source = _live(parsed, store, results, name, fold)
        columns = {"features": json.dumps(source.features)} if source and source.features else {}
        return {**columns, **ensemble.expects()}, ""
    except InputError as error:
        classes = {"classes": json.dumps(results.plan.classes)} if results.plan.classes else {}
        scaler = str(results.plan.recipe.get("preprocess") or "").rpartition(" ")[0]
        scaled = {"preprocess": scaler} if scaler else {}
        return {**scaled, **classes}, f"unknown: transforms, and what preprocess fitted: {error}"


def _short(text: str) -> str:
    """Return what an entry of the metadata says, without numbers.

    >>> _short('["a", "colour=red"]'), _short('{"class": "PCA", "fitted": {"mean_": [0.5]}}')
    ('a, colour=red', 'PCA')
    """
    content = json.loads(text) if text.startswith(("[", "{")) else text
    if isinstance(content, dict):
        return str(content["class"])
    if isinstance(content, str):
        return content
    more = f", … {len(content)} in all" if len(content) > SHOWN else ""
    return ", ".join(content[:SHOWN]) + more
