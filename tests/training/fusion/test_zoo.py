"""Every animal of the zoo: fused as it should be, equivalent, repeatable, saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from asynckfold.training.calls import call_model
from asynckfold.training.fusion import (
    FusedModule,
    NotFusible,
    backward,
    check_equivalence,
    fuse,
    fuse_criterion,
    parts_of,
)
from tests.training.fusion.zoo import REFUSED, ZOO, Animal, state_of, vgg_quarter

REPLICAS = 3


def replicas(animal: Animal, count: int = REPLICAS) -> list[nn.Module]:
    torch.manual_seed(1)
    return [animal.make().train() for _ in range(count)]


def steps(animal: Animal, count: int = 2, sizes: Sequence[int] = (5, 5, 4)) -> list:
    return [
        [animal.batch(size, seed=10 * step + replica) for replica, size in enumerate(sizes)]
        for step in range(count)
    ]


def fused_step(animal: Animal, models: Sequence[nn.Module], batches: list) -> FusedModule:
    fused = fuse(models, [batches[0][0]])
    for replica, generator in enumerate(fused.generators):
        generator.manual_seed(replica)
    outputs = torch.zeros(len(batches[0][1]), animal.classes)
    criterion = fuse_criterion(nn.CrossEntropyLoss(), len(models), outputs, batches[0][1])
    fused.losses = backward(fused, criterion, parts_of(batches))
    return fused


@pytest.mark.nightly(
    but=[
        "mlp",
        "lenet",
        "lenet5",
        "residual",
        "functional",
        "transformer",
        "groups",
        "grouped",
        "signal",
        "volume",
        "pre-norm",
        "weight norm",
        "lists",
        "frozen",
        "by name",
        "by position",
        "one tree",
    ]
)
@pytest.mark.parametrize("name", ZOO)
def test_fused_is_plain(name: str) -> None:
    animal = ZOO[name]
    models = replicas(animal)
    found = check_equivalence(
        models,
        nn.CrossEntropyLoss(),
        steps(animal),
        lambda model: torch.optim.Adam(
            [p for p in model.parameters() if p.requires_grad], 1e-2, weight_decay=0.1
        ),
    )
    assert found.refusal is None
    assert found.float64 is not None
    assert found.float64.largest < 1e-9


@pytest.mark.nightly(but=["mlp", "lenet", "residual", "transformer", "groups", "functional"])
@pytest.mark.parametrize("name", ZOO)
def test_fused_twice_gives_the_same_bits(name: str) -> None:
    animal = ZOO[name]
    batches = steps(animal, 1)[0]
    one, two = (fused_step(animal, replicas(animal), batches) for _ in range(2))
    assert torch.equal(one.losses, two.losses)
    for replica in range(REPLICAS):
        for mine, other in zip(
            (one.gradients_of(replica), state_of(one, replica)),
            (two.gradients_of(replica), state_of(two, replica)),
            strict=True,
        ):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[key], other[key]) for key in mine)


@pytest.mark.nightly(but=["mlp", "lenet5", "lists", "frozen", "transformer"])
@pytest.mark.parametrize("name", ZOO)
def test_state_dict_goes_in_and_out_unchanged(name: str) -> None:
    animal = ZOO[name]
    plain = replicas(animal)
    fused = fuse(copy.deepcopy(plain), [animal.inputs(4)])
    other = animal.make().state_dict()
    for replica, model in enumerate(plain):
        assert_same(state_of(fused, replica), model.state_dict())
    fused.models[1].load_state_dict(other)
    assert_same(state_of(fused, 1), other)
    for replica in (0, 2):
        assert_same(state_of(fused, replica), plain[replica].state_dict())


def assert_same(one: dict, other: dict) -> None:
    assert list(one) == list(other)
    for key, tensor in one.items():
        assert tensor.dtype == other[key].dtype
        assert torch.equal(tensor, other[key])


@pytest.mark.parametrize(
    "name", ["lenet5", "residual", "tied", "buffers", "transformer", "by name"]
)
def test_a_part_of_the_replicas_leaves_the_others_alone(name: str) -> None:
    animal = ZOO[name]
    batches = steps(animal, 1)[0]
    some = [None, batches[1], None]
    plain = replicas(animal)
    fused = fused_step(animal, copy.deepcopy(plain), [batches[0]] * REPLICAS)
    before = [state_of(fused, replica) for replica in range(REPLICAS)]
    state = [generator.get_state() for generator in fused.generators]
    criterion = fuse_criterion(nn.CrossEntropyLoss(), 3, torch.zeros(5, 3), batches[1][1])
    losses = backward(fused, criterion, parts_of(some))
    assert losses.isnan().tolist() == [True, False, True]
    for replica in (0, 2):
        assert_same(state_of(fused, replica), before[replica])
        assert torch.equal(fused.generators[replica].get_state(), state[replica])
        assert all(not gradient.any() for gradient in fused.gradients_of(replica).values())
    plain[1].load_state_dict(before[1])
    torch.set_rng_state(state[1])
    loss = nn.functional.cross_entropy(call_model(plain[1], batches[1][0]), batches[1][1])
    torch.testing.assert_close(losses[1], loss.detach())


@pytest.mark.parametrize(
    "name", ["lenet5", "residual", "grouped", "volume", "transformer", "mlp", "one tree"]
)
def test_a_diverged_replica_leaves_the_others_alone(name: str) -> None:
    animal = ZOO[name]
    batches = steps(animal, 1, (4, 4, 4))[0]
    healthy = fused_step(animal, replicas(animal), batches)
    models = replicas(animal)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.fill_(float("nan"))
    sick = fused_step(animal, models, batches)
    assert sick.losses.isnan().tolist() == [False, True, False]
    for replica in (0, 2):
        assert torch.equal(sick.losses[replica], healthy.losses[replica])
        assert_same(sick.gradients_of(replica), healthy.gradients_of(replica))
        assert_same(state_of(sick, replica), state_of(healthy, replica))


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_reason(name: str) -> None:
    make, shape, part = REFUSED[name]
    model = make()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with pytest.raises(NotFusible) as refused:
        fuse([model], [torch.randn(4, *shape, generator=torch.Generator())])
    reason = str(refused.value)
    assert part in reason
    assert "\n" not in reason
    assert_same(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.nightly
def test_a_vgg_of_quarter_width_is_the_plain_net() -> None:
    """A prototype had other accuracies for it after 50 steps, fused and plain."""
    animal = Animal(vgg_quarter, (3, 32, 32))
    found = check_equivalence(
        replicas(animal, 2),
        nn.CrossEntropyLoss(),
        steps(animal, 4, (8, 8)),
        lambda model: torch.optim.Adam(model.parameters(), 1e-3),
    )
    assert found.refusal is None
    assert found.float64 is not None
    assert found.float64.largest < 1e-11
