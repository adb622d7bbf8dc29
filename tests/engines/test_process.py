"""What the process engine lets a server import, so that not each of its workers does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sklearn.preprocessing
import torchvision
from torch import nn

from asynckfold.engines.process import preloads
from asynckfold.jobs.recipe import Recipe
from asynckfold.models import LeNet5


def of_main(code: str) -> Any:
    """Return what is defined as ``found`` in a script."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(code, scope)
    return scope["found"]


adam = of_main("from torch import optim\nfound = lambda model: optim.Adam(model.parameters())")


class Proxy(ModuleType):
    """A module of which nothing can be asked, as of those that are loaded when they are used."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            return {}
        raise RuntimeError(name)


def found(model: Any = LeNet5, preprocess: Any = None, data: Any = None) -> list[str]:
    recipe = Recipe({"m": model}, {"s": "constant"}, adam, nn.CrossEntropyLoss(), preprocess)
    return preloads(SimpleNamespace(recipe=recipe, data=data), streams=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, []),
        ({"model": torchvision.models.resnet18}, ["torchvision"]),
        (
            {"model": of_main("from torchvision import models\nfound = lambda: models.resnet18()")},
            ["torchvision"],
        ),
        ({"model": of_main("def found():\n    import torchvision")}, ["torchvision"]),
        ({"data": torchvision.transforms.RandomCrop(3)}, ["torchvision"]),
        ({"preprocess": sklearn.preprocessing.StandardScaler()}, ["sklearn"]),
    ],
    ids=["nothing", "by reference", "by value", "imported inside", "transform", "preprocess"],
)
def test_what_travels_is_looked_through(parts: dict[str, Any], expected: list[str]) -> None:
    assert found(**parts) == expected


def test_a_module_of_the_user_is_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_own.py").write_text(
        "import torch\nfrom torchvision.models import resnet18\nclass Net(torch.nn.Linear): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module: Any = importlib.import_module("users_own")
    module.later = Proxy("later")
    try:
        assert found(module.Net) == ["torchvision"]
    finally:
        del sys.modules["users_own"]


def test_workers_that_read_samples_get_all_that_is_here() -> None:
    assert {"torchvision", "sklearn"} == set(preloads(SimpleNamespace(), streams=True))  # type: ignore[arg-type]
