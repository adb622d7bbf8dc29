"""A call without LR schedules and `opt_fn`: its models are LightningModules, which bring both."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from asynckfold.api.arguments import Settings
from asynckfold.errors import Problem
from asynckfold.jobs.trainer_params import TrainerParams

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def are_meant(schedulers: Any, opt_fn: Any) -> bool:
    """Whether models are to bring LR schedule and optimizer themselves."""
    if schedulers is None and opt_fn is None:
        return any(name in sys.modules for name in _PACKAGES)
    # As the first call passes them on for a refit.
    return type(opt_fn).__module__ == "asynckfold.integrations.lightning"


def notes(models: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each LightningModule that is trained as a module like any other."""
    kinds = tuple(sys.modules[name].LightningModule for name in _PACKAGES if name in sys.modules)
    for name, model in models.items():
        kind = model if isinstance(model, type) else type(getattr(model, "module", None))
        if kinds and issubclass(kind, kinds):
            yield (
                f"model {name} is a LightningModule: with an opt_fn it trains by the criterion, "
                "not by its training_step; leave schedulers and opt_fn out to change that"
            )


def schedulers() -> dict[str, Any]:
    """Return the LR schedules that stand for ``configure_optimizers``."""
    from asynckfold.integrations import lightning
    from asynckfold.training.lr_schedules import attached

    return {lightning.NAME: attached}


def opt_fn(epochs: int) -> Any:
    """Return the optimizer function that stands for ``configure_optimizers``."""
    from asynckfold.integrations import lightning

    return lightning.ConfiguredOptimizer(epochs)


@dataclass(frozen=True, eq=False)
class WithSteps:
    """Settings with the steps of the modules, parameters, and what is wrong."""

    settings: Settings
    params: TrainerParams
    problems: list[Problem]


def with_steps(
    settings: Settings, models: Mapping[str, Any], params: TrainerParams, trainer_params: Any
) -> WithSteps:
    """Return what trains LightningModules by their own steps.

    Parameters
    ----------
    models : Mapping
        Factories by name.
    trainer_params : Mapping or None
        What the caller said.
    """
    from asynckfold.integrations import lightning

    modules = lightning.look_into(models, params.epochs)
    problems = list(modules.problems)
    for name in ("training_step", "validation_step", "fit_fn"):
        if getattr(settings, name) is not None:
            problems.append(
                Problem(
                    "a LightningModule trains by its own steps",
                    f"{name}= and no opt_fn",
                    f"Drop {name}, or pass schedulers and opt_fn too.",
                )
            )
    lr_step: Literal["epoch", "batch"] = "batch" if modules.each == "step" else "epoch"
    said = {**settings.trainer_params, **(trainer_params or {})}.get("lr_step", lr_step)
    if said != lr_step:
        rule = "lr_step must be the interval of the LR schedule in configure_optimizers"
        received = f"lr_step={said!r}, interval={modules.each!r}"
        problems.append(Problem(rule, received, "Leave lr_step out."))
    epochs, key = params.epochs, settings.target_key
    names = ["training_step", *["validation_step"] * modules.validates]
    steps: dict[str, Any] = {name: lightning.ModuleStep(name, epochs, key) for name in names}
    if problems:
        return WithSteps(settings, params, problems)
    return WithSteps(replace(settings, **steps), replace(params, lr_step=lr_step), [])
