"""Pictures of hard samples: kept at the end of a call, where samples are pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from asynckfold import AsyncKFold, RunStore
from tests.toy import adam

SIZE = 60


class Guess(nn.Module):
    """Looks at one pixel of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 2)

    def forward(self, inputs: Any) -> Any:
        return self.last(inputs.flatten(1)[:, :1])


def call(root: Path, inputs: Any, **settings: Any) -> None:
    words = {"verbose": 0, "parallelize": False, **settings}
    kfold = AsyncKFold(2, (inputs, np.arange(SIZE) % 2), root, nn.CrossEntropyLoss(), 8, **words)
    kfold({"guess": Guess}, ["constant"], adam, {"epochs": 1})


@pytest.mark.parametrize(("channels", "edge"), [(1, 8), (3, 40)])
def test_hard_samples_have_their_pictures(root: Path, channels: int, edge: int) -> None:
    inputs = np.random.default_rng(0).random((SIZE, channels, edge, edge), np.float32)
    call(root, inputs)
    with np.load(root / "oof" / "pictures.npz") as file:
        rows, pictures = file["samples"], file["pictures"]
    assert len(rows) > 0
    assert pictures.shape == (len(rows), min(edge, 32), min(edge, 32), channels)
    if edge == 8:
        # From the darkest to the lightest pixel of all pictures that are kept.
        kept = inputs[rows]
        scaled = 255 * (kept[:, 0] - kept.min()) / (kept.max() - kept.min())
        np.testing.assert_allclose(pictures[..., 0], scaled, atol=0.51)


def test_rows_of_a_table_are_no_pictures(root: Path) -> None:
    call(root, np.random.default_rng(0).random((SIZE, 8), np.float32))
    assert not (root / "oof" / "pictures.npz").exists()


def test_a_fault_of_a_picture_does_not_end_the_sweep(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise ValueError("no ink")

    monkeypatch.setattr("asynckfold.results.report.predictions.hard_samples", refuses)
    call(root, np.random.default_rng(0).random((SIZE, 1, 8, 8), np.float32))
    with RunStore.read(root) as store:
        assert store.counts()["done"] == 2
        assert "there are no pictures of samples: no ink" in [
            event.text for event in store.events()
        ]
