"""A plan that does not continue the run in a folder is refused."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from asynckfold.digests.changes import WEIGHTS
from asynckfold.errors import PlanMismatchError, Problem
from asynckfold.plan import Plan

_ANEW = (
    "resume='never' to train all anew: what the folder holds is kept, under another name beside it"
)
_SEED = (
    " A model that is passed as an instance has other weights in each process, unless "
    "torch.manual_seed is called before it is made: or pass its class."
)


def refuse_other(root: Path, stored: Plan, plan: Plan, free: Collection[str] = ()) -> None:
    """Refuse a plan that is no continuation of the one that is stored in a folder.

    Raises
    ------
    PlanMismatchError
        Names the first difference.
    """
    difference = stored.obstacle(plan, free)
    if difference:
        raise PlanMismatchError(
            [
                Problem(
                    f"{root} holds a run of another plan, and a run keeps its plan",
                    difference,
                    _remedy(stored, plan, difference),
                )
            ]
        )


def _remedy(stored: Plan, plan: Plan, difference: str) -> str:
    changed = stored.changed_parts(plan)
    if not any(difference.startswith(text) for text in changed.values()):
        return f"Use another folder, the same arguments to continue that run, or {_ANEW}."
    seed = _SEED if any(WEIGHTS in text for text in changed.values()) else ""
    return f"Undo the change to continue that run, use another folder, or {_ANEW}.{seed}"
