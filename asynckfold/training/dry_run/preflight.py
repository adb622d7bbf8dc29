"""The dry run: one small step of each model with each LR schedule, before the sweep.

::

    for each model × LR schedule
        build ── fingerprint ── LR schedule fits the steps?
          └─ first time for a model: step, timed and counted ── checks ── channels last? ── fusible?
                 │                                                │
                 user code raised → a failure: its jobs will      a broken rule → a problem: the
                 fail, the others run                             sweep is refused, or the candidate
"""

from __future__ import annotations

import traceback
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from asynckfold.data.batches import Batches
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.messages import Facts, Fusibility
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.system.plain_text import one_line
from asynckfold.training.bundle import Bundle
from asynckfold.training.dry_run import (
    checks,
    collation_trial,
    criterion_trial,
    fingerprints,
    fusibility,
    sampler_trial,
)
from asynckfold.training.dry_run.candidate import CandidateTrial
from asynckfold.training.dry_run.checks import Refused, TooFewOutputs
from asynckfold.training.evaluation import kept_key
from asynckfold.training.fold_criterion import as_given
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
    facts = Facts({}, {}, {})
    architectures: dict[str, Any] = dict.fromkeys(names)
    settings: dict[str, Any] = {}
    problems: dict[tuple[str, str, str], None] = {}
    notes: dict[str, None] = {}
    sums = batches_fit = False
    for name in names:
        schedules = [schedule for model, schedule in recipe.candidates if model == name]
        stepped: set[type] = set()
        for schedule in schedules:
            heartbeat.begin_long_phase()
            candidate = candidate_name(name, schedule)
            concerned = [candidate]
            # User code may raise anything here, and will again in its jobs.
            try:
                with isolated(patches=True) as traces:
                    if not batches_fit:
                        collation_trial.check(bundle, data)
                        sampler_trial.check(bundle, data)
                        batches_fit = True
                    bundle = criterion_trial.with_criterion(bundle, data)
                    recipe = bundle.recipe
                    dry = CandidateTrial(bundle, data, name, schedule)
                    if dry.reacts:
                        facts.reacting[candidate] = True
                    architectures[name] = fingerprints.architecture_of(dry.model)
                    has_own = schedule in recipe.optimizers
                    settings[f"{candidate}: optimizer" if has_own else name] = (
                        fingerprints.optimizer_settings(dry.optimizer)
                    )
                    settings[candidate] = fingerprints.lr_schedule_settings(dry.lr_schedule)
                    checks.check_storable(f"LR schedule {schedule}", dry.lr_schedule)
                    dry.check_ownership()
                    fit = dry.schedule_fit()
                    problems |= dict.fromkeys(fit.problems)
                    if fit.problems:
                        facts.refused[concerned[0]] = _told(*fit.problems[0])
                    notes |= dict.fromkeys(fit.notes)
                    if name not in facts.step_seconds:
                        concerned = [candidate_name(name, other) for other in schedules]
                        dry.check_model()
                        facts.step_seconds[name] = dry.step_seconds(facts.output_samples)
                        dry.check_learning()
                        dry.check_criterion()
                        checks.check_storable(f"model {name}", dry.model)
                        checks.check_storable("criterion", recipe.criterion)
                        dry.check_stepped_optimizer()
                        dry.check_checkpoint()
                        if dry.changed_in_evaluation:
                            settings[kept_key(name)] = True
                        facts.measured[name] = dry.measured()
                        dry.check_callbacks()
                        sums = sums or dry.criterion_sums()
                        dry.check_parts(sums)
                        facts.memory[name] = dry.memory()
                        facts.weights[name] = sum(item.nbytes for item in dry.model.parameters())
                        stepped.add(type(dry.optimizer))
                        checks.check_servable(bundle, dry.model)
                        checks.check_pretraining(bundle, name, dry.model)
                        facts.flops[name] = dry.counter.flops
                        facts.products[name] = dry.counter.products
                        facts.formats[name] = dry.why_not_channels_last()
                        if bundle.plan.params.compile:
                            heartbeat.begin_long_phase()
                            dry.check_compiled()
                        heartbeat.begin_long_phase()
                        notes |= dict.fromkeys(dry.notes())
                        changed = ", ".join(traces.look())
                        if bundle.plan.device == "cpu":
                            _check_fusible(dry, facts, changed)
                    elif type(dry.optimizer) not in stepped:
                        dry.check_model()
                        dry.step_seconds({})
                        dry.check_stepped_optimizer()
                        dry.check_checkpoint()
            except Refused as refused:
                problems[refused.args] = None
                facts.refused.update(dict.fromkeys(concerned, _told(*refused.args)))
            except TooFewOutputs:
                continue
            except (Exception, SystemExit):  # noqa: BLE001
                facts.failures[candidate] = traceback.format_exc()
    recorded = {
        "architecture": architectures,
        "settings": settings,
        "criterion": fingerprints.criterion_text(as_given(recipe.criterion)),
        "preprocess": None
        if recipe.preprocess is None
        else fingerprints.transformer_text(recipe.preprocess),
        **(SUMS if sums else {}),
    }
    return replace(facts, recipe=recorded, problems=tuple(problems), notes=tuple(notes))


def _told(rule: str, received: str, _: str) -> str:
    """Return a problem without its remedy, on one line."""
    return one_line(f"{rule}: received {received}")


def _check_fusible(dry: CandidateTrial, facts: Facts, changed: str) -> None:
    """Note whether jobs can be fused on cores; `changed` is what the model changes outside."""
    # Each job must begin in an unchanged process, and fused ones share one.
    changing = Fusibility(f"it changes its process ({changed})")
    found = changing if changed else fusibility.on_cores(dry)
    facts.fusible[dry.name] = found.refusal
    if not found.refusal:
        facts.fused[dry.name] = found.found
    checks.check_fusible(dry.bundle, dry.name, found.refusal)
