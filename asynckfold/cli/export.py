"""The verb ``export``: the weights that a job trained, as a safetensors file."""

from __future__ import annotations

import argparse
from pathlib import Path

from asynckfold.api.stored_results import load_results
from asynckfold.cli.output import Output
from asynckfold.cli.run_folder import open_run
from asynckfold.errors import InputError, Problem
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report.sentences import plural
from asynckfold.store import RunReader
from asynckfold.system.files import write_whole


def export(parsed: argparse.Namespace, out: Output) -> int:
    """Write a job's trained weights; an existing file is never replaced."""
    path = Path(parsed.to)
    with open_run(parsed.directory, [*parsed.problems, *new_file_problems(path)]) as store:
        return _export(parsed, path, store, out)


def _export(parsed: argparse.Namespace, path: Path, store: RunReader, out: Output) -> int:
    results = load_results(store)
    name = parsed.candidate or best(results)
    state = results.state_dict(name, parsed.fold, parsed.repeat)
    import torch
    from safetensors.torch import save

    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    about = {"candidate": name, "fold": str(parsed.fold), "repeat": str(parsed.repeat)}
    write_whole(path, save(tensors, about))
    numbers = sum(tensor.numel() for tensor in tensors.values())
    left_out = sorted(state.keys() - tensors.keys())
    out.data({**about, "to": str(path), "tensors": len(tensors), "numbers": numbers})
    what = "all samples" if parsed.fold == "all" else f"fold {parsed.fold}"
    out.say(f"{name}, {what}: {plural(len(tensors), 'tensor')} in {path}")
    out.say("in Python: model.load_state_dict(safetensors.torch.load_file(...))")
    if left_out:
        out.error(f"left out, not tensors: {', '.join(left_out)}")
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
