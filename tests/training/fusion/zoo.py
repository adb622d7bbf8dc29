"""Small models of every kind that users write, each with an input for one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from asynckfold import models
from asynckfold.training.fusion.module import FusedModule

CLASSES = 3


def state_of(fused: FusedModule, replica: int) -> dict[str, Any]:
    """A copy of what the plain model of a replica would return as its ``state_dict``."""
    return copy.deepcopy(fused.models[replica].state_dict())


@dataclass(frozen=True)
class Animal:
    """A model, and the shape of one sample; `form` makes a tree of a batch."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    vocabulary: int = 0
    classes: int = CLASSES
    form: Callable[[torch.Tensor], Any] = lambda batch: batch

    def inputs(self, batch: int, seed: int = 0) -> Any:
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, *self.shape)
        if self.vocabulary:
            return self.form(torch.randint(self.vocabulary, shape, generator=generator))
        return self.form(torch.randn(shape, generator=generator))

    def batch(self, batch: int, seed: int = 0) -> tuple[Any, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        targets = torch.randint(self.classes, (batch,), generator=generator)
        return self.inputs(batch, seed), targets


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.block = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4, momentum=0.3),
        )
        self.shortcut = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        out = self.block(x)
        out += self.shortcut(x)
        return self.head(F.relu_(out).mean(dim=(2, 3)))


class Tied(nn.Module):
    """The embedding's table is the output layer's weight, and two layers share a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 4, padding_idx=1)
        self.middle = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.other.bias = self.middle.bias
        self.head = nn.Linear(4, CLASSES, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words).mean(1)
        return self.head(self.other(F.silu(self.middle(x))))


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.1, norm_first: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.block = nn.TransformerEncoderLayer(
            8, 2, 16, dropout, batch_first=True, norm_first=norm_first, activation="gelu"
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.table(words) + self.position)[:, 0])


class CrossAttention(nn.Module):
    """Attention in its other forms: sequence first, masks, averaged weights that are used."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, bias=False)
        self.register_buffer("mask", torch.randn(5, 5))
        self.head = nn.Linear(8 + 25, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = (x[:, :, 0] > 1.5) & (torch.arange(5, device=x.device) > 0)
        first = x.transpose(0, 1)
        y, weights = self.attention(
            first, first * 2, first, attn_mask=self.mask, key_padding_mask=padding.to(x.dtype) * -9
        )
        return self.head(torch.cat([y.sum(0), weights.flatten(1)], 1))


class Buffers(nn.Module):
    """A running mean of its own, a fixed scale, and a counter; asks for a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scale", torch.rand(6) + 0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.dim() == 2 else x.flatten(1)
        if self.training:
            self.calls.add_(1)
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.linear((x - self.mean) * self.scale)


class Frozen(nn.Module):
    """Its evaluation holds a number that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.head = nn.Linear(5, CLASSES)
        self.features.requires_grad_(False)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.features.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.head(self.features(x))
        return out if self.training else out * torch.tensor(0.1)


def groups() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same"),
        nn.GroupNorm(2, 4),
        nn.SiLU(inplace=True),
        nn.Conv2d(4, 6, 3),
        nn.GroupNorm(3, 6, affine=False),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(6 * 16, CLASSES),
    )


def signal() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1, padding_mode="replicate"),
        nn.BatchNorm1d(4, affine=False),
        nn.ELU(inplace=True),
        nn.MaxPool1d(2),
        nn.ConvTranspose1d(4, 3, 3, stride=2),
        nn.AvgPool1d(2),
        nn.Dropout1d(0.4),
        nn.AdaptiveMaxPool1d(3),
        nn.Flatten(),
        nn.Linear(9, CLASSES),
    )


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2, dilation=2, padding=2, padding_mode="circular"),
        nn.BatchNorm2d(8, momentum=0.3),
        nn.PReLU(8),
        nn.Conv2d(8, 8, (3, 1), stride=(2, 1), groups=8, padding=(1, 0), bias=False),
        nn.ReflectionPad2d(1),
        nn.Dropout2d(0.3),
        nn.AvgPool2d(3, stride=2),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(8, 2, 2, groups=2),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        same = x
        x += 1
        same.mul_(0.5).clamp_(-1, 1)
        x[:, 0] = 0.25
        x[:, 1:3] = x[:, 3:5] * 2
        return self.last(x.view(-1, 6).relu_()).sub_(0.1)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.heads = nn.ModuleDict({"mean": nn.Linear(4, CLASSES), "spread": nn.Linear(4, CLASSES)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.trunk(x).chunk(2, dim=-1)
        noise = torch.randn_like(right) if self.training else torch.zeros_like(right)
        noise = torch.tensor(0.1) * noise
        return self.heads["mean"](left + noise) - F.softplus(self.heads["spread"](right))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()) for _ in range(3)
        )
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(())) for _ in range(3))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outs = [block(x) * weight for block, weight in zip(self.blocks, self.weights, strict=True)]
        return self.head(torch.stack(outs, dim=1).sum(1) + torch.stack(outs).std(0))


