"""A dry run of every candidate before the sweep: what cannot work is told before hours are spent.

One small step of each model with each LR schedule. What breaks our rules (no optimizer, an output
that does not fit the labels, a loss without a gradient) refuses the sweep; what the user's own code
raises does not: those jobs will fail by themselves, and the others go on.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from asynckfold.data import Batches
from asynckfold.data.transforms import describe
from asynckfold.errors import InputError
from asynckfold.jobs.criteria import Criterion, criterion_of
from asynckfold.jobs.messages import Facts
from asynckfold.jobs.objective import BINARY, Look
from asynckfold.planning import fusion_groups
from asynckfold.planning import memory_format as formats
from asynckfold.system.heartbeat import Heartbeat
from asynckfold.training import checkpoint, lr_schedules, pretraining, seeding, setup
from asynckfold.training.bundle import Bundle
from asynckfold.training.checkpoint import weights_digest
from asynckfold.training.compiling import compile_whole
from asynckfold.training.dry_run import learning, loss_trial, schedule_fit
from asynckfold.training.dry_run.batch_dependence import evaluation_depends_on
from asynckfold.training.dry_run.looks import look_at
from asynckfold.training.flops import FlopCounter
from asynckfold.training.fused_optimizers import with_fused_kernel
from asynckfold.training.fusion import (
    backward,
    check_equivalence,
    fuse,
    fuse_criterion,
    fuse_optimizers,
    parts_of,
)
from asynckfold.training.fusion.optimizers import why_not_on_views, why_not_stackable
from asynckfold.training.fusion.tracing import copied
from asynckfold.training.isolation.guard import isolated
from asynckfold.training.losses import SUMS
from asynckfold.training.parameter_server.flat_parameters import ParameterLayout
from asynckfold.training.precision import outputs_of
from asynckfold.training.preprocessing import fitted

REPLICA_BATCH = 8
"""Samples with which fused replicas are compared with plain models, and memory formats with each
other: these are checks of formulas, and must not want for memory.
"""

_Problem = tuple[str, str, str]

SAME = 1e-2
"""Largest difference of outputs in two memory formats, as a share of their size: a model that
reads memory in the wrong order has others altogether, and bfloat16 rounds to some thousandths."""

LONG_FLOPS, LONG_SECONDS = 5e9, 0.1
"""A step of so many operations that took so long is not timed again: of that, what is done but once
is little. Where others compute, the first step of a small model was seen to last as long."""

AGAIN_SECONDS = 0.1
"""Where several processes are to share such steps, the first one's seconds so often; the others
take much less. Whether they are too short to be shared is told by them, see `processes`."""


class _Refused(Exception):  # noqa: N818
    """One of our rules is broken: (rule, received, remedy)."""


def _refuse(problem: _Problem | None) -> None:
    if problem is not None:
        raise _Refused(problem)


class _TooFew(Exception):  # noqa: N818
    """The model has no outputs for labels as they are, which can be numbered anew."""


def check(
    bundle: Bundle, data: Batches, heartbeat: Heartbeat | None = None, models: Collection[str] = ()
) -> Facts:
    """Build and step every candidate once.

    Parameters
    ----------
    bundle : Bundle
        The sweep.
    data : Batches
        The samples.
    heartbeat : Heartbeat, optional
        Shows every candidate that is begun to whoever watches.
    models : collection of str, optional
        Candidates of these only.

    Returns
    -------
    Facts
        Problems, failures, and what the plan should know of the live objects.
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
    problems: dict[_Problem, None] = {}
    failures: dict[str, str] = {}
    notes: dict[str, None] = {}
    sums = False
    for name in names:
        for schedule in recipe.lr_schedules:
            heartbeat.aside()
            # The user's code may raise anything here; it is told, and its jobs tell it again.
            try:
                with isolated(patches=True) as traces:
                    dry = _DryRun(bundle, data, name, schedule)
                    architectures[name] = _architecture(dry.model)
                    settings[name] = _settings(dry.optimizer)
                    settings[f"{name}/{schedule}"] = _rule(dry.lr_schedule)
                    _check_storable(f"LR schedule {schedule}", dry.lr_schedule)
                    fit = dry.schedule_fit(schedule)
                    problems |= dict.fromkeys(fit.problems)
                    notes |= dict.fromkeys(fit.notes)
                    if name not in seconds:
                        dry.check_model()
                        seconds[name] = dry.step_seconds(looks)
                        dry.check_learning()
                        dry.check_criterion()
                        sums = sums or dry.criterion_sums()
                        memory[name] = _bytes(dry)
                        _check_storable(f"model {name}", dry.model)
                        _check_storable("optimizer", dry.optimizer)
                        _check_storable("criterion", recipe.criterion)
                        _check_shareable(bundle, dry.optimizer)
                        _check_servable(bundle, dry.model)
                        _check_stage(bundle, name, dry.model)
                        flops[name] = dry.counter.flops
                        products[name] = dry.counter.products
                        channels_last[name] = dry.why_not_channels_last()
                        if bundle.plan.params.compile:
                            heartbeat.aside()
                            dry.check_compiled()
                        heartbeat.aside()
                        notes |= dict.fromkeys(dry.notes())
                        fusible[name] = _told(traces.look()) or dry.why_not_fusible()
                        if not fusible[name]:
                            fused[name] = dry.fused
                        _check_fusible(bundle, name, fusible[name])
            except _Refused as refused:
                problems[refused.args[0]] = None
            except _TooFew:
                continue
            except (Exception, SystemExit):  # noqa: BLE001
                failures[f"{name}/{schedule}"] = traceback.format_exc()
    facts = {
        "architecture": architectures,
        "settings": settings,
        "criterion": _describe(recipe.criterion),
        "preprocess": None if recipe.preprocess is None else _transformer(recipe.preprocess),
        # Plans of other criteria are as they were before this was known.
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


class _DryRun:
    def __init__(self, bundle: Bundle, data: Batches, name: str, schedule: str) -> None:
        recipe, plan = bundle.recipe, bundle.plan
        self.bundle, self.name = bundle, name
        self.counter, self.fused = FlopCounter(), ""
        self.outputs: torch.Tensor | None = None
        seeding.seed_all(bundle.folds[0].index)
        self.model = recipe.models[name]()
        if not isinstance(self.model, nn.Module):
            raise _Refused(
                (
                    f"model {name} must be a torch.nn.Module",
                    f"{type(self.model).__name__}",
                    "Return the module from the factory.",
                )
            )
        self.optimizer = with_fused_kernel(recipe.opt_fn, self.model)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise _Refused(
                (
                    "opt_fn must return a torch.optim.Optimizer",
                    f"{self.optimizer!r:.80}",
                    "Write for instance: def opt_fn(model): return Adam(model.parameters(), 1e-3)",
                )
            )
        self.unscheduled = schedule_fit.unscheduled(self.optimizer)
        self.lr_schedule = lr_schedules.make(
            recipe.lr_schedules[schedule], self.optimizer, plan.params.epochs
        )
        _check_schedule(schedule, self.lr_schedule)
        fold = bundle.folds[0]
        self.rows = fold.train
        self.told: list[str] = []
        rows = torch.from_numpy(fold.train[: max(2, plan.batch_size)])
        try:
            self.seen = fitted(data, recipe.preprocess, fold.train, self.told.append)
        except InputError as error:
            problem = error.problems[0]
            raise _Refused((problem.rule, problem.received, problem.remedy)) from error
        except Exception as error:
            raise _Refused(
                (
                    "preprocess must work on the training part of each fold",
                    f"{type(error).__name__} on fold 0: {_first_line(error)}",
                    "It gets an array of numbers, one row for each sample, without column names.",
                )
            ) from error
        self.inputs, self.targets = self.seen.train(rows, 0, 0)

    def schedule_fit(self, schedule: str) -> schedule_fit.Fit:
        """Judge the LR schedule by the steps that the candidate's jobs take."""
        plan, spec = self.bundle.plan, self.bundle.recipe.lr_schedules[schedule]
        sizes = [len(fold.train) for fold in self.bundle.folds]
        least, most = (
            setup.steps_of(plan, count, self.model) for count in (min(sizes), max(sizes))
        )
        batches = setup.steps_of(plan, max(sizes), self.model, "batch")
        steps = schedule_fit.Steps(least, most, plan.params.lr_step, batches)

        def make(optimizer: torch.optim.Optimizer) -> Any:
            # A built-in one is made for the steps of each job.
            return lr_schedules.make(spec, optimizer, most)

        made = make(schedule_fit.unscheduled(self.unscheduled))
        if lr_schedules.needs_metric(made):
            return schedule_fit.fit_of(schedule, made, steps, ())
        found = schedule_fit.rates_of(make, self.unscheduled, most)
        return schedule_fit.fit_of(schedule, made, steps, *found)

    def check_model(self) -> None:
        """Refuse an optimizer of another model, and a model of which there is but one."""
        with seeding.preserved():
            again = self.bundle.recipe.models[self.name]()
        _refuse(learning.why_not_its_own(self.name, self.model, self.optimizer))
        _refuse(learning.why_not_new(self.name, self.model, again))

    def check_learning(self) -> None:
        """Refuse a step that cannot teach anything."""
        _refuse(learning.why_not_learning(self.name, self.model, self.optimizer))
        criterion = self.bundle.recipe.criterion
        assert self.outputs is not None
        _refuse(learning.why_not_logarithms(self.name, criterion, self.outputs))

    def step_seconds(self, looks: dict[str, Look]) -> float:
        """Seconds of the fastest of some steps; the first warms up, its operations are counted.

        What it says goes into `looks`.
        """
        with self.counter:
            first = self._step(looks)
        if first > LONG_SECONDS and self.counter.flops > LONG_FLOPS:
            return first
        several = self.bundle.plan.params.processes > 1
        again = max(1, int(AGAIN_SECONDS / first)) if several else 1
        return min(first, *(self._step() for _ in range(again)))

    def _step(self, looks: dict[str, Look] | None = None) -> float:
        started = time.perf_counter()
        criterion = copy.deepcopy(self.bundle.recipe.criterion)
        outputs = self._outputs(self.model.train())
        if looks is not None and isinstance(outputs, torch.Tensor):
            looks[self.name] = look_at(outputs)
        _check_outputs(self.name, outputs, self.targets, self.bundle)
        # Those of the first step: how many follow is a matter of time.
        self.outputs = outputs.detach() if self.outputs is None else self.outputs
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loss = criterion(outputs, self.targets)
        _check_broadcast(self.name, outputs, self.targets, [str(item.message) for item in told])
        _check_loss(self.name, loss)
        loss.backward()
        if not isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step()
        return time.perf_counter() - started

    def check_criterion(self) -> None:
        """Refuse a criterion that compares outputs with the targets of other samples."""
        criterion, outputs = self.bundle.recipe.criterion, self.outputs
        assert outputs is not None
        with seeding.preserved():
            mixed = loss_trial.mixes_samples(criterion, outputs, self.targets)
        if mixed:
            (first, second), count = map(tuple, mixed), len(self.targets)
            raise _Refused(
                (
                    "the criterion must compare each output with the target of its own sample",
                    f"model {self.name}: outputs {tuple(outputs.shape)} and targets "
                    f"{tuple(self.targets.shape)}, of which it broadcasts {first} and {second} to "
                    f"all {count} × {count} pairs of a batch",
                    "Give both the same shape, as by outputs.squeeze(1) in forward; for all pairs "
                    "on purpose, the same number of dimensions, as outputs[:, None] and "
                    "targets[None, :].",
                )
            )

    def criterion_sums(self) -> bool:
        """Whether the criterion sums over the samples of a batch."""
        assert self.outputs is not None
        with seeding.preserved():
            # The plan holds the answer, which must be the same in the next session.
            seeding.seed_all(self.bundle.folds[0].index)
            return loss_trial.adds_up(self.bundle.recipe.criterion, self.outputs, self.targets)

    def notes(self) -> Iterator[str]:
        """Yield what is lost in preprocessing, and on what scores depend besides the samples."""
        yield from filter(None, self.told)
        precision = self.bundle.plan.params.precision
        found = evaluation_depends_on(self.model, self.inputs[:REPLICA_BATCH], precision)
        if found:
            yield f"model {self.name}: {found}"

    def why_not_channels_last(self) -> str:
        """Return why the model is not to be trained channels last, or nothing where it is."""
        plan = self.bundle.plan
        reason = formats.why_not_paying(plan, self.counter.convolutions)
        if reason:
            return reason
        # What the user's code raises, such as a view of what does not lie in a row, is the reason.
        try:
            reason = self._difference_channels_last()
        except Exception as error:  # noqa: BLE001
            reason = f"{type(error).__name__} was raised: {_first_line(error)}"
        if reason and plan.params.memory_format == "channels_last":
            raise _Refused(
                (
                    "memory_format='channels_last' needs models that compute the same so",
                    f"model {self.name}: {reason}",
                    "Leave memory_format out, or use flatten in place of view.",
                )
            )
        return reason

    def _difference_channels_last(self) -> str:
        """Compare one step in both formats: a model may look into the memory of its tensors."""
        found = []
        for memory_format in (torch.contiguous_format, torch.channels_last):
            model = copied(self.model).to(memory_format=memory_format).train()
            with seeding.preserved():
                outputs = self._outputs(model, REPLICA_BATCH)
                criterion = copy.deepcopy(self.bundle.recipe.criterion)
                criterion(outputs, self.targets[:REPLICA_BATCH]).backward()
            found.append(outputs.detach())
        apart, size = float((found[0] - found[1]).abs().max()), float(found[0].abs().max())
        return "" if apart <= SAME * size else f"its outputs differ by {apart:.1e} of {size:.1e}"

    def check_compiled(self) -> None:
        """Refuse a model that ran, and does not when it is compiled."""
        compile_whole(self.model)
        try:
            self._step()
            with torch.no_grad():
                self._outputs(self.model.eval())
        except Exception as error:
            raise _Refused(
                (
                    "compile=True needs models that torch.compile takes whole",
                    f"model {self.name}: {type(error).__name__}: {_first_line(error)}",
                    "Leave compile out, or change the model.",
                )
            ) from error
        finally:
            torch.compiler.reset()

    def _outputs(self, model: nn.Module, most: int | None = None) -> Any:
        return outputs_of(model, self.inputs[:most], self.bundle.plan.params.precision)

    def why_not_fusible(self) -> str:
        """Return why jobs of the model are not to be trained as one, or nothing where they are."""
        bundle, recipe = self.bundle, self.bundle.recipe
        if pretraining.wanted(self.model):
            return "it has a stage of pretraining, which each job does by itself"
        reason = fusion_groups.why_not_paying(
            bundle.fuse, bundle.plan, bundle.folds, self.name, self.counter.flops
        )
        if reason:
            return reason
        # What the user's code raises in two replicas is the reason.
        try:
            models = [recipe.models[self.name]() for _ in range(2)]
            opt_fn = partial(with_fused_kernel, recipe.opt_fn)
            precision, steps = bundle.plan.params.precision, self._steps()
            found = check_equivalence(models, recipe.criterion, steps, opt_fn, precision)
            if found.fused is None:
                return str(found.refusal)
            if found.fused.why_vmap:
                return f"there is no batched form of it: {found.fused.why_vmap}"
            self.fused = str(found)
            optimizers = [opt_fn(model) for model in found.fused.models]
            own = why_not_stackable(found.fused, optimizers, range(2))
            if own is None:
                return ""
            self.fused += f"; each job steps an optimizer of its own: {own}"
            views = self._why_not_on_views(models, opt_fn, steps[-1])
            return f"{own}, and {views}" if views else ""
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__} was raised: {error}"

    def _why_not_on_views(
        self,
        models: Sequence[nn.Module],
        opt_fn: Callable[[nn.Module], torch.optim.Optimizer],
        batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> str | None:
        """Return why optimizers of their own do not step them as one, or None where they do."""
        plain, (inputs, targets) = [copied(model) for model in models], batches[0]
        fused = fuse(models, [inputs])
        replica_optimizers, _ = fuse_optimizers(
            fused, [opt_fn(model) for model in models], [range(2)]
        )
        criterion = self.bundle.recipe.criterion
        together = fuse_criterion(criterion, len(plain), copied(plain[0])(inputs), targets)
        backward(fused, together, parts_of(batches), self.bundle.plan.params.precision)
        return why_not_on_views(
            fused, replica_optimizers, plain, [opt_fn(model) for model in plain]
        )

    def _steps(self) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Two steps of two replicas: with batches that differ by one sample, then together.

        Batches of different sizes are computed one replica at a time, and that would not show what
        replicas do to each other; evaluated are the last ones. No two have a sample in common, so
        that a replica which sees another's is found, too, where there are enough.
        """
        most = min(REPLICA_BATCH, len(self.inputs))
        rows = torch.from_numpy(self.rows)
        return [
            [
                self.seen.train(rows.roll(-(2 * step + row) * most)[:size], row, step)
                for row, size in enumerate(sizes)
            ]
            for step, sizes in enumerate([(most, most - 1), (most, most)])
        ]


def _told(changed: Sequence[str]) -> str:
    """Say why jobs that change their process, which each begins anew, cannot share one."""
    return f"it changes its process ({', '.join(changed)})" if changed else ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200]


def _check_fusible(bundle: Bundle, name: str, reason: str) -> None:
    """Refuse what was asked for by more than "auto" and cannot be."""
    several = sum(job.model == name for job in bundle.plan.jobs) > 1
    if reason and several and bundle.fuse not in ("auto", False):
        raise _Refused(
            (
                f"fuse={bundle.fuse} needs models that can be fused",
                f"model {name}: {reason}",
                "Pass fuse='auto' or fuse=False, or leave the model out.",
            )
        )


def _check_storable(what: str, owner: Any) -> None:
    """Refuse a state that no checkpoint can hold, before there is one to be written."""
    if not hasattr(owner, "state_dict"):
        return
    try:
        checkpoint.check_storable({what: owner.state_dict()})
    except TypeError as error:
        raise _Refused(
            (
                "checkpoints must be able to hold the whole state of a job",
                str(error),
                f"Leave that out of state_dict() of the {what}, or keep it as tensors or numbers.",
            )
        ) from error


def _check_shareable(bundle: Bundle, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose state several processes can neither share nor keep."""
    params = bundle.plan.params
    if params.processes == 1:
        return
    # Of the gradients of several processes one optimizer makes one step.
    states = [] if params.trainer == "allreduce" else optimizer.state.values()
    tensors_only = "shared_state=True" if params.shared_state else ""
    tensors_only = "trainer='averaging'" if params.trainer == "averaging" else tensors_only
    for values in states:
        for name, value in values.items():
            if not isinstance(value, (torch.Tensor, int, float, bool, type(None))):
                raise _Refused(
                    (
                        "several processes need an optimizer that keeps tensors and numbers",
                        f"{type(optimizer).__name__}, whose {name} is a {type(value).__name__}",
                        "Use another, such as SGD or Adam, or processes=1.",
                    )
                )
            if tensors_only and not isinstance(value, torch.Tensor):
                raise _Refused(
                    (
                        f"{tensors_only} needs an optimizer that keeps tensors only",
                        f"{type(optimizer).__name__}, whose {name} is a {type(value).__name__}",
                        f"Use another, such as SGD or Adam, or leave {tensors_only} out.",
                    )
                )
    if params.trainer == "allreduce" and _has_sparse_gradients(optimizer):
        raise _Refused(
            (
                "gradients that are added up must be dense",
                "sparse ones, as of an Embedding with sparse=True",
                "Pass sparse=False, or trainer='hogwild'.",
            )
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _Refused(
            (
                "several processes need an optimizer with one gradient a step",
                "LBFGS, which asks for several",
                "Use another, such as SGD or Adam, or processes=1.",
            )
        )


def _check_servable(bundle: Bundle, model: nn.Module) -> None:
    """Refuse a model whose parameters a parameter server cannot hold."""
    if bundle.plan.params.trainer == "parameter_server":
        try:
            ParameterLayout.of(model)
        except InputError as error:
            problem = error.problems[0]
            raise _Refused((problem.rule, problem.received, problem.remedy)) from error


def _check_stage(bundle: Bundle, name: str, model: nn.Module) -> None:
    """Refuse a stage that may differentiate before a process is forked for a GPU."""
    if bundle.plan.params.on_gpu and pretraining.may_differentiate(model):
        raise _Refused(
            (
                "a process of the kind 'gpu' needs a model without pretrain(), or a DBN's own",
                f"model {name}, a {type(model).__name__} whose pretrain() may call backward()",
                "Leave the kind 'gpu' out, or the model.",
            )
        )


def _has_sparse_gradients(optimizer: torch.optim.Optimizer) -> bool:
    held = [item for group in optimizer.param_groups for item in group["params"]]
    return any(item.grad is not None and item.grad.is_sparse for item in held)


def _check_schedule(name: str, schedule: Any) -> None:
    if not callable(getattr(schedule, "step", None)) or not hasattr(schedule, "state_dict"):
        raise _Refused(
            (
                f"LR schedule {name} must have step() and state_dict()",
                f"{schedule!r:.80}",
                "Return a torch.optim.lr_scheduler object from the function optimizer → schedule.",
            )
        )


def _check_outputs(name: str, outputs: Any, targets: torch.Tensor, bundle: Bundle) -> None:
    classes = len(bundle.plan.classes)
    if not isinstance(outputs, torch.Tensor):
        raise _Refused(
            (
                f"model {name} must return one tensor",
                type(outputs).__name__,
                "Return the outputs only, not a tuple or dict.",
            )
        )
    if len(outputs) != len(targets):
        raise _Refused(
            (
                f"model {name} must return one row for each sample",
                f"shape {tuple(outputs.shape)} for {len(targets)} samples",
                "Keep the first dimension of the input.",
            )
        )
    criterion = criterion_of(bundle.recipe.criterion)
    if not classes or (bundle.plan.objective and bundle.plan.objective.kind == BINARY):
        return
    needed = bundle.highest + 1 if bundle.highest >= 0 else classes
    columns = outputs.shape[1] if outputs.ndim == 2 else int(outputs.ndim == 1)
    # One output may be for two classes, where the criterion is the user's own.
    found = 2 if criterion is None and columns == 1 else columns
    if outputs.ndim == 2 or found == 2:
        if found < needed and bundle.may_be_numbered:
            raise _TooFew
        if found >= needed:
            _check_weight(name, bundle.recipe.criterion, criterion, found)
            return
    raise _Refused(
        (
            f"model {name} must return (samples, classes) scores for the {needed} classes",
            f"shape {tuple(outputs.shape)}",
            f"Give its last layer {needed} outputs.",
        )
    )


def _check_weight(name: str, criterion: Any, asked: Criterion | None, columns: int) -> None:
    weight = getattr(criterion, "weight", None)
    if asked is None or not isinstance(weight, torch.Tensor) or weight.numel() == columns:
        return
    raise _Refused(
        (
            f"weight of {asked.name} must hold a number for each output of model {name}",
            f"{weight.numel()} for {columns} outputs",
            "Pass a weight for each class, by its index.",
        )
    )


def _check_broadcast(
    name: str, outputs: torch.Tensor, targets: torch.Tensor, told: list[str]
) -> None:
    """Refuse what torch only warns of: each output compared with the targets of all samples."""
    if any(text.startswith("Using a target size") for text in told):
        raise _Refused(
            (
                f"model {name} must return outputs of the shape of the targets",
                f"outputs {tuple(outputs.shape)}, targets {tuple(targets.shape)}",
                "Squeeze the outputs in forward, or pass targets of shape (samples, 1).",
            )
        )


def _check_loss(name: str, loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = (
            f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
            if isinstance(loss, torch.Tensor)
            else repr(loss)[:80]
        )
        raise _Refused(
            (
                f"the criterion must give model {name} one number with a gradient",
                found,
                "Let it return the mean over the samples (reduction='mean'); the model needs "
                "parameters that are not frozen.",
            )
        )


def _architecture(model: nn.Module) -> str:
    shapes = [
        f"{name}:{tuple(tensor.shape)}:{tensor.dtype}" for name, tensor in _tensors(model).items()
    ]
    return _digest("\n".join([_text(model), *shapes]))


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    entries = module.state_dict().items()
    return {name: value for name, value in entries if isinstance(value, torch.Tensor)}


def _text(value: object) -> str:
    """Text that is equal in any process: without addresses in memory."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _settings(optimizer: torch.optim.Optimizer) -> str:
    groups = [
        {key: _text(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    for group in groups:
        group.pop("initial_lr", None)
    return f"{type(optimizer).__name__} {json.dumps(groups, sort_keys=True)}"


def _rule(lr_schedule: Any) -> str:
    """The LR schedule with its settings, which its first state holds."""
    state = lr_schedule.state_dict()
    shown = sorted(state.items()) if isinstance(state, dict) else state
    return f"{type(lr_schedule).__name__} {_text(shown)}"


def _describe(criterion: Any) -> str:
    if isinstance(criterion, nn.Module):
        # Its text does not show everything: the smoothing and the weights of a CrossEntropyLoss.
        plain = {key: value for key, value in vars(criterion).items() if not key.startswith("_")}
        state = criterion.state_dict()
        digest = weights_digest(state)[:16] if state else ""
        return f"{_text(criterion)} {_text(sorted(plain.items()))} {digest}".strip()
    name = getattr(criterion, "__qualname__", type(criterion).__name__)
    return f"{name} {_digest(describe(criterion))}"


def _transformer(preprocess: Any) -> str:
    return f"{_text(preprocess)} {_digest(describe(sorted(preprocess.get_params().items())))}"


def _bytes(dry: _DryRun) -> int:
    """Parameters and gradients, optimizer state, and some room for activations."""
    weights: int = sum(tensor.nbytes for tensor in _tensors(dry.model).values())
    state: int = sum(
        value.nbytes
        for entry in dry.optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )
    return 2 * weights + state + 64 * int(dry.inputs.nbytes)
