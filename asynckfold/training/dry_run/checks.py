"""Rules that a candidate must keep; breaking one refuses the sweep before it starts."""

from __future__ import annotations

from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import nn

from asynckfold.data.batches import Batches
from asynckfold.data.transforms.trees import kinds_text, tensors_in
from asynckfold.jobs.criteria import criterion_of
from asynckfold.jobs.objective import BINARY, SEGMENTATION
from asynckfold.jobs.schema import Schema, UnfitTree, leaves_of
from asynckfold.training import checkpoint, lr_schedules, pretraining
from asynckfold.training.bundle import Bundle
from asynckfold.training.calls import UnfitInputsError, needs_inputs, way_of
from asynckfold.training.dry_run.refusals import Refusal, TooFewOutputs
from asynckfold.training.evaluation import has_modes
from asynckfold.training.gradients import needs_closure
from asynckfold.training.losses import as_given
from asynckfold.training.optimizers import SeveralOptimizers, optimizers_of

_STATISTICS = "running_"
"""Prefix of the buffers that torch's normalising layers update in a forward pass."""


# Model, optimizer and LR schedule as they are made


def check_optimizer_kind(optimizer: Any, recipe: Any) -> None:
    """Refuse what is no optimizer, and several without a step that uses them."""
    parts = optimizers_of(optimizer)
    remedy = "Write for instance: def opt_fn(model): return Adam(model.parameters(), 1e-3)"
    several = isinstance(optimizer, SeveralOptimizers)
    received = f"a tuple of {len(parts)}" if several else f"{optimizer!r:.80}"
    if several and recipe.training_step is None and recipe.fit_fn is None:
        remedy += "; several optimizers need training_step= or fit_fn="
        raise Refusal("opt_fn must return a torch.optim.Optimizer", received, remedy)
    for part in parts:
        if not isinstance(part, torch.optim.Optimizer):
            received = f"{part!r:.80}"
            raise Refusal("opt_fn must return a torch.optim.Optimizer", received, remedy)


def check_new(name: str, model: nn.Module, again: Any) -> None:
    """Refuse a factory whose models share parameters or running statistics.

    A worker's second job would continue from what the first one learned, on other folds.
    """
    if not isinstance(again, nn.Module):
        return
    known = {id(item) for item in chain(model.parameters(), model.buffers())}
    shared = [
        path for path, item in again.named_parameters() if id(item) in known and item.requires_grad
    ] + [
        path
        for path, item in again.named_buffers()
        if id(item) in known and path.rpartition(".")[2].startswith(_STATISTICS)
    ]
    if shared:
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        raise Refusal(
            f"each call of the factory of model {name} must make a new model",
            f"two models that share {shared[0]}{more}",
            "Build it in the factory, or return copy.deepcopy(...) of a prototype: folds would "
            "learn from each other.",
        )


def check_lr_schedule(name: str, schedule: Any, recipe: Any) -> None:
    """Refuse an object without ``step`` and ``state_dict``, or that a `fit_fn` cannot step."""
    if recipe.fit_fn is not None and lr_schedules.needs_metric(schedule):
        raise Refusal(
            "LR schedules that react to a loss need inner-validation samples, which a fit_fn lacks",
            f"LR schedule {name}",
            "Use another, such as 'constant', and lower the learning rate in fit_fn.",
        )
    if as_given(recipe.criterion) is None and lr_schedules.needs_metric(schedule):
        raise Refusal(
            "LR schedules that react to a loss need a criterion",
            f"LR schedule {name}, and criterion=None",
            "Pass a criterion, or use another schedule, such as 'cosine'.",
        )
    if not callable(getattr(schedule, "step", None)) or not hasattr(schedule, "state_dict"):
        raise Refusal(
            f"LR schedule {name} must have step() and state_dict()",
            f"{schedule!r:.80}",
            "Return a torch.optim.lr_scheduler object from the function optimizer → schedule.",
        )


def way_of_call(name: str, model: nn.Module, inputs: Any, data: Batches) -> str:
    """Return how a model gets several inputs; refuse one that takes them in no way."""
    if data.last_is_target and not needs_inputs(model, len(inputs)):
        raise Refusal(
            "each sample of the dataset must be a pair (x, y), unless forward needs all of a "
            "TensorDataset's tensors but the last",
            f"{len(inputs) + 1} tensors, and forward{signature(model.forward)} of model {name}",
            "Pass TensorDataset(x, y); or ((x, ...), y), a tuple of inputs and the target.",
        )
    try:
        return way_of(model, inputs)
    except UnfitInputsError as error:
        rule = f"model {name} must take the inputs {kinds_text(inputs)}"
        raise Refusal(rule, *error.args) from error


