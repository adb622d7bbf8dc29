from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from asynckfold import InputError
from asynckfold.models import (
    ARCHITECTURES,
    MLP,
    VGG,
    AlexNet,
    LeNet,
    LeNet5,
    MobileNet,
    shared_input_shape,
)

IMAGE_MODELS: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "AlexNet": (AlexNet, 1),
    "LeNet": (LeNet, 3),
    "LeNet5": (LeNet5, 1),
    "MobileNet": (lambda **given: MobileNet(width=0.125, **given), 3),
    "VGG": (lambda **given: VGG("VGG11", width=0.125, **given), 3),
}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.nightly(but=["LeNet5", "MobileNet"])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_an_image_model_takes_any_classes_channels_and_memory_format(name: str) -> None:
    make, channels = IMAGE_MODELS[name]
    torch.manual_seed(0)
    assert make()(torch.zeros(2, channels, 32, 32)).shape == (2, 10)
    model, images = (
        make(num_classes=7, in_channels=4 - channels),
        torch.rand(2, 4 - channels, 32, 32),
    )
    plain = model.eval()(images)
    assert plain.shape == (2, 7)
    last = model.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-5)


def test_an_mlp_takes_flat_and_image_input_alike() -> None:
    model, images = MLP(), torch.rand(3, 1, 28, 28)
    assert torch.equal(model(images), model(images.reshape(3, 784)))


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(VGG, 20_040_522), (AlexNet, 2_456_778), (LeNet5, 61_750), (MobileNet, 3_217_226)],
)
def test_the_networks_have_the_parameters_of_the_ancestors(
    model: type[nn.Module], parameters: int
) -> None:
    assert count(model()) == parameters


def parts_of(model: nn.Module) -> list[str]:
    return [*dict.fromkeys(name.rpartition(".")[0] for name in model.state_dict())]


def test_networks_name_their_weights_as_the_ancestors_checkpoints_do() -> None:
    assert parts_of(LeNet()) == ["conv1", "conv2", "fc1", "fc2", "fc3"]
    assert parts_of(AlexNet()) == [*(f"features.{n}" for n in (0, 3, 6, 8, 10)), "classifier"]
    layers = [f"layer{n}.{part}" for n in (1, 2) for part in (0, 1)]
    assert parts_of(LeNet5()) == [*layers, "fc", "fc1", "fc2"]
    blocks = [f"layers.{n}.{part}{k}" for n in range(13) for k in (1, 2) for part in ("conv", "bn")]
    assert parts_of(MobileNet(width=0.125)) == ["conv1", "bn1", *blocks, "linear"]
    depth = {"VGG11": 8, "VGG19": 16}
    for variant, convolutions in depth.items():
        *features, classifier = parts_of(VGG(variant, width=0.125))
        assert len(features) == 2 * convolutions
        assert features[:2] == ["features.0", "features.1"]
        assert classifier == "classifier"


@pytest.mark.nightly(but=["dbn", "lenet", "mlp", "vgg11"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_factory_survives_pickling_and_builds_for_the_data(name: str) -> None:
    factory = pickle.loads(pickle.dumps(ARCHITECTURES[name].build((2, 32, 32), 4)))
    model = factory().eval()
    assert isinstance(model, ARCHITECTURES[name].model)
    assert model(torch.zeros(1, 2, 32, 32)).shape == (1, 4)


def test_a_model_refuses_samples_that_it_cannot_take() -> None:
    for shape in ((1, 28, 28), (9,)):
        with pytest.raises(InputError, match=r"lenet5 needs images of 32×32: .*use mlp for tables"):
            ARCHITECTURES["lenet5"].build(shape, 10)


def test_the_shared_shape_keeps_the_channels_of_the_data() -> None:
    mlp, lenet, lenet5 = (ARCHITECTURES[name] for name in ("mlp", "lenet", "lenet5"))
    assert shared_input_shape([mlp, lenet, lenet5], (1, 28, 28)) == (1, 32, 32)
    assert shared_input_shape([lenet5], (3, 48, 64)) == (3, 32, 32)
    assert shared_input_shape([mlp], (1, 28, 28)) == (1, 28, 28)
    assert shared_input_shape([mlp, lenet], (9,)) == (9,)


def test_the_shell_knows_these_names() -> None:
    assert list(ARCHITECTURES) == [
        *("alexnet", "dbn", "lenet", "lenet5", "mlp", "mobilenet"),
        *("vgg11", "vgg13", "vgg16", "vgg19"),
    ]


def convolution_of(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def linear_of(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def test_a_lenet_loads_a_checkpoint_of_the_ancestor() -> None:
    torch.manual_seed(0)
    shapes = {
        **{"conv1": (6, 3, 5, 5), "conv2": (16, 6, 5, 5)},
        **{"fc1": (120, 400), "fc2": (84, 120), "fc3": (10, 84)},
    }
    checkpoint = {f"{name}.weight": torch.randn(shape) * 0.1 for name, shape in shapes.items()}
    checkpoint |= {f"{name}.bias": torch.randn(shape[0]) for name, shape in shapes.items()}
    images = torch.rand(4, 3, 32, 32)
    x = images
    for name in ("conv1", "conv2"):
        x = functional.max_pool2d(functional.relu(convolution_of(checkpoint, name, x)), 2)
    x = x.flatten(1)
    for name in ("fc1", "fc2"):
        x = functional.relu(linear_of(checkpoint, name, x))
    model = LeNet()
    model.load_state_dict(checkpoint)
    torch.testing.assert_close(model(images), linear_of(checkpoint, "fc3", x))
