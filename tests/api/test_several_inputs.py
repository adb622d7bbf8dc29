"""Samples of several tensors: a dict by name, a tuple by position, or one argument."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.dummy import DummyClassifier
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from asynckfold import AsyncKFold, CVResults, InputError
from asynckfold import fit as fit_one
from tests.plain import BATCH, EPOCHS, adam, assert_bits, plain_loop
from tests.several_inputs import Items, N, OneDict, TwoInputs, arrays


def swept(
    dataset: Any, root: Path, model: Any = TwoInputs, engine: str = "serial", **settings: Any
) -> CVResults:
    kfold = AsyncKFold(
        2, dataset, root, nn.CrossEntropyLoss(), BATCH, engine=engine, verbose=0, report=False,
        threads_per_job=1, **settings,
    )  # fmt: skip
    return kfold([model], ["constant"], adam, {"epochs": EPOCHS})


def weights_of(results: CVResults) -> dict[str, Tensor]:
    return results.state_dict(results.candidates[0].name, fold=0)


def as_tuple(inputs: dict[str, Any], target: int) -> Any:
    return (inputs["image"], inputs["age"]), target


X, Y = arrays()
PAIR = (X["image"], X["age"])
REORDERED = {name: torch.from_numpy(X[name]) for name in ("age", "image")}


@pytest.mark.parametrize(
    ("dataset", "engine"),
    [
        ((X, Y), "process"),
        ((PAIR, Y), "serial"),
        ((REORDERED, Y), "serial"),
        (TensorDataset(*map(torch.from_numpy, (*PAIR, Y))), "serial"),
        (Items(), "process"),
        (Items(as_tuple), "process"),
        (Items(lambda inputs, y: {**inputs, "labels": y}), "serial"),
    ],
    ids=["dict", "tuple", "tensors", "TensorDataset", "dict, y", "tuple, y", "labels in dict"],
)
def test_a_job_has_the_bits_of_a_plain_loop(root: Path, dataset: Any, engine: str) -> None:
    results = swept(dataset, root, engine=engine)
    weights, outputs = plain_loop(
        TwoInputs, Items(), results, lambda model, inputs: model(**inputs)
    )
    assert_bits(results, weights, outputs)


def test_target_key_names_the_target_of_a_dict(root: Path) -> None:
    named = Items(lambda inputs, y: {**inputs, "kind": y})
    found = [
        weights_of(swept(data, root / name, **key))
        for name, data, key in (("pair", Items(), {}), ("key", named, {"target_key": "kind"}))
    ]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("names", "settings", "match"),
    [
        (["kind"], {}, "under 'labels' or 'target': received a dict of 'image', 'age', 'kind'"),
        (["kind"], {"target_key": "kin"}, "Did you mean 'kind'"),
        (["labels", "target"], {}, "under 'labels' or 'target'"),
    ],
)
def test_a_dict_without_its_target_is_refused(
    root: Path, names: list[str], settings: dict[str, str], match: str
) -> None:
    items = Items(lambda inputs, y: {**inputs, **dict.fromkeys(names, y)})
    with pytest.raises(InputError, match=match):
        swept(items, root, **settings)


def test_a_model_may_take_the_whole_dict(root: Path) -> None:
    by_name = swept((X, Y), root / "name")
    whole = swept((X, Y), root / "whole", OneDict)
    found = [[item.tolist() for item in weights_of(one).values()] for one in (by_name, whole)]
    assert found[0] == found[1]


@pytest.mark.parametrize(("dataset", "inputs"), [((X, Y), X), ((PAIR, Y), PAIR)])
def test_the_ensemble_predicts_for_dicts_and_tuples(root: Path, dataset: Any, inputs: Any) -> None:
    results = swept(dataset, root)
    ensemble = results.ensemble()
    assert np.array_equal(ensemble.predict(inputs), ensemble.predict(dataset))
    models = [results.model(fold=fold) for fold in range(2)]
    with torch.no_grad():
        tensors = [torch.from_numpy(part) for part in PAIR]
        mean = sum(model(*tensors).softmax(1) for model in models) / 2
    assert np.array_equal(ensemble.predict(inputs), mean.argmax(1).numpy())


def test_a_run_with_renamed_inputs_is_another_run(root: Path) -> None:
    class Anything(TwoInputs):
        def forward(self, age: Tensor, **others: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(*others.values(), age)

    swept((X, Y), root, Anything)
    with pytest.raises(InputError, match="data"):
        swept(({"age": X["age"], "picture": X["image"]}, Y), root, Anything)


def test_fused_jobs_are_close_to_plain_ones(root: Path) -> None:
    plain, fused = (swept((X, Y), root / f"{fuse}", fuse=fuse) for fuse in (False, 2))
    assert [len(group) for group in fused.plan.groups] == [2]
    torch.testing.assert_close(weights_of(plain), weights_of(fused), rtol=1e-3, atol=1e-5)
    (expected,), (found,) = plain.oof.values(), fused.oof.values()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


class Misnamed(TwoInputs):
    def forward(self, image: Tensor, ages: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(image, ages)


class Narrow(TwoInputs):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(11, 8)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


def ragged(index: int, change: Callable[[dict[str, Any]], Any]) -> Items:
    data = Items()
    plain = Items.__getitem__

    class Changed(Items):
        def __getitem__(self, at: int) -> Any:
            inputs, target = plain(data, at)
            return (change(inputs) if at == index else inputs), target

    return Changed()


@pytest.mark.parametrize(
    ("dataset", "model", "match"),
    [
        (({**X, "age": X["age"][:-1]}, Y), TwoInputs, r"X\['age'\] has 59"),
        ((PAIR, Y[:-1]), TwoInputs, "y has 59"),
        (({**X, "name": ["Ann"] * N}, Y), TwoInputs, r"X\['name'\] has list"),
        (({**X, "name": np.array(["Ann"] * N)}, Y), TwoInputs, r"X\['name'\] must hold numbers"),
        ((X, Y), Misnamed, "Did you mean 'ages'"),
        ((X, Y), Narrow, r"\['image'\] float32"),
        (((*PAIR, X["age"]), Y), TwoInputs, "3 inputs by position"),
        (Stream(), TwoInputs, "must be map-style"),
        (
            Items(lambda inputs, y: ({**inputs, "name": "Ann"}, y)),
            TwoInputs,
            r"\['name'\] is a str",
        ),
        (ragged(1, lambda x: {**x, "age": np.zeros(2)}), TwoInputs, r"dataset\[1\].*\['age'\]"),
        (ragged(9, lambda x: {"image": x["image"]}), TwoInputs, r"dataset\[9\](.|\n)*\['age'\]"),
        (ragged(9, lambda x: {**x, "more": 1}), TwoInputs, r"dataset\[9\](.|\n)*\['more'\]"),
        (ragged(9, lambda x: x["image"]), TwoInputs, r"dataset\[9\]"),
    ],
)
def test_bad_input_is_refused_before_the_start(
    root: Path, dataset: Any, model: Any, match: str
) -> None:
    with pytest.raises(InputError, match=match):
        swept(dataset, root, model)
    assert not (root / "run.db").exists()


def test_what_takes_one_tensor_only_is_refused(root: Path) -> None:
    with pytest.raises(InputError, match="preprocess needs samples of one tensor"):
        swept((X, Y), root, preprocess=StandardScaler())
    results = swept((X, Y), root)
    with pytest.raises(InputError, match="models that are saved must take one"):
        results.ensemble().save(root / "models.safetensors")
    with pytest.raises(InputError, match="estimators need samples of one array"):
        results.compare_with([DummyClassifier()])
    with pytest.raises(InputError, match=r"\['age'\]"):
        results.ensemble().predict({"image": X["image"]})


def test_fit_trains_one_model_with_two_inputs(root: Path) -> None:
    valid = ({name: array[:20] for name, array in X.items()}, Y[:20])
    found = fit_one(
        TwoInputs, (X, Y), adam, nn.CrossEntropyLoss(), root, valid=valid, epochs=1, verbose=0
    )
    assert len(found.epochs) == 1
