"""The verb ``status``: how far a run is, its scores so far, who runs it, or how it ended."""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from asynckfold.cli.output import Output
from asynckfold.cli.run_folder import stored_command
from asynckfold.errors import InterruptedRunError, Problem, refuse
from asynckfold.jobs.decoding import uncollected
from asynckfold.jobs.reproducibility import Reproducibility, reproducibility_of
from asynckfold.jobs.result import CANCELLED, DONE, ENDED, Result, counts_line
from asynckfold.store import Attempt, RunReader, RunStore, WaitReasons, open_run
from asynckfold.store.layout import refit_folders
from asynckfold.system.plain_text import one_line
from asynckfold.system.units import duration, named_cores, named_node

if TYPE_CHECKING:
    from rich.console import Console, Group

WATCH_SECONDS = 1.0

MOST_SCORES, MOST_NODES = 10, 16
UNREAD = ("samples",)  # nearly all rows of a long run, which say nothing of its state


def status(parsed: argparse.Namespace, out: Output) -> int:
    """Print how far a run is, once or until it ends."""
    if parsed.watch:
        return _watch(parsed, out)
    with open_run(parsed.directory, "DIR", parsed.problems, UNREAD) as store:
        state = with_refits(store)
    out.data(state)
    _say(state, out)
    return 0


def _say(state: Mapping[str, Any], out: Output) -> None:
    for line in lines(state):
        # A command is copied whole.
        out.say(line, wraps="continue with: " not in line)


def _watch(parsed: argparse.Namespace, out: Output) -> int:
    """Show the state on the whole screen until the run ends or Ctrl-C."""
    from rich.live import Live

    from asynckfold.system.console import animates, console

    problems = list(parsed.problems)
    if parsed.json or not animates():
        received = "--json" if parsed.json else "standard output that is none"
        remedy = "Leave out --watch: status then prints the present state once."
        problems.append(Problem("--watch needs a terminal", received, remedy))
    refuse(problems)
    place = console(soft_wrap=False)
    try:
        with Live(console=place, screen=True, auto_refresh=False) as live:
            while True:
                with open_run(parsed.directory, "DIR", unread=UNREAD) as store:
                    state = with_refits(store)
                live.update(_screen(state, parsed.directory, place), refresh=True)
                if not state["holder"]:
                    break
                time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt as interrupt:
        # Ctrl-C is how the view ends well; others asked the command to end.
        if isinstance(interrupt, InterruptedRunError) and interrupt.exit_code != 130:
            raise
    _say(state, out)
    return 0


def _screen(state: Mapping[str, Any], directory: str, place: Console) -> Group:
    from rich.console import Group
    from rich.text import Text

    from asynckfold.system.console import hung

    head = Text(one_line(f"{directory} · Ctrl-C ends this view, not the run"), style="dim")
    return Group(head, *(hung(one_line(line), place) for line in lines(state)))


def state_of(store: RunReader) -> dict[str, Any]:
    """Return what ``asynckfold status --json`` prints for one run.

    Returns
    -------
    dict
        The jobs by state; ``fingerprint`` and ``bit_identity``; ``holder`` (pid, host, start) or
        None; ``running_jobs``, one entry for each job in training (its worker's pid, attempt,
        cores, progress, and ``node`` if it has a name); ``progress``, the steps done of all and the
        expected ``seconds_left``, or None while no sweep runs; ``scores``, of each candidate with a
        result the ``mean`` of the first metric over ``folds`` folds, and whether racing left it
        out; ``verdict``, sentences on the
        results so far; ``idle``, the free cores and GPUs, the cores that other processes use
        (``neighbours``), and how many jobs wait for what, or None while no sweep runs (on several
        nodes the first three are in ``nodes``, by name); ``ended``, how the run ended, None while
        it is held; ``continue_with``, the command that continues it, None if nothing is pending;
        and ``refits``, empty here, see `with_refits`.
    """
    counts, holder = store.counts(), store.holder()
    attempts = store.attempts() if holder or counts["pending"] else []
    at_work = [item for item in attempts if item.outcome is None] if holder else []
    taken = {(item.node, item.last_cores) for item in at_work if item.pid}
    interim = store.interim if holder and counts["pending"] else None
    shown = ("steps_done", "steps", "seconds_left")
    progress = {name: getattr(interim, name) for name in shown} if interim else None
    return {
        **counts,
        "fingerprint": store.fingerprint(),
        "bit_identity": asdict(reproducibility_of(store.plan, store.software())),
        "holder": holder,
        # Without jobs of a batch that wait behind a running one on the same cores.
        "running_jobs": [
            _at_work(store, item)
            for item in at_work
            if item.pid or (item.node, item.last_cores) not in taken
        ],
        "progress": progress,
        "scores": _scores(store),
        "verdict": _verdict(store, is_stopped=not holder and counts["pending"] > 0),
        "idle": _idle(store.waiting, at_work) if holder else None,
        "ended": None if holder else _ended(store, counts, attempts),
        "continue_with": None if holder or not counts["pending"] else stored_command(store.about),
        "refits": [],
    }


