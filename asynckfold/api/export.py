"""Write a run's results as the files of the project that this one grew out of.

::

    folder/
      train_data_RANK.csv                a job of several processes: mean loss, second of its end
      LeNet/cosine/time.json             first start and last end of the candidate's jobs
      LeNet/cosine/0/                    a fold
        train-loss-epoch-N.npy           mean losses of the epochs 0 to N
        confusion_matrix.npy             held-out samples: a row per true class
        checkpoint_latest.tar            for torch.load

Notebooks that draw these files work on.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckfold.api.stored_results import load_results
from asynckfold.errors import StoreCorruptError
from asynckfold.jobs.result import DONE, Result
from asynckfold.results.cv_results import CVResults
from asynckfold.results.report.predictions import count_classes, held_out
from asynckfold.store import RunReader, open_run
from asynckfold.system.files import make_folder, slug, write_whole


def export(root_dir: str | Path, folder: str | Path | None = None) -> list[Path]:
    """Write losses, confusion matrices, times and checkpoints of a run as plain files.

    The layout is that of ``parallel-neural-networks``, so that notebooks for it work on: in
    ``Model/schedule/fold``, ``train-loss-epoch-N.npy`` with the mean losses of the epochs 0 to N,
    ``confusion_matrix.npy`` and ``checkpoint_latest.tar``; in ``Model/schedule``, ``time.json``;
    and for one job of several processes ``train_data_RANK.csv``.

    Parameters
    ----------
    root_dir : str or Path
        Folder of the run, which may not be complete: jobs that are not done are left out.
    folder : str or Path, optional
        Where to write; by default into the folder of the run.

    Returns
    -------
    list of Path
        The files. Earlier ones of the same names are replaced.

    Raises
    ------
    InputError
        `root_dir` holds no run.
    StorageError
        `folder` cannot be written.

    Notes
    -----
    Times are seconds of the run. Candidates are trained side by side, so ``time.json`` says when a
    candidate's jobs ran, not what they would take alone. Processes of one job report one mean loss
    per epoch, so their files are equal. The optimizer's state in a checkpoint is None: no step
    follows the last.

    Examples
    --------
    >>> import tempfile, torch
    >>> from asynckfold import fit
    >>> inputs, root = torch.randn(60, 4), tempfile.mkdtemp()
    >>> fitted = fit(torch.nn.Linear(4, 2), (inputs, (inputs[:, 0] > 0).long()),
    ...             lambda model: torch.optim.SGD(model.parameters(), 0.1),
    ...             torch.nn.CrossEntropyLoss(), root, epochs=1, verbose=0, report=False)
    >>> sorted(path.name for path in export(root))
    ['checkpoint_latest.tar', 'confusion_matrix.npy', 'time.json', 'train-loss-epoch-0.npy']
    """
    files: dict[str, bytes] = {}
    with open_run(root_dir, "root_dir") as store:
        results = load_results(store)
        targets = store.splits()[1]
        for candidate in results.candidates:
            place = f"{slug(candidate.model)}/{slug(candidate.lr_schedule)}"
            done = _done(results, candidate.name)
            for number, result in done.items():
                for name, data in _of_job(store, results, targets, result).items():
                    files[f"{place}/{number}/{name}"] = data
            if done:
                start = min(item.started for item in done.values())
                end = max(item.ended for item in done.values())
                files[f"{place}/time.json"] = json.dumps({"start": start, "end": end}).encode()
        if len(results.plan.jobs) == 1 and results.plan.params.processes > 1:
            for result in results.results.values():
                table = _loss_table(result)
                for rank in range(results.plan.params.processes):
                    files[f"train_data_{rank}.csv"] = table
    return [_written(Path(folder or root_dir) / name, data) for name, data in files.items()]


def as_npy(array: npt.NDArray[Any]) -> bytes:
    """Return an array as the content of an ``.npy`` file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _done(run: CVResults, candidate: str) -> dict[int, Result]:
    """Return a candidate's finished jobs by number; folds of further repeats follow the first's."""
    jobs = [job for job in run.plan.jobs if job.candidate == candidate]
    results = {number: run.results.get(job.id) for number, job in enumerate(jobs)}
    return {number: item for number, item in results.items() if item and item.status == DONE}


def _of_job(
    store: RunReader, results: CVResults, targets: npt.NDArray[Any], result: Result
) -> dict[str, bytes]:
    losses = np.array([epoch.train_loss for epoch in result.epochs])
    files = {
        f"train-loss-epoch-{number}.npy": as_npy(losses[: number + 1])
        for number in range(len(losses))
    }
    alone = replace(results, results={result.job_id: result})
    for confusion in count_classes(alone, targets, held_out(alone, targets)).values():
        files["confusion_matrix.npy"] = as_npy(confusion)
    return {**files, "checkpoint_latest.tar": _checkpoint(store, result)}


def _checkpoint(store: RunReader, result: Result) -> bytes:
    import torch

    from asynckfold.training import checkpoint

    for ref in store.checkpoints(result.job_id):
        tree = checkpoint.load(store.root / ref.file, ref.sha256)
        buffer = io.BytesIO()
        torch.save(
            {
                "epoch": tree["epoch"] - 1,
                "model_state_dict": tree["model"],
                "optimizer_state_dict": tree["optimizer"],
                "scheduler_state_dict": tree["lr_schedule"],
            },
            buffer,
        )
        return buffer.getvalue()
    raise StoreCorruptError(f"no checkpoint of {result.job_id} is recorded in {store.root}")


def _loss_table(result: Result) -> bytes:
    import pandas as pd

    ends = accumulate((epoch.seconds for epoch in result.epochs), initial=result.started)
    losses = [epoch.train_loss for epoch in result.epochs]
    return str(pd.DataFrame({"train_loss": losses, "time": list(ends)[1:]}).to_csv()).encode()


def _written(path: Path, data: bytes) -> Path:
    make_folder(path.parent)
    write_whole(path, data)
    return path
