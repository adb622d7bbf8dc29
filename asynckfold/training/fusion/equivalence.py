"""Whether fused replicas compute what their plain models do: measured, not assumed.

Both start every step from the same parameters; their losses, gradients, buffers and outputs are
compared after it. Parameters after several steps are not compared: a bias before a batch
normalisation has a gradient of zero but for rounding, which Adam turns into steps of full size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
"""Largest relative difference in float32, unless the model itself is more sensitive."""

SHORT = 5e-2
"""Largest relative difference in bfloat16, whose numbers have 2 to 3 digits. It shows whether both
round in the same places; float64 and float32 have compared the formulas."""

NUDGE = 1e-6
"""Relative change of the parameters that measures how sensitive a model is, in float32.

It changed the gradients of a MobileNet by 3 % of their size, as units close to 0 switch over; such
a model cannot keep them to 0.1 % when sums are taken in another order. Ten times the effect of the
nudge is allowed; float64 stays the strict test.
"""

SHORT_NUDGE = 2.0**-9
"""The same in bfloat16: about what rounding a number to it loses."""

FLOOR = 1e-3
"""A tensor is measured against its own size, or this share of the largest of its kind: values that
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
    sensitivity : Differences or None
        The effect of a nudge of its parameters on the plain model, in the shortest precision.
    refusal : str or None
        Why the models must not be fused.
    fused : FusedModule or None
        The module compared last, in float32; None after a refusal.
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
        each = [f"{item.largest:.1e} in {name}" for name, item in found.items() if item]
        return f"largest deviation from separate training: {' and '.join(each)}"


@dataclass(frozen=True)
class _Test:
    """A comparison in one precision; with a `nudge`, ten times its effect is allowed too."""

    name: str
    dtype: torch.dtype
    precision: str
    allowed: float
    nudge: float


_TESTS = (
    _Test("float64", torch.float64, "fp32", EXACT, 0.0),
    _Test("float32", torch.float32, "fp32", SINGLE, NUDGE),
    _Test("bfloat16", torch.float32, "bf16", SHORT, SHORT_NUDGE),
)


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
        The replicas; they are copied.
    criterion : callable
        (outputs, targets) → loss; it is copied for each replica.
    steps : sequence of sequence of (inputs, targets)
        For each step the batch of each replica; sizes may differ.
    opt_fn : callable
        model → optimizer, which steps the plain models.
    precision : {"fp32", "bf16"}
        What the models will compute in; float64 and float32 are always compared.
    """
    found: dict[str, Any] = {}
    for test in _TESTS if precision == "bf16" else _TESTS[:2]:
        # Whatever the user's code raises, say in another precision, is the reason.
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
        self.generators = [torch.Generator().manual_seed(i) for i in range(len(models))]
        for index, generator in enumerate(self.fused.generators):
            generator.manual_seed(index)
        self.found: dict[str, float] = dict.fromkeys(Differences.__annotations__, 0.0)
        self.nudged: dict[str, float] = dict(self.found)

    def run(self) -> tuple[Differences, Differences]:
        """Return differences between fused and plain, and between plain and nudged plain."""
        for batches in self.steps:
            losses = backward(self.fused, self.criterion, parts_of(batches), self.test.precision)
            for index, batch in enumerate(batches):
                self._step(index, batch, losses[index])
        self._evaluate(self.steps[-1])
        return Differences(**self.found), Differences(**self.nudged)

    def _step(self, index: int, batch: Batch, fused_loss: torch.Tensor) -> None:
        plain, state = self.plain[index], self.generators[index].get_state()
        nudged = self._nudged(plain, index) if self.test.nudge else None
        other = None if nudged is None else self._plain_step(nudged, index, batch, state)
        loss = self._plain_step(plain, index, batch, state)
        self.generators[index].set_state(torch.get_rng_state())
        gradients, buffers = _gradients(plain), dict(plain.named_buffers())
        _note(self.found, "losses", [(fused_loss, loss)])
        _note(self.found, "gradients", _paired(self.fused.gradients_of(index), gradients))
        of_fused = dict(self.fused.models[index].named_buffers())
        _note(self.found, "buffers", _paired(of_fused, buffers))
        if nudged is not None and other is not None:
            _note(self.nudged, "losses", [(other, loss)])
            _note(self.nudged, "gradients", _paired(_gradients(nudged), gradients))
            _note(self.nudged, "buffers", _paired(dict(nudged.named_buffers()), buffers))
        # The gradients are there already; some optimizers ask for the loss themselves.
        self.optimizers[index].step(lambda: loss)  # type: ignore[arg-type, return-value]
        self.fused.models[index].load_state_dict(plain.state_dict())

    def _evaluate(self, batches: Sequence[Batch]) -> None:
        self.fused.train(False)
        with torch.no_grad():
            for part in parts_of(batches):
                outputs = self._outputs(self.fused.part(part.replicas), part.inputs)
                for place, index in enumerate(part.replicas):
                    plain = self.plain[index].eval()
                    inputs = batches[index][0]
                    expected = self._outputs(plain, inputs)
                    _note(self.found, "outputs", [(outputs[place], expected)])
                    if self.test.nudge:
                        other = self._outputs(self._nudged(plain, index), inputs)
                        _note(self.nudged, "outputs", [(other, expected)])

    def _outputs(self, model: Any, inputs: torch.Tensor) -> Any:
        return outputs_of(model, inputs, self.test.precision)

    def _plain_step(
        self, model: nn.Module, index: int, batch: Batch, state: torch.Tensor
    ) -> torch.Tensor:
        model.zero_grad()
        torch.set_rng_state(state)
        loss: torch.Tensor = self.criteria[index](self._outputs(model, batch[0]), batch[1])
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
