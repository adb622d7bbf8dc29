"""Whether fused replicas compute what their plain models do: measured, not assumed.

::

    float64, the formulas ── float32, as the jobs ── bfloat16, where the jobs compute in it

float64 compares the formulas. In shorter formats gradients may differ by any finite amount: where
rounding flips a unit or a pooling, those of a LeNet with batch normalisation differ in float32 by
18 % of their size, more than by a cast to bfloat16.

All of it runs on cores, also for jobs on a GPU: both ways call the same kernels of torch there, and
these differ by rounding, as two plain steps do.

Losses, gradients and buffers of one step are compared, and outputs of an evaluation after it. No
optimizer takes a step: a bias before a batch normalisation has a gradient of zero but for rounding,
which Adam turns into steps of full size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from asynckfold.data.transforms.trees import mapped, tensors_in
from asynckfold.training import seeding
from asynckfold.training.calls import call_model, outputs_of
from asynckfold.training.fusion.backward import (
    Batch,
    GroupCriterion,
    backward,
    fuse_criterion,
    parts_of,
)
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.module import FusedModule, fuse
from asynckfold.training.fusion.tracing import copied

CHECKS = {
    "float64": (torch.float64, "fp32", 1e-9),
    "float32": (torch.float32, "fp32", 1e-2),
    "bfloat16": (torch.float32, "bf16", 5e-2),
}
"""Type of the parameters, precision of the computation, and largest allowed relative difference.
Only in float64 the sizes of gradients count: losses, buffers and outputs do not jump."""

FLOOR = 1e-3
"""A tensor is measured against its size, or this share of the largest of its kind: values that
are zero but for rounding have no digits to agree in."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Equivalence:
    """The result of the comparison.

    Parameters
    ----------
    largest : Mapping of str to float
        The largest relative difference between fused and plain in each precision that was reached;
        infinite where only one side is finite.
    refusal : str or None
        Why the models must not be fused.
    fused : FusedModule or None
        The module compared last; None after a refusal.
    """

    largest: Mapping[str, float]
    refusal: str | None = None
    fused: FusedModule | None = None

    def __str__(self) -> str:
        """The largest difference in each precision."""
        each = [f"{apart:.1e} in {name}" for name, apart in self.largest.items()]
        return f"largest deviation from separate training: {' and '.join(each)}"


def check_equivalence(
    models: Sequence[nn.Module],
    criterion: Callable[..., Any],
    batches: Sequence[Batch],
    precision: str = "fp32",
) -> Equivalence:
    """Compare a step of fused replicas, and an evaluation, with those of the plain models.

    Parameters
    ----------
    models : sequence of nn.Module
        The replicas, on cores; they are copied.
    criterion : callable
        (outputs, targets) → loss; it is copied for each replica.
    batches : sequence of (inputs, targets)
        Of each replica; sizes may differ.
    precision : {"fp32", "tf32", "bf16"}
        What the models will compute in; float64 and float32 are always compared.
    """
    outcome = _checked(models, criterion, batches, precision, traced_once=True)
    if outcome.refusal is None:
        return outcome
    # A graph holds numbers of a forward in the format in which it was traced.
    return _checked(models, criterion, batches, precision, traced_once=False)


def _checked(
    models: Sequence[nn.Module],
    criterion: Callable[..., Any],
    batches: Sequence[Batch],
    precision: str,
    *,
    traced_once: bool,
) -> Equivalence:
    largest: dict[str, float] = {}
    traced = None
    for name, (dtype, _, allowed) in CHECKS.items():
        if name == "bfloat16" and precision != "bf16":
            continue
        # Whatever the user's code raises, say in another precision, is the reason.
        try:
            with seeding.preserved():
                if not largest:
                    models = [_disturbed(copied(model)).train() for model in models]
                    traced = _traced(models, criterion, batches[0]) if traced_once else None
                comparison = _Comparison(models, criterion, batches, name, traced)
                comparison.run()
        except NotFusible as error:
            return Equivalence(largest, str(error))
        except Exception as error:  # noqa: BLE001
            return Equivalence(largest, f"{type(error).__name__} was raised in {name}: {error}")
        differences = comparison.worst
        if dtype is not torch.float64 and math.isfinite(differences["gradients"]):
            del differences["gradients"]
        largest[name] = max(differences.values())
        for kind, apart in differences.items():
            if apart > allowed:
                return Equivalence(
                    largest,
                    f"the fused {kind} differ from the plain ones by {apart:.1e} in {name}, "
                    f"and at most {allowed:.0e} is allowed",
                )
    return Equivalence(largest, fused=comparison.fused)


class _Float64(TorchFunctionMode):
    """Lets code that says float32, or names no format, mean float64.

    Forwards make numbers of integers by ``.float()``, and begin with ``torch.zeros``.
    """

    def __enter__(self) -> Any:
        self.usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        torch.set_default_dtype(self.usual)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {name: _wide(item) for name, item in (kwargs or {}).items()}
        return func(*map(_wide, args), **named)


def _wide(item: Any) -> Any:
    return torch.float64 if item is torch.float32 else item


_Traced = tuple[FusedModule, GroupCriterion]


