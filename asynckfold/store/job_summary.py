"""``summary.json`` of a job: what one would look up or grep. Nothing reads it back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from asynckfold.jobs.candidate_names import base_of
from asynckfold.jobs.plan import Job
from asynckfold.jobs.result import Result
from asynckfold.store.layout import SUMMARY, job_folder
from asynckfold.system.files import make_folders, write_whole


def write_summary(root: Path, job: Job, result: Result) -> None:
    """Write the summary of a job that has ended; raise `StorageError` if the disk refuses."""
    folder = job_folder(root, job)
    make_folders(root, folder)
    text = json.dumps(_summary(job, result), indent=1, allow_nan=False)
    write_whole(folder / SUMMARY, f"{text}\n".encode(), root)


def _summary(job: Job, result: Result) -> dict[str, Any]:
    last = result.epochs[-1] if result.epochs else None
    return {
        "job": job.id,
        "model": base_of(job.model),
        "scheduler": base_of(job.lr_schedule),
        **({"params": job.params} if job.params else {}),
        "repeat": job.repeat,
        "fold": job.fold,
        "status": result.status,
        "error": result.error,
        "scores": {name: _finite(value) for name, value in result.scores.items()},
        "train_loss": _finite(last.train_loss) if last else None,
        "valid_loss": _finite(last.valid_loss) if last else None,
        "epochs": len(result.epochs),
        "seconds": _finite(result.fit_seconds),
        "attempts": result.attempt,
        **({"node": result.node} if result.node else {}),
        "device": result.device,
        "cores": list(result.cores),
        "threads": result.threads,
        "peak_memory": result.peak_memory,
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
