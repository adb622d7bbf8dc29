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
from asynckfold.data.transforms.trees import mapped, tensors_in
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.objective import REGRESSION, OutputSample
from asynckfold.planning import memory_format
from asynckfold.training import lr_schedules, seeding, setup
from asynckfold.training.batches import samples_per_epoch
from asynckfold.training.bundle import Bundle
from asynckfold.training.callbacks import Callbacks, callbacks_of, try_callbacks
from asynckfold.training.calls import ONE, outputs_of
from asynckfold.training.dry_run import checks, criteria, state, user_code
from asynckfold.training.dry_run.fingerprints import tensors_of
from asynckfold.training.dry_run.outputs import evaluation_depends_on, output_sample
from asynckfold.training.dry_run.refusals import attempting, first_line, kinds_of, layer_of, trying
from asynckfold.training.dry_run.schedule_fit import check_lr_schedule, without_schedule
from asynckfold.training.dry_run.user_code import Batch, Live
from asynckfold.training.flops import FlopCounter
from asynckfold.training.fusion.tracing import copied
from asynckfold.training.losses import trained_parameters
from asynckfold.training.optimizers import opt_fn_for, optimizers_of, with_fused_kernel
from asynckfold.training.target_transform import seen_by
from asynckfold.training.user_steps import Refusal, check_loss, joined, user_step, user_validation

REPLICA_BATCH = 8
"""Samples for comparing fused replicas with plain models, and memory formats with each other: these
check formulas, and must not run out of memory. And for models of GPUs, whose step is not timed."""

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