@uncollected()
def with_refits(store: RunReader) -> dict[str, Any]:
    """Return `state_of` a run and, in ``refits``, of its runs on all samples.

    Before there is a plan, all counts are 0.
    """
    holder = store.holder()
    if holder and not store.has_plan:
        counts = dict.fromkeys(("planned", *ENDED, "pending", "running"), 0)
        lists = {name: list[Any]() for name in ("running_jobs", "scores", "verdict", "refits")}
        unknown = ("fingerprint", "bit_identity", "progress", "idle", "ended", "continue_with")
        return {**counts, "holder": holder, **lists, **dict.fromkeys(unknown)}
    refits = []
    for folder in refit_folders(store.root):
        with RunStore.read(folder) as alone:
            if alone.has_plan:
                state = state_of(alone)
                again = state["continue_with"] and stored_command(store.about)
                name = alone.plan.jobs[0].candidate
                refits.append({**state, "candidate": name, "continue_with": again})
    return {**state_of(store), "refits": refits}


def _verdict(store: RunReader, *, is_stopped: bool) -> list[str]:
    """Return the sentences that the sweep recorded; of a stopped one, those of its results.

    A sweep records them every few seconds: those of one that was killed may be older than its last
    results.
    """
    if not is_stopped:
        return list(store.interim.verdict) if store.interim else []
    # Take NumPy and SciPy, which status does without otherwise.
    from asynckfold.jobs.folds import outer_folds
    from asynckfold.results.candidates import candidates
    from asynckfold.results.verdict import make_verdict

    plan = store.plan.outer
    results = {
        name: Result(name, 1, status, scores) for name, (status, scores) in store.scores().items()
    }
    if not results:
        return []
    folds = outer_folds(store.splits()[0])
    return list(make_verdict(candidates(plan, results), plan.scoring[0], folds).sentences)


def _scores(store: RunReader) -> list[dict[str, Any]]:
    """Return the mean score of each candidate that has one, the highest first.

    What racing left out stands below.
    """
    plan, scores, values = store.plan.outer, store.scores(), defaultdict[str, list[float]](list)
    metric, left_out = plan.scoring[0], set()
    for job in plan.jobs:
        status, by_metric = scores.get(job.id, ("", {}))
        if status == CANCELLED:
            left_out.add(job.candidate)
        if status == DONE and not math.isnan(by_metric.get(metric, math.nan)):
            values[job.candidate].append(by_metric[metric])
    planned = Counter(job.candidate for job in plan.jobs)
    rows = [
        {
            "candidate": name,
            "metric": metric,
            "mean": sum(folds) / len(folds),  # of infinities of both signs NaN
            "folds": len(folds),
            "planned": planned[name],
            "is_left_out": name in left_out,
        }
        for name, folds in values.items()
    ]
    return sorted(rows, key=lambda row: (row["is_left_out"], -row["mean"], row["candidate"]))


def _at_work(store: RunReader, attempt: Attempt) -> dict[str, Any]:
    saved = next(iter(store.checkpoints(attempt.job_id)), None)
    return {
        "job": attempt.job_id,
        "attempt": attempt.attempt,
        "pid": attempt.pid or None,
        **({"node": attempt.node} if attempt.node else {}),
        "cores": attempt.last_cores,
        "threads": attempt.threads,
        "device": attempt.device,
        "started": attempt.started,
        "epochs_done": len(store.epochs(attempt.job_id)),
        "epochs": store.plan.params.epochs,
        "checkpoint": saved and {"epoch": saved.epoch, "batch": saved.batch},
    }


def _idle(waiting: WaitReasons | None, at_work: Sequence[Attempt]) -> dict[str, Any] | None:
    if waiting is None:
        return None
    if not waiting.peers:
        return {**_idle_on(waiting, at_work), "jobs": waiting.jobs}
    nodes = {node.node: _idle_on(node, at_work) for node in waiting.nodes if node.cores}
    return {"nodes": nodes, "jobs": waiting.jobs}


