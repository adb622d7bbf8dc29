"""One run out of its parts, each trained in another folder.

As in a cluster, each part is a node, and all began at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from asynckfold.errors import InputError
from asynckfold.jobs.reproducibility import NODES, differences
from asynckfold.store.opening import read_run, refuse_other
from asynckfold.store.run_store import RunStore


def merge_parts(
    root: Path, folders: Sequence[Path], about: Callable[[dict[str, Any], Path], dict[str, Any]]
) -> None:
    """Take over what some folders hold of a run; a job that has a result in `root` keeps it.

    `about` makes what is kept with the run of what is kept with a part. A `PlanMismatchError` names
    the first difference between the plans of two parts.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(read_run(folder)) for folder in folders]
        parts = [part for part in opened if part.has_plan]
        if not parts:
            rule, remedy = "one part of a run must hold a plan", "Look into the logs of the parts."
            raise InputError.one(rule, f"none below {root}", remedy)
        first = parts[0]
        for part in parts:
            refuse_other(part.root, part.plan, first.plan)
        store = stack.enter_context(RunStore.hold(root))
        store.begin(first.plan, *first.splits(), about(first.about, root))
        sessions = [session for part in parts for session in part.software()]
        if sessions:
            changes = sorted({text for each in sessions for text in differences(sessions[0], each)})
            more = {NODES: "; ".join(changes)} if changes else {}
            store.set_software({**sessions[0], **more})
        with store.together():
            times = [store.take_over(part) for part in parts]
        store.last(*(max(each) for each in zip(*times, strict=True)))
