"""Whether fused replicas compute what their plain models do: measured, not hoped.

Both are given the same parameters before every step, and losses, gradients, buffers and outputs
are compared after it. Parameters after several steps are not: a bias before a batch normalisation
has a gradient of zero but for rounding, and Adam makes steps of full size out of that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from asynckfold.training import seeding
from asynckfold.training.fusion.fused import fuse
from asynckfold.training.fusion.gradients import Batch, backward, fuse_criterion, parts_of
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.tracing import copied

EXACT = 1e-9
"""Largest relative difference in float64."""

SINGLE = 1e-3
"""Largest relative difference in float32, unless the model itself is more sensitive than that."""

NUDGE = 1e-6
"""Relative change of the parameters that tells how sensitive a model is, in float32.

A MobileNet was seen to change its gradients by 3 % of their size under it, as units close to 0
switch over; it cannot be asked to keep them to 0.1 % when sums are taken in another order. Ten
times the effect of the nudge is allowed; float64 stays the strict test.
"""

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
    float64, float32 : Differences or None
        Between fused and plain; None where it did not come to that.
    sensitivity : Differences or None
        What a `NUDGE` of its parameters changes in the plain model, in float32.
    refusal : str or None
        Why the models must not be fused; None when they may be.
    """

    float64: Differences | None = None
    float32: Differences | None = None
    sensitivity: Differences | None = None
    refusal: str | None = None


def check_equivalence(
    models: Sequence[nn.Module],
    criterion: Callable[..., Any],
    steps: Sequence[Sequence[Batch]],
    opt_fn: Callable[[nn.Module], Optimizer],
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

    Returns
    -------
    Equivalence
        Its refusal says why they cannot be fused, or by how much they are not equivalent.
    """
    found: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32):
        precision = str(dtype).removeprefix("torch.")
        # What the user's code raises, in another precision for instance, is the reason.
        try:
            with seeding.preserved():
                comparison = _Comparison(models, criterion, steps, opt_fn, dtype)
                differences, sensitivity = comparison.run()
        except NotFusible as error:
            return Equivalence(**found, refusal=str(error))
        except Exception as error:  # noqa: BLE001
            text = f"{type(error).__name__} was raised in {precision}: {error}"
            return Equivalence(**found, refusal=text)
        found[precision] = differences
        if dtype is torch.float32:
            found["sensitivity"] = sensitivity
        for kind, apart in asdict(differences).items():
            allowed = EXACT if dtype is torch.float64 else SINGLE
            if dtype is torch.float32:
                allowed = max(allowed, 10 * getattr(sensitivity, kind))
            if not apart <= allowed:
                text = (
                    f"the fused {kind} differ from the plain ones by {apart:.1e} in {precision}, "
                    f"and at most {allowed:.0e} is allowed"
                )
                return Equivalence(**found, refusal=text)
    return Equivalence(**found)


class _Comparison:
    """Both trainings, in one precision."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        criterion: Callable[..., Any],
        steps: Sequence[Sequence[Batch]],
        opt_fn: Callable[[nn.Module], Optimizer],
        dtype: torch.dtype,
    ) -> None:
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
            losses = backward(self.fused, self.criterion, parts_of(batches))
            for row, batch in enumerate(batches):
                self._step(row, batch, losses[row])
        self._evaluate(self.steps[-1])
        return Differences(**self.found), Differences(**self.nudged)

    def _step(self, row: int, batch: Batch, fused_loss: torch.Tensor) -> None:
        plain, state = self.plain[row], self.generators[row].get_state()
        nudged = _nudged(plain, row)
        other = _plain_step(nudged, self.criteria[row], batch, state)
        loss = _plain_step(plain, self.criteria[row], batch, state)
        self.generators[row].set_state(torch.get_rng_state())
        gradients = _gradients(plain)
        _note(self.found, "losses", [(fused_loss, loss)])
        _note(self.nudged, "losses", [(other, loss)])
        _note(self.found, "gradients", _paired(self.fused.gradients_of(row), gradients))
        _note(self.nudged, "gradients", _paired(_gradients(nudged), gradients))
        of_fused = dict(self.fused.models[row].named_buffers())
        _note(self.found, "buffers", _paired(of_fused, dict(plain.named_buffers())))
        _note(
            self.nudged,
            "buffers",
            _paired(dict(nudged.named_buffers()), dict(plain.named_buffers())),
        )
        # Gradients are there already, also for those that ask for the loss themselves.
        self.optimizers[row].step(partial(_same, loss))  # type: ignore[arg-type]
        self.fused.load(row, plain.state_dict())

    def _evaluate(self, batches: Sequence[Batch]) -> None:
        self.fused.eval()
        with torch.no_grad():
            for part in parts_of(batches):
                outputs = self.fused.rows(part.rows)(part.inputs)
                for place, row in enumerate(part.rows):
                    plain = self.plain[row].eval()
                    nudged, inputs = _nudged(plain, row), batches[row][0]
                    expected = plain(inputs)
                    _note(self.found, "outputs", [(outputs[place], expected)])
                    _note(self.nudged, "outputs", [(nudged(inputs), expected)])


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    inputs, targets = (item.to(dtype) if item.is_floating_point() else item for item in batch)
    return inputs, targets


def _to(criterion: Any, dtype: torch.dtype) -> Any:
    return criterion.to(dtype) if isinstance(criterion, nn.Module) else criterion


def _nudged(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    nudged = copied(model)
    with torch.no_grad():
        for parameter in nudged.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.mul_(1 + NUDGE * noise)
    return nudged


def _plain_step(
    model: nn.Module, criterion: Any, batch: Batch, state: torch.Tensor
) -> torch.Tensor:
    model.zero_grad()
    torch.set_rng_state(state)
    loss: torch.Tensor = criterion(model(batch[0]), batch[1])
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


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