def _idle_on(waiting: WaitReasons, at_work: Sequence[Attempt]) -> dict[str, Any]:
    here = [item for item in at_work if item.node == waiting.node]
    held = {core for item in here for core in item.last_cores}
    busy = {item.device for item in here}
    return {
        "cores": [core for core in waiting.cores if core not in {*held, *waiting.neighbours}],
        "gpus": [index for index in waiting.gpus if f"cuda:{index}" not in busy],
        "neighbours": [core for core in waiting.neighbours if core not in held],
    }


def _ended(store: RunReader, counts: Mapping[str, int], attempts: Sequence[Attempt]) -> str:
    if not counts["pending"]:
        return "complete"
    newest = max((item.session for item in attempts), default=0)
    outcomes = [item.outcome for item in attempts if item.session == newest]
    if None in outcomes:
        number = outcomes.count(None)
        return f"killed while {number} {'job was' if number == 1 else 'jobs were'} running"
    reasons = [item.text for item in store.events() if item.kind == "interrupted"]
    if "interrupted" in outcomes and reasons:
        return reasons[-1]
    return "stopped by an I/O error" if "io" in outcomes else "stopped early"


def lines(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for people."""
    holder, progress = state["holder"], state["progress"]
    if state["planned"]:
        yield counts_line(state, is_held=bool(holder))
    else:
        yield "no plan yet: the data are read, and the candidates are checked"
    if progress:
        done = f"{100 * progress['steps_done'] // max(1, progress['steps'])} % of the steps"
        left = progress["seconds_left"]
        yield done if left is None else f"{done}, {duration(left)} left"
    if holder:
        yield f"held by process {holder.get('pid')} on {holder.get('host')}"
    else:
        yield f"{state['ended']}{_continued(state)}"
    scores = state["scores"]
    for row in scores[:MOST_SCORES]:
        folds = f"{row['folds']} of {row['planned']} folds"
        folds += ", left out by racing" if row["is_left_out"] else ""
        yield f"  {row['candidate']}: {row['metric']} {row['mean']:.4f} ({folds})"
    if len(scores) > MOST_SCORES:
        yield f"  and {len(scores) - MOST_SCORES} more candidates"
    yield from state["verdict"]
    nodes = {item.get("node", "") for item in state["running_jobs"]}
    is_cluster = len(nodes) > 1 or "nodes" in (state["idle"] or {})
    for item in state["running_jobs"]:
        where = item["device"] if item["device"] != "cpu" else named_cores(item["cores"])
        where += f" on {named_node(item.get('node', ''))}" if is_cluster else ""
        yield (
            f"  {item['job']}: epoch {item['epochs_done']}/{item['epochs']} done, {where}, "
            f"attempt {item['attempt']}, process {item['pid'] or 'starting'}"
        )
    yield from _idle_lines(state["idle"]) if state["idle"] else ()
    for refit in state["refits"]:
        name = next(word for word in (*ENDED, "pending") if refit[word])
        text = "being trained" if refit["running"] else name
        why = f", {refit['ended']}" if name == "pending" and refit["ended"] else ""
        yield f"{refit['candidate']} on all samples: {text}{why}{_continued(refit)}"
    if state["pending"] < state["planned"]:
        verdict = Reproducibility(tuple(state["bit_identity"]["reasons"]))
        yield f"fingerprint {state['fingerprint']}, {verdict}"


def _continued(state: Mapping[str, Any]) -> str:
    command = state["continue_with"]
    return f"; continue with: {command}" if command else ""


def _idle_lines(idle: Mapping[str, Any]) -> Iterator[str]:
    """Yield why cores and GPUs are idle, and on which nodes."""
    nodes = list(idle.get("nodes", {"": idle}).items())
    for name, node in nodes[:MOST_NODES]:
        parts = [f"idle {named_cores(node['cores'])}"] if node["cores"] else []
        if node["gpus"]:
            parts.append(f"idle {named_cores(node['gpus']).replace('core', 'GPU')}")
        if node["neighbours"]:
            parts.append(f"{named_cores(node['neighbours'])} used by other processes")
        where = f"{named_node(name)}: " if "nodes" in idle else ""
        yield f"  {where}{'; '.join(parts) or 'all cores busy'}"
    if more := [len(node["cores"]) for _, node in nodes[MOST_NODES:]]:
        yield f"  {len(more)} more nodes: {sum(more)} idle cores"
    waits = "; ".join(
        f"{count} {'job waits' if count == 1 else 'jobs wait'} for {text}"
        for text, count in idle["jobs"].items()
    )
    yield f"  {waits or 'no pending job'}"