class Shapes(nn.Module):
    """Dimensions in all directions."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, CLASSES)
        self.bias = nn.Parameter(torch.zeros(2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b = x.shape[0]
        x = x.permute(0, 2, 3, 1).reshape(b, -1, 2).transpose(1, 2) + self.bias
        y = x.unsqueeze(1).expand(-1, 3, -1, -1).squeeze(1)
        y = torch.einsum("bhct,bhdt->bhcd", y, y) / x.shape[-1]
        y = y + F.scaled_dot_product_attention(y, y, y, dropout_p=0.2 if self.training else 0.0)
        first, second, third = y.flatten(2).unbind(1)
        z = torch.cat([first, second, third, x.flip(2)[..., :6].flatten(1)], 1)
        z = z.unflatten(1, (2, 12)).movedim(1, 2).repeat(1, 1, 1)
        return self.head(z.reshape_as(z.flatten(1)).roll(1, 1) - z.flatten(1).mean(1, True))


class Straight(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sign() * x.abs().sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient  # straight through: not what tracing would derive


class OwnGradient(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Straight.apply(super().forward(x))


class NoGrad(nn.Module):
    """A part without gradients, which a trace would lose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        with torch.no_grad():
            shift = out.mean(0) * 2
        return out * shift


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, CLASSES)))


class TwoInputs(nn.Module):
    """An image, and an age in whole years; an input that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.age = nn.Conv2d(1, 4, 3), nn.Linear(1, 4)
        self.out = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, CLASSES))

    def forward(self, image: torch.Tensor, age: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        ages = self.age(age[:, None].to(image.dtype) / 90).relu()
        return self.out(torch.cat([self.image(image).mean((2, 3)).relu(), ages], 1))


def by_name(batch: torch.Tensor) -> dict[str, torch.Tensor]:
    age = (30 + 10 * batch[:, 0, 0, 0]).long()
    return {"age": age, "row": torch.arange(len(batch)), "image": batch}


def by_position(batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    named = by_name(batch)
    return named["image"], named["age"], named["row"]


class OneTree(TwoInputs):
    """The same of one argument, a dict with a tuple."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
        image, age = batch["pair"]
        return super().forward(image, age, batch["row"])


def nested(batch: torch.Tensor) -> dict[str, Any]:
    image, age, row = by_position(batch)
    return {"pair": (image, age), "row": row}


ZOO: dict[str, Animal] = {
    "mlp": Animal(lambda: models.MLP(6, (5, 4), CLASSES), (6,)),
    "lenet": Animal(lambda: models.LeNet(CLASSES), (3, 32, 32)),
    "lenet5": Animal(lambda: models.LeNet5(CLASSES), (1, 32, 32)),
    "alexnet": Animal(lambda: models.AlexNet(CLASSES), (1, 32, 32)),
    "mobilenet": Animal(lambda: models.MobileNet(CLASSES, width=0.125), (3, 32, 32)),
    "vgg": Animal(lambda: models.VGG("VGG13", CLASSES, width=0.0625), (3, 32, 32)),
    "residual": Animal(Residual, (2, 5, 5)),
    "tied": Animal(Tied, (4,), vocabulary=CLASSES),
    "transformer": Animal(Transformer, (5,), vocabulary=11),
    "pre-norm": Animal(lambda: Transformer(0.0, norm_first=True), (5,), vocabulary=11),
    "cross attention": Animal(CrossAttention, (5, 8)),
    "buffers": Animal(Buffers, (6,)),
    "frozen": Animal(Frozen, (6,)),
    "groups": Animal(groups, (2, 6, 6)),
    "signal": Animal(signal, (2, 12)),
    "grouped": Animal(grouped, (4, 8, 8)),
    "in place": Animal(InPlace, (6,)),
    "heads": Animal(Heads, (6,)),
    "lists": Animal(Lists, (6,)),
    "shapes": Animal(Shapes, (2, 3, 4)),
    "weight norm": Animal(normed, (6,)),
    "by name": Animal(TwoInputs, (1, 5, 5), form=by_name),
    "one tree": Animal(OneTree, (1, 5, 5), form=nested),
}
"""What can be fused, and how."""


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        return -out if out.sum() > 0 else out


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.gate = nn.Linear(6, CLASSES), Choosing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + self.gate(x)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Noise(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(CLASSES)


class NumPy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import numpy as np

        return super().forward(x) * float(np.random.rand())  # noqa: NPY002


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, CLASSES))
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    return model


OTHER = "differ from the plain ones"

REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "no grad": (NoGrad, (6,), OTHER),
    "own gradient": (OwnGradient, (6,), OTHER),
    "data-dependent control flow": (Inner, (6,), "layer gate (Choosing)"),
    "Python state": (lambda: Counting(6, CLASSES), (6,), "changes its attribute calls"),
    "NumPy's generator": (lambda: NumPy(6, CLASSES), (6,), "Python or NumPy"),
    "noise": (lambda: Noise(6, CLASSES), (6,), OTHER),
    "hooks": (hooked, (6,), "layer 0 (Linear) has hooks"),
    "batch norm over one": (lambda: nn.BatchNorm1d(6), (2, 6, 3), "raises ValueError"),
    "alpha dropout": (
        lambda: nn.Sequential(nn.Linear(6, CLASSES), nn.AlphaDropout(0.3)),
        (6,),
        "random operation",
    ),
}
"""What cannot, and a part of the reason."""
