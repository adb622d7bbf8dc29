"""The comparisons of a GPU, computed on cores: what is alike passes, what is not is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from asynckfold.training.fusion import Equivalence, check_equivalence, equivalence
from asynckfold.training.fusion.equivalence import MARGIN, ROUNDING, Check, checks_on_gpu
from asynckfold.training.fusion.plain_draws import drawing_as_replica
from asynckfold.training.fusion.rules import linear
from asynckfold.training.isolation import torch_settings
from tests.training.fusion.test_zoo import replicas, steps
from tests.training.fusion.zoo import ZOO

FLOAT64, FLOAT32, SHORT = checks_on_gpu("bf16")
TF32 = checks_on_gpu("tf32")[-1]


def compared(name: str = "mlp", checks: Sequence[Check] = (FLOAT64, FLOAT32, SHORT)) -> Equivalence:
    animal = ZOO[name]
    return check_equivalence(
        replicas(animal),
        nn.CrossEntropyLoss(),
        steps(animal),
        lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2),
        checks=checks,
    )


@pytest.mark.parametrize("name", ["mlp", "lenet5", "transformer"])
def test_what_computes_the_same_passes_all_three(name: str) -> None:
    found = compared(name)
    assert found.refusal is None
    assert found.fused is not None
    assert found.float64 is not None
    assert found.float64.largest < 1e-9
    assert found.short is not None
    assert found.plain_short is not None
    # Autocast rounds both; a plain step that is not rounded would tell nothing.
    assert found.plain_short.largest > 1e-4
    assert "from float64 in the jobs' format: " in str(found)


def slightly(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Products of all but the first replica are 10 % too large."""
    found = affine(x, weight, bias)
    return torch.cat([found[:1], 1.1 * found[1:]])


def exchanged(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The outputs of another replica."""
    return affine(x, weight, bias).roll(1, 0)


affine = linear.affine


@pytest.mark.parametrize("wrong", [slightly, exchanged])
@pytest.mark.parametrize("check", [FLOAT64, FLOAT32, SHORT, TF32], ids=lambda check: check.name)
def test_a_wrongly_stacked_module_is_refused_in_each_alone(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., torch.Tensor], check: Check
) -> None:
    assert compared(checks=[check]).refusal is None
    monkeypatch.setattr(linear, "affine", wrong)
    found = compared(checks=[check])
    assert "the fused losses" in str(found.refusal)
    assert found.fused is None


@pytest.mark.parametrize(
    ("fused", "plain", "passes"),
    [
        (1e-2, 1e-2, True),
        (0.9 * MARGIN * 1e-2, 1e-2, True),
        (1.1 * MARGIN * 1e-2, 1e-2, False),
        # A plain step that is exact by chance allows what the format rounds.
        (0.9 * MARGIN * ROUNDING["tf32"], 0.0, True),
        (1.1 * MARGIN * ROUNDING["tf32"], 0.0, False),
        # One that overflowed allows no more than that.
        (1e-2, float("inf"), False),
        (float("inf"), 1e-2, False),
        (float("nan"), 1e-2, False),
    ],
)
def test_in_a_short_format_the_distance_of_the_plain_step_is_the_measure(
    fused: float, plain: float, passes: bool
) -> None:
    reason = TF32.refusal("gradients", fused, plain)
    assert (not reason) == passes
    assert passes or "the fused gradients are" in reason


def test_coarse_rounding_is_allowed_where_plain_steps_round_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stands in for TF32: inputs of all models that are not in float64 lose digits."""
    usual = equivalence.outputs_of

    def rounded(model: Any, inputs: torch.Tensor, precision: str) -> Any:
        if precision == "tf32":
            inputs = inputs.bfloat16().to(inputs.dtype)
        return usual(model, inputs, precision)

    def only_fused(model: Any, inputs: torch.Tensor, precision: str) -> Any:
        is_plain = isinstance(model, nn.Module)
        return usual(model, inputs, precision) if is_plain else rounded(model, inputs, precision)

    for module in (equivalence, equivalence.backward.__globals__):
        if isinstance(module, dict):
            monkeypatch.setitem(module, "outputs_of", rounded)
        else:
            monkeypatch.setattr(module, "outputs_of", rounded)
    found = compared(checks=[TF32])
    assert found.refusal is None
    assert found.plain_short is not None
    assert found.plain_short.largest > ROUNDING["tf32"]
    monkeypatch.setattr(equivalence, "outputs_of", only_fused)
    assert "in the jobs' format (tf32) the fused" in str(compared(checks=[TF32]).refusal)


def test_tf32_is_off_where_float32_is_compared_and_as_in_the_jobs_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []
    usual = equivalence.outputs_of

    def noted(model: Any, inputs: torch.Tensor, precision: str) -> Any:
        seen.append(torch_settings.tf32_is_allowed())
        return usual(model, inputs, precision)

    monkeypatch.setattr(equivalence, "outputs_of", noted)
    before = torch_settings.current()
    # As torch has it by default: allowed in convolutions.
    assert torch_settings.tf32_is_allowed()
    assert [check.name for check in checks_on_gpu("fp32")] == ["float64", "float32", "short"]
    for check, allowed in ((FLOAT64, False), (FLOAT32, False), (TF32, True)):
        seen.clear()
        assert compared(checks=[check]).refusal is None
        assert set(seen) == {allowed}
    assert torch_settings.current() == before
    with torch_settings.without_tf32():
        assert [check.name for check in checks_on_gpu("fp32")] == ["float64", "float32"]


def test_cores_have_the_comparisons_that_they_had() -> None:
    for precision, names in (("fp32", []), ("bf16", ["bfloat16"])):
        checks = equivalence.checks_on_cores(precision)
        assert [check.name for check in checks] == ["float64", "float32", *names]
        assert not any(check.on_gpu or check.from_float64 for check in checks)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "layer": nn.Dropout(0.3),
    "in place": lambda x: F.dropout(x.clone(), 0.3, True, True),
    "torch": lambda x: torch.dropout(x, 0.3, True),
    "channels": lambda x: F.dropout2d(x, 0.3),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True),
    "off": lambda x: F.dropout(x, 0.3, False),
    "all": lambda x: F.dropout(x, 1.0),
    "uniform": lambda x: torch.rand_like(x),
    "normal": lambda x: torch.randn_like(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.3),
    "no dropout": lambda x: F.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_plain_model_draws_from_the_generator_of_its_replica_what_torch_draws(
    name: str, layout: torch.memory_format
) -> None:
    """On a core, where both are known."""
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1)).to(memory_format=layout)
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(7)
    expected, after = DRAWS[name](x), torch.get_rng_state()
    with drawing_as_replica(generator):
        found = DRAWS[name](x)
    torch.testing.assert_close(found, expected)
    assert torch.equal(generator.get_state(), after)
    # The global generator is not drawn from, and afterwards it is again.
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(7)
    assert torch.equal(DRAWS[name](x), expected)


def test_a_step_in_float64_has_the_masks_of_one_in_float32() -> None:
    def dropped(dtype: torch.dtype) -> torch.Tensor:
        with drawing_as_replica(torch.Generator().manual_seed(3), torch.float32):
            return F.dropout(torch.ones(50, dtype=dtype), 0.5)

    for short in (torch.float32, torch.bfloat16):
        assert torch.equal(dropped(torch.float64), dropped(short).double())
