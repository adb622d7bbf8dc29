"""Rules that a candidate must keep; breaking one refuses the sweep before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn

from asynckfold.data.batches import Batches
from asynckfold.data.transforms.trees import kinds_text, tensors_in
from asynckfold.jobs.criteria import criterion_of
from asynckfold.jobs.objective import BINARY, SEGMENTATION
from asynckfold.jobs.recipe import Recipe
from asynckfold.jobs.schema import Schema, UnfitTree, leaves_of
from asynckfold.training import checkpoint, lr_schedules, pretraining
from asynckfold.training.bundle import Bundle
from asynckfold.training.calls import UnfitInputsError, needs_inputs, way_of
from asynckfold.training.dry_run.refusals import TooFewOutputs
from asynckfold.training.evaluation import has_modes
from asynckfold.training.gradients import needs_closure
from asynckfold.training.losses import as_given
from asynckfold.training.optimizers import SeveralOptimizers, optimizers_of
from asynckfold.training.user_steps import Refusal

_STATISTICS = "running_"
"""Prefix of the buffers that torch's normalising layers update in a forward pass."""


# Model, optimizer and LR schedule as they are made


def check_optimizer_kind(optimizer: Any, recipe: Any) -> None:
    """Refuse what is no optimizer, and several without a step that uses them."""
    parts = optimizers_of(optimizer)
    is_usable = len(parts) == 1 or recipe.training_step is not None or recipe.fit_fn is not None
    if not is_usable or not all(isinstance(part, torch.optim.Optimizer) for part in parts):
        raise Refusal(
            "opt_fn must return a torch.optim.Optimizer",
            f"a tuple of {len(parts)}" if len(parts) > 1 else f"{optimizer!r:.80}",
            "Write for instance: def opt_fn(model): return Adam(model.parameters(), 1e-3). Several "
            "optimizers need training_step= or fit_fn=.",
        )


def check_new(name: str, model: nn.Module, again: nn.Module) -> None:
    """Refuse a factory whose models share parameters or running statistics.

    A worker's second job would continue from what the first one learned, on other folds.
    """
    known = {id(item) for item in (*model.parameters(), *model.buffers())}
    if shared := [path for path, item in _changing(again) if id(item) in known]:
        raise Refusal(
            f"each call of the factory of model {name} must make a new model",
            f"two models that share {few(shared)}",
            "Build it in the factory, or return copy.deepcopy(...) of a prototype: folds would "
            "learn from each other.",
        )