_DEVICE = torch.device("cpu")


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
    Refusal
        A part cannot be made, or breaks a rule.
    """

    def __init__(self, bundle: Bundle, data: Batches, name: str, schedule: str) -> None:
        recipe, plan = bundle.recipe, bundle.plan
        self.bundle, self.name, self.schedule = bundle, name, schedule
        self.candidate = candidate_name(name, schedule)
        # On many cores, a step of ResNet18 in bfloat16 takes ten seconds.
        on_gpus = "cuda" in bundle.kinds
        self.precision = "fp32" if on_gpus else plan.params.precision_on_cores
        self.counter = FlopCounter()
        self.outputs: Any = None
        self.changed_in_evaluation: list[str] = []
        self.live = self._made()
        self.unscheduled = without_schedule(self.live.optimizer)
        with attempting(f"LR schedule {schedule} must be made for the optimizer of model {name}"):
            self.lr_schedule = self._lr_schedule(self.live.optimizer)
        checks.check_lr_schedule(schedule, self.lr_schedule, recipe)
        self.reacts = lr_schedules.needs_metric(self.lr_schedule)
        job = replace(plan.jobs[0], model=name, lr_schedule=schedule)
        reacting = (job.candidate,) if self.reacts else ()
        self.rows = replace(plan, reacting=reacting).fold_of(job, bundle.folds).fitted
        # Those that may break a model or a loss come first.
        whole = min(max(2, plan.batch_size), len(self.rows))
        size = min(whole, max(REPLICA_BATCH, plan.params.processes)) if on_gpus else whole
        self.shortened = whole / size
        rows = dict.fromkeys((*data.not_finite, *self.rows[:size].tolist()))
        self.first_rows = torch.tensor(list(rows)[:size])
        self.data_notes: list[str] = []
        remedy = "It gets an array of numbers, one row for each sample, without column names."
        if data.codes is not None:
            remedy = "It gets a DataFrame with the columns of X, and the targets."
        what, tell = "preprocess", self.data_notes.append
        if recipe.target_transform is not None:
            what, remedy = "preprocess and target_transform", f"{remedy} Targets are rows, too."
        with trying(f"{what} must work on the training part of each fold", remedy):
            self.seen = seen_by(data, recipe, self.rows, tell)
        self.batch = self._batch(self.first_rows)
        # How the model gets several inputs; empty for one tensor.
        is_one = isinstance(self.batch.inputs, torch.Tensor) and self.seen.collation is None
        inputs = self.batch.inputs
        self.way = "" if is_one else checks.way_of_call(name, self.live.model, inputs, data)

    # How a job makes its parts

    def _made(self) -> Live:
        """Return a new model, and what belongs to it; the same each time."""
        recipe, name = self.bundle.recipe, self.name
        seeding.seed_all(self.bundle.folds[0].index)
        with attempting(f"the factory of model {name} must return a torch.nn.Module"):
            model = recipe.models[name]()
        if not isinstance(model, nn.Module):
            remedy = "Return the module from the factory."
            raise Refusal(f"model {name} must be a torch.nn.Module", type(model).__name__, remedy)
        criterion = copy.deepcopy(recipe.criterion)
        with attempting(f"opt_fn must make an optimizer for model {name}"):
            optimizer = with_fused_kernel(opt_fn_for(recipe, self.schedule, criterion), model)
        checks.check_optimizer_kind(optimizer, recipe)
        params = self.bundle.plan.params
        step = user_step(recipe, params, optimizer, criterion, _DEVICE, self.precision)
        return Live(model, optimizer, criterion, step, self.precision)

    def _lr_schedule(self, optimizer: Any, steps: int = 0) -> Any:
        spec = self.bundle.recipe.lr_schedules[self.schedule]
        return lr_schedules.make(spec, optimizer, steps or self.bundle.plan.params.epochs)

    def _batch(self, rows: torch.Tensor) -> Batch:
        inputs, targets = self.seen.train(rows, 0, 0)
        return Batch(inputs, targets, self.seen.asked_of(targets))

    # Before a step

    def check_lr_schedule(self) -> None:
        """Refuse an LR schedule that does not fit the number of steps in the candidate's jobs."""
        plan, every = self.bundle.plan, [fold.fitted for fold in self.bundle.folds]
        if self.candidate in self.bundle.refits:
            every.append(np.arange(self.seen.n_samples))
        sampler = self.bundle.recipe.sampler
        most = max(samples_per_epoch(sampler, self.seen, rows, 0) for rows in every)
        steps = setup.steps_of(plan, most, self.live.model)
        make = partial(self._lr_schedule, steps=steps)
        check_lr_schedule(self.schedule, make, self.unscheduled, steps, plan.params.lr_step)

    # A step

    def step_seconds(self, output_samples: dict[str, OutputSample]) -> float:
        """Return the seconds of the faster of two steps; add the outputs to `output_samples`.

        The first step warms up, and its operations are counted; they grow with the samples.
        """
        with state.only_inside(self.bundle.recipe, self.name, self.live):
            self._look(output_samples)
            with self.counter:
                first = self._step()
        self.counter.flops = round(self.counter.flops * self.shortened)
        if self.shortened > 1 or (first > LONG_SECONDS and self.counter.flops > LONG_FLOPS):
            return first
        return min(first, self._step())

    def _step(self) -> float:
        """Return the seconds of a step."""
        started = time.perf_counter()
        if self.bundle.recipe.fit_fn is not None:
            self.live, batch = self._made(), mapped(torch.clone, self.batch.pair)
            schedule = self._lr_schedule(self.live.optimizer)
            user_code.run_loop(self.bundle, self.live, schedule, batch)
        else:
            self.live.step(self.batch)
        return time.perf_counter() - started

    def _look(self, output_samples: dict[str, OutputSample]) -> None:
        """Refuse outputs and a loss that cannot be trained with, or scored."""
        recipe = self.bundle.recipe
        is_plain = self.live.user_step is None and recipe.fit_fn is None
        self.live.set_mode(train=is_plain)
        outputs = evaluated = self._outputs(self.live.model)
        if is_plain and not isinstance(outputs, torch.Tensor):
            # In evaluation mode, which is scored.
            with seeding.preserved(), torch.no_grad():
                evaluated = self._outputs(copied(self.live.model).eval())
        if isinstance(evaluated, torch.Tensor):
            # Before the check: labels are numbered where a model has too few outputs.
            output_samples[self.name] = output_sample(evaluated)
            checks.check_outputs(self.name, evaluated, self.batch.targets, self.bundle)
            checks.check_units(self.name, evaluated, self.batch.targets, recipe)
        else:
            checks.check_units(self.name, evaluated, self.batch.targets, recipe)
            output_samples[self.name] = self._sample_of(evaluated)
        loss = self._loss(outputs)
        scorer = f"the criterion of model {self.name}"
        check_loss(loss, scorer, differentiable=is_plain, remedy=_MEAN)
        results = loss if is_plain else outputs
        pair = self.batch.inputs, self.batch.targets
        checks.check_finite(self.name, self.first_rows, pair, results)
        self.outputs = mapped(torch.detach, outputs)

    def _outputs(self, model: nn.Module) -> Any:
        inputs = self.batch.inputs
        rule = f"model {self.name} must take the samples, in batches of {kinds_of(inputs)}"
        remedy = "Change the model or transform the samples"
        if self.way == ONE and isinstance(inputs, Mapping):
            remedy = "Name the inputs as forward does"
        with attempting(rule, partial(layer_of, model, inputs), remedy):
            return outputs_of(model, inputs, self.precision)

    def _loss(self, outputs: Any) -> Any:
        targets = self.batch.users_targets
        rule = f"the criterion must take the outputs of model {self.name} and the targets"
        shapes = f" for outputs {kinds_of(outputs)} and targets {kinds_of(targets)}"
        remedy = "Change the criterion, the last layer of the model, or the targets"
        if isinstance(outputs, torch.Tensor) and outputs.numel() == self.batch.targets.numel():
            remedy = "Squeeze the outputs in forward or return outputs[:, None], as the targets are"
        with attempting(rule, lambda error: shapes, remedy), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Of torch's losses, which broadcast outputs against the targets of other samples.
            warnings.filterwarnings("error", "Using a target size")
            return copy.deepcopy(self.bundle.recipe.criterion)(outputs, self.batch.targets)

    def _sample_of(self, outputs: Any) -> OutputSample:
        """Return a sample of several outputs of the whole batch; refuse unfit ones."""
        count = len(self.batch.targets)
        listed = isinstance(outputs, (list, tuple)) and len(outputs) == count
        if listed:
            # Several outputs may be as many as the samples.
            fewer = self._batch(self.first_rows[: count - 1]).inputs
            with torch.no_grad():
                others = outputs_of(copied(self.live.model).eval(), fewer, self.precision)
            listed = len(others) == count - 1
        return output_sample(outputs, checks.columns_of(self.name, outputs, count, listed=listed))

    # After a step

    def check_learning(self) -> bool:
        """Refuse a step that cannot teach anything; return whether the criterion is a sum."""
        criterion, params = self.bundle.recipe.criterion, self.bundle.plan.params
        if self.bundle.recipe.fit_fn is None:
            checks.check_gradient(self.name, self.live.model, self.live.optimizer)
        checks.check_log_probabilities(self.name, criterion, self.outputs)
        targets, users_targets = self.batch.targets, self.batch.users_targets
        with seeding.preserved():
            criteria.check_mixing(self.name, criterion, self.outputs, targets, users_targets)
            # The plan records the answer: it must be the same in the next session.
            seeding.seed_all(self.bundle.folds[0].index)
            sums = criteria.adds_up(criterion, self.outputs, targets)
            if self.seen.sample_weight is not None:
                criteria.check_weighing(self.name, criterion, self.outputs, targets)
            if params.trainer == "allreduce" and params.processes > 1:
                criteria.check_parts(criterion, self.outputs, targets, params.processes, sums)
        return sums

    def check_state(self) -> None:
        """Refuse what a checkpoint would lose, or no trainer can use; see what evaluations change.

        Objects of another session, or another process, must train on as these do.
        """
        live, criterion = self.live, self.bundle.recipe.criterion
        with seeding.preserved():
            spare = [self._made()]
        checks.check_new(self.name, live.model, spare[0].model)
        states = {f"model {self.name}": live.model, "criterion": criterion}
        checks.check_storable({**states, "optimizer": live.optimizer})
        checks.check_trainable(self.bundle, self.name, live.model, live.optimizer)
        # A model that does not take fewer samples gets no verdict here.
        try:
            self.changed_in_evaluation = state.changed_in_evaluation(
                self.name,
                live,
                lambda: spare.pop() if spare else self._made(),
                self._batch(self.first_rows[:REPLICA_BATCH]),
                steps=self.bundle.recipe.fit_fn is None,
            )
        except Refusal:
            raise
        except Exception:  # noqa: BLE001
            return

    def measured(self) -> tuple[str, ...]:
        """Return the names of what a `validation_step` measures; refuse one that breaks a rule."""
        recipe, parts = self.bundle.recipe, optimizers_of(self.live.optimizer)
        step = user_validation(
            recipe, parts, copy.deepcopy(recipe.criterion), _DEVICE, self.precision
        )
        if step is None:
            return ()
        batch, size = self.batch.pair, len(self.batch.targets)
        loss = step.loss(self.live.model.eval(), [(batch, size)], 0)
        joined(self.live.user_step.state.measures if self.live.user_step else {}, step.measures)
        if loss is None and not step.measures:
            raise Refusal(
                "validation_step must measure something",
                "a function that returns and logs nothing",
                "Return a loss or a dict of numbers, or call state.log(name=number).",
            )
        return tuple(step.measures)

    def check_callbacks(self) -> None:
        """Refuse callbacks that break a rule."""
        live, epochs = self.live, self.bundle.plan.params.epochs
        parts = live.model, live.optimizer, self.lr_schedule, _DEVICE, live.criterion
        callbacks = callbacks_of(self.bundle.recipe, self.candidate, epochs, parts)
        if callbacks is None:
            return
        names = ["train_loss", "lr", *(live.user_step.state.measures if live.user_step else ())]
        watched = []
        if self.bundle.folds[0].inner_valid.size:
            is_number = self.bundle.plan.objective_of(self.name).kind == REGRESSION
            watched = ["inner_loss"] if is_number else ["inner_loss", "inner_accuracy"]
        try_callbacks(callbacks, dict.fromkeys([*names, *watched], 0.0))
        checks.check_storable({"callbacks": callbacks})
        if watched and self.candidate in self.bundle.refits:
            left = [item for item in callbacks.items if not hasattr(item, "monitor")]
            rule = "callbacks must work without inner_valid, which refit leaves out"
            with trying(
                rule, "Read state.metrics.get('inner_loss'), or set the attribute monitor."
            ):
                try_callbacks(Callbacks(left, callbacks.state), dict.fromkeys(names, 0.0))

    def memory(self) -> int:
        """Estimate bytes: parameters and gradients, optimizer state, some activations."""
        tensors = [*tensors_of(self.live.model).values(), *trained_parameters(self.live.criterion)]
        kept = [value for entry in self.live.optimizer.state.values() for value in entry.values()]
        held = sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))
        inputs = sum(item.nbytes for item in tensors_in(self.batch.inputs)) * self.shortened
        return 2 * sum(tensor.nbytes for tensor in tensors) + held + round(64 * inputs)

    def notes(self) -> Iterator[str]:
        """Yield what preprocessing loses, and what scores depend on besides the samples."""
        yield from filter(None, self.data_notes)
        samples: Any = self.batch.inputs
        batch: Callable[[torch.Tensor], Any] = torch.clone
        if self.way:
            samples, batch = self.first_rows, lambda rows: self._batch(rows).inputs
        rows, changed = samples[:REPLICA_BATCH], self.changed_in_evaluation
        if dependence := evaluation_depends_on(
            self.live.model, rows, self.precision, batch, changes=bool(changed)
        ):
            yield f"model {self.name}: {dependence}"
        if changed:
            yield (
                f"model {self.name}: its evaluation changes {checks.few(changed)}, which each "
                "evaluation restores, so that nothing of the held-out fold stays in the model"
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
        flat, batch = [], self._batch(self.first_rows[:REPLICA_BATCH])
        for layout in (torch.contiguous_format, torch.channels_last):
            model = copied(self.live.model).to(memory_format=layout).train()
            with seeding.preserved():
                outputs = outputs_of(model, batch.inputs, self.precision)
                if layout is torch.channels_last:  # its backward pass may raise
                    copy.deepcopy(self.bundle.recipe.criterion)(outputs, batch.targets).backward()
            flat.append(
                torch.cat([part.detach().double().flatten() for part in tensors_in(outputs)])
            )
        apart, size = float((flat[0] - flat[1]).abs().max()), float(flat[0].abs().max())
        return "" if apart <= SAME * size else f"its outputs differ by {apart:.1e} of {size:.1e}"
