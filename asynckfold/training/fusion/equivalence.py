"""Whether fused replicas compute what their plain models do: measured, not assumed.

::

    float64 ── float32 ─┬─ on cores, in bfloat16: both differ by little
                        └─ on a GPU, in TF32 or bfloat16: both are as far from float64

float64 compares the formulas. Sizes tell nothing more in float32: where rounding flips a unit or a
pooling, gradients of a LeNet with batch normalisation differ by 18 % of their size, more than by a
cast to bfloat16. So float32 shows that the same operations compute in no shorter format.

Both start every step from the same parameters; their losses, gradients, buffers and outputs are
compared after it. Parameters after several steps are not compared: a bias before a batch
normalisation has a gradient of zero but for rounding, which Adam turns into steps of full size.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asynckfold.data.transforms import mapped, tensors_in
from asynckfold.training import seeding
from asynckfold.training.calls import call_model
from asynckfold.training.fusion.backward import Batch, backward, fuse_criterion, parts_of
from asynckfold.training.fusion.in_float64 import naming
from asynckfold.training.fusion.layouts import NotFusible
from asynckfold.training.fusion.module import FusedModule, fuse
from asynckfold.training.fusion.plain_draws import drawing_as_replica
from asynckfold.training.fusion.tracing import copied
from asynckfold.training.isolation import torch_settings
from asynckfold.training.precision import outputs_of

_CPU = torch.device("cpu")

EXACT = 1e-9
"""Largest relative difference in float64."""

SINGLE = 1e-2
"""Largest relative difference in float32 of losses, buffers and outputs, which do not jump."""

SHORT = 5e-2
"""Largest relative difference in bfloat16, whose numbers have 2 to 3 digits. It shows whether both
round in the same places; float64 and float32 have compared the formulas."""

NUDGE = 2.0**-9
"""Relative change of the parameters that measures how sensitive a model is, in bfloat16: about what
rounding a number to it loses. Ten times the effect of the nudge is allowed."""

MARGIN = 1.5
"""On a GPU a fused step may be this many times as far from a step in float64 as the plain step is:
two ways to round the same sums differ by chance. In bfloat16 on a core, 27 of the 28 models of
`tests/training/fusion/zoo.py` were at most 1.24 times as far; the other has a gradient of which
bfloat16 leaves no digit, and is refused."""

ROUNDING = {"tf32": 2.0**-11, "bf16": 2.0**-9}
"""What rounding a number to the format loses; a plain step may be nearer to float64 by chance."""

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
    short, plain_short : Differences or None
        On a GPU, in the format of the jobs: of fused and plain from float64.
    sensitivity : Differences or None
        The effect of a nudge of its parameters on the plain model, in bfloat16.
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
    short: Differences | None = None
    plain_short: Differences | None = None

    def __str__(self) -> str:
        """The largest difference in each precision."""
        found = {name: getattr(self, name) for name in ("float64", "float32", "bfloat16")}
        each = [f"{item.largest:.1e} in {name}" for name, item in found.items() if item]
        text = f"largest deviation from separate training: {' and '.join(each)}"
        if self.short is None or self.plain_short is None:
            return text
        apart, plain = self.short.largest, self.plain_short.largest
        return f"{text}; from float64 in the jobs' format: {apart:.1e}, separately {plain:.1e}"


@dataclass(frozen=True)
class Check:
    """A comparison in one precision.

    Parameters
    ----------
    name : str
        Field of `Equivalence`.
    dtype, precision : torch.dtype, str
        Of the parameters, and of the computation.
    allowed : float
        Largest difference between fused and plain.
    nudge : float
        Ten times the effect of such a nudge is allowed, too.
    from_float64 : bool
        Fused and plain are compared with float64 instead, and `MARGIN` times the plain distance is
        allowed, or `allowed` if that is more.
    flips : bool
        Gradients may differ by any finite amount; formats are compared with those in float64.
    on_gpu : bool
        Plain models draw as replicas do, see `plain_draws`; TF32 is as in the jobs `from_float64`,
        and off otherwise.
    """

    name: str
    dtype: torch.dtype
    precision: str
    allowed: float
    nudge: float = 0.0
    from_float64: bool = False
    flips: bool = False
    on_gpu: bool = False

    def limit(self, own: float) -> float:
        """Return the largest allowed difference where that of the plain model is `own`."""
        if self.from_float64:
            return MARGIN * max(own if own < math.inf else 0.0, self.allowed)
        return max(self.allowed, 10 * own if self.nudge else 0.0)

    def refusal(self, kind: str, apart: float, own: float) -> str:
        """Return why the difference of a kind is too large; empty if it is not."""
        limit = self.limit(own)
        if apart <= limit:
            return ""
        if not self.from_float64:
            return (
                f"the fused {kind} differ from the plain ones by {apart:.1e} in {self.name}, "
                f"and at most {limit:.0e} is allowed"
            )
        return (
            f"in the jobs' format ({self.precision}) the fused {kind} are {apart:.1e} from those "
            f"in float64, the plain ones {own:.1e}, and at most {limit:.0e} is allowed"
        )


_FLOAT64 = Check("float64", torch.float64, "fp32", EXACT)
_FLOAT32 = Check("float32", torch.float32, "fp32", SINGLE, flips=True)
_BFLOAT16 = Check("bfloat16", torch.float32, "bf16", SHORT, NUDGE)


def checks_on_cores(precision: str) -> tuple[Check, ...]:
    """Return the comparisons on cores."""
    return (_FLOAT64, _FLOAT32, *([_BFLOAT16] if precision == "bf16" else []))


def checks_on_gpu(precision: str) -> tuple[Check, ...]:
    """Return the comparisons on a GPU, the last in the format of the jobs if that is a short one.

    In "fp32", torch's settings may allow TF32.
    """
    both = tuple(replace(check, on_gpu=True) for check in (_FLOAT64, _FLOAT32))
    if precision == "fp32" and torch_settings.tf32_is_allowed():
        precision = "tf32"
    if precision not in ROUNDING:
        return both
    size = ROUNDING[precision]
    return (*both, Check("short", torch.float32, precision, size, from_float64=True, on_gpu=True))


def check_equivalence(
    models: Sequence[nn.Module],
    criterion: Callable[..., Any],
    steps: Sequence[Sequence[Batch]],
    opt_fn: Callable[[nn.Module], Optimizer],
    precision: str = "fp32",
    device: torch.device = _CPU,
    checks: Sequence[Check] = (),
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
    precision : {"fp32", "tf32", "bf16"}
        What the models will compute in; float64 and float32 are always compared.
    device : torch.device
        Where: models and batches are copied to it.
    checks : sequence of Check
        By default those of the device.
    """
    found: dict[str, Any] = {}
    expected: ShortFormats | None = None
    usual = checks_on_cores if device.type == "cpu" else checks_on_gpu
    for check in checks or usual(precision):
        exact = check.on_gpu and not check.from_float64
        # Whatever the user's code raises, say in another precision, is the reason.
        try:
            with (
                seeding.preserved(),
                torch_settings.without_tf32() if exact else nullcontext(),
                naming(check.dtype),
            ):
                comparison = _Comparison(models, criterion, steps, opt_fn, check, device)
                differences, sensitivity = comparison.run()
        except NotFusible as error:
            return Equivalence(**found, refusal=str(error))
        except Exception as error:  # noqa: BLE001
            text = f"{type(error).__name__} was raised in {check.name}: {error}"
            return Equivalence(**found, refusal=text)
        if check.flips:
            jump = 0.0 if math.isfinite(differences.gradients) else math.inf
            differences = replace(differences, gradients=jump)
            if expected is not None and (wrong := comparison.formats.beyond(expected)):
                return Equivalence(**found, refusal=f"in {check.name} the fused {wrong}")
        elif not check.from_float64:
            expected = expected or comparison.formats
        found[check.name] = differences
        if check.from_float64:
            found["plain_short"] = sensitivity
        elif check.nudge:
            found["sensitivity"] = sensitivity
        for kind, apart in asdict(differences).items():
            if text := check.refusal(kind, apart, getattr(sensitivity, kind)):
                return Equivalence(**found, refusal=text)
    return Equivalence(**found, fused=comparison.fused)


