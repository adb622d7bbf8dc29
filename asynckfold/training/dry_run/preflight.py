"""The dry run: one small step of each model with each LR schedule, before the sweep.

::

    for each model × LR schedule
        build ── fingerprint ── LR schedule fits the steps?
          └─ first time for a model: step, timed and counted ── checks ── channels last? ── fusible?
                 │                                                │
                 user code raised → a failure: its jobs will      a broken rule → a problem: the
                 fail, the others run                             sweep is refused
"""

from __future__ import annotations

import traceback
from collections.abc import Collection
from typing import Any

from asynckfold.data import Batches
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.objective import Look
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training.bundle import Bundle
from asynckfold.training.dry_run.candidate import Candidate
from asynckfold.training.dry_run.checks import (
    Refused,
    TooFewOutputs,
    check_fusible,
    check_pretraining,
    check_servable,
    check_shareable,
    check_storable,
)
from asynckfold.training.dry_run.fingerprints import (
    architecture_of,
    criterion_text,
    lr_schedule_settings,
    optimizer_settings,
    transformer_text,
)
from asynckfold.training.isolation.guard import isolated
from asynckfold.training.losses import SUMS


def check(
    bundle: Bundle, data: Batches, heartbeat: Heartbeat | None = None, models: Collection[str] = ()
) -> Facts:
    """Build every candidate, or those of some models, and take one step with each.

    The heartbeat beats before every candidate.
    """
    recipe, heartbeat = bundle.recipe, heartbeat or Heartbeat()
    names = [name for name in recipe.models if not models or name in models]
    architectures: dict[str, Any] = dict.fromkeys(names)
    settings: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    memory: dict[str, int] = {}
    flops: dict[str, int] = {}
    products: dict[str, int] = {}
    fusible: dict[str, str] = {}
    channels_last: dict[str, str] = {}
    fused: dict[str, str] = {}
    looks: dict[str, Look] = {}
    problems: dict[tuple[str, str, str], None] = {}
    failures: dict[str, str] = {}
    notes: dict[str, None] = {}
    sums = False
    for name in names:
        for schedule in recipe.lr_schedules:
            heartbeat.aside()
            # User code may raise anything here, and will again in its jobs.
            try:
                with isolated(patches=True) as traces:
                    dry = Candidate(bundle, data, name, schedule)
                    architectures[name] = architecture_of(dry.model)
                    settings[name] = optimizer_settings(dry.optimizer)
                    settings[f"{name}/{schedule}"] = lr_schedule_settings(dry.lr_schedule)
                    check_storable(f"LR schedule {schedule}", dry.lr_schedule)
                    fit = dry.schedule_fit()
                    problems |= dict.fromkeys(fit.problems)
                    notes |= dict.fromkeys(fit.notes)
                    if name not in seconds:
                        dry.check_model()
                        seconds[name] = dry.step_seconds(looks)
                        dry.check_learning()
                        dry.check_criterion()
                        sums = sums or dry.criterion_sums()
                        memory[name] = dry.memory()
                        check_storable(f"model {name}", dry.model)
                        check_storable("optimizer", dry.optimizer)
                        check_storable("criterion", recipe.criterion)
                        check_shareable(bundle, dry.optimizer)
                        check_servable(bundle, dry.model)
                        check_pretraining(bundle, name, dry.model)
                        flops[name] = dry.counter.flops
                        products[name] = dry.counter.products
                        channels_last[name] = dry.why_not_channels_last()
                        if bundle.plan.params.compile:
                            heartbeat.aside()
                            dry.check_compiled()
                        heartbeat.aside()
                        notes |= dict.fromkeys(dry.notes())
                        changed = ", ".join(traces.look())
                        fusible[name] = (
                            # Each job must begin in an unchanged process, and fused ones share one.
                            f"it changes its process ({changed})"
                            if changed
                            else dry.why_not_fusible()
                        )
                        if not fusible[name]:
                            fused[name] = dry.fused
                        check_fusible(bundle, name, fusible[name])
            except Refused as refused:
                problems[refused.args] = None
            except TooFewOutputs:
                continue
            except (Exception, SystemExit):  # noqa: BLE001
                failures[f"{name}/{schedule}"] = traceback.format_exc()
    facts = {
        "architecture": architectures,
        "settings": settings,
        "criterion": criterion_text(recipe.criterion),
        "preprocess": None if recipe.preprocess is None else transformer_text(recipe.preprocess),
        # Plans of other criteria keep the form that they had in earlier versions.
        **(SUMS if sums else {}),
    }
    return Facts(
        facts,
        seconds,
        memory,
        tuple(problems),
        failures,
        flops,
        fusible,
        channels_last,
        fused,
        products,
        tuple(notes),
        looks,
    )
