"""Whether fused replicas compute what their plain models do: measured, not hoped.

Both are given the same parameters before every step, and losses, gradients, buffers and outputs
are compared after it. Parameters after several steps are not: a bias before a batch normalisation
has a gradient of zero but for rounding, and Adam makes steps of full size out of that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from asynckfold.training import seeding
from asynckfold.training.fusion.backward import Batch, backward, fuse_criterion, parts_of
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.module import FusedModule, fuse
from asynckfold.training.fusion.tracing import copied
from asynckfold.training.precision import outputs_of

EXACT = 1e-9
"""Largest relative difference in float64."""

SINGLE = 1e-3
"""Largest relative difference in float32, unless the model itself is more sensitive than that."""

SHORT = 5e-2
"""The same where models compute in bfloat16, whose numbers have 2 to 3 digits. It tells whether
both round in the same places; whether their formulas are the same, the others have told."""

NUDGE = 1e-6
"""Relative change of the parameters that tells how sensitive a model is, in float32.

A MobileNet was seen to change its gradients by 3 % of their size under it, as units close to 0
switch over; it cannot be asked to keep them to 0.1 % when sums are taken in another order. Ten
times the effect of the nudge is allowed; float64 stays the strict test.
"""

SHORT_NUDGE = 2.0**-9
"""The same in bfloat16: about what is lost when a number is rounded to it."""

FLOOR = 1e-3
"""A tensor is measured against its own size, or this share of the largest of its kind: what is
zero but for rounding has no digits to agree in."""


@dataclass(frozen=True)
class Differences:
    """The largest relative differences in one precision; infinite where only one is finite.

    Parameters
    ----------
    losses, gradients, buffers : float
        Of the training steps.
    outputs : float
        Of an evaluation after them.
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
    """What the comparison found.

    Parameters
    ----------
    float64, float32, bfloat16 : Differences or None
        Between fused and plain; None where it did not come to that.
    sensitivity : Differences or None
        What a nudge of its parameters changes in the plain model, in the shortest of these.
    refusal : str or None
        Why the models must not be fused; None when they may be.
    fused : FusedModule or None
        What was compared last, in float32; None where it is refused.
    """

    float64: Differences | None = None
    float32: Differences | None = None
    sensitivity: Differences | None = None
    refusal: str | None = None
    bfloat16: Differences | None = None
    fused: FusedModule | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        """The largest difference in each precision."""
        found = {name: getattr(self, name) for name in ("float64", "float32", "bfloat16")}
        told = [f"{item.largest:.1e} in {name}" for name, item in found.items() if item]
        return f"at most {' and '.join(told)} from each by itself"


@dataclass(frozen=True)
class _Test:
    """A comparison: models of a type compute with a precision; what differences are allowed.

    Ten times the effect of a nudge is allowed, too; none is tried where it is 0.
    """

    name: str
    dtype: torch.dtype
    precision: str
    allowed: float
    nudge: float


