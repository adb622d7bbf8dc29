"""How far a run is, who works on it, and what became of it when nobody does."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from asynckfold.jobs.reproducibility import Reproducibility, reproducibility_of
from asynckfold.scheduling.wait_reasons import named_cores
from asynckfold.store import Attempt, RunReader, RunStore, Waiting
from asynckfold.store.layout import refit_folders


def state_of(store: RunReader) -> dict[str, Any]:
    """Return what ``asynckfold status --json`` prints of one run: plain data.

    Returns
    -------
    dict
        The jobs by state; ``fingerprint`` and ``bit_identity``; ``holder`` (pid, host, start) or
        None; ``running_jobs``, one entry a job that a worker has in hand (its pid, attempt, cores
        and last progress); ``idle``, the cores and GPUs that nobody holds, the cores that are left
        to ``neighbours``, and how many jobs wait for what, or None where no sweep is at work;
        ``ended``, what became of the run where nobody holds it;
        ``continue_with``, the command that does, where there is something to do; and ``refits``,
        empty here, see `with_refits`.
    """
    counts, holder, attempts = store.counts(), store.holder(), store.attempts()
    at_work = [item for item in attempts if item.outcome is None] if holder else []
    return {
        **counts,
        "fingerprint": store.fingerprint(),
        "bit_identity": asdict(reproducibility_of(store.plan, store.software())),
        "holder": holder,
        "running_jobs": [_at_work(store, item) for item in _in_hand(at_work)],
        "idle": _idle(store.waiting, at_work) if holder else None,
        "ended": None if holder else _ended(store, counts, attempts),
        "continue_with": None if holder or not counts["pending"] else continuation(store.about),
        "refits": [],
    }


def with_refits(store: RunReader) -> dict[str, Any]:
    """Return `state_of` a run, and in ``refits`` the same of its runs on all samples."""
    return {**state_of(store), "refits": list(_refits(store))}


def _refits(store: RunReader) -> Iterator[dict[str, Any]]:
    for folder in refit_folders(store.root):
        with RunStore.read(folder) as alone:
            if alone.has_plan:
                found = state_of(alone)
                again = found["continue_with"] and continuation(store.about)
                candidate = alone.plan.jobs[0].candidate
                yield {**found, "candidate": candidate, "continue_with": again}


def _in_hand(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Leave out those of a row of jobs that come after the one in hand, on the same cores."""
    taken = {item.last_cores for item in attempts if item.pid}
    return [item for item in attempts if item.pid or item.last_cores not in taken]


def _at_work(store: RunReader, attempt: Attempt) -> dict[str, Any]:
    saved = next(iter(store.checkpoints(attempt.job_id)), None)
    return {
        "job": attempt.job_id,
        "attempt": attempt.attempt,
        "pid": attempt.pid or None,
        "cores": attempt.last_cores,
        "threads": attempt.threads,
        "device": attempt.device,
        "started": attempt.started,
        "epochs_done": len(store.epochs(attempt.job_id)),
        "epochs": store.plan.params.epochs,
        "checkpoint": saved and {"epoch": saved.epoch, "batch": saved.batch},
    }


def _idle(waiting: Waiting | None, at_work: Sequence[Attempt]) -> dict[str, Any] | None:
    if waiting is None:
        return None
    held = {core for item in at_work for core in item.last_cores}
    devices = {item.device for item in at_work}
    return {
        "cores": [core for core in waiting.cores if core not in {*held, *waiting.neighbours}],
        "gpus": [index for index in waiting.gpus if f"cuda:{index}" not in devices],
        "neighbours": [core for core in waiting.neighbours if core not in held],
        "jobs": waiting.jobs,
    }


def _ended(store: RunReader, counts: Mapping[str, int], attempts: Sequence[Attempt]) -> str:
    if not counts["pending"]:
        return "complete"
    newest = max((item.session for item in attempts), default=0)
    outcomes = [item.outcome for item in attempts if item.session == newest]
    if None in outcomes:
        number = outcomes.count(None)
        return f"killed while {number} {'job was' if number == 1 else 'jobs were'} running"
    told = [item.text for item in store.events() if item.kind == "interrupted"]
    if "interrupted" in outcomes and told:
        return told[-1]
    return "stopped by an I/O fault" if "io" in outcomes else "stopped before its end"


def continuation(about: Mapping[str, Any]) -> str:
    """Return the command that continues a run, from what it knows about itself."""
    words, command = about.get("cli"), about.get("command")
    if isinstance(words, list) and words:
        return shlex.join(["asynckfold", *map(str, words)])
    shown = shlex.join(map(str, command)) if isinstance(command, list) and command else ""
    return f"the same call{f' ({shown})' if shown else ''}"


def lines(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the state in words."""
    ends = " + ".join(
        f"{state[name]} {name}" for name in ("done", "failed", "diverged", "cancelled", "pending")
    )
    yield f"{state['planned']} planned = {ends} ({state['running']} of them running)"
    holder = state["holder"]
    if holder:
        yield f"held by process {holder.get('pid')} on {holder.get('host')}"
    else:
        then = f"; continue with: {state['continue_with']}" if state["continue_with"] else ""
        yield f"not held by anyone: {state['ended']}{then}"
    for item in state["running_jobs"]:
        where = item["device"] if item["device"] != "cpu" else f"cores {item['cores']}"
        yield (
            f"  {item['job']}: epoch {item['epochs_done']}/{item['epochs']} done, {where}, "
            f"attempt {item['attempt']}, process {item['pid'] or 'not yet known'}"
        )
    yield from _idle_lines(state["idle"])
    for refit in state["refits"]:
        name = next(
            word for word in ("done", "failed", "diverged", "cancelled", "pending") if refit[word]
        )
        text = "being trained" if refit["running"] else name
        then = f"; continue with: {refit['continue_with']}" if refit["continue_with"] else ""
        why = f", {refit['ended']}" if name == "pending" and refit["ended"] else ""
        yield f"{refit['candidate']} on all samples: {text}{why}{then}"
    verdict = Reproducibility(tuple(state["bit_identity"]["reasons"]))
    yield f"fingerprint {state['fingerprint']}, {verdict}"


def _idle_lines(idle: Mapping[str, Any] | None) -> Iterator[str]:
    """Say what each core and GPU waits for that no job holds."""
    if idle is None:
        return
    waits = [
        f"{count} {'job waits' if count == 1 else 'jobs wait'} for {text}"
        for text, count in idle["jobs"].items()
    ]
    for kind in ("cores", "gpus"):
        if idle[kind]:
            named = named_cores(idle[kind])
            what = named if kind == "cores" else named.replace("core", "GPU")
            yield f"  idle {what}: {'; '.join(waits) or 'no job is left to start'}"
    if idle["neighbours"]:
        yield f"  left to neighbours: {named_cores(idle['neighbours'])}"
    if waits and not idle["cores"]:
        yield f"  {'; '.join(waits)}"
