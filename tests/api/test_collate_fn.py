"""`collate_fn=`: samples of different length, padded by a function of the user's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asynckfold import AsyncKFold, CVResults, InputError
from tests.plain import BATCH, EPOCHS, adam, assert_bits, plain_loop
from tests.ragged import Mean, Recurrent, Texts, collate, of_dicts, with_lengths


def swept(
    root: Path, dataset: Any = None, model: Any = Mean, engine: str = "serial", **settings: Any
) -> CVResults:
    settings = {"collate_fn": collate, **settings}
    kfold = AsyncKFold(
        2, dataset or Texts(), root, nn.CrossEntropyLoss(), BATCH, engine=engine, verbose=0,
        report=False, threads_per_job=1, **settings,
    )  # fmt: skip
    return kfold([model], ["constant"], adam, {"epochs": EPOCHS})


def weights_of(results: CVResults) -> dict[str, Tensor]:
    return results.state_dict(results.candidates[0].name, fold=0)


def lists(ids: Tensor, y: int) -> Any:
    return {"ids": ids.tolist(), "label": y}


BY_NAME = {"collate_fn": of_dicts, "target_key": "label"}


@pytest.mark.parametrize(
    ("model", "engine", "change", "settings", "call"),
    [
        (Mean, "process", None, {}, lambda model, ids: model(ids)),
        (Mean, "serial", None, {"random_samples": True}, lambda model, ids: model(ids)),
        (Recurrent, "serial", None, {"collate_fn": with_lengths}, lambda model, two: model(*two)),
        (Recurrent, "serial", lists, BY_NAME, lambda model, two: model(*two)),
    ],
    ids=["process", "streamed", "by position", "by name"],
)
def test_a_job_has_the_bits_of_a_plain_loop(
    root: Path, model: Any, engine: str, change: Any, settings: dict[str, Any], call: Any
) -> None:
    data = Texts() if change is None else Texts(change)
    results = swept(root, data, model, engine, **settings)
    function = with_lengths if model is Recurrent else collate
    weights, outputs = plain_loop(model, Texts(), results, call, function)
    assert_bits(results, weights, outputs)


def test_steps_and_loops_of_ones_own_get_the_batches(root: Path) -> None:
    def step(model: nn.Module, batch: Any, state: Any) -> Any:
        return state.criterion(model(**batch[0]), batch[1])

    def fit_fn(context: Any) -> None:
        for _ in range(context.epochs):
            for inputs, targets in context.train_loader:
                context.optimizer.zero_grad()
                context.criterion(context.model(**inputs), targets).backward()
                context.optimizer.step()

    found = [
        weights_of(swept(root / str(number), Texts(lists), Recurrent, **BY_NAME, **own))
        for number, own in enumerate(({}, {"training_step": step}, {"fit_fn": fit_fn}))
    ]
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in other)


def test_named_classes_arrive_as_their_index(root: Path) -> None:
    named = Texts(lambda ids, y: (ids, ("cold", "warm")[y]))
    results = swept(root / "named", named)
    assert list(results.classes_) == ["cold", "warm"]
    assert set(results.ensemble().predict(named)) <= {"cold", "warm"}
    ours, theirs = weights_of(results), weights_of(swept(root / "numbers"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_lists_of_two_ids_are_predicted_whole(root: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        texts, targets = zip(*samples, strict=True)
        return pad_sequence(list(map(torch.tensor, texts)), batch_first=True), torch.tensor(targets)

    results = swept(root, Texts(lambda ids, y: (ids.tolist(), y)), collate_fn=collate, refit=True)
    texts = [[3, 5], [4, 6, 7], [15]]
    ensemble = results.ensemble()
    assert np.array_equal(ensemble.predict(texts), ensemble.predict([(ids, 1) for ids in texts]))
    models = [results.model(fold=fold) for fold in range(2)]
    with torch.no_grad():
        alone = [torch.cat([one(torch.tensor([ids])) for ids in texts]) for one in models]
    mean = torch.stack(alone).softmax(2).mean(0).numpy()
    assert np.allclose(ensemble.predict_proba(texts), mean, atol=1e-6)
    refitted = results.refitted
    assert refitted is not None
    assert refitted.counts["done"] == 1
    with pytest.raises(InputError, match="models that are saved must take one"):
        ensemble.save(root / "models.safetensors")


def of_rows(change: Callable[[Tensor, Tensor], Any]) -> Callable[[list[Any]], Any]:
    return lambda samples: change(*collate(samples))


def fails(samples: list[Any]) -> Any:
    raise ValueError("no such word")


def by_length(samples: list[Any]) -> Any:
    return collate(sorted(samples, key=lambda pair: -len(pair[0])))


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"collate_fn": None}, r"int64 \(2,\) and tensor int64 \(8,\)(.|\n)*collate_fn="),
        ({"collate_fn": 3}, "collate_fn must be a function of a list of samples"),
        ({"collate_fn": fails}, r"ValueError: no such word \(test_collate_fn.py, line \d+\)"),
        (
            {"collate_fn": of_rows(lambda ids, y: (ids, y, 1))},
            "for items that are pairs: received tuple",
        ),
        ({"collate_fn": of_rows(lambda ids, y: ids)}, r"return \(inputs, targets\)"),
        ({"collate_fn": of_rows(lambda ids, y: (ids, y[:-1]))}, "one target for each sample"),
        ({"collate_fn": of_rows(lambda ids, y: (ids, 1 - y))}, "the targets of its samples"),
        ({"collate_fn": by_length}, "in their order"),
        (
            {"collate_fn": of_rows(lambda ids, y: (ids + torch.rand(ids.shape), y))},
            "same inputs for the same samples",
        ),
        ({"trainer": "hogwild", "processes": 2, "engine": "process"}, "only the plain trainer"),
        ({"baseline": "estimate"}, "the serial baseline .* collate_fn must go"),
        ({"fuse": 2}, "its batches come of a collate_fn"),
        ({"preprocess": StandardScaler()}, "preprocess needs samples of one tensor"),
        (
            {"engine": "process", "collate_fn": lambda samples: (LOCK, collate(samples))[1]},
            "collate_fn must be sendable",
        ),
    ],
)
def test_bad_input_is_refused_before_the_start(
    root: Path, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        swept(root, **settings)
    assert not (root / "run.db").exists()


def test_lists_of_different_length_name_the_remedy(root: Path) -> None:
    texts = [ids.tolist() for ids in Texts().ids]
    with pytest.raises(InputError, match=r"list\(zip\(X, y\)\) and collate_fn="):
        swept(root, (texts, Texts().labels), collate_fn=None)


def test_a_keyed_batch_needs_its_target(root: Path) -> None:
    def without(samples: list[Any]) -> Any:
        found = of_dicts(samples)
        del found["labels"]
        return found

    with pytest.raises(InputError, match="a dict of the inputs and of 'label'"):
        swept(root, Texts(lists), Recurrent, collate_fn=without, target_key="label")
