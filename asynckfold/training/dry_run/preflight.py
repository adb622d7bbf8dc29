"""The dry run: one small step of each model with each LR schedule, before the sweep.

::

    for each model × LR schedule
        build ── fingerprint ── LR schedule fits the steps?
          └─ first time for a model: step, timed and counted ── checks ── channels last? ── fusible?
                 │                                                │
                 user code raised → a failure: its jobs will      a broken rule → a problem: the
                 fail, the others run                             sweep is refused, or the candidate

A model is made twice: training the first, and loading its checkpoint into the second, shows what
no other check can, such as models that share weights, or a state that checkpoints lack.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from asynckfold.data.batches import Batches
from asynckfold.errors import InputError, Problem
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.messages import Facts
from asynckfold.planning import fusion_rule
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.system.plain_text import one_line
from asynckfold.training.bundle import Bundle
from asynckfold.training.dry_run import checks, criteria, fingerprints, state, user_code
from asynckfold.training.dry_run.candidate import CandidateTrial
from asynckfold.training.dry_run.fusibility import fusibility
from asynckfold.training.dry_run.refusals import TooFewOutputs
from asynckfold.training.evaluation import kept_key
from asynckfold.training.isolation.guard import isolated
from asynckfold.training.losses import SUMS
from asynckfold.training.parameter_server.flat_parameters import ParameterLayout
from asynckfold.training.user_steps import Refusal


def check(
    bundle: Bundle, data: Batches, heartbeat: Heartbeat | None = None, models: Collection[str] = ()
) -> Facts:
    """Build every candidate, or those of some models, and take one step with each.

    The heartbeat beats before every candidate.
    """
    dry_run = _DryRun(bundle, data, heartbeat or Heartbeat())
    for name in bundle.recipe.models:
        if not models or name in models:
            dry_run.try_model(name)
    return dry_run.result()


class _DryRun:
    """What the candidates have shown so far."""

    def __init__(self, bundle: Bundle, data: Batches, heartbeat: Heartbeat) -> None:
        self.bundle, self.data, self.heartbeat = bundle, data, heartbeat
        self.facts = Facts({}, {}, {})
        self.architectures: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.problems: dict[tuple[str, str, str], None] = {}
        self.notes: dict[str, None] = {}
        self.sums = self.batches_fit = False

    def try_model(self, name: str) -> None:
        """Build the model with each of its LR schedules; note what breaks a rule, or raises."""
        self.architectures[name] = None
        schedules = [other for model, other in self.bundle.recipe.candidates if model == name]
        stepped: set[type] = set()
        for schedule in schedules:
            self.heartbeat.begin_long_phase()
            candidate = candidate_name(name, schedule)
            concerned = [candidate]
            # User code may raise anything here, and will again in its jobs.
            try:
                with isolated(patches=True) as traces:
                    trial = self._built(name, schedule)
                    if name not in self.facts.step_seconds:
                        concerned = [candidate_name(name, other) for other in schedules]
                        self._try_step(trial)
                        stepped.add(type(trial.live.optimizer))
                        changed = ", ".join(traces.look())
                        self._check_fusible(trial, changed)
                    elif type(trial.live.optimizer) not in stepped:
                        trial.step_seconds({})
                        trial.check_state()
            except InputError as error:
                self._refuse(concerned, error.problems)
            except TooFewOutputs:
                continue
            except (Exception, SystemExit):  # noqa: BLE001
                text = traceback.format_exc().encode("utf-8", "backslashreplace")
                self.facts.failures[candidate] = text.decode()

    def _built(self, name: str, schedule: str) -> CandidateTrial:
        """Build a candidate, and check what needs no step."""
        if not self.batches_fit:
            user_code.check_collation(self.bundle, self.data)
            user_code.check_sampler(self.bundle, self.data)
            self.bundle = criteria.with_criterion(self.bundle, self.data)
            self.batches_fit = True
        trial = CandidateTrial(self.bundle, self.data, name, schedule)
        if trial.reacts:
            self.facts.reacting[trial.candidate] = True
        self.architectures[name] = fingerprints.architecture_of(trial.live.model)
        is_own = schedule in self.bundle.recipe.optimizers
        self.settings[f"{trial.candidate}: optimizer" if is_own else name] = (
            fingerprints.optimizer_settings(trial.live.optimizer)
        )
        self.settings[trial.candidate] = fingerprints.lr_schedule_settings(trial.lr_schedule)
        checks.check_storable({f"LR schedule {schedule}": trial.lr_schedule})
        recipe, params = self.bundle.recipe, self.bundle.plan.params
        state.check_optimized(name, trial.live, recipe, params)
        trial.check_lr_schedule()
        return trial

    def _try_step(self, trial: CandidateTrial) -> None:
        """Take a step, and check what it shows."""
        facts, name = self.facts, trial.name
        facts.step_seconds[name] = trial.step_seconds(facts.output_samples)
        self.sums |= trial.check_learning()
        trial.check_state()
        if trial.changed_in_evaluation:
            self.settings[kept_key(name)] = True
        facts.measured[name] = trial.measured()
        trial.check_callbacks()
        facts.memory[name] = trial.memory()
        facts.weights[name] = sum(item.nbytes for item in trial.live.model.parameters())
        if self.bundle.plan.params.trainer == "parameter_server":
            ParameterLayout.of(trial.live.model)
        facts.flops[name] = trial.counter.flops
        facts.products[name] = trial.counter.products
        facts.formats[name] = trial.why_not_channels_last()
        self.heartbeat.begin_long_phase()
        self.notes |= dict.fromkeys(trial.notes())

    def _check_fusible(self, trial: CandidateTrial, changed: str) -> None:
        """Note whether jobs can be fused; `changed` is what the model changes outside."""
        # Each job must begin in an unchanged process, and fused ones share one.
        changing = dict.fromkeys(self.bundle.kinds, f"it changes its process ({changed})"), ""
        refusals, comparison = changing if changed else fusibility(trial)
        for kind, by_model in (("cpu", self.facts.fusible), ("cuda", self.facts.gpu_fusible)):
            if kind in refusals:
                by_model[trial.name] = refusals[kind]
        refusal = "" if "" in refusals.values() else next(iter(refusals.values()))
        if not refusal:
            self.facts.fused[trial.name] = comparison
        several = sum(job.model == trial.name for job in self.bundle.plan.jobs) > 1
        if refusal and several and self.bundle.fuse not in ("auto", False):
            raise Refusal(*fusion_rule.unfit(self.bundle.fuse, trial.name, refusal))

    def _refuse(self, candidates: list[str], problems: Sequence[Problem]) -> None:
        for item in problems:
            self.problems[item.rule, item.received, item.remedy] = None
            for candidate in candidates:
                self.facts.refused[candidate] = one_line(f"{item.rule}: received {item.received}")

    def result(self) -> Facts:
        """Return the facts, with what the plan records of the live objects."""
        recipe = self.bundle.recipe
        preprocess, target = recipe.preprocess, recipe.target_transform
        recorded = {
            "architecture": self.architectures,
            "settings": self.settings,
            "preprocess": "" if preprocess is None else fingerprints.text_of(preprocess),
            **({} if target is None else {"target_transform": fingerprints.text_of(target)}),
            **(SUMS if self.sums else {}),
            **({} if self.data.sample_weight is None else {"sample_weight": "in all means"}),
        }
        return replace(
            self.facts, recipe=recorded, problems=tuple(self.problems), notes=tuple(self.notes)
        )