def _changing(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield path and tensor of what training changes."""
    yield from (item for item in model.named_parameters() if item[1].requires_grad)
    for path, item in model.named_buffers():
        if path.rpartition(".")[2].startswith(_STATISTICS):
            yield path, item


def check_lr_schedule(name: str, schedule: Any, recipe: Any) -> None:
    """Refuse an object without ``step`` and ``state_dict``, or one that has no loss to react to."""
    is_lossless = recipe.fit_fn is not None or as_given(recipe.criterion) is None
    if is_lossless and lr_schedules.needs_metric(schedule):
        raise Refusal(
            "LR schedules that react to a loss need a criterion and no fit_fn, which has no "
            "inner-validation samples",
            f"LR schedule {name}",
            "Use another, such as 'constant' or 'cosine'.",
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


def check_storable(owners: Mapping[str, Any]) -> None:
    """Refuse a state that no checkpoint can hold."""
    states = {
        what: owner.state_dict() for what, owner in owners.items() if hasattr(owner, "state_dict")
    }
    try:
        checkpoint.check_storable(states)
    except TypeError as error:
        raise Refusal(
            "checkpoints must be able to hold the whole state of a job",
            str(error),
            "Leave that out of state_dict(), as by persistent=False for a buffer that stays as it "
            "is, or keep it as dense tensors or numbers.",
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
        _check_pixels(name, outputs, targets, bundle.highest + 1)
    elif targets.ndim <= 2 and not objective.is_dense:
        _check_classes(name, outputs, bundle)


def check_units(name: str, outputs: Any, targets: torch.Tensor, recipe: Recipe) -> None:
    """Refuse outputs that `target_transform` cannot bring back into the units of the targets."""
    fits = isinstance(outputs, torch.Tensor) and outputs.numel() == targets.numel()
    if recipe.target_transform is not None and not fits:
        raise Refusal(
            f"model {name} must return as many numbers as its targets have, for target_transform",
            f"outputs {kinds_text(outputs)} for targets {tuple(targets.shape)}",
            "Change its last layer, or leave target_transform out.",
        )


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


def _check_pixels(name: str, outputs: torch.Tensor, targets: torch.Tensor, needed: int) -> None:
    places = outputs.ndim == targets.ndim + 1 and outputs.shape[2:] == targets.shape[1:]
    if not places or outputs.shape[1] < needed:
        raise Refusal(
            f"model {name} must return a score of each class for each pixel, "
            f"{(len(targets), needed, *targets.shape[1:])}",
            f"shape {tuple(outputs.shape)}",
            f"Give its last layer {needed} channels and the height and width of the targets; pass "
            "ignore_index= to the criterion if a class stands for pixels without one; or pass "
            "masks of float32, for one output.",
        )


def columns_of(name: str, outputs: Any, count: int, *, listed: bool) -> Schema:
    """Return the columns of several outputs of `count` samples; refuse what has none.

    `listed`: a list with a tree for each sample.
    """
    received = f"{kinds_text(outputs)} for {count} samples"
    try:
        if listed:
            return Schema.of_listed(outputs)
        columns = Schema.of(outputs)
        if len(next(leaf for _, leaf in leaves_of(outputs))) == count:
            return columns
    except UnfitTree as error:
        received, _ = error.args
    raise Refusal(
        f"model {name} must return a tensor, or a dict or tuple of them, a row for each sample",
        received,
        "Return only what the criterion and the scores need, with the samples first.",
    )


def check_finite(name: str, rows: torch.Tensor, batch: tuple[Any, Any], results: Any) -> None:
    """Refuse samples with NaN or infinity that make a loss, or outputs, such numbers, too.

    `rows` are the numbers of the samples in `batch`, (inputs, targets).
    """
    if all(map(_is_finite, tensors_in(results))):
        return
    for what, part in zip(("inputs", "target"), batch, strict=True):
        bad = [item for item in tensors_in(part) if not _is_finite(item)]
        # A batch of the user's making need not have a row for each sample.
        odd = [(~torch.isfinite(item).flatten(1).all(1)) for item in bad if len(item) == len(rows)]
        first = min((int(rows[places.nonzero()[0]]) for places in odd), default="a first batch")
        if bad:
            raise Refusal(
                f"samples must be finite where model {name} or its loss does not take others",
                f"NaN or infinity in the {what} of sample {first}",
                "Fill such inputs, for instance by preprocess=sklearn.impute.SimpleImputer(), let "
                "the criterion skip such targets, or leave these samples out.",
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


def check_log_probabilities(name: str, criterion: Any, outputs: Any) -> None:
    """Refuse outputs above 0 for `NLLLoss`."""
    if type(criterion) is nn.NLLLoss and float(outputs.max()) > 0:
        raise Refusal(
            f"model {name} must return logarithms of probabilities for NLLLoss",
            f"outputs up to {float(outputs.max()):.3g}, where none can exceed 0",
            "End it with log_softmax(1), or use CrossEntropyLoss.",
        )


# What the trainer asks for


def check_trainable(bundle: Bundle, name: str, model: nn.Module, optimizer: Any) -> None:
    """Refuse an optimizer, or pretraining, that the trainer or the number format cannot use."""
    params, kind = bundle.plan.params, kind_of(optimizer)
    is_several = isinstance(optimizer, SeveralOptimizers) or needs_closure(optimizer)
    if is_several and (params.precision == "fp16" or params.processes > 1):
        raise Refusal(
            "precision='fp16' and several processes need one optimizer with one gradient a step",
            f"{kind}, which takes several",
            "Use another, such as SGD or Adam, or precision='bf16' and processes=1.",
        )
    if params.on_gpu and pretraining.may_differentiate(model):
        raise Refusal(
            "a process of the kind 'gpu' needs a model without pretrain(), or a DBN's own",
            f"model {name}, a {type(model).__name__} whose pretrain() may call backward()",
            "Leave the kind 'gpu' out, or the model.",
        )
    if params.trainer == "allreduce" and params.processes > 1:
        if any(item.grad is not None and item.grad.is_sparse for item in optimized(optimizer)):
            raise Refusal(
                "gradients that are averaged over processes must be dense",
                "sparse ones, as of an Embedding with sparse=True",
                "Pass sparse=False, or trainer='hogwild'.",
            )
    elif params.processes > 1:
        _check_own_optimizers(params, kind, optimizer)


def _check_own_optimizers(params: Any, kind: str, optimizer: Any) -> None:
    """Refuse what processes cannot share that each step an optimizer of their own."""
    if has_modes(optimizer):
        raise Refusal(
            "processes that each step their own optimizer need one with the same weights in "
            "training and evaluation",
            f"trainer={params.trainer!r}, and {kind}, which has train() and eval()",
            "Pass trainer='allreduce', where one optimizer steps for all, or processes=1.",
        )
    tensors_only = params.shared_state or params.trainer == "averaging"
    allowed = (torch.Tensor,) if tensors_only else (torch.Tensor, int, float, bool, type(None))
    for values in optimizer.state.values():
        for key, value in values.items():
            if not isinstance(value, allowed):
                raise Refusal(
                    f"trainer={params.trainer!r} needs an optimizer that keeps "
                    f"{'tensors only' if tensors_only else 'tensors and numbers'}",
                    f"{kind}, whose {key} is a {type(value).__name__}",
                    "Use another, such as SGD or Adam, or processes=1.",
                )


def kind_of(optimizer: Any) -> str:
    """Return the class, or classes, of an optimizer."""
    return " and ".join(type(part).__name__ for part in optimizers_of(optimizer))


def optimized(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer, or several, holds."""
    return [item for group in optimizer.param_groups for item in group["params"]]


def few(names: list[str]) -> str:
    """Join the first three names, and count the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