def check_storable(what: str, owner: Any) -> None:
    """Refuse a state that no checkpoint can hold."""
    if not hasattr(owner, "state_dict"):
        return
    try:
        checkpoint.check_storable({what: owner.state_dict()})
    except TypeError as error:
        raise Refusal(
            "checkpoints must be able to hold the whole state of a job",
            str(error),
            f"Leave that out of state_dict() of the {what}, as by persistent=False for a buffer "
            "that stays as it is, or keep it as dense tensors or numbers.",
        ) from error


# Outputs and loss of a step


def check_outputs(name: str, outputs: torch.Tensor, targets: torch.Tensor, bundle: Bundle) -> None:
    """Refuse outputs without a row for each sample, or a score for each class."""
    if len(outputs) != len(targets):
        raise Refusal(
            f"model {name} must return one row for each sample",
            f"shape {tuple(outputs.shape)} for {len(targets)} samples",
            "Keep the first dimension of the input.",
        )
    objective = bundle.plan.objective_of(name)
    if objective.kind == SEGMENTATION:
        _check_pixels(name, outputs, targets, bundle)
    elif targets.ndim <= 2 and not objective.is_dense:
        _check_classes(name, outputs, bundle)


def _check_classes(name: str, outputs: torch.Tensor, bundle: Bundle) -> None:
    classes = len(bundle.plan.classes)
    if not classes or (bundle.plan.objective and bundle.plan.objective.kind == BINARY):
        return
    needed = bundle.highest + 1 if bundle.highest >= 0 else classes
    columns = outputs.shape[1] if outputs.ndim == 2 else int(outputs.ndim == 1)
    # With a criterion of the user's, one output may stand for two classes.
    if columns == 1 and criterion_of(bundle.recipe.criterion) is None:
        columns = 2
    if columns < needed:
        if bundle.may_be_numbered and (outputs.ndim == 2 or columns == 2):
            raise TooFewOutputs
        raise Refusal(
            f"model {name} must return (samples, classes) scores for the {needed} classes",
            f"shape {tuple(outputs.shape)}",
            f"Give its last layer {needed} outputs.",
        )


def _check_pixels(name: str, outputs: torch.Tensor, targets: torch.Tensor, bundle: Bundle) -> None:
    needed = bundle.highest + 1
    places = outputs.ndim == targets.ndim + 1 and outputs.shape[2:] == targets.shape[1:]
    if not places or outputs.shape[1] < needed:
        masks = "; or pass masks of float32, for one output" if needed == 2 else ""
        raise Refusal(
            f"model {name} must return a score of each class for each pixel, "
            f"{(len(targets), needed, *targets.shape[1:])}",
            f"shape {tuple(outputs.shape)}",
            f"Give its last layer {needed} channels and the height and width of the targets; pass "
            f"ignore_index= to the criterion if a class stands for pixels without one{masks}.",
        )


def columns_of(name: str, outputs: Any, count: int, *, listed: bool) -> Schema:
    """Return the columns of several outputs of `count` samples; refuse what has none.

    `listed`: a list with a tree for each sample.
    """
    rule = f"model {name} must return a tensor, or a dict or tuple of them, a row for each sample"
    try:
        if listed:
            return Schema.of_listed(outputs)
        columns = Schema.of(outputs)
    except UnfitTree as error:
        received, _ = error.args
        remedy = "Return only what the criterion and the scores need, with the samples first."
        raise Refusal(rule, received, remedy) from error
    if len(next(leaf for _, leaf in leaves_of(outputs))) != count:
        received = f"{kinds_text(outputs)} for {count} samples"
        raise Refusal(rule, received, "Keep the first dimension of the input.")
    return columns


def check_finite(name: str, rows: torch.Tensor, batch: tuple[Any, Any], results: Any) -> None:
    """Refuse samples with NaN or infinity that make a loss, or outputs, such numbers, too.

    `rows` are the numbers of the samples in `batch`, (inputs, targets).
    """
    if all(map(_is_finite, tensors_in(results))):
        return
    for what, part, remedy in zip(("its inputs", "its target"), batch, _FILLED, strict=True):
        bad = [item for item in tensors_in(part) if not _is_finite(item)]
        if not bad:
            continue
        kinds = " and ".join(
            kind
            for kind, of in (("NaN", torch.isnan), ("infinity", torch.isinf))
            if any(bool(of(item).any()) for item in bad)
        )
        # A batch of the user's making need not have a row for each sample.
        odd = (~torch.isfinite(item).flatten(1).all(1) for item in bad if len(item) == len(rows))
        first = min((int(rows[places.nonzero()[0]]) for places in odd), default=None)
        rule = f"samples must be finite where model {name} or its loss does not take others"
        where = "a first batch" if first is None else f"sample {first}"
        raise Refusal(rule, f"{kinds} in {what} of {where}", remedy)


