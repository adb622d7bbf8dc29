"""Refuse a plan that does not continue the run in a folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from asynckfold.errors import PlanMismatchError, Problem
from asynckfold.jobs.digests.changes import WEIGHTS
from asynckfold.jobs.plan import Plan
from asynckfold.store.layout import initial_weights

_ANEW = "resume='never' to train everything again: the old folder is kept under another name"
_SEED = (
    " A model passed as an instance has different weights in each process, unless "
    "torch.manual_seed is called before it is created: or pass its class."
)


def refuse_other(root: Path, stored: Plan, plan: Plan, free: Collection[str] = ()) -> None:
    """Refuse a plan that does not continue the stored one.

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
                    f"{root} holds a run with another plan, and the plan of a run cannot change",
                    difference,
                    _remedy(root, stored, plan, difference),
                )
            ]
        )


def _remedy(root: Path, stored: Plan, plan: Plan, difference: str) -> str:
    changed = stored.changed_parts(plan)
    if not any(difference.startswith(text) for text in changed.values()):
        return f"Use another folder, the same arguments to continue that run, or {_ANEW}."
    remedy = f"Undo the change to continue that run, use another folder, or {_ANEW}."
    models = [part.removeprefix("model ") for part, text in changed.items() if WEIGHTS in text]
    kept = [path for model in models if (path := initial_weights(root, model)).is_file()]
    if kept:
        remedy += (
            " Its initial weights: "
            f"model.load_state_dict(safetensors.torch.load_file({str(kept[0])!r}))."
        )
    return remedy + _SEED * bool(models)
