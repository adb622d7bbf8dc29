"""Stacked RBMs: layers one by one, from the samples and the generator alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asynckfold import InputError
from asynckfold.models import DBN, RBM, Pretraining

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = Pretraining(epochs=3, batch_size=10)


def samples(count: int = 80) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(count, 1, 3, 4, generator=generator) < 0.3).float()


def made(**given: Any) -> DBN:
    torch.manual_seed(1)
    return DBN(12, (8, 5), 3, **{"pretraining": QUICK, **given})


def pretrained(seed: int = 0, inputs: Tensor | None = None, **given: Any) -> tuple[DBN, list[RBM]]:
    model = made(**given)
    generator = torch.Generator().manual_seed(seed)
    return model, model.pretrain(samples() if inputs is None else inputs, generator)


def test_the_hidden_layers_get_what_their_rbms_learned_and_the_top_stays() -> None:
    before, (model, rbms) = made(), pretrained()
    assert [rbm.weight.shape for rbm in rbms] == [(8, 12), (5, 8)]
    for layer, rbm in zip([model[1], model[3]], rbms, strict=True):
        assert isinstance(layer, nn.Linear)
        assert torch.equal(layer.weight, rbm.weight)
        assert torch.equal(layer.bias, rbm.hidden_bias)
    assert torch.equal(model[5].weight, before[5].weight)  # type: ignore[arg-type]
    values = samples()
    hidden = nn.Sequential(*list(model)[:5])
    torch.testing.assert_close(hidden(values), rbms[1](rbms[0](values.flatten(1))))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_same_seed_gives_the_same_bits_whatever_else_draws() -> None:
    (one, _), (other, _) = pretrained(0), pretrained(1)
    torch.manual_seed(1)
    again = made()
    torch.rand(9)
    state = torch.get_rng_state()
    again.pretrain(samples(), torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in one.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not torch.equal(one.state_dict()["1.weight"], other.state_dict()["1.weight"])


def test_the_first_layer_sees_the_kind_of_input() -> None:
    for visible, shift, kind in (
        ("auto", 0.0, "binary"),
        ("auto", -0.5, "gaussian"),
        ("gaussian", 0.0, "gaussian"),
    ):
        _, rbms = pretrained(inputs=samples() + shift, visible=visible)
        assert [rbm.visible for rbm in rbms] == [kind, "binary"]


def test_binary_units_refuse_other_numbers() -> None:
    with pytest.raises(ValueError, match=r"need inputs from 0 to 1, these are from -0\.5 to 0\.5"):
        pretrained(inputs=samples() - 0.5, visible="binary")


def test_one_sample_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="at least 2 samples, it has 1"):
        pretrained(inputs=samples(1))
    pretrained(inputs=samples(2))


def test_the_units_of_upper_layers_stay_alive() -> None:
    inputs = samples(300).flatten(1)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    torch.manual_seed(0)
    model = DBN(12, (100, 100), 3, pretraining=Pretraining(lr=0.2, epochs=5))
    first, second = model.pretrain(inputs, torch.Generator().manual_seed(0))
    with torch.no_grad():
        means = second(first(inputs)).mean(0)
    # Without centring, by such large steps, they are below 0.01.
    assert 0.2 < means.min() < means.max() < 0.8


def test_an_unknown_kind_is_refused_and_settings_are_shown() -> None:
    with pytest.raises(InputError, match="visible must be auto, binary or gaussian: received 'b'"):
        made(visible="b")
    # A plan knows models by their text.
    assert "k=2" in repr(made(pretraining=Pretraining(k=2)))


def test_it_tells_how_each_layer_gets_on() -> None:
    told: list[Any] = []
    made().pretrain(samples(), torch.Generator(), lambda *item: told.append(item))
    assert [(layer, epoch) for layer, epoch, _ in told] == [
        (f"layer {layer}", epoch) for layer in (1, 2) for epoch in (1, 2, 3)
    ]
    assert all(set(found) == {"reconstruction_error", "free_energy_gap"} for *_, found in told)