def _traced(models: Sequence[nn.Module], criterion: Callable[..., Any], batch: Batch) -> _Traced:
    inputs, targets = batch
    fused = fuse([copied(model) for model in models], [inputs])
    outputs = call_model(copied(models[0]), inputs)
    return fused, fuse_criterion(criterion, len(models), outputs, targets)


class _Comparison:
    """Fused and plain training, in one precision; ``worst`` are differences by kind."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        criterion: Callable[..., Any],
        batches: Sequence[Batch],
        name: str,
        traced: _Traced | None,
    ) -> None:
        self.name = name
        dtype, self.precision, _ = CHECKS[name]
        self.plain = [copied(model).to(dtype) for model in models]
        self.criteria = [copy.deepcopy(criterion) for _ in models]
        nn.ModuleList([item for item in self.criteria if isinstance(item, nn.Module)]).to(dtype)
        self.batches = [
            mapped(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
            for batch in batches
        ]
        # Only around the user's code: each operation in it takes some microseconds more.
        self.widened: Any = _Float64 if name == "float64" else nullcontext
        if traced is None:
            with self.widened():
                traced = _traced(self.plain, self.criteria[0], self.batches[0])
        self.fused = traced[0].beside(self.plain)
        self.criterion = traced[1].beside(self.criteria)
        self.generators = [torch.Generator().manual_seed(i) for i in range(len(models))]
        self.worst = dict.fromkeys(("losses", "gradients", "buffers", "outputs"), 0.0)

    def run(self) -> None:
        """Take a step by both ways, then evaluate."""
        parts = parts_of(self.batches)
        with self.widened():
            losses = backward(self.fused, self.criterion, parts, self.precision)
        for index, batch in enumerate(self.batches):
            self._step(index, batch, losses[index])
        self.fused.train(False)
        with torch.no_grad(), self.widened():
            for part in parts:
                view = self.fused.part(part.replicas)
                together = outputs_of(view, part.inputs, self.precision)
                for place, index in enumerate(part.replicas):
                    inputs, _ = self.batches[index]
                    expected = outputs_of(self.plain[index].eval(), inputs, self.precision)
                    outputs = mapped(itemgetter(place), together)
                    self._compare("outputs", _numbered(outputs), _numbered(expected))

    def _step(self, index: int, batch: Batch, fused_loss: torch.Tensor) -> None:
        plain = self.plain[index]
        # A plain model draws the numbers of its replica.
        torch.set_rng_state(self.generators[index].get_state())
        with self.widened():
            outputs = outputs_of(plain, batch[0], self.precision)
            loss: torch.Tensor = self.criteria[index](outputs, batch[1])
            loss.backward()  # type: ignore[no-untyped-call]
        self.generators[index].set_state(torch.get_rng_state())
        gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        self._compare("losses", {"": fused_loss}, {"": loss.detach()})
        self._compare("gradients", self.fused.gradients_of(index), gradients)
        self._compare("buffers", self.fused.buffers_of(index), dict(plain.named_buffers()))

    def _compare(self, kind: str, fused: Tensors, plain: Tensors) -> None:
        """Compare by name; what only one of them has is compared with zeros."""
        pairs = []
        for name in {**plain, **fused}:
            mine = fused[name] if name in fused else torch.zeros_like(plain[name])
            theirs = plain[name] if name in plain else torch.zeros_like(fused[name])
            if mine.dtype is not theirs.dtype:
                types = f"{mine.dtype} in {self.name}, the plain ones {theirs.dtype}"
                raise NotFusible(f"the fused {kind} are {types}")
            if mine.numel():
                pairs.append((mine.detach().double(), theirs.detach().double()))
        self.worst[kind] = max(self.worst[kind], _distance(pairs))


@torch.no_grad()
def _disturbed(model: nn.Module) -> nn.Module:
    """Change parameters a little: pretrained ones are equal in all replicas, and others are 0."""
    for item in filter(torch.is_floating_point, model.parameters()):
        item.add_(torch.where(item == 0, 1, item) * torch.randn_like(item), alpha=0.01)
    return model


def _numbered(outputs: Any) -> Tensors:
    return {str(at): leaf for at, leaf in enumerate(tensors_in(outputs))}


def _distance(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the largest difference, relative to the size of its tensor or to the `FLOOR`."""
    sizes = [_largest(theirs, not_finite=0.0) for _, theirs in pairs]
    floor = FLOOR * max(sizes, default=0.0)
    worst = 0.0
    for (mine, theirs), size in zip(pairs, sizes, strict=True):
        difference = _largest(mine - theirs, not_finite=math.inf)
        if math.isinf(difference):
            # Equal values that are not finite do not count.
            apart = (mine != theirs) & ~(mine.isnan() & theirs.isnan())
            difference = _largest((mine - theirs)[apart], not_finite=math.inf)
        worst = max(worst, difference / max(size, floor, 1e-300))
    return worst


def _largest(values: torch.Tensor, not_finite: float) -> float:
    """Return the largest absolute value; `not_finite` stands for those that are not."""
    size = float(values.abs().max()) if values.numel() else 0.0
    if math.isfinite(size):
        return size
    return float(values.nan_to_num(*[not_finite] * 3).abs().max())
