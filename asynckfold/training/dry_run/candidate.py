"""The dry run of one candidate: model, optimizer, LR schedule, and one batch."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn

from asynckfold.data.batches import Batches
from asynckfold.data.collation import structure
from asynckfold.data.transforms import kinds_text, mapped, tensors_in
from asynckfold.errors import InputError
from asynckfold.jobs.candidate_names import candidate_name
from asynckfold.jobs.objective import REGRESSION, OutputSample
from asynckfold.planning import memory_format
from asynckfold.training import gradients, lr_schedules, seeding, setup
from asynckfold.training.bundle import Bundle
from asynckfold.training.callback_rules import try_callbacks
from asynckfold.training.callbacks import callbacks_of
from asynckfold.training.calls import UnfitInputsError, needs_inputs, way_of
from asynckfold.training.compiling import compile_whole
from asynckfold.training.dry_run import (
    checks,
    loss_trial,
    own_loop_trial,
    own_step_trial,
    ownership,
    schedule_fit,
)
from asynckfold.training.dry_run.batch_dependence import evaluation_depends_on
from asynckfold.training.dry_run.checkpoint_trial import CheckpointTrial, Live
from asynckfold.training.dry_run.checks import Refused, first_line
from asynckfold.training.dry_run.fingerprints import tensors_of
from asynckfold.training.dry_run.misfit import criterion_misfit, making, misfit
from asynckfold.training.dry_run.output_samples import output_sample
from asynckfold.training.flops import FlopCounter
from asynckfold.training.fold_criterion import trained_parameters
from asynckfold.training.fused_optimizers import with_fused_kernel
from asynckfold.training.fusion.tracing import copied
from asynckfold.training.job_optimizer import opt_fn_for
from asynckfold.training.own_step import StepError, own_step
from asynckfold.training.own_validation import own_validation
from asynckfold.training.precision import outputs_of
from asynckfold.training.preprocessing import fit_transform
from asynckfold.training.pretraining import has_pretraining
from asynckfold.training.sampling import samples_per_epoch
from asynckfold.training.several_optimizers import optimizers_of

REPLICA_BATCH = 8
"""Samples for comparing fused replicas with plain models, and memory formats with each other: these
check formulas, and must not run out of memory."""

SAME = 1e-2
"""Largest difference of outputs in two memory formats, relative to their size. A model that reads
memory in the wrong order is far beyond it; bfloat16 rounds to a few thousandths."""

LONG_FLOPS, LONG_SECONDS = 5e9, 0.1
"""A step of more operations and seconds is timed once: the warm-up is a small part of it. Seconds
alone do not tell: beside other processes, the first step of a small model takes as long."""

AGAIN_SECONDS = 0.1
"""How long to repeat a step that several processes are to share: their seconds must be exact enough
to tell whether it is too short for that. Counted in first steps; later ones are much faster."""


class CandidateTrial:
    """The live objects of one model and LR schedule on fold 0, before and after a step."""

    def __init__(self, bundle: Bundle, data: Batches, name: str, schedule: str) -> None:
        recipe, plan = bundle.recipe, bundle.plan
        self.bundle, self.name, self.schedule = bundle, name, schedule
        self.counter = FlopCounter()
        self.outputs: Any = None
        self.bits = ""
        seeding.seed_all(bundle.folds[0].index)
        with making(f"the factory of model {name} must return a torch.nn.Module"):
            self.model = recipe.models[name]()
        if not isinstance(self.model, nn.Module):
            raise Refused(
                f"model {name} must be a torch.nn.Module",
                f"{type(self.model).__name__}",
                "Return the module from the factory.",
            )
        self.criterion = copy.deepcopy(recipe.criterion)
        with making(f"opt_fn must make an optimizer for model {name}"):
            self.optimizer = self._optimizer(self.model, self.criterion)
        checks.check_optimizer_kind(self.optimizer, recipe)
        self.unscheduled = schedule_fit.unscheduled(self.optimizer)
        with making(f"LR schedule {schedule} must be made for the optimizer of model {name}"):
            self.lr_schedule = lr_schedules.make(
                recipe.lr_schedules[schedule], self.optimizer, plan.params.epochs
            )
        checks.check_lr_schedule(schedule, self.lr_schedule, recipe)
        self.reacts = lr_schedules.needs_metric(self.lr_schedule)
        job = replace(plan.jobs[0], model=name, lr_schedule=schedule)
        reacting = (job.candidate,) if self.reacts else ()
        fold = replace(plan, reacting=reacting).fold_of(job, bundle.folds)
        self.rows = fold.fitted
        self.data_notes: list[str] = []
        # Those that may break a model or a loss come first.
        rows = dict.fromkeys((*data.not_finite, *fold.fitted[: max(2, plan.batch_size)].tolist()))
        self.first_rows = torch.tensor(list(rows)[: max(2, plan.batch_size)])
        try:
            self.seen = fit_transform(data, recipe.preprocess, fold.fitted, self.data_notes.append)
        except InputError as error:
            raise Refused.first_of(error) from error
        except Exception as error:
            raise Refused(
                "preprocess must work on the training part of each fold",
                f"{type(error).__name__} on fold 0: {first_line(error)}",
                "It gets an array of numbers, one row for each sample, without column names.",
            ) from error
        self.inputs, self.targets = self.seen.train(self.first_rows, 0, 0)
        self.again: Live | None = None
        self.changed_in_evaluation: list[str] = []
        self.live = self._live(self.model, self.optimizer, self.criterion)
        self.own = self.live.own
        self.last_is_target = data.last_is_target
        self.way = self._way_of_call()

    def _optimizer(self, model: nn.Module, criterion: Any) -> Any:
        return with_fused_kernel(opt_fn_for(self.bundle.recipe, self.schedule, criterion), model)

    def _live(self, model: nn.Module, optimizer: Any, criterion: Any) -> Live:
        """Return live objects with a step of the user's own."""
        recipe, params = self.bundle.recipe, self.bundle.plan.params
        device = self.targets.device
        own = own_step(recipe, params, optimizer, criterion, device, params.precision_on_cores)
        return Live(model, optimizer, criterion, own)

    def _made(self) -> Live:
        """Return a new model, and what belongs to it; the same each time."""
        seeding.seed_all(self.bundle.folds[0].index)
        model = self.bundle.recipe.models[self.name]()
        criterion = copy.deepcopy(self.bundle.recipe.criterion)
        return self._live(model, self._optimizer(model, criterion), criterion)

    def _way_of_call(self) -> str:
        """Return how the model gets several inputs; empty for one tensor."""
        collates = self.seen.collation is not None
        if isinstance(self.inputs, torch.Tensor) and not collates:
            return ""
        if has_pretraining(self.model):
            raise Refused(
                "pretraining needs samples of one tensor",
                f"model {self.name}, and {kinds_text(self.inputs)}",
                "Leave pretrain out, or join the inputs into one tensor.",
            )
        if self.last_is_target and not needs_inputs(self.model, len(self.inputs)):
            raise Refused(
                "each sample of the dataset must be a pair (x, y), unless forward needs all of a "
                "TensorDataset's tensors but the last",
                f"{len(self.inputs) + 1} tensors, and forward{signature(self.model.forward)} of "
                f"model {self.name}",
                "Pass TensorDataset(x, y); or ((x, ...), y), a tuple of inputs and the target.",
            )
        try:
            return way_of(self.model, self.inputs)
        except UnfitInputsError as error:
            received, remedy = error.args
            rule = f"model {self.name} must take the inputs {kinds_text(self.inputs)}"
            raise Refused(rule, received, remedy) from error

    def _new(self) -> Live:
        """Return what `check_model` made, or the same once more."""
        new, self.again = self.again, None
        return new or self._made()

    def _batch(self, rows: torch.Tensor) -> Any:
        return self.seen.train(rows, 0, 0)[0]

    def _fit_of(self, unscheduled: torch.optim.Optimizer) -> schedule_fit.Fit:
        plan, spec = self.bundle.plan, self.bundle.recipe.lr_schedules[self.schedule]
        every = [fold.fitted for fold in self.bundle.folds]
        refits = candidate_name(self.name, self.schedule) in self.bundle.refits
        if refits:
            every.append(np.arange(self.seen.n_samples))
        sampler = self.bundle.recipe.sampler
        sizes = [samples_per_epoch(sampler, self.seen, rows, 0) for rows in every]
        least, most = (
            setup.steps_of(plan, count, self.model) for count in (min(sizes), max(sizes))
        )
        batches = setup.steps_of(plan, max(sizes), self.model, "batch")
        steps = schedule_fit.Steps(least, most, plan.params.lr_step, batches, refits)

        def make(optimizer: torch.optim.Optimizer) -> Any:
            # As `setup` does for each job.
            return lr_schedules.make(spec, optimizer, most)

        made = make(schedule_fit.unscheduled(unscheduled))
        if lr_schedules.needs_metric(made):
            return schedule_fit.fit_of(self.schedule, made, steps, ())
        found = schedule_fit.rates_of(make, unscheduled, most)
        return schedule_fit.fit_of(self.schedule, made, steps, *found)

    def schedule_fit(self) -> schedule_fit.Fit:
        """Judge the LR schedule by the number of steps in the candidate's jobs."""
        fits = [self._fit_of(part) for part in optimizers_of(self.unscheduled)]
        return schedule_fit.Fit(
            tuple(dict.fromkeys(item for fit in fits for item in fit.problems)),
            tuple(dict.fromkeys(note for fit in fits for note in fit.notes)),
        )

    def check_ownership(self) -> None:
        """Refuse an optimizer of tensors outside model and criterion, or of too few of theirs."""
        live, recipe = (self.model, self.optimizer, self.criterion), self.bundle.recipe
        ownership.check(self.name, live, recipe, self.bundle.plan.params)

    def check_model(self) -> None:
        """Refuse a factory that returns one model twice."""
        with seeding.preserved():
            self.again = self._made()
        checks.check_new(self.name, self.model, self.again.model)

    def check_stepped_optimizer(self) -> None:
        """Refuse an optimizer, after a step, whose state fits no checkpoint or no trainer."""
        checks.check_storable("optimizer", self.optimizer)
        checks.check_scalable(self.bundle, self.optimizer)
        checks.check_shareable(self.bundle, self.optimizer)

    def check_learning(self) -> None:
        """Refuse a step that cannot teach anything."""
        if self.bundle.recipe.fit_fn is None:
            checks.check_gradient(self.name, self.model, self.optimizer)
        if isinstance(self.outputs, torch.Tensor):
            checks.check_log_probabilities(self.name, self.bundle.recipe.criterion, self.outputs)

    def step_seconds(self, output_samples: dict[str, OutputSample]) -> float:
        """Return the seconds of the fastest of some steps; add the outputs to `output_samples`.

        The first step warms up, and its operations are counted.
        """
        if self.own or self.bundle.recipe.fit_fn is not None:
            self._score(output_samples)
        live = self.model, self.criterion
        with ownership.only_inside(self.bundle.recipe, self.name, *live), self.counter:
            first = self._step(output_samples)
        is_repeated = self.bundle.recipe.fit_fn is not None
        if first > LONG_SECONDS and self.counter.flops > LONG_FLOPS and not is_repeated:
            return first
        several = self.bundle.plan.params.processes > 1
        again = max(1, int(AGAIN_SECONDS / first)) if several else 1
        return min(first, *(self._step() for _ in range(again)))

    def _step(self, output_samples: dict[str, OutputSample] | None = None) -> float:
        started = time.perf_counter()
        if self.bundle.recipe.fit_fn is not None:
            self._own_loop()
            return time.perf_counter() - started
        self.live.set_mode(train=True)
        if self.own:
            own_step_trial.step(self.own, self.model, self._given_batch())
            return time.perf_counter() - started
        outputs = self._fitting_outputs(self.model)
        if not isinstance(outputs, torch.Tensor):
            checks.check_criterion_takes(self.name, outputs, self.bundle.recipe.criterion)
            self._see_evaluation(output_samples)
        else:
            if output_samples is not None:
                output_samples[self.name] = output_sample(outputs)
            checks.check_outputs(self.name, outputs, self.targets, self.bundle)
        if self.outputs is None:
            # Of the first step: the number of steps depends on their seconds.
            self.outputs = mapped(torch.detach, outputs)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            loss = self._loss(self.criterion, outputs)
        checks.check_broadcast(
            self.name, outputs, self.targets, [str(item.message) for item in warned]
        )
        checks.check_loss(self.name, loss)
        checks.check_finite(self.name, self.first_rows, (self.inputs, self.targets), loss)
        loss.backward()

        def backward() -> torch.Tensor:
            self.optimizer.zero_grad()
            outputs = self._fitting_outputs(self.model)
            loss: torch.Tensor = self.criterion(outputs, self.targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if not isinstance(self.optimizer, torch.optim.LBFGS):
            gradients.take_step(self.optimizer, backward)
        return time.perf_counter() - started

    def check_checkpoint(self) -> None:
        """Refuse what a checkpoint would lose; note what an evaluation changes."""
        precision = self.bundle.plan.params.precision_on_cores
        inputs, targets = self.seen.train(self.first_rows[:REPLICA_BATCH], 0, 0)

        def step(live: Live) -> torch.Tensor:
            if live.own:
                batch = inputs, self.seen.asked_of(targets)
                return own_step_trial.step(live.own, live.model, batch)

            def backward() -> torch.Tensor:
                live.optimizer.zero_grad()
                outputs = outputs_of(live.model, inputs, precision)
                loss: torch.Tensor = live.criterion(outputs, targets)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            loss = backward()
            if not isinstance(live.optimizer, torch.optim.LBFGS):
                gradients.take_step(live.optimizer, backward)
            return loss

        trial = CheckpointTrial(
            self.name,
            self._new,
            lambda model: outputs_of(model, inputs, precision),
            step if self.bundle.recipe.fit_fn is None else None,
        )
        try:
            self.changed_in_evaluation = trial.check(self.live)
        except Refused:
            raise
        except Exception:  # noqa: BLE001
            # A model that does not take fewer samples gets no verdict here.
            return

    def check_callbacks(self) -> None:
        """Refuse callbacks that break a rule."""
        recipe, epochs = self.bundle.recipe, self.bundle.plan.params.epochs
        live = self.model, self.optimizer, self.lr_schedule, self.targets.device, self.criterion
        candidate = candidate_name(self.name, self.schedule)
        found = callbacks_of(recipe, candidate, epochs, live)
        if found is None:
            return
        names = ["train_loss", "lr", *(self.own.state.measures if self.own else ())]
        watched = []
        if self.bundle.folds[0].inner_valid.size:
            is_number = self.bundle.plan.objective_of(self.name).kind == REGRESSION
            watched = ["inner_loss", *([] if is_number else ["inner_accuracy"])]
        try:
            try_callbacks(found, dict.fromkeys([*names, *watched], 0.0))
        except StepError as error:
            raise Refused(*error.args) from error
        checks.check_storable("callbacks", found)
        left = tuple(item for item in recipe.callbacks if not hasattr(item, "monitor"))
        again = callbacks_of(replace(recipe, callbacks=left), candidate, epochs, live)
        if again is None or not watched or candidate not in self.bundle.refits:
            return
        try:
            try_callbacks(again, dict.fromkeys(names, 0.0))
        except Exception as error:
            raise Refused(
                "callbacks must work without inner_valid, which refit leaves out",
                f"{type(error).__name__}: {first_line(error)}",
                "Read state.metrics.get('inner_loss'), or give the callback the attribute monitor, "
                "so that refit leaves it out, too.",
            ) from error

    def measured(self) -> tuple[str, ...]:
        """Return the names of what a `validation_step` measures; refuse one that breaks a rule."""
        parts = optimizers_of(self.optimizer)
        criterion = copy.deepcopy(self.bundle.recipe.criterion)
        precision = self.bundle.plan.params.precision_on_cores
        recipe, device = self.bundle.recipe, self.targets.device
        own = own_validation(recipe, parts, criterion, device, precision)
        if own is None:
            return ()
        logged = self.own.state.measures if self.own else {}
        size = len(self.targets)
        own_step_trial.validate(own, self.model.eval(), self._given_batch(), size, logged)
        return tuple(own.found)

    def _own_loop(self) -> None:
        """Run the user's loop for one batch, and compare its bits with those of the first run."""
        recipe, plan = self.bundle.recipe, self.bundle.plan
        self.live = self._made()
        self.model, self.optimizer = self.live.model, self.live.optimizer
        self.criterion = self.live.criterion
        spec = recipe.lr_schedules[self.schedule]
        schedule = lr_schedules.make(spec, self.optimizer, plan.params.epochs)
        batch, device = mapped(torch.clone, self._given_batch()), self.targets.device
        live = self.model, self.optimizer, schedule, self.criterion
        found = own_loop_trial.run(self.bundle, live, batch, device)
        own_loop_trial.check_same(self.bits or found, found)
        self.bits = found

    def _given_batch(self) -> tuple[Any, Any]:
        """Return inputs and targets as the user's own steps and loop get them."""
        return self.inputs, self.seen.asked_of(self.targets)

    def _see_evaluation(self, output_samples: dict[str, OutputSample] | None) -> None:
        """Keep what a model of several outputs gives in evaluation mode, which is scored."""
        if output_samples is not None:
            with seeding.preserved(), torch.no_grad():
                outputs = self._fitting_outputs(copied(self.model).eval())
                output_samples[self.name] = self._sample_of(outputs)

    def _sample_of(self, outputs: Any) -> OutputSample:
        """Return a sample of outputs of the whole batch in evaluation mode; refuse unfit ones."""
        if isinstance(outputs, torch.Tensor):
            checks.check_outputs(self.name, outputs, self.targets, self.bundle)
            return output_sample(outputs)
        count = len(self.targets)
        listed = isinstance(outputs, (list, tuple)) and len(outputs) == count
        if listed:
            # Several outputs may be as many as the samples.
            fewer = self._outputs(copied(self.model).eval(), count - 1)
            listed = len(fewer) == count - 1
        columns = checks.columns_of(self.name, outputs, count, listed=listed)
        return output_sample(outputs, columns)

    def _fitting_outputs(self, model: nn.Module) -> Any:
        try:
            return self._outputs(model)
        except Exception as error:
            if refusal := misfit(self.name, self.model, self.inputs, self.way, error):
                raise refusal from error
            raise

    def _loss(self, criterion: Any, outputs: Any) -> Any:
        try:
            return criterion(outputs, self.targets)
        except Exception as error:
            asked = self.seen.asked_of(self.targets)
            if refusal := criterion_misfit(self.name, outputs, self.targets, asked, error):
                raise refusal from error
            raise

    def _score(self, output_samples: dict[str, OutputSample]) -> None:
        """Refuse a model that is trained by a step of its own, and cannot be scored."""
        with torch.no_grad():
            outputs = self._fitting_outputs(self.model.eval())
            checks.check_criterion_takes(self.name, outputs, self.bundle.recipe.criterion)
            output_samples[self.name] = self._sample_of(outputs)
            loss = self._loss(copy.deepcopy(self.bundle.recipe.criterion), outputs)
        checks.check_held_out_loss(self.name, loss)
        checks.check_finite(self.name, self.first_rows, (self.inputs, self.targets), outputs)
        self.outputs = outputs

    def check_criterion(self) -> None:
        """Refuse a criterion that compares outputs with the targets of other samples."""
        criterion, outputs = self.bundle.recipe.criterion, self.outputs
        assert outputs is not None
        with seeding.preserved():
            mixed = loss_trial.mixes_samples(criterion, outputs, self.targets)
        if mixed:
            (first, second), count = map(tuple, mixed), len(self.targets)
            targets = checks.shape_text(self.seen.asked_of(self.targets))
            raise Refused(
                "the criterion must compare each output with the target of its own sample",
                f"model {self.name}: outputs {checks.shape_text(outputs)} and targets {targets}, "
                f"of which it broadcasts {first} and {second} to all {count} × {count} pairs of a "
                "batch",
                "Give both the same shape, as by outputs.squeeze(1) in forward; for all pairs "
                "on purpose, the same number of dimensions, as outputs[:, None] and "
                "targets[None, :].",
            )

    def criterion_sums(self) -> bool:
        """Whether the criterion sums over the samples of a batch."""
        assert self.outputs is not None
        with seeding.preserved():
            # The plan records the answer: it must be the same in the next session.
            seeding.seed_all(self.bundle.folds[0].index)
            return loss_trial.adds_up(self.bundle.recipe.criterion, self.outputs, self.targets)

    def check_parts(self, sums: bool) -> None:
        """Refuse a criterion that is no mean or sum over samples where processes divide batches."""
        params, criterion = self.bundle.plan.params, self.bundle.recipe.criterion
        if params.trainer != "allreduce" or params.processes == 1 or self.outputs is None:
            return
        with seeding.preserved():
            losses = loss_trial.of_whole_and_parts(
                criterion, self.outputs, self.targets, params.processes, sums
            )
        if losses is None:
            return
        whole, together = losses
        raise Refused(
            "trainer='allreduce' needs a criterion that is the mean or the sum over samples: each "
            "process computes it on a part of the batch",
            f"one that is {whole:.4g} on a batch, and {together:.4g} as the mean over its "
            f"{params.processes} parts",
            "For class weights pass nn.CrossEntropyLoss(weight=...), whose mean is known; else "
            "pass trainer='averaging', or processes=1.",
        )

    def memory(self) -> int:
        """Estimate bytes: parameters and gradients, optimizer state, some activations."""
        tensors = [*tensors_of(self.model).values(), *trained_parameters(self.criterion)]
        weights: int = sum(tensor.nbytes for tensor in tensors)
        state: int = sum(
            value.nbytes
            for entry in self.optimizer.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        )
        return 2 * weights + state + 64 * sum(item.nbytes for item in tensors_in(self.inputs))

    def notes(self) -> Iterator[str]:
        """Yield what preprocessing loses, and what scores depend on besides the samples."""
        yield from filter(None, self.data_notes)
        precision, changed = self.bundle.plan.params.precision_on_cores, self.changed_in_evaluation
        if self.way:
            collates = self.seen.collation is not None
            text = structure(self.inputs) if collates else kinds_text(self.inputs, samples=True)
            yield f"model {self.name} gets its inputs {self.way}: {text}"
            found = evaluation_depends_on(
                self.model,
                self.first_rows[:REPLICA_BATCH],
                precision,
                self._batch,
                changes=bool(changed),
            )
        else:
            inputs = self.inputs[:REPLICA_BATCH]
            found = evaluation_depends_on(self.model, inputs, precision, changes=bool(changed))
        if found:
            yield f"model {self.name}: {found}"
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            yield (
                f"model {self.name}: its evaluation changes {', '.join(changed[:3])}{more}, which "
                "each evaluation restores, so that nothing of the held-out fold stays in the model"
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
            raise Refused(
                "memory_format='channels_last' needs models with the same outputs in both formats",
                f"model {self.name}: {reason}",
                "Leave memory_format out, or use flatten in place of view.",
            )
        return reason

    def _difference_channels_last(self) -> str:
        """Compare a step in both formats: a model may read its tensors' memory directly."""
        found = []
        for layout in (torch.contiguous_format, torch.channels_last):
            model = copied(self.model).to(memory_format=layout).train()
            with seeding.preserved():
                outputs = self._outputs(model, REPLICA_BATCH)
                criterion = copy.deepcopy(self.bundle.recipe.criterion)
                criterion(outputs, self.targets[:REPLICA_BATCH]).backward()
            parts = [part.detach().double().flatten() for part in tensors_in(outputs)]
            found.append(torch.cat(parts))
        apart, size = float((found[0] - found[1]).abs().max()), float(found[0].abs().max())
        return "" if apart <= SAME * size else f"its outputs differ by {apart:.1e} of {size:.1e}"

    def check_compiled(self) -> None:
        """Refuse a model that runs, but not compiled."""
        compile_whole(self.model)
        try:
            self._step()
            with torch.no_grad():
                self._outputs(self.model.eval())
        except Exception as error:
            raise Refused(
                "compile=True needs models that torch.compile compiles as one graph",
                f"model {self.name}: {type(error).__name__}: {first_line(error)}",
                "Leave compile out, or change the model.",
            ) from error
        finally:
            torch.compiler.reset()

    def _outputs(self, model: nn.Module, most: int | None = None) -> Any:
        inputs = self._batch(self.first_rows[:most]) if self.way else self.inputs[:most]
        return outputs_of(model, inputs, self.bundle.plan.params.precision_on_cores)
