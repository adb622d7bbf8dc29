"""The verb ``slurm``: trains a run in parts by an array job, and makes one run of them.

::

    task k of n    asynckfold run … --root ROOT/parts/k-of-n --part k/n
    last job       merges what the parts have; if that is all: asynckfold run … --root ROOT,
                   which finds each job trained, refits and reports
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asynckfold.cli import main
from asynckfold.cli.output import Output
from asynckfold.cli.parser import parse
from asynckfold.cli.run_folder import continue_with, stored_words, with_root, without
from asynckfold.cli.summary import print_results
from asynckfold.errors import OUT_OF_TIME, Problem, refuse
from asynckfold.store import RunStore
from asynckfold.store.layout import DATABASE, PARTS
from asynckfold.store.merging import merge_parts

_GENERIC = ("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node")
"""Parameters of submitit for any cluster."""


def slurm(parsed: argparse.Namespace, out: Output) -> int:
    """Submit the jobs, or merge the parts of a run; return the exit code."""
    refuse(parsed.problems)
    if parsed.words[:1] == ["merge"] and len(parsed.words) == 2:
        return _merge(Path(parsed.words[1]), (), parsed.line, out)
    refuse(_problems(parsed))
    from asynckfold.cli.sweep_file import make_kfold, sweep_parts

    task = _Task(tuple(parsed.words), Path(parsed.root).absolute(), parsed.tasks, parsed.line)
    first = parse(task.run(1))
    make_kfold(first, sweep_parts(first))  # refuses what each task would refuse
    import submitit

    executor = submitit.AutoExecutor(task.root / PARTS / "submitit", cluster=parsed.cluster)
    executor.update_parameters(name="asynckfold")
    for name, (value, *_) in (parsed.slurm or {}).items():
        executor.update_parameters(**{name if name in _GENERIC else f"slurm_{name}": value})
    jobs = executor.map_array(task, range(1, task.count + 1))
    if executor.cluster == "slurm":
        array = jobs[0].job_id.partition("_")[0]
        executor.update_parameters(slurm_dependency=f"afterany:{array}")
        last = executor.submit(task, 0).job_id
        out.say(f"job {array}: {task.count} parts of {task.root}; job {last} merges them")
        return 0
    for job in jobs:
        if (error := job.exception()) is not None:
            out.error(str(error))
    return task(0)


def _problems(parsed: argparse.Namespace) -> Iterator[Problem]:
    if not (parsed.root and parsed.words and (parsed.tasks or 0) > 0):
        rule = "slurm needs --root, --tasks of at least 1, and after -- the arguments of run"
        yield Problem(rule, " ".join(parsed.line), "See `asynckfold slurm --help`.")
        return
    counts = {count for _, _, count in _folders(Path(parsed.root))} - {parsed.tasks}
    if counts:
        rule = f"a run keeps its number of parts, {counts.pop()}"
        yield Problem(rule, f"--tasks {parsed.tasks}", "Pass that number, or another --root.")
    for flag in ("--root", "--part"):
        if [*without(flag, parsed.words)] != parsed.words:
            yield Problem(f"{flag} is set for each task", "it after --", "Leave it out there.")
    try:
        import submitit  # noqa: F401
    except ImportError as error:
        yield Problem("slurm needs submitit", str(error), "pip install 'asynckfold[slurm]'")


@dataclass(frozen=True)
class _Task:
    """Trains a part by its number, or merges all: 0. Called again after a preemption."""

    words: tuple[str, ...]
    root: Path
    count: int
    line: Sequence[str]

    def __call__(self, number: int) -> int:
        if not number:
            return _merge(self.root, self.words, self.line, Output(argparse.Namespace()))
        return main(self.run(number))

    def run(self, number: int) -> list[str]:
        """Return the words that train a part."""
        folder = self.root / PARTS / f"{number}-of-{self.count}"
        return with_root(["run", "--part", f"{number}/{self.count}", *self.words], str(folder))

    def checkpoint(self, number: int) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, number)


def _folders(root: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield the folder of each part, its number, and how many there are."""
    for path in sorted((root / PARTS).glob("*-of-*")):
        if match := re.fullmatch(r"(\d+)-of-(\d+)", path.name):
            yield path, int(match[1]), int(match[2])


def _merge(root: Path, words: Sequence[str], line: Sequence[str], out: Output) -> int:
    """Make one run of the parts; where it is complete, end it as the words of `run` say."""
    folders = [item for item in _folders(root) if (item[0] / DATABASE).is_file()]
    merge_parts(root, [path for path, _, _ in folders], _about)
    with RunStore.read(root) as store:
        plan, ended = store.plan, store.finished()
    missing, count = {job.id for job in plan.jobs} - ended.keys(), folders[0][2]
    if words and not missing and "failed" not in ended.values():
        return main(with_root(["run", *words], str(root)))
    code = print_results(root, out, with_report=True)
    for number in range(1, count + 1):
        if left := len(missing - plan.jobs_outside((number, count))):
            out.error(f"part {number} of {count}: {left} jobs have no result")
    if missing:
        out.error(continue_with(line))
    return OUT_OF_TIME if missing else code


def _about(about: dict[str, Any], root: Path) -> dict[str, Any]:
    """Return what is kept with the run, from what is kept with a part."""
    words = stored_words(about)
    command = with_root([*without("--part", words)], str(root)) if words else []
    return about | ({"cli": command, "command": ["asynckfold", *command]} if words else {})
