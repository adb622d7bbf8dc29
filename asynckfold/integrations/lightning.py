"""A `LightningModule` moved over unchanged: its steps, optimizer and LR schedule.

::

    training_step         ──►  training_step=    what self.log gets is in the table of epochs
    validation_step       ──►  validation_step=
    configure_optimizers  ──►  opt_fn, and the LR schedule that comes with its optimizer

What a `Trainer` would do besides is refused by name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from asynckfold.errors import Problem
from asynckfold.jobs.argument import one_line
from asynckfold.jobs.trainer_params import TrainerParams
from asynckfold.training import lr_schedules, seeding
from asynckfold.training.user_steps import TAKEN, Refusal, StepState

NAME = "configure_optimizers"
"""Name of the LR schedule of a module."""

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

_MIXINS = ("ModelHooks", "DataHooks", "CheckpointHooks")
"""Bases of a `LightningModule`, whose public functions are hooks."""

_HOOKS = (
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""Hooks of the class itself."""

_UNUSED = ("on_test_", "on_predict_", "test_", "predict_", "teardown")
"""Hooks that a `Trainer` does not call while it fits, or when nothing follows."""


def schedules_and_optimizer(epochs: int) -> tuple[dict[str, Any], ConfiguredOptimizer]:
    """Return what stands for ``configure_optimizers`` where a call has neither."""
    return {NAME: lr_schedules.attached}, ConfiguredOptimizer(epochs)


