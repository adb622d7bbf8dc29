"""A tiny model of transformers: the bits of a plain loop with its own loss."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asynckfold import AsyncKFold, InputError
from asynckfold.integrations.transformers import Logits, padded
from tests.plain import epoch_order, one_thread, seed_all, stream

WORDS = ["[PAD]", "good", "bad", "film", "play", "very"]


def by_zeros(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Pads as `DataCollatorWithPadding` does."""
    longest = max(len(item["input_ids"]) for item in items)
    return {
        name: torch.tensor([item[name] + [0] * (longest - len(item[name])) for item in items])
        for name in items[0]
    }


def sentences(count: int = 24) -> list[dict[str, Any]]:
    """Sentences of two to five words, about a good or a bad film."""
    rng, found = np.random.default_rng(0), []
    for number in range(count):
        label = number % 2
        ids = [*rng.integers(3, 6, rng.integers(1, 5)).tolist(), 1 + label]
        found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": label})
    return found


def test_samples_are_padded_once() -> None:
    items = sentences()
    inputs, targets = padded(items, by_zeros)
    assert sorted(inputs) == ["attention_mask", "input_ids"]
    assert inputs["input_ids"].shape == (24, max(len(item["input_ids"]) for item in items))
    assert targets.tolist() == [0, 1] * 12
    assert inputs["attention_mask"].sum() == sum(len(item["input_ids"]) for item in items)
    assert all("labels" in item for item in items)


def with_labels(items: list[dict[str, Any]]) -> dict[str, Any]:
    labels = torch.tensor([item["labels"] for item in items])
    given = [{name: item[name] for name in ("input_ids", "attention_mask")} for item in items]
    return {**by_zeros(given), "labels": labels}


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.EmbeddingBag(6, 2, padding_idx=0)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(input_ids)
        return found


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.1)


@pytest.mark.nightly
def test_a_data_set_of_hugging_face_is_taken_as_it_is(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    items = sentences()
    given = datasets.Dataset.from_list(items)
    for found, wanted in zip(padded(given, by_zeros), padded(items, by_zeros), strict=True):
        assert str(found) == str(wanted)
    sweep: dict[str, Any] = {"engine": "serial", "verbose": 0, "report": False}
    runs = [
        AsyncKFold(
            3, data, tmp_path / name, nn.CrossEntropyLoss(), 8, collate_fn=with_labels, **sweep
        )({"bag": Bag}, ["constant"], adam, {"epochs": 2})
        for name, data in (("dataset", given), ("list", items))
    ]
    assert runs[0].fingerprint == runs[1].fingerprint
    kfold = AsyncKFold(3, given, tmp_path / "ragged", nn.CrossEntropyLoss(), 8, **sweep)
    with pytest.raises(InputError, match="pass collate_fn="):
        kfold({"bag": Bag}, ["constant"], adam)


def test_a_model_without_logits_is_named() -> None:
    with pytest.raises(TypeError, match="output of Identity must have logits: received Tensor"):
        Logits(nn.Identity())(input=torch.ones(2))


@pytest.mark.nightly
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the extra transformers"
)
def test_a_model_has_the_bits_of_a_plain_loop_with_its_own_loss(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        DataCollatorWithPadding,
        PreTrainedTokenizerFast,
    )

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    texts = [" ".join(WORDS[code] for code in item["input_ids"]) for item in sentences()]
    labels = [item["labels"] for item in sentences()]
    encoded = tokenizer(texts, return_token_type_ids=False)
    items = [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(
            encoded["input_ids"], encoded["attention_mask"], labels, strict=True
        )
    ]
    inputs, targets = padded(items, DataCollatorWithPadding(tokenizer))
    config = BertConfig(
        vocab_size=6,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )

    def model() -> nn.Module:
        return Logits(BertForSequenceClassification(config))

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-2, fused=True)

    given = {"engine": "serial", "verbose": 0, "threads_per_job": 1, "report": False}
    kfold = AsyncKFold(3, (inputs, targets), tmp_path, nn.CrossEntropyLoss(), 8, **given)
    results = kfold({"bert": model}, ["constant"], adam, {"epochs": 2})
    rows_of = {name: torch.from_numpy(value) for name, value in inputs.items()}
    for job in results.plan.jobs:
        with one_thread():
            seed_all(job.seed)
            net: Any = model()
            optimizer = adam(net)
            for epoch in range(2):
                seed_all(stream(job.seed, epoch + 1))
                order = epoch_order(results.folds[job.fold].train, job.seed, epoch)
                for rows in torch.from_numpy(order).split(8):
                    batch = {name: value[rows] for name, value in rows_of.items()}
                    found = net.model.train()(**batch, labels=torch.from_numpy(targets)[rows])
                    optimizer.zero_grad()
                    found.loss.backward()
                    optimizer.step()
        trained = results.state_dict(job.candidate, fold=job.fold)
        for name, value in net.state_dict().items():
            assert torch.equal(trained[name], value), name
