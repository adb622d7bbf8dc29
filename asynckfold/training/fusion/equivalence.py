"""Whether fused replicas compute what their plain models do: measured, not assumed.

::

    float64, the formulas ── float32, as the jobs ── bfloat16, where the jobs compute in it

float64 compares the formulas. In shorter formats gradients may differ by any finite amount: where
rounding flips a unit or a pooling, those of a LeNet with batch normalisation differ in float32 by
18 % of their size, more than by a cast to bfloat16.

All of it runs on cores, also for jobs on a GPU: both ways call the same kernels of torch there, and
these differ by rounding, as two plain steps do.

Both start every step from the same parameters; their losses, gradients, buffers and outputs are
compared after it. Parameters after several steps are not compared: a bias before a batch
normalisation has a gradient of zero but for rounding, which Adam turns into steps of full size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from asynckfold.data.transforms.trees import mapped, tensors_in
from asynckfold.training import seeding
from asynckfold.training.calls import call_model, outputs_of
from asynckfold.training.fusion.backward import Batch, backward, fuse_criterion, parts_of
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.module import FusedModule, fuse
from asynckfold.training.fusion.tracing import copied

EXACT = 1e-9
"""Largest relative difference in float64."""

SINGLE = 1e-2
"""Largest relative difference in float32 of losses, buffers and outputs, which do not jump."""

SHORT = 5e-2
"""The same in bfloat16, whose numbers have 2 to 3 digits."""

FLOOR = 1e-3
"""A tensor is measured against its size, or this share of the largest of its kind: values that
are zero but for rounding have no digits to agree in."""


@dataclass(frozen=True)
class Differences:
    """The largest relative differences in one precision; infinite where only one side is finite.

    ``outputs`` are those of an evaluation after the training steps.
    """

    losses: float = 0.0
    gradients: float = 0.0
    buffers: float = 0.0
    outputs: float = 0.0

    @property
    def largest(self) -> float:
        """The largest of all."""
        return max(self.losses, self.gradients, self.buffers, self.outputs)


@dataclass(frozen=True)
class Equivalence:
    """The result of the comparison.

    Parameters
    ----------
    float64, float32, bfloat16 : Differences or None
        Between fused and plain; None in precisions that were not reached.
    refusal : str or None
        Why the models must not be fused.
    fused : FusedModule or None
        The module compared last; None after a refusal.
    """

    float64: Differences | None = None
    float32: Differences | None = None
    bfloat16: Differences | None = None
    refusal: str | None = None
    fused: FusedModule | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        """The largest difference in each precision."""
        reached = {name: getattr(self, name) for name in ("float64", "float32", "bfloat16")}
        each = [f"{item.largest:.1e} in {name}" for name, item in reached.items() if item]
        return f"largest deviation from separate training: {' and '.join(each)}"


CHECKS = {
    "float64": (torch.float64, "fp32", EXACT),
    "float32": (torch.float32, "fp32", SINGLE),
    "bfloat16": (torch.float32, "bf16", SHORT),
}
"""Type of the parameters, precision of the computation, and largest allowed difference, by the
fields of `Equivalence`. Only in float64 the sizes of gradients count."""


def check_equivalence(
    models: Sequence[nn.Module],
    criterion: Callable[..., Any],
    steps: Sequence[Sequence[Batch]],
    opt_fn: Callable[[nn.Module], Optimizer],
    precision: str = "fp32",
) -> Equivalence:
    """Compare a few steps of fused replicas with those of the plain models.

    Parameters
    ----------
    models : sequence of nn.Module
        The replicas, on cores; they are copied.
    criterion : callable
        (outputs, targets) → loss; it is copied for each replica.
    steps : sequence of sequence of (inputs, targets)
        For each step the batch of each replica; sizes may differ.
    opt_fn : callable
        model → optimizer, which steps the plain models.
    precision : {"fp32", "tf32", "bf16"}
        What the models will compute in; float64 and float32 are always compared.
    """
    reached: dict[str, Any] = {}
    for name, (dtype, _, allowed) in CHECKS.items():
        if name == "bfloat16" and precision != "bf16":
            continue
        # Whatever the user's code raises, say in another precision, is the reason.
        try:
            with seeding.preserved(), naming(dtype):
                comparison = _Comparison(models, criterion, steps, opt_fn, name)
                differences = comparison.run()
        except NotFusible as error:
            return Equivalence(**reached, refusal=str(error))
        except Exception as error:  # noqa: BLE001
            text = f"{type(error).__name__} was raised in {name}: {error}"
            return Equivalence(**reached, refusal=text)
        if name != "float64" and math.isfinite(differences.gradients):
            differences = replace(differences, gradients=0.0)
        reached[name] = differences
        for kind, apart in asdict(differences).items():
            if apart > allowed:
                text = (
                    f"the fused {kind} differ from the plain ones by {apart:.1e} in {name}, "
                    f"and at most {allowed:.0e} is allowed"
                )
                return Equivalence(**reached, refusal=text)
    return Equivalence(**reached, fused=comparison.fused)


@contextmanager
def naming(dtype: torch.dtype) -> Iterator[None]:
    """Let code that says float32, or names no format, mean float64 if that is `dtype`.

    Forwards make numbers of integers by ``.float()``, and begin with ``torch.zeros``.

    Examples
    --------
    >>> with naming(torch.float64):
    ...     numbers = torch.arange(2).float() + torch.zeros(2)
    >>> numbers.dtype
    torch.float64
    """
    if dtype is not torch.float64:
        yield
        return
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(usual)


class _Float64(TorchFunctionMode):
    """Exchanges float32 for float64 in every call of torch."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {name: _wide(item) for name, item in (kwargs or {}).items()}
        return func(*map(_wide, args), **named)


