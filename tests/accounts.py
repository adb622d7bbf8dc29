"""Do the accounts of a run on disk add up? Read through its public reader, after any test."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from asynckfold import AsyncKFoldError, RunReader, RunStore
from asynckfold.jobs.result import ENDED
from asynckfold.store import job_folder
from asynckfold.store.layout import SUMMARY
from asynckfold.system.files import sha256


def wrong_in(root: Path) -> list[str]:
    """Return what does not add up in a run; nothing for one that never got a plan."""
    try:
        with RunStore.read(root) as store:
            if not store.has_plan:
                return []
            wrong = [*_wrong_counts(store), *_wrong_attempts(store), *_wrong_files(store)]
            return [*wrong, *_wrong_summaries(store)]
    except AsyncKFoldError as error:
        return [f"{type(error).__name__}: {error}"]


def _wrong_counts(store: RunReader) -> Iterator[str]:
    """Planned = done + failed + diverged + cancelled + pending, each counted by itself."""
    planned, results = {job.id for job in store.plan.jobs}, store.results()
    if strangers := results.keys() - planned:
        yield f"results of jobs that are not in the plan: {sorted(strangers)}"
    found = Counter(result.status for result in results.values())
    if unknown := found.keys() - {*ENDED}:
        yield f"unknown states: {sorted(unknown)}"
    counts = store.counts()
    own = {"planned": len(planned), "pending": len(planned - results.keys())}
    own |= {status: found[status] for status in ENDED}
    if any(counts[state] != number for state, number in own.items()):
        yield f"counts {counts}, but {own} when counted one by one"


def _wrong_attempts(store: RunReader) -> Iterator[str]:
    """Each done job has one attempt that ended well, its last."""
    attempts: dict[str, list[tuple[int, str | None]]] = {}
    for item in store.attempts():
        attempts.setdefault(item.job_id, []).append((item.attempt, item.outcome))
    for name, result in store.results().items():
        tries = sorted(attempts.get(name, []))
        good = [number for number, outcome in tries if outcome == "ok"]
        if result.status == "done" and good != [result.attempt]:
            yield f"{name} is done by attempt {result.attempt}, but attempts {good} ended well"
        if tries and tries[-1][0] > result.attempt:
            yield f"{name} was tried again after it had a result: {tries}"


def _wrong_files(store: RunReader) -> Iterator[str]:
    """What is recorded of a done job is there, as it was recorded."""
    for name, result in store.results().items():
        for ref in store.checkpoints(name) if result.status == "done" else ():
            path = store.root / ref.file
            if not path.is_file():
                yield f"{ref.file} of {name} is gone"
            elif sha256(path) != ref.sha256:
                yield f"{ref.file} of {name} is not what was recorded"


def _wrong_summaries(store: RunReader) -> Iterator[str]:
    """No job has a summary of another end than its own; a kill may leave it without one."""
    results = store.results()
    for job in store.plan.jobs:
        path, result = job_folder(store.root, job) / SUMMARY, results.get(job.id)
        found = json.loads(path.read_text()) if path.is_file() else None
        # A kill as a failed job becomes pending again leaves its summary until it has another.
        if found is None or (result is None and found["status"] == "failed"):
            continue
        own = (result.status, result.attempt, len(result.epochs)) if result else None
        if (found["status"], found["attempts"], found["epochs"]) != own:
            yield f"{SUMMARY} of {job.id} tells of another end: {found['status']}, not {own}"
