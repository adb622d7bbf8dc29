"""Every animal of the zoo: fused and equivalent, or refused with the reason."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from asynckfold.training.fusion import equivalence
from asynckfold.training.fusion.backward import backward, fuse_criterion, parts_of
from asynckfold.training.fusion.equivalence import check_equivalence
from asynckfold.training.fusion.module import FusedModule, fuse
from tests.training.fusion.zoo import REFUSED, ZOO, Animal, state_of

REPLICAS = 3


def replicas(animal: Animal, count: int = REPLICAS) -> list[nn.Module]:
    torch.manual_seed(1)
    return [animal.make().train() for _ in range(count)]


def batches_of(animal: Animal, sizes: Sequence[int]) -> list:
    return [animal.batch(size, seed=replica) for replica, size in enumerate(sizes)]


def fused_step(animal: Animal, models: Sequence[nn.Module], batches: list) -> FusedModule:
    fused = fuse(models, [batches[0][0]])
    for replica, generator in enumerate(fused.generators):
        generator.manual_seed(replica)
    outputs = torch.zeros(len(batches[0][1]), animal.classes)
    criterion = fuse_criterion(nn.CrossEntropyLoss(), len(models), outputs, batches[0][1])
    fused.losses = backward(fused, criterion, parts_of(batches))
    return fused


AT_NIGHT = (
    *("alexnet", "mobilenet", "vgg", "tied", "cross attention", "buffers", "in place", "heads"),
    *("shapes", "pre-norm", "lenet", "by name", "signal", "groups", "lists"),
)


@pytest.mark.nightly(but=[name for name in ZOO if name not in AT_NIGHT])
@pytest.mark.parametrize("name", ZOO)
def test_fused_is_plain(name: str) -> None:
    animal = ZOO[name]
    models = replicas(animal)
    found = check_equivalence(models, nn.CrossEntropyLoss(), batches_of(animal, (5, 5, 4)))
    assert found.refusal is None
    assert found.largest["float64"] < 1e-9


@pytest.mark.parametrize(("name", "traced"), [("lenet5", 1), ("frozen", 3)])
def test_a_model_is_traced_anew_only_where_formats_differ(
    monkeypatch: pytest.MonkeyPatch, name: str, traced: int
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(equivalence, "fuse", lambda *call: calls.append(call) or fuse(*call))
    check_equivalence(replicas(ZOO[name]), nn.CrossEntropyLoss(), batches_of(ZOO[name], (4, 4, 4)))
    assert len(calls) == traced


def assert_same(one: dict, other: dict) -> None:
    assert list(one) == list(other)
    for key, tensor in one.items():
        assert tensor.dtype == other[key].dtype
        assert torch.equal(tensor, other[key])


@pytest.mark.parametrize("name", ["lenet5", "residual", "grouped", "transformer", "one tree"])
def test_a_diverged_replica_leaves_the_others_alone(name: str) -> None:
    animal = ZOO[name]
    batches = batches_of(animal, (4, 4, 4))
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
    animal = Animal(make, shape)
    models = [make() for _ in range(2)]
    before, state = copy.deepcopy(models[0].state_dict()), torch.get_rng_state()
    refusal = check_equivalence(models, nn.CrossEntropyLoss(), batches_of(animal, (5, 4))).refusal
    assert refusal is not None
    assert part in refusal
    assert_same(models[0].state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
