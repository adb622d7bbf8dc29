"""Samples of different length, stored as offsets and values."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from asynckfold.data.prepare import prepare
from asynckfold.data.transforms.trees import Records, same_sample
from tests.ragged import N, Texts, collate


@pytest.mark.parametrize(
    "samples",
    [
        [torch.arange(3), torch.arange(0), torch.arange(9)],
        [[], [1, 2], [3]],
        [{"x": np.ones((2, at), np.float32), "n": at, "f": 0.1 * at} for at in range(3)],
        [(torch.rand(at, 2) > 0.5, [True] * at, np.float32(at)) for at in range(1, 4)],
    ],
    ids=["tensors", "lists", "dicts", "tuples"],
)
def test_a_record_gives_its_sample_again(samples: list[Any]) -> None:
    records = Records.of_any_shape(samples)
    assert records is not None
    for sample in samples:
        again = records.restore(torch.from_numpy(records(sample)))
        assert same_sample(again, sample)
        assert type(again) is type(sample)


def test_samples_are_held_and_batches_are_collated() -> None:
    data = Texts()
    with closing(prepare(data, collate_fn=collate)) as prepared:
        assert prepared.held
        handle = prepared.handle()
        found = handle.open(handle.fds)
        rows = np.array([7, 0, 30])
        inputs, targets = found.train(rows, 1, 2)
        wanted = collate([data[at] for at in rows.tolist()])
        assert torch.equal(inputs, wanted[0])
        assert torch.equal(targets, wanted[1])
        values = sum(len(ids) for ids in data.ids)
        assert handle.specs[2].shape == (8 * (values + N),)
        changed = Texts(lambda ids, y: (ids + (ids == 3) * (len(ids) == 9), y))
        with closing(prepare(changed, collate_fn=collate)) as other:
            assert other.fingerprint != prepared.fingerprint


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda ids, y: (" ".join(map(str, ids.tolist())), y), "hold something else than tensors"),
        (lambda ids, y: (ids[torch.randperm(len(ids))], y), "the dataset itself is random"),
        (
            lambda ids, y: (ids if len(ids) != 4 or ids[0] % 2 else ids.float(), y),
            "another structure: it is tensor float32",
        ),
    ],
    ids=["text", "random", "another type"],
)
def test_what_cannot_be_stored_is_streamed(change: Any, why: str) -> None:
    with closing(prepare(Texts(change), collate_fn=collate)) as prepared:
        assert not prepared.held
        assert any(why in note for note in prepared.notes)


@pytest.mark.parametrize("random", [False, True], ids=["held", "streamed"])
def test_a_function_that_changes_its_samples_changes_no_data(random: bool) -> None:
    def spoils(samples: list[Any]) -> Any:
        for ids, _ in samples:
            ids += 1
        return collate(samples)

    pairs = [Texts()[at] for at in range(N)]
    with closing(prepare(pairs, collate_fn=spoils, random_samples=random)) as prepared:
        handle = prepared.handle()
        data, rows = handle.open(handle.fds), np.arange(3)
        first, again = (data.eval(rows)[0] for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(pairs[0][0], Texts()[0][0])