@dataclass(frozen=True)
class _Way:
    """How a plain model computes: its format, and that in which it draws."""

    dtype: torch.dtype
    precision: str
    draws: torch.dtype | None = None


class ShortFormats(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the tensors that operations compute in a format shorter than float32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[tuple[str, torch.dtype]] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As in `FlopCounter`: torch's own answer imports its compiler, which takes seconds.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.itemsize < 4:
                self.counts[str(func), leaf.dtype] += 1
        return outputs

    def beyond(self, expected: ShortFormats) -> str:
        """Say which operation computes in a short format, unless it is expected to."""
        more = [*(self.counts - expected.counts), *(expected.counts - self.counts)]
        return f"{more[0][0]} computes in {_short(more[0][1])}, unlike in float64" if more else ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Comparison:
    """Both trainings, in one precision, and a third: of nudged plain models, or in float64."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        criterion: Callable[..., Any],
        steps: Sequence[Sequence[Batch]],
        opt_fn: Callable[[nn.Module], Optimizer],
        check: Check,
        device: torch.device,
    ) -> None:
        self.check, dtype = check, check.dtype
        self.way = self.third_way = _Way(dtype, check.precision)
        self.plain = [copied(model).to(device, dtype).train() for model in models]
        self.steps = [[_cast(batch, dtype, device) for batch in batches] for batches in steps]
        inputs, targets = self.steps[0][0]
        self.fused = fuse([copied(model) for model in self.plain], [inputs])
        self.optimizers = [opt_fn(model) for model in self.plain]
        self.criteria = [_to(copy.deepcopy(criterion), dtype, device) for _ in models]
        self.third_criteria = self.criteria
        if check.from_float64:
            self.third_way = _Way(torch.float64, "fp32", dtype)
            exact = [_to(copy.deepcopy(criterion), torch.float64, device) for _ in models]
            self.third_criteria = exact
        outputs = call_model(copied(self.plain[0]), inputs)
        self.criterion = fuse_criterion(self.criteria[0], len(models), outputs, targets)
        self.generators = [seeding.generator_on(device).manual_seed(i) for i in range(len(models))]
        for index, generator in enumerate(self.fused.generators):
            generator.manual_seed(index)
        self.found: dict[str, float] = dict.fromkeys(Differences.__annotations__, 0.0)
        self.own: dict[str, float] = dict(self.found)
        self.formats = ShortFormats()

    def run(self) -> tuple[Differences, Differences]:
        """Return differences between fused and plain, and between plain and nudged plain.

        For a check from float64: of fused and of plain from that.
        """
        for batches in self.steps:
            with self.formats:
                losses = backward(
                    self.fused, self.criterion, parts_of(batches), self.check.precision
                )
            for index, batch in enumerate(batches):
                self._step(index, batch, losses[index])
        self._evaluate(self.steps[-1])
        return Differences(**self.found), Differences(**self.own)

    def _step(self, index: int, batch: Batch, fused_loss: torch.Tensor) -> None:
        plain, state = self.plain[index], self.generators[index].get_state()
        third = self._third(plain, index)
        of_third: _Values = {}
        if third is not None:
            third_loss = self._plain_step(third, self.third_way, index, batch, state)
            of_third = _values(third_loss, _gradients(third), third)
        loss = self._plain_step(plain, self.way, index, batch, state)
        of_fused = _values(fused_loss, self.fused.gradients_of(index), self.fused.models[index])
        self._compare(of_fused, _values(loss, _gradients(plain), plain), of_third)
        # The gradients are there already; some optimizers ask for the loss themselves.
        self.optimizers[index].step(lambda: loss)  # type: ignore[arg-type, return-value]
        self.fused.models[index].load_state_dict(plain.state_dict())

    def _evaluate(self, batches: Sequence[Batch]) -> None:
        self.fused.train(False)
        with torch.no_grad():
            for part in parts_of(batches):
                with self.formats:
                    outputs = outputs_of(
                        self.fused.part(part.replicas), part.inputs, self.check.precision
                    )
                for place, index in enumerate(part.replicas):
                    plain = self.plain[index].eval()
                    expected = _outputs(plain, batches[index], self.way)
                    third = self._third(plain, index)
                    of_third: _Values = {}
                    if third is not None:
                        of_third = _evaluated(_outputs(third, batches[index], self.third_way))
                    own = mapped(lambda item, at=place: item[at], outputs)  # type: ignore[misc]
                    self._compare(_evaluated(own), _evaluated(expected), of_third)

    def _compare(self, fused: _Values, plain: _Values, third: _Values) -> None:
        for kind in fused:
            if self.check.from_float64:
                _note(self.found, kind, _paired(fused[kind], third[kind]))
                _note(self.own, kind, _paired(plain[kind], third[kind]))
                continue
            pairs = _paired(fused[kind], plain[kind])
            for mine, theirs in pairs:
                if mine.dtype is not theirs.dtype:
                    text = f"the fused {kind} are {_short(mine.dtype)} in {self.check.name}"
                    raise NotFusible(f"{text}, the plain ones {_short(theirs.dtype)}")
            _note(self.found, kind, pairs)
            if third:
                _note(self.own, kind, _paired(third[kind], plain[kind]))

    def _plain_step(
        self, model: nn.Module, way: _Way, index: int, batch: Batch, state: torch.Tensor
    ) -> torch.Tensor:
        criteria = self.criteria if way is self.way else self.third_criteria
        model.zero_grad()
        with self._drawing(self.generators[index], state, way), naming(way.dtype):
            loss: torch.Tensor = criteria[index](_outputs(model, batch, way), batch[1])
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @contextmanager
    def _drawing(
        self, generator: torch.Generator, state: torch.Tensor, way: _Way
    ) -> Iterator[None]:
        """Let a plain model draw from a state of its replica's generator."""
        generator.set_state(state)
        if self.check.on_gpu:
            with drawing_as_replica(generator, way.draws):
                yield
            return
        torch.set_rng_state(state)
        yield
        generator.set_state(torch.get_rng_state())

    def _third(self, model: nn.Module, seed: int) -> nn.Module | None:
        """Return a copy in float64 or with nudged parameters; None if the check needs none."""
        if self.check.from_float64:
            return copied(model).to(torch.float64)
        if not self.check.nudge:
            return None
        generator = torch.Generator().manual_seed(seed)
        nudged = copied(model)
        with torch.no_grad():
            for parameter in nudged.parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.mul_(1 + self.check.nudge * noise)
        return nudged


def _cast(batch: Batch, dtype: torch.dtype, device: torch.device) -> Batch:
    inputs, targets = mapped(
        lambda item: item.to(device, dtype) if item.is_floating_point() else item.to(device), batch
    )
    return inputs, targets


def _to(criterion: Any, dtype: torch.dtype, device: torch.device) -> Any:
    return criterion.to(device, dtype) if isinstance(criterion, nn.Module) else criterion


def _outputs(model: nn.Module, batch: Batch, way: _Way) -> Any:
    inputs, _ = _cast(batch, way.dtype, batch[1].device)
    with naming(way.dtype):
        return outputs_of(model, inputs, way.precision)


Tensors = Mapping[str, torch.Tensor]
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
_Values = Mapping[str, Tensors]


def _values(loss: torch.Tensor, gradients: Tensors, model: nn.Module) -> _Values:
    return {"losses": {"": loss}, "gradients": gradients, "buffers": dict(model.named_buffers())}


def _evaluated(outputs: Any) -> _Values:
    return {"outputs": {str(at): leaf for at, leaf in enumerate(tensors_in(outputs))}}


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
