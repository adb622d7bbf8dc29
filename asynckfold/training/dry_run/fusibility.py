"""Whether the jobs of a model can be fused: two replicas of it are, and compared with the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from asynckfold.planning import fusion_rule
from asynckfold.training import seeding
from asynckfold.training.dry_run.candidate import REPLICA_BATCH, CandidateTrial
from asynckfold.training.evaluation import has_modes
from asynckfold.training.fusion.backward import Batch
from asynckfold.training.fusion.equivalence import check_equivalence
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.optimizers import fuse_optimizers
from asynckfold.training.losses import trained_parameters
from asynckfold.training.optimizers import opt_fn_for, with_fused_kernel
from asynckfold.training.pretraining import has_pretraining


def fusibility(trial: CandidateTrial) -> tuple[dict[str, str], str]:
    """Return by kind of device why a model's jobs cannot be fused, and what a comparison has shown.

    Fused and separate replicas are compared where a rule says that fusing may pay.
    """
    plan, bundle, counter = trial.bundle.plan, trial.bundle, trial.counter
    unfit = _unfit(trial)
    refusals = {
        kind: unfit
        or fusion_rule.why_not_paying(
            bundle.fuse, plan, bundle.folds, trial.name, counter.flops, counter.products, kind
        )
        for kind in bundle.kinds
    }
    if all(refusals.values()):
        return refusals, ""
    refusal, comparison = _compared(trial, plan.params.precision_on_cores)
    return {kind: reason or refusal for kind, reason in refusals.items()}, comparison


def _unfit(trial: CandidateTrial) -> str:
    """Return why jobs of a model are fused on no device; empty if nothing speaks against it."""
    bundle, recipe = trial.bundle, trial.bundle.recipe
    kinds = {type(trial.live.optimizer), *_optimizer_kinds(trial)}
    obstacles = {
        "it has pretraining, which each job runs separately": has_pretraining(trial.live.model),
        "it has a training step of the user's own": recipe.training_step is not None,
        "it has a validation step of the user's own": recipe.validation_step is not None,
        "it has a loop of the user's own": recipe.fit_fn is not None,
        "it has callbacks": bool(recipe.callbacks),
        "a part of each training fold is set aside": bool(bundle.folds[0].inner_valid.size),
        "each fold has a criterion of its own": recipe.make_criterion is not None,
        "its criterion has parameters, which each job trains": trained_parameters(
            trial.live.criterion
        ),
        "its samples have weights": trial.seen.sample_weight is not None,
        "its batches come of a collate_fn": trial.seen.collation is not None,
        "each step takes the mean gradient of several batches": bundle.plan.params.accumulate > 1,
        "in float16, each job scales its own losses": bundle.plan.params.precision == "fp16",
        "its optimizer has other weights for evaluation": has_modes(trial.live.optimizer),
        "its evaluation changes it, and restores it": trial.changed_in_evaluation,
        "its candidates have optimizers of different kinds": kinds > {type(trial.live.optimizer)},
    }
    return next((reason for reason, holds in obstacles.items() if holds), "")


def _optimizer_kinds(trial: CandidateTrial) -> Iterator[type]:
    """Yield the class of each optimizer that a grid gives the model."""
    recipe = trial.bundle.recipe
    for model, schedule in recipe.candidates:
        if model == trial.name and schedule in recipe.optimizers:
            # A candidate whose optimizer cannot be made is in no group.
            with contextlib.suppress(Exception), seeding.preserved():
                yield type(opt_fn_for(recipe, schedule, trial.live.criterion)(trial.live.model))


def _compared(trial: CandidateTrial, precision: str) -> tuple[str, str]:
    recipe = trial.bundle.recipe
    # An exception of user code in two replicas is the reason.
    try:
        models = [recipe.models[trial.name]() for _ in range(2)]
        comparison = check_equivalence(models, recipe.criterion, _batches(trial), precision)
        if comparison.fused is None:
            return str(comparison.refusal), ""
        opt_fn = opt_fn_for(recipe, trial.schedule, trial.live.criterion)
        optimizers = [with_fused_kernel(opt_fn, model) for model in comparison.fused.models]
        fuse_optimizers(comparison.fused, optimizers, [range(2)])
        return "", str(comparison)
    except NotFusible as error:
        return str(error), ""
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__} was raised: {error}", ""


def _batches(trial: CandidateTrial) -> list[Batch]:
    """Return the batches of a step of two replicas.

    They have one size: others are computed one by one, which hides what replicas do to each other.
    If possible they share no sample, so that a replica that sees another's samples is noticed.
    """
    most = min(REPLICA_BATCH, len(trial.first_rows))
    rows = torch.from_numpy(trial.rows)
    return [trial.seen.train(rows.roll(-row * most)[:most], row, 0) for row in range(2)]
