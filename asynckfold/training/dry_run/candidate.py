"""The dry run of one candidate: model, optimizer, LR schedule, and one batch."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from asynckfold.data.batches import Batches
from asynckfold.data.collation import structure
from asynckfold.data.transforms.trees import kinds_text, mapped, tensors_in
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.objective import REGRESSION, OutputSample
from asynckfold.planning import memory_format
from asynckfold.training import gradients, lr_schedules, seeding, setup
from asynckfold.training.batches import samples_per_epoch
from asynckfold.training.bundle import Bundle
from asynckfold.training.callbacks import Callbacks, callbacks_of, try_callbacks
from asynckfold.training.calls import ONE, outputs_of
from asynckfold.training.dry_run import checks, criteria, outside, user_code
from asynckfold.training.dry_run.fingerprints import tensors_of
from asynckfold.training.dry_run.outputs import evaluation_depends_on, output_sample
from asynckfold.training.dry_run.refusals import (
    OF_SHAPES,
    Refusal,
    attempting,
    first_line,
    kinds_of,
    layer_of,
    trying,
)
from asynckfold.training.dry_run.saved_state import CheckpointTrial, Live, few
from asynckfold.training.dry_run.schedule_fit import Fit, Steps, judge, without_schedule
from asynckfold.training.flops import FlopCounter
from asynckfold.training.fusion.tracing import copied
from asynckfold.training.losses import trained_parameters
from asynckfold.training.optimizers import opt_fn_for, optimizers_of, with_fused_kernel
from asynckfold.training.preprocessing import fit_transform
from asynckfold.training.user_steps import check_loss, user_step, user_validation

REPLICA_BATCH = 8
"""Samples for comparing fused replicas with plain models, and memory formats with each other: these
check formulas, and must not run out of memory."""

SAME = 1e-2
"""Largest difference of outputs in two memory formats, relative to their size. A model that reads
memory in the wrong order is far beyond it; bfloat16 rounds to a few thousandths."""

_MEAN = (
    "Let it return the mean over the samples (reduction='mean'); the model needs parameters that "
    "are not frozen."
)

LONG_FLOPS, LONG_SECONDS = 5e9, 0.1
"""A step of more operations and seconds is timed once: the warm-up is a small part of it. Seconds
alone do not tell: beside other processes, the first step of a small model takes as long."""


class CandidateTrial:
    """One model and LR schedule on fold 0: built, trained by a step, evaluated.

    Parameters
    ----------
    bundle : Bundle
        With the criterion of fold 0.
    data : Batches
        All samples, before preprocessing.
    name, schedule : str
        Of the model and of the LR schedule.

    Raises
    ------
    Refused
        A part cannot be made, or breaks a rule.
    """

    def __init__(self, bundle: Bundle, data: Batches, name: str, schedule: str) -> None:
        recipe, plan = bundle.recipe, bundle.plan
        self.bundle, self.name, self.schedule = bundle, name, schedule
        self.candidate = candidate_name(name, schedule)
        self.precision = plan.params.precision_on_cores
        self.counter = FlopCounter()
        self.outputs: Any = None
        self.changed_in_evaluation: list[str] = []
        seeding.seed_all(bundle.folds[0].index)
        with attempting(f"the factory of model {name} must return a torch.nn.Module"):
            model = recipe.models[name]()
        if not isinstance(model, nn.Module):
            remedy = "Return the module from the factory."
            raise Refusal(f"model {name} must be a torch.nn.Module", type(model).__name__, remedy)
        criterion = copy.deepcopy(recipe.criterion)
        with attempting(f"opt_fn must make an optimizer for model {name}"):
            optimizer = self._optimizer(model, criterion)
        checks.check_optimizer_kind(optimizer, recipe)
        self.unscheduled = without_schedule(optimizer)
        with attempting(f"LR schedule {schedule} must be made for the optimizer of model {name}"):
            self.lr_schedule = self._lr_schedule(optimizer)
        checks.check_lr_schedule(schedule, self.lr_schedule, recipe)
        self.reacts = lr_schedules.needs_metric(self.lr_schedule)
        job = replace(plan.jobs[0], model=name, lr_schedule=schedule)
        reacting = (job.candidate,) if self.reacts else ()
        self.rows = replace(plan, reacting=reacting).fold_of(job, bundle.folds).fitted
        # Those that may break a model or a loss come first.
        size = max(2, plan.batch_size)
        rows = dict.fromkeys((*data.not_finite, *self.rows[:size].tolist()))
        self.first_rows = torch.tensor(list(rows)[:size])
        self.data_notes: list[str] = []
        remedy = "It gets an array of numbers, one row for each sample, without column names."
        with trying("preprocess must work on the training part of each fold", remedy):
            tell = self.data_notes.append
            self.seen = fit_transform(data, recipe.preprocess, self.rows, tell)
        self.inputs, self.targets = self.seen.train(self.first_rows, 0, 0)
        self.live = self._live(model, optimizer, criterion)
        # How the model gets several inputs; empty for one tensor.
        is_one = isinstance(self.inputs, torch.Tensor) and self.seen.collation is None
        self.way = "" if is_one else checks.way_of_call(name, model, self.inputs, data)

    # How a job makes its parts

    def _optimizer(self, model: nn.Module, criterion: Any) -> Any:
        return with_fused_kernel(opt_fn_for(self.bundle.recipe, self.schedule, criterion), model)

    def _lr_schedule(self, optimizer: Any, steps: int = 0) -> Any:
        spec = self.bundle.recipe.lr_schedules[self.schedule]
        return lr_schedules.make(spec, optimizer, steps or self.bundle.plan.params.epochs)

    def _live(self, model: nn.Module, optimizer: Any, criterion: Any) -> Live:
        """Return live objects with a step of the user's."""
        params, device = self.bundle.plan.params, self.targets.device
        step = user_step(self.bundle.recipe, params, optimizer, criterion, device, self.precision)
        return Live(model, optimizer, criterion, step)

    def _made(self) -> Live:
        """Return a new model, and what belongs to it; the same each time."""
        seeding.seed_all(self.bundle.folds[0].index)
        model = self.bundle.recipe.models[self.name]()
        criterion = copy.deepcopy(self.bundle.recipe.criterion)
        return self._live(model, self._optimizer(model, criterion), criterion)

    # Before a step

    def schedule_fit(self) -> Fit:
        """Judge the LR schedule by the number of steps in the candidate's jobs."""
        plan, every = self.bundle.plan, [fold.fitted for fold in self.bundle.folds]
        refits = self.candidate in self.bundle.refits
        if refits:
            every.append(np.arange(self.seen.n_samples))
        sampler = self.bundle.recipe.sampler
        sizes = [samples_per_epoch(sampler, self.seen, rows, 0) for rows in every]
        least, most = (
            setup.steps_of(plan, count, self.live.model) for count in (min(sizes), max(sizes))
        )
        batches = setup.steps_of(plan, max(sizes), self.live.model, "batch")
        steps = Steps(least, most, plan.params.lr_step, batches, refits)
        make = partial(self._lr_schedule, steps=most)
        return judge(self.schedule, make, self.unscheduled, steps)

    # A step

    def step_seconds(self, output_samples: dict[str, OutputSample]) -> float:
        """Return the seconds of the faster of two steps; add the outputs to `output_samples`.

        The first step warms up, and its operations are counted.
        """
        is_loop = self.bundle.recipe.fit_fn is not None
        if self.live.user_step or is_loop:
            self._score(output_samples)
        with outside.only_inside(self.bundle.recipe, self.name, self.live), self.counter:
            first, weights = self._step(output_samples)
        if first > LONG_SECONDS and self.counter.flops > LONG_FLOPS and not is_loop:
            return first
        second, again = self._step()
        if weights != again:
            raise Refusal(
                "fit_fn must give the same bits each time",
                "other weights after one batch of the same seed",
                "Draw from the global generators of torch, NumPy and random, which are seeded, or "
                "seed your own by context.seed.",
            )
        return min(first, second)

    def _step(self, output_samples: dict[str, OutputSample] | None = None) -> tuple[float, str]:
        """Return the seconds of a step; after a user's loop, the digest of the weights."""
        started, weights = time.perf_counter(), ""
        if self.bundle.recipe.fit_fn is not None:
            self.live, batch = self._made(), mapped(torch.clone, self._users_batch())
            schedule, device = self._lr_schedule(self.live.optimizer), self.targets.device
            weights = user_code.run_loop(self.bundle, self.live, schedule, batch, device)
        elif self.live.user_step:
            self.live.set_mode(train=True)
            user_code.train_step(self.live.user_step, self.live.model, self._users_batch())
        else:
            self._plain_step(output_samples)
        return time.perf_counter() - started, weights

    def _plain_step(self, output_samples: dict[str, OutputSample] | None) -> None:
        self.live.set_mode(train=True)
        outputs = self._fitting_outputs(self.live.model)
        if not isinstance(outputs, torch.Tensor):
            if output_samples is not None:
                # In evaluation mode, which is scored.
                with seeding.preserved(), torch.no_grad():
                    evaluated = self._fitting_outputs(copied(self.live.model).eval())
                    output_samples[self.name] = self._sample_of(evaluated)
        else:
            if output_samples is not None:
                output_samples[self.name] = output_sample(outputs)
            checks.check_outputs(self.name, outputs, self.targets, self.bundle)
        if self.outputs is None:
            # Of the first step: the number of steps depends on their seconds.
            self.outputs = mapped(torch.detach, outputs)
        loss = self._loss(self.live.criterion, outputs)
        check_loss(loss, f"the criterion of model {self.name}", remedy=_MEAN)
        checks.check_finite(self.name, self.first_rows, (self.inputs, self.targets), loss)
        loss.backward()

        def backward() -> torch.Tensor:
            self.live.optimizer.zero_grad()
            again: torch.Tensor = self.live.criterion(
                self._fitting_outputs(self.live.model), self.targets
            )
            again.backward()  # type: ignore[no-untyped-call]
            return again

        if not isinstance(self.live.optimizer, torch.optim.LBFGS):
            gradients.take_step(self.live.optimizer, backward)

    def _users_batch(self) -> tuple[Any, Any]:
        """Return inputs and targets as the user's steps and loop get them."""
        return self.inputs, self.seen.asked_of(self.targets)

    def _batch(self, rows: torch.Tensor) -> Any:
        return self.seen.train(rows, 0, 0)[0]

    def _outputs(self, model: nn.Module, most: int | None = None) -> Any:
        inputs = self._batch(self.first_rows[:most]) if self.way else self.inputs[:most]
        return outputs_of(model, inputs, self.precision)

    def _fitting_outputs(self, model: nn.Module) -> Any:
        rule = f"model {self.name} must take the samples, in batches of {kinds_of(self.inputs)}"
        where: Callable[[Exception], str] = partial(layer_of, model, self.inputs)
        remedy, kinds = "Change the model or transform the samples", OF_SHAPES
        if self.way == ONE and isinstance(self.inputs, Mapping):
            remedy, kinds = "Name the inputs as forward does", (Exception,)
        with attempting(rule, where, remedy, kinds):
            return self._outputs(model)

    def _loss(self, criterion: Any, outputs: Any) -> Any:
        targets = self.seen.asked_of(self.targets)
        rule = f"the criterion must take the outputs of model {self.name} and the targets"
        shapes = f" for outputs {kinds_of(outputs)} and targets {kinds_of(targets)}"
        remedy = "Change the criterion, the last layer of the model, or the targets"
        unlike = isinstance(outputs, torch.Tensor) and outputs.ndim != self.targets.ndim
        if unlike and outputs.squeeze(-1).shape == self.targets.squeeze(-1).shape:
            remedy = "Squeeze the outputs in forward, or pass targets of shape (samples, 1)"
            if outputs.ndim < self.targets.ndim:
                remedy = "Return outputs[:, None] in forward, or pass targets of shape (samples,)"
        kinds = (*OF_SHAPES, AttributeError, UserWarning)
        with attempting(rule, lambda error: shapes, remedy, kinds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Of torch's losses, which broadcast outputs against the targets of other samples.
            warnings.filterwarnings("error", "Using a target size")
            return criterion(outputs, self.targets)

    def _sample_of(self, outputs: Any) -> OutputSample:
        """Return a sample of outputs of the whole batch in evaluation mode; refuse unfit ones."""
        if isinstance(outputs, torch.Tensor):
            checks.check_outputs(self.name, outputs, self.targets, self.bundle)
            return output_sample(outputs)
        count = len(self.targets)
        listed = isinstance(outputs, (list, tuple)) and len(outputs) == count
        if listed:
            # Several outputs may be as many as the samples.
            fewer = self._outputs(copied(self.live.model).eval(), count - 1)
            listed = len(fewer) == count - 1
        columns = checks.columns_of(self.name, outputs, count, listed=listed)
        return output_sample(outputs, columns)

    def _score(self, output_samples: dict[str, OutputSample]) -> None:
        """Refuse a model that the user's code trains, and that cannot be scored."""
        with torch.no_grad():
            outputs = self._fitting_outputs(self.live.model.eval())
            output_samples[self.name] = self._sample_of(outputs)
            loss = self._loss(copy.deepcopy(self.bundle.recipe.criterion), outputs)
        scorer = f"the criterion of model {self.name}, which scores the held-out fold,"
        check_loss(loss, scorer, differentiable=False, remedy=_MEAN)
        checks.check_finite(self.name, self.first_rows, (self.inputs, self.targets), outputs)
        self.outputs = outputs

    # After a step

    def check_learning(self) -> None:
        """Refuse a step that cannot teach anything."""
        if self.bundle.recipe.fit_fn is None:
            checks.check_gradient(self.name, self.live.model, self.live.optimizer)
        if isinstance(self.outputs, torch.Tensor):
            checks.check_log_probabilities(self.name, self.bundle.recipe.criterion, self.outputs)

    def check_state(self) -> None:
        """Refuse a state that no checkpoint can hold or restore, or that fits no trainer."""
        with seeding.preserved():
            again = self._made()
        checks.check_new(self.name, self.live.model, again.model)
        checks.check_storable(f"model {self.name}", self.live.model)
        checks.check_storable("criterion", self.bundle.recipe.criterion)
        checks.check_storable("optimizer", self.live.optimizer)
        checks.check_scalable(self.bundle, self.live.optimizer)
        checks.check_shareable(self.bundle, self.live.optimizer)
        self.check_checkpoint([again])

    def check_checkpoint(self, made: list[Live] | None = None) -> None:
        """Refuse what a checkpoint would lose; see what an evaluation changes.

        `made` are new objects to load it.
        """
        inputs, targets = self.seen.train(self.first_rows[:REPLICA_BATCH], 0, 0)
        spare = made or []

        def step(live: Live) -> torch.Tensor:
            if live.user_step:
                batch = inputs, self.seen.asked_of(targets)
                return user_code.train_step(live.user_step, live.model, batch)

            def backward() -> torch.Tensor:
                live.optimizer.zero_grad()
                outputs = outputs_of(live.model, inputs, self.precision)
                loss: torch.Tensor = live.criterion(outputs, targets)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            return gradients.update(live.optimizer, backward)

        trial = CheckpointTrial(
            self.name,
            lambda: spare.pop() if spare else self._made(),
            lambda model: outputs_of(model, inputs, self.precision),
            step if self.bundle.recipe.fit_fn is None else None,
        )
        # A model that does not take fewer samples gets no verdict here.
        try:
            self.changed_in_evaluation = trial.check(self.live)
        except Refusal:
            raise
        except Exception:  # noqa: BLE001
            return

    def measured(self) -> tuple[str, ...]:
        """Return the names of what a `validation_step` measures; refuse one that breaks a rule."""
        parts, device = optimizers_of(self.live.optimizer), self.targets.device
        criterion = copy.deepcopy(self.bundle.recipe.criterion)
        step = user_validation(self.bundle.recipe, parts, criterion, device, self.precision)
        if step is None:
            return ()
        logged = self.live.user_step.state.measures if self.live.user_step else {}
        batch, size = self._users_batch(), len(self.targets)
        user_code.validate(step, self.live.model.eval(), batch, size, logged)
        return tuple(step.measures)

    def check_callbacks(self) -> None:
        """Refuse callbacks that break a rule."""
        epochs, step = self.bundle.plan.params.epochs, self.live.user_step
        live = (
            self.live.model,
            self.live.optimizer,
            self.lr_schedule,
            self.targets.device,
            self.live.criterion,
        )
        callbacks = callbacks_of(self.bundle.recipe, self.candidate, epochs, live)
        if callbacks is None:
            return
        names = ["train_loss", "lr", *(step.state.measures if step else ())]
        watched = []
        if self.bundle.folds[0].inner_valid.size:
            is_number = self.bundle.plan.objective_of(self.name).kind == REGRESSION
            watched = ["inner_loss"] if is_number else ["inner_loss", "inner_accuracy"]
        try_callbacks(callbacks, dict.fromkeys([*names, *watched], 0.0))
        checks.check_storable("callbacks", callbacks)
        if watched and self.candidate in self.bundle.refits:
            left = tuple(item for item in callbacks.items if not hasattr(item, "monitor"))
            rule = "callbacks must work without inner_valid, which refit leaves out"
            remedy = (
                "Read state.metrics.get('inner_loss'), or give the callback the attribute monitor, "
                "so that refit leaves it out, too."
            )
            with trying(rule, remedy):
                try_callbacks(Callbacks(left, callbacks.state), dict.fromkeys(names, 0.0))

    def check_criterion(self) -> bool:
        """Refuse a criterion that mixes samples; return whether it sums over them."""
        criterion, targets = self.bundle.recipe.criterion, self.seen.asked_of(self.targets)
        with seeding.preserved():
            criteria.check_mixing(self.name, criterion, self.outputs, self.targets, targets)
            # The plan records the answer: it must be the same in the next session.
            seeding.seed_all(self.bundle.folds[0].index)
            return criteria.adds_up(criterion, self.outputs, self.targets)

    def check_parts(self, sums: bool) -> None:
        """Refuse a criterion that is no mean or sum over samples where processes divide batches."""
        params = self.bundle.plan.params
        if params.trainer == "allreduce" and params.processes > 1:
            batch = self.outputs, self.targets
            with seeding.preserved():
                criteria.check_parts(self.bundle.recipe.criterion, *batch, params.processes, sums)

    def memory(self) -> int:
        """Estimate bytes: parameters and gradients, optimizer state, some activations."""
        tensors = [*tensors_of(self.live.model).values(), *trained_parameters(self.live.criterion)]
        weights: int = sum(tensor.nbytes for tensor in tensors)
        state: int = sum(
            value.nbytes
            for entry in self.live.optimizer.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        )
        return 2 * weights + state + 64 * sum(item.nbytes for item in tensors_in(self.inputs))

    def notes(self) -> Iterator[str]:
        """Yield what preprocessing loses, and what scores depend on besides the samples."""
        yield from filter(None, self.data_notes)
        samples: Any = self.inputs
        batch = None
        if self.way:
            is_collated = self.seen.collation is not None
            form = structure(self.inputs) if is_collated else kinds_text(self.inputs, samples=True)
            yield f"model {self.name} gets its inputs {self.way}: {form}"
            samples, batch = self.first_rows, self._batch
        changed = self.changed_in_evaluation
        dependence = evaluation_depends_on(
            self.live.model, samples[:REPLICA_BATCH], self.precision, batch, changes=bool(changed)
        )
        if dependence:
            yield f"model {self.name}: {dependence}"
        if changed:
            yield (
                f"model {self.name}: its evaluation changes {few(changed)}, which each evaluation "
                "restores, so that nothing of the held-out fold stays in the model"
            )

    def why_not_channels_last(self) -> str:
        """Return why the model is not trained channels last; empty if it is."""
        plan = self.bundle.plan
        reason = memory_format.why_not_paying(plan, self.counter.convolutions)
        if reason:
            return reason
        # User code may raise, as `view` does for non-contiguous tensors: that is the reason.
        try:
            reason = self._difference_channels_last()
        except Exception as error:  # noqa: BLE001
            reason = f"{type(error).__name__} was raised: {first_line(error)}"
        if reason and plan.params.memory_format == "channels_last":
            raise Refusal(
                "memory_format='channels_last' needs models with the same outputs in both formats",
                f"model {self.name}: {reason}",
                "Leave memory_format out, or use flatten in place of view.",
            )
        return reason

    def _difference_channels_last(self) -> str:
        """Compare a step in both formats: a model may read its tensors' memory directly."""
        flat = []
        for layout in (torch.contiguous_format, torch.channels_last):
            model = copied(self.live.model).to(memory_format=layout).train()
            with seeding.preserved():
                outputs = self._outputs(model, REPLICA_BATCH)
                criterion = copy.deepcopy(self.bundle.recipe.criterion)
                criterion(outputs, self.targets[:REPLICA_BATCH]).backward()
            parts = [part.detach().double().flatten() for part in tensors_in(outputs)]
            flat.append(torch.cat(parts))
        apart, size = float((flat[0] - flat[1]).abs().max()), float(flat[0].abs().max())
        return "" if apart <= SAME * size else f"its outputs differ by {apart:.1e} of {size:.1e}"