def module_notes(models: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each LightningModule that is trained as a module like any other."""
    for name, model in models.items():
        kind = model if isinstance(model, type) else type(getattr(model, "module", None))
        if issubclass(kind, module_types()):
            yield (
                f"model {name} is a LightningModule: with an opt_fn it trains by the criterion, "
                "not by its training_step; leave schedulers and opt_fn out to change that"
            )


def with_steps(
    settings: Any, models: Mapping[str, Any], params: TrainerParams, trainer_params: Any
) -> tuple[Any, TrainerParams, list[Problem]]:
    """Return settings and parameters by which modules train by their own steps, or problems.

    `models` are factories by name, `trainer_params` what the caller passed.
    """
    problems: list[Problem] = []
    validates, intervals = {}, {}
    # Each model is built once.
    for name, factory in models.items():
        try:
            with seeding.preserved():
                module = factory()
                problems += _problems_of(name, module)
                if not isinstance(module, module_types()):
                    continue
                validates[name] = _overrides(module, "validation_step")
                intervals[name] = ConfiguredOptimizer(params.epochs).configured(module)[2]
        except Refusal as error:
            (problem,) = error.problems
            received = f"{problem.received}, of model {name}"
            problems.append(replace(problem, received=received))
        except Exception as error:  # noqa: BLE001 - a factory is the user's code
            received = f"{type(error).__name__}: {error}".splitlines()[0]
            rule = f"model {name} must be made and configured without a Trainer"
            problems.append(Problem(rule, one_line(received), "Correct it."))
    for what, by_model in (
        ("validation_step", validates),
        ("interval of the LR schedule", intervals),
    ):
        if len({*by_model.values()}) > 1:
            values = ", ".join(f"{name}: {value}" for name, value in by_model.items())
            rule = f"the LightningModules of a call must agree on the {what}"
            problems.append(Problem(rule, values, "Make a run of each kind."))
    for name in ("training_step", "validation_step", "fit_fn"):
        if getattr(settings, name) is not None:
            remedy = f"Drop {name}, or pass schedulers and opt_fn too."
            rule = "a LightningModule trains by its own steps"
            problems.append(Problem(rule, f"{name}= and no opt_fn", remedy))
    each = next(iter(intervals.values()), "epoch")
    lr_step: Literal["epoch", "batch"] = "batch" if each == "step" else "epoch"
    passed = {**settings.trainer_params, **(trainer_params or {})}.get("lr_step", lr_step)
    if passed != lr_step:
        rule = "lr_step must be the interval of the LR schedule in configure_optimizers"
        received = f"lr_step={passed!r}, interval={each!r}"
        problems.append(Problem(rule, received, "Leave lr_step out."))
    if problems:
        return settings, params, list(dict.fromkeys(problems))
    names = ["training_step", *["validation_step"] * any(validates.values())]
    steps = {name: ModuleStep(name, params.epochs, settings.target_key) for name in names}
    return replace(settings, **steps), replace(params, lr_step=lr_step), []


def module_types() -> tuple[Any, ...]:
    """Return the classes called `LightningModule` that this process has imported."""
    types = (getattr(sys.modules.get(name), "LightningModule", None) for name in _PACKAGES)
    return tuple(item for item in types if isinstance(item, type))


class TrainerView:
    """What a module sees as ``self.trainer``."""

    logger = None
    loggers = ()
    global_rank = local_rank = node_rank = 0
    world_size = num_nodes = num_devices = 1
    is_global_zero, sanity_checking = True, False

    def __init__(self, max_epochs: int, current_epoch: int = 0) -> None:
        self.max_epochs, self.current_epoch = max_epochs, current_epoch

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for names that are not there.
        if name.startswith("__"):
            raise AttributeError(name)
        raise Refusal(
            "a LightningModule sees of its trainer max_epochs, current_epoch and the ranks",
            f"self.trainer.{name}",
            "Pass what it needs to the module's constructor.",
        )


@contextmanager
def _attached(module: Any, trainer: TrainerView, log: Callable[..., None]) -> Iterator[None]:
    module.trainer = trainer
    vars(module)["log"] = log
    try:
        yield
    finally:
        del vars(module)["log"]
        module.trainer = None


@dataclass(frozen=True)
class ConfiguredOptimizer:
    """As ``opt_fn``: the optimizer that a module configures, with its LR schedule attached."""

    epochs: int = 1

    def __call__(self, module: Any) -> Any:
        """Return the optimizer of a module."""
        optimizer, schedule, _ = self.configured(module)
        lr_schedules.attach(schedule, optimizer)
        return optimizer

    def configured(self, module: Any) -> tuple[Any, Any, str]:
        """Return optimizer, LR schedule or None, and after what the schedule steps.

        Raises
        ------
        Refusal
            The module configures what has no counterpart here.
        """
        with _attached(module, TrainerView(self.epochs), lambda *args, **kwargs: None):
            configuration = module.configure_optimizers()
        optimizers, schedules = _parsed(configuration)
        if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
            raise Refusal(
                "configure_optimizers must return one torch.optim.Optimizer",
                f"{len(optimizers)} optimizers" if optimizers else one_line(configuration),
                "For several, write a training_step for AsyncKFold; see examples/gan.py.",
            )
        if len(schedules) > 1:
            rule, received = "an optimizer has one LR schedule", f"{len(schedules)} LR schedules"
            raise Refusal(rule, received, "Chain them by SequentialLR or ChainedScheduler.")
        schedule, each = _schedule_of(schedules[0]) if schedules else (None, "epoch")
        return optimizers[0], schedule, each


def _parsed(configuration: Any) -> tuple[list[Any], list[Any]]:
    """Return optimizers and LR schedules, in all forms that Lightning takes."""
    if isinstance(configuration, Mapping):
        given = configuration.get("lr_scheduler")
        return [configuration.get("optimizer")], [] if given is None else [given]
    if not isinstance(configuration, (list, tuple)):
        return [] if configuration is None else [configuration], []
    if len(configuration) == 2 and isinstance(configuration[0], list):
        schedules = (
            configuration[1] if isinstance(configuration[1], (list, tuple)) else [configuration[1]]
        )
        return list(configuration[0]), list(schedules)
    return list(configuration), []


def _schedule_of(given: Any) -> tuple[Any, str]:
    """Return an LR schedule and its interval, of what stands beside an optimizer."""
    config = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    schedule, each = config.get("scheduler"), config.get("interval", "epoch")
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise Refusal(
            "an LR schedule must not react to the held-out fold, which scores the model",
            "ReduceLROnPlateau",
            "Pass schedulers=['reduce'], which sets samples aside, with opt_fn, and a "
            "training_step for AsyncKFold; or use another LR schedule.",
        )
    if config.get("frequency", 1) != 1 or each not in ("epoch", "step"):
        rule = "an LR schedule steps after each epoch or each step"
        received = f"interval={each!r}, frequency={config.get('frequency', 1)!r}"
        raise Refusal(rule, received, "Leave frequency out.")
    return schedule, each


@dataclass(frozen=True)
class ModuleStep:
    """As ``training_step`` or ``validation_step``: that of the module itself."""

    name: str
    epochs: int = 1
    target_key: str | None = None

    def __call__(self, module: Any, batch: Any, state: StepState) -> Any:
        """Call the module's function on a batch; return its loss, None of a ``validation_step``."""
        function = getattr(module, self.name)
        given = {"batch_idx": state.batch_index, "dataloader_idx": 0}
        taken = inspect.signature(function).parameters
        known = {name: value for name, value in given.items() if name in taken}
        count = len(batch[1])

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            _check_log(name, kwargs, count)
            state.log(**{f"logged_{name}" if name in TAKEN else name: value})

        with _attached(module, TrainerView(self.epochs, state.epoch), log):
            returned = function(self._batch(batch), **known)
        if self.name == "validation_step":
            return None
        return returned.get("loss") if isinstance(returned, Mapping) else returned

    def _batch(self, batch: Any) -> Any:
        inputs, targets = batch
        return {**inputs, self.target_key: targets} if isinstance(inputs, Mapping) else batch


def _check_log(name: str, kwargs: Mapping[str, Any], count: int) -> None:
    """Refuse to log what would be another number here."""
    if kwargs.get("reduce_fx", "mean") not in ("mean", torch.mean):
        received = f"self.log({name!r}, reduce_fx={kwargs['reduce_fx']!r})"
        raise Refusal("what is logged is averaged", received, "Leave reduce_fx out.")
    if kwargs.get("batch_size") not in (None, count):
        received = f"self.log({name!r}, batch_size={kwargs['batch_size']}) of {count} samples"
        rule = "what is logged is averaged over samples"
        raise Refusal(rule, received, "Leave batch_size out.")


def _problems_of(name: str, module: Any) -> Iterator[Problem]:
    if not isinstance(module, module_types()):
        yield Problem(
            "schedulers and opt_fn can be left out for LightningModules only",
            f"model {name}, a {type(module).__name__}",
            "Pass both, such as ['cosine'] and lambda model: Adam(model.parameters(), 1e-3).",
        )
        return
    if not module.automatic_optimization:
        yield Problem(
            "a LightningModule must leave the optimization to the trainer",
            f"automatic_optimization=False in model {name}",
            "Write a training_step for AsyncKFold, which may use several optimizers.",
        )
    if hooks := [hook for hook in _hooks() if _overrides(module, hook)]:
        yield Problem(
            "only training_step, validation_step, configure_optimizers and forward of a "
            "LightningModule are called",
            f"model {name} with {', '.join(hooks)}",
            "Remove the others, or train by a fit_fn for AsyncKFold.",
        )
    for needed in ("training_step", "forward"):
        if not _overrides(module, needed):
            why = "trains it" if needed == "training_step" else "gives the outputs that are scored"
            rule = f"a LightningModule must have {needed}, which {why}"
            yield Problem(rule, f"model {name} without", f"Write {needed}.")


def _hooks() -> Sequence[str]:
    bases = {base for kind in module_types() for base in kind.__mro__ if base.__name__ in _MIXINS}
    defined = {
        name for base in bases for name in vars(base) if inspect.isfunction(vars(base)[name])
    }
    return sorted(name for name in defined.union(_HOOKS) if not name.startswith(("_", *_UNUSED)))


def _overrides(module: Any, name: str) -> bool:
    base = next(kind for kind in module_types() if isinstance(module, kind))
    function = getattr(getattr(module, name, None), "__func__", None)
    return function is not getattr(base, name, None)
