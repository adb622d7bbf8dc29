"""The verb ``status``: how far a run is, which process runs it, or how it ended."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from asynckfold.cli.output import Output
from asynckfold.cli.run_folder import open_run, stored_command
from asynckfold.jobs.reproducibility import Reproducibility, reproducibility_of
from asynckfold.store import Attempt, RunReader, RunStore, Waiting
from asynckfold.store.layout import refit_folders
from asynckfold.system.units import named_cores


def status(parsed: argparse.Namespace, out: Output) -> int:
    """Print how far a run is."""
    with open_run(parsed.directory, parsed.problems) as store:
        found = with_refits(store)
    out.data(found)
    for line in lines(found):
        out.say(line)
    return 0


def state_of(store: RunReader) -> dict[str, Any]:
    """Return what ``asynckfold status --json`` prints for one run.

    Returns
    -------
    dict
        The jobs by state; ``fingerprint`` and ``bit_identity``; ``holder`` (pid, host, start) or
        None; ``running_jobs``, one entry for each job in training (its worker's pid, attempt,
        cores and progress); ``idle``, the free cores and GPUs, the cores that other processes use
        (``neighbours``), and how many jobs wait for what, or None while no sweep runs; ``ended``,
        how the run ended, None while it is held; ``continue_with``, the command that continues it,
        None if nothing is pending; and ``refits``, empty here, see `with_refits`.
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
        "continue_with": None if holder or not counts["pending"] else stored_command(store.about),
        "refits": [],
    }


def with_refits(store: RunReader) -> dict[str, Any]:
    """Return `state_of` a run and, in ``refits``, of its runs on all samples."""
    return {**state_of(store), "refits": list(_refits(store))}


def _refits(store: RunReader) -> Iterator[dict[str, Any]]:
    for folder in refit_folders(store.root):
        with RunStore.read(folder) as alone:
            if alone.has_plan:
                found = state_of(alone)
                again = found["continue_with"] and stored_command(store.about)
                candidate = alone.plan.jobs[0].candidate
                yield {**found, "candidate": candidate, "continue_with": again}


def _in_hand(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Leave out jobs of a batch that wait behind a running one on the same cores."""
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
    busy = {number for item in at_work for number in item.device.removeprefix("cuda:").split(",")}
    return {
        "cores": [core for core in waiting.cores if core not in {*held, *waiting.neighbours}],
        "gpus": [index for index in waiting.gpus if str(index) not in busy],
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
    return "stopped by an I/O error" if "io" in outcomes else "stopped early"


def counts_line(counts: Mapping[str, Any], *, is_held: bool = False) -> str:
    """Return the number of finished jobs, and the others by state.

    >>> counts = {"planned": 20, "done": 12, "failed": 1, "diverged": 0, "cancelled": 0}
    >>> counts_line({**counts, "pending": 7, "running": 2}, is_held=True)
    '12 of 20 jobs finished, 1 failed, 2 running, 5 waiting'
    >>> counts_line({**counts, "pending": 7})
    '12 of 20 jobs finished, 1 failed, 7 pending'
    """
    running = counts.get("running", 0)
    numbers = {name: counts[name] for name in ("failed", "diverged", "cancelled")}
    numbers["running"] = running
    numbers["waiting" if is_held else "pending"] = max(0, counts["pending"] - running)
    others = "".join(f", {number} {name}" for name, number in numbers.items() if number)
    planned = counts["planned"]
    return f"{counts['done']} of {planned} {'job' if planned == 1 else 'jobs'} finished{others}"


def lines(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for people."""
    holder = state["holder"]
    yield counts_line(state, is_held=bool(holder))
    if holder:
        yield f"held by process {holder.get('pid')} on {holder.get('host')}"
    else:
        then = f"; continue with: {state['continue_with']}" if state["continue_with"] else ""
        yield f"{state['ended']}{then}"
    for item in state["running_jobs"]:
        where = item["device"] if item["device"] != "cpu" else f"cores {item['cores']}"
        yield (
            f"  {item['job']}: epoch {item['epochs_done']}/{item['epochs']} done, {where}, "
            f"attempt {item['attempt']}, process {item['pid'] or 'starting'}"
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
    if state["pending"] < state["planned"]:
        verdict = Reproducibility(tuple(state["bit_identity"]["reasons"]))
        yield f"fingerprint {state['fingerprint']}, {verdict}"


def _idle_lines(idle: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield why cores and GPUs are idle."""
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
            yield f"  idle {what}: {'; '.join(waits) or 'no pending job'}"
    if idle["neighbours"]:
        yield f"  used by other processes: {named_cores(idle['neighbours'])}"
    if waits and not idle["cores"]:
        yield f"  {'; '.join(waits)}"