_FILLED = (
    "Fill such inputs, for instance by preprocess=sklearn.impute.SimpleImputer(), or leave these "
    "samples out.",
    "Leave these samples out, or let the criterion skip such targets.",
)


def _is_finite(item: torch.Tensor) -> bool:
    return not item.is_floating_point() or bool(torch.isfinite(item).all())


def check_gradient(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a backward pass that reached no optimised parameter."""
    of_model = {id(item) for item in model.parameters()}
    held = [item for item in optimized(optimizer) if id(item) in of_model]
    if held and all(item.grad is None for item in held):
        raise Refusal(
            f"the loss of model {name} must have a gradient for the optimised parameters",
            f"none for the {len(held)} parameters that {kind_of(optimizer)} holds",
            "Look for detach(), no_grad() or a frozen part between them and the loss.",
        )


def check_log_probabilities(name: str, criterion: Any, outputs: torch.Tensor) -> None:
    """Refuse outputs above 0 for `NLLLoss`."""
    if type(criterion) is nn.NLLLoss and float(outputs.max()) > 0:
        raise Refusal(
            f"model {name} must return logarithms of probabilities for NLLLoss",
            f"outputs up to {float(outputs.max()):.3g}, where none can exceed 0",
            "End it with log_softmax(1), or use CrossEntropyLoss.",
        )


# What the trainer asks for


def check_scalable(bundle: Bundle, optimizer: torch.optim.Optimizer) -> None:
    """Refuse several optimizers, or one that evaluates the loss itself, where losses are scaled."""
    several = isinstance(optimizer, SeveralOptimizers)
    if bundle.plan.params.precision == "fp16" and (several or needs_closure(optimizer)):
        raise Refusal(
            "precision='fp16' needs one optimizer with one gradient a step",
            f"{kind_of(optimizer)}, which takes several",
            "Use another, such as SGD or Adam, or pass precision='bf16'.",
        )


def check_shareable(bundle: Bundle, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that several processes cannot use."""
    params, kind = bundle.plan.params, type(optimizer).__name__
    if params.processes == 1:
        return
    if params.trainer != "allreduce" and has_modes(optimizer):
        raise Refusal(
            "processes that each step their own optimizer need one with the same weights in "
            "training and evaluation",
            f"trainer={params.trainer!r}, and {kind}, which has train() and eval()",
            "Pass trainer='allreduce', where one optimizer steps for all, or processes=1.",
        )
    tensors_only = params.shared_state or params.trainer == "averaging"
    allowed = (torch.Tensor,) if tensors_only else (torch.Tensor, int, float, bool, type(None))
    # In allreduce one optimizer steps for all processes.
    for values in [] if params.trainer == "allreduce" else optimizer.state.values():
        for key, value in values.items():
            if not isinstance(value, allowed):
                raise Refusal(
                    f"trainer={params.trainer!r} needs an optimizer that keeps "
                    f"{'tensors only' if tensors_only else 'tensors and numbers'}",
                    f"{kind}, whose {key} is a {type(value).__name__}",
                    "Use another, such as SGD or Adam, or processes=1.",
                )
    sparse = any(item.grad is not None and item.grad.is_sparse for item in optimized(optimizer))
    if params.trainer == "allreduce" and sparse:
        raise Refusal(
            "gradients that are averaged over processes must be dense",
            "sparse ones, as of an Embedding with sparse=True",
            "Pass sparse=False, or trainer='hogwild'.",
        )
    if needs_closure(optimizer):
        raise Refusal(
            "several processes need an optimizer with one gradient a step",
            f"{type(optimizer).__name__}, which computes several",
            "Use another, such as SGD or Adam, or processes=1.",
        )


def check_pretraining(bundle: Bundle, name: str, model: nn.Module) -> None:
    """Refuse pretraining that may call backward() in a job with a process on a GPU."""
    if bundle.plan.params.on_gpu and pretraining.may_differentiate(model):
        raise Refusal(
            "a process of the kind 'gpu' needs a model without pretrain(), or a DBN's own",
            f"model {name}, a {type(model).__name__} whose pretrain() may call backward()",
            "Leave the kind 'gpu' out, or the model.",
        )


def kind_of(optimizer: Any) -> str:
    """Return the class, or classes, of an optimizer."""
    return " and ".join(type(part).__name__ for part in optimizers_of(optimizer))


def optimized(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer, or several, holds."""
    return [item for group in optimizer.param_groups for item in group["params"]]