def _wide(item: Any) -> Any:
    return torch.float64 if item is torch.float32 else item


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Comparison:
    """Fused and plain training, in one precision."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        criterion: Callable[..., Any],
        steps: Sequence[Sequence[Batch]],
        opt_fn: Callable[[nn.Module], Optimizer],
        name: str,
    ) -> None:
        self.name = name
        dtype, self.precision, _ = CHECKS[name]
        self.plain = [copied(model).to(dtype).train() for model in models]
        self.steps = [[_cast(batch, dtype) for batch in batches] for batches in steps]
        inputs, targets = self.steps[0][0]
        self.fused = fuse([copied(model) for model in self.plain], [inputs])
        self.optimizers = [opt_fn(model) for model in self.plain]
        self.criteria = [_to(copy.deepcopy(criterion), dtype) for _ in models]
        outputs = call_model(copied(self.plain[0]), inputs)
        self.criterion = fuse_criterion(self.criteria[0], len(models), outputs, targets)
        self.generators = [torch.Generator().manual_seed(i) for i in range(len(models))]
        for index, generator in enumerate(self.fused.generators):
            generator.manual_seed(index)
        self.worst: dict[str, float] = dict.fromkeys(Differences.__annotations__, 0.0)

    def run(self) -> Differences:
        """Return the differences between fused and plain."""
        for batches in self.steps:
            losses = backward(self.fused, self.criterion, parts_of(batches), self.precision)
            for index, batch in enumerate(batches):
                self._step(index, batch, losses[index])
        self._evaluate(self.steps[-1])
        return Differences(**self.worst)

    def _step(self, index: int, batch: Batch, fused_loss: torch.Tensor) -> None:
        plain = self.plain[index]
        plain.zero_grad()
        # A plain model draws the numbers of its replica.
        torch.set_rng_state(self.generators[index].get_state())
        outputs = outputs_of(plain, batch[0], self.precision)
        loss: torch.Tensor = self.criteria[index](outputs, batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        self.generators[index].set_state(torch.get_rng_state())
        gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        fused = self.fused.models[index]
        self._compare("losses", {"": fused_loss}, {"": loss.detach()})
        self._compare("gradients", self.fused.gradients_of(index), gradients)
        self._compare("buffers", dict(fused.named_buffers()), dict(plain.named_buffers()))
        # The gradients are there already; some optimizers ask for the loss themselves.
        self.optimizers[index].step(lambda: loss.detach())  # type: ignore[arg-type, return-value]
        fused.load_state_dict(plain.state_dict())

    def _evaluate(self, batches: Sequence[Batch]) -> None:
        precision = self.precision
        self.fused.train(False)
        with torch.no_grad():
            for part in parts_of(batches):
                together = outputs_of(self.fused.part(part.replicas), part.inputs, precision)
                for place, index in enumerate(part.replicas):
                    expected = outputs_of(self.plain[index].eval(), batches[index][0], precision)
                    outputs = mapped(lambda item, at=place: item[at], together)  # type: ignore[misc]
                    self._compare("outputs", _numbered(outputs), _numbered(expected))

    def _compare(self, kind: str, fused: Tensors, plain: Tensors) -> None:
        """Compare by name; what only one of them has is compared with zeros."""
        pairs = [
            (
                fused[name] if name in fused else torch.zeros_like(plain[name]),
                plain[name] if name in plain else torch.zeros_like(fused[name]),
            )
            for name in {**plain, **fused}
        ]
        for mine, theirs in pairs:
            if mine.dtype is not theirs.dtype:
                text = f"the fused {kind} are {_short(mine.dtype)} in {self.name}"
                raise NotFusible(f"{text}, the plain ones {_short(theirs.dtype)}")
        self.worst[kind] = max(self.worst[kind], _distance(pairs))


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    inputs, targets = mapped(
        lambda item: item.to(dtype) if item.is_floating_point() else item, batch
    )
    return inputs, targets


def _to(criterion: Any, dtype: torch.dtype) -> Any:
    return criterion.to(dtype) if isinstance(criterion, nn.Module) else criterion


Tensors = Mapping[str, torch.Tensor]


def _numbered(outputs: Any) -> Tensors:
    return {str(at): leaf for at, leaf in enumerate(tensors_in(outputs))}


def _distance(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the largest difference, relative to the size of its tensor or to the `FLOOR`."""
    kept = [(mine.detach().double(), theirs.detach().double()) for mine, theirs in pairs]
    kept = [(mine, theirs) for mine, theirs in kept if mine.numel()]
    if not kept:
        return 0.0
    sizes = [_size(theirs) for _, theirs in kept]
    floor = FLOOR * max(sizes)
    worst = 0.0
    for (mine, theirs), size in zip(kept, sizes, strict=True):
        apart = mine != theirs
        apart &= ~(mine.isnan() & theirs.isnan())
        if apart.any():
            difference = float((mine - theirs)[apart].abs().nan_to_num(nan=torch.inf).max())
            worst = max(worst, difference / max(size, floor, 1e-300))
    return worst


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max())