_TESTS: dict[str, tuple[_Test, ...]] = {
    "fp32": (
        _Test("float64", torch.float64, "fp32", EXACT, 0.0),
        _Test("float32", torch.float32, "fp32", SINGLE, NUDGE),
    )
}
_TESTS["bf16"] = (
    *_TESTS["fp32"],
    _Test("bfloat16", torch.float32, "bf16", SHORT, SHORT_NUDGE),
)
"""By the precision that was asked for."""


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
        The replicas; they are copied and stay as they are.
    criterion : callable
        (outputs, targets) → loss.
    steps : sequence of sequence of (inputs, targets)
        For each step each replica's batch; their sizes may differ.
    opt_fn : callable
        model → optimizer, which steps the plain models.
    precision : {"fp32", "bf16"}
        What the models will compute in; float64 and float32 are compared always.

    Returns
    -------
    Equivalence
        Its refusal says why they cannot be fused, or by how much they are not equivalent.
    """
    found: dict[str, Any] = {}
    for test in _TESTS[precision]:
        # What the user's code raises, in another precision for instance, is the reason.
        try:
            with seeding.preserved():
                comparison = _Comparison(models, criterion, steps, opt_fn, test)
                differences, sensitivity = comparison.run()
        except NotFusible as error:
            return Equivalence(**found, refusal=str(error))
        except Exception as error:  # noqa: BLE001
            text = f"{type(error).__name__} was raised in {test.name}: {error}"
            return Equivalence(**found, refusal=text)
        found[test.name] = differences
        if test.nudge:
            found["sensitivity"] = sensitivity
        for kind, apart in asdict(differences).items():
            allowed = max(test.allowed, 10 * getattr(sensitivity, kind) if test.nudge else 0.0)
            if not apart <= allowed:
                text = (
                    f"the fused {kind} differ from the plain ones by {apart:.1e} in {test.name}, "
                    f"and at most {allowed:.0e} is allowed"
                )
                return Equivalence(**found, refusal=text)
    return Equivalence(**found, fused=comparison.fused)


class _Comparison:
    """Both trainings, in one precision."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        criterion: Callable[..., Any],
        steps: Sequence[Sequence[Batch]],
        opt_fn: Callable[[nn.Module], Optimizer],
        test: _Test,
    ) -> None:
        self.test, dtype = test, test.dtype
        self.plain = [copied(model).to(dtype).train() for model in models]
        self.steps = [[_cast(batch, dtype) for batch in batches] for batches in steps]
        inputs, targets = self.steps[0][0]
        self.fused = fuse([copied(model) for model in self.plain], [inputs])
        self.optimizers = [opt_fn(model) for model in self.plain]
        self.criteria = [_to(copy.deepcopy(criterion), dtype) for _ in models]
        outputs = copied(self.plain[0])(inputs)
        self.criterion = fuse_criterion(self.criteria[0], len(models), outputs, targets)
        self.generators = [torch.Generator().manual_seed(row) for row in range(len(models))]
        for row, generator in enumerate(self.fused.generators):
            generator.manual_seed(row)
        self.found: dict[str, float] = dict.fromkeys(Differences.__annotations__, 0.0)
        self.nudged: dict[str, float] = dict(self.found)

    def run(self) -> tuple[Differences, Differences]:
        """Return differences between fused and plain, and between plain and nudged plain."""
        for batches in self.steps:
            losses = backward(self.fused, self.criterion, parts_of(batches), self.test.precision)
            for row, batch in enumerate(batches):
                self._step(row, batch, losses[row])
        self._evaluate(self.steps[-1])
        return Differences(**self.found), Differences(**self.nudged)

    def _step(self, row: int, batch: Batch, fused_loss: torch.Tensor) -> None:
        plain, state = self.plain[row], self.generators[row].get_state()
        nudged = self._nudged(plain, row) if self.test.nudge else None
        other = None if nudged is None else self._plain_step(nudged, row, batch, state)
        loss = self._plain_step(plain, row, batch, state)
        self.generators[row].set_state(torch.get_rng_state())
        gradients, buffers = _gradients(plain), dict(plain.named_buffers())
        _note(self.found, "losses", [(fused_loss, loss)])
        _note(self.found, "gradients", _paired(self.fused.gradients_of(row), gradients))
        of_fused = dict(self.fused.models[row].named_buffers())
        _note(self.found, "buffers", _paired(of_fused, buffers))
        if nudged is not None and other is not None:
            _note(self.nudged, "losses", [(other, loss)])
            _note(self.nudged, "gradients", _paired(_gradients(nudged), gradients))
            _note(self.nudged, "buffers", _paired(dict(nudged.named_buffers()), buffers))
        # Gradients are there already, also for those that ask for the loss themselves.
        self.optimizers[row].step(partial(_same, loss))  # type: ignore[arg-type]
        self.fused.load(row, plain.state_dict())

    def _evaluate(self, batches: Sequence[Batch]) -> None:
        self.fused.eval()
        with torch.no_grad():
            for part in parts_of(batches):
                outputs = self._outputs(self.fused.rows(part.rows), part.inputs)
                for place, row in enumerate(part.rows):
                    plain = self.plain[row].eval()
                    inputs = batches[row][0]
                    expected = self._outputs(plain, inputs)
                    _note(self.found, "outputs", [(outputs[place], expected)])
                    if self.test.nudge:
                        other = self._outputs(self._nudged(plain, row), inputs)
                        _note(self.nudged, "outputs", [(other, expected)])

    def _outputs(self, model: Any, inputs: torch.Tensor) -> Any:
        return outputs_of(model, inputs, self.test.precision)

    def _plain_step(
        self, model: nn.Module, row: int, batch: Batch, state: torch.Tensor
    ) -> torch.Tensor:
        model.zero_grad()
        torch.set_rng_state(state)
        loss: torch.Tensor = self.criteria[row](self._outputs(model, batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _nudged(self, model: nn.Module, seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        nudged = copied(model)
        with torch.no_grad():
            for parameter in nudged.parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.mul_(1 + self.test.nudge * noise)
        return nudged


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    inputs, targets = (item.to(dtype) if item.is_floating_point() else item for item in batch)
    return inputs, targets


def _to(criterion: Any, dtype: torch.dtype) -> Any:
    return criterion.to(dtype) if isinstance(criterion, nn.Module) else criterion


def _same(loss: torch.Tensor) -> torch.Tensor:
    return loss


Tensors = Mapping[str, torch.Tensor]
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


def _gradients(model: nn.Module) -> Tensors:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _paired(mine: Tensors, theirs: Tensors) -> Pairs:
    """Pair by name; what only one of them has is compared with zeros."""
    names = {**theirs, **mine}
    return [
        (
            mine[name] if name in mine else torch.zeros_like(theirs[name]),
            theirs[name] if name in theirs else torch.zeros_like(mine[name]),
        )
        for name in names
    ]


def _note(worst: dict[str, float], kind: str, pairs: Pairs) -> None:
    worst[kind] = max(worst[kind], _distance(pairs))


def _distance(pairs: Pairs) -> float:
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
