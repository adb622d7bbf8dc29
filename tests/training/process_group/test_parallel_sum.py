"""What several processes add up is what one finds, and they are gone with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from asynckfold.errors import WorkerDiedError
from asynckfold.models import RBM, Pretraining, dbn
from asynckfold.training.process_group.ranks import ParallelSum
from tests.leftovers import descendants

BY = pytest.mark.parametrize("processes", [2, 3])


def test_what_a_part_raises_is_raised_here_and_nobody_stays() -> None:
    before = descendants()

    def part(order: str, rank: int, count: int) -> Sequence[Tensor]:
        if rank == 1 and order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            raise ValueError(order)
        return [torch.zeros(1)]

    with (
        pytest.raises(ValueError, match="no such luck"),
        ParallelSum(2)(part, [], [torch.zeros(1)]) as total,
    ):
        total("no such luck")
    with pytest.raises(WorkerDiedError), ParallelSum(2)(part, [], [torch.zeros(1)]) as total:
        total("die")
    assert descendants() <= before


@pytest.fixture
def _any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dbn, "LEAST_ROWS", 1)


def fitted(visible: str, summing: dbn.ProcessSum | None, seed: int = 0) -> tuple[RBM, list[Any]]:
    """An RBM after some epochs of batches of 7, the last of which has one sample."""
    generator = torch.Generator().manual_seed(seed)
    samples = torch.rand(60, 6, generator=generator, dtype=torch.float64)
    rbm = RBM(6, 4, visible, generator).double()
    how = Pretraining(epochs=3, lr=0.1, gaussian_lr=0.01, k=2, batch_size=7)
    told: list[Any] = []
    rbm.fit(samples[:50], samples[50:], how, generator, lambda *item: told.append(item), summing)
    return rbm, [(epoch, dict(found)) for epoch, found in told]


@BY
@pytest.mark.usefixtures("_any_rows")
@pytest.mark.parametrize("visible", ["binary", "gaussian"])
def test_several_take_the_steps_of_one_to_rounding(visible: str, processes: int) -> None:
    (one, told), (several, heard) = (fitted(visible, None), fitted(visible, ParallelSum(processes)))
    torch.testing.assert_close(several.state_dict(), one.state_dict())
    for (epoch, mine), (number, theirs) in zip(told, heard, strict=True):
        assert epoch == number
        assert mine == pytest.approx(theirs)
    again, _ = fitted(visible, ParallelSum(processes))
    assert all(torch.equal(again.state_dict()[name], value)
               for name, value in several.state_dict().items())  # fmt: skip
    # The draws matter: with others it ends elsewhere.
    other, _ = fitted(visible, None, seed=1)
    assert not torch.allclose(other.weight, one.weight)


@pytest.mark.parametrize(
    ("samples", "batch_size", "several"),
    [(40, 20, True), (40, 19, False), (19, 20, False), (20, 40, True)],
)
def test_only_batches_that_are_worth_it_are_divided(
    monkeypatch: pytest.MonkeyPatch, samples: int, batch_size: int, several: bool
) -> None:
    monkeypatch.setattr(dbn, "LEAST_ROWS", 10)
    met: list[int] = []

    class Noting(ParallelSum):
        def __call__(self, part: Any, seen: Any, like: Any) -> Any:
            met.append(self.processes)
            return super().__call__(part, seen, like)

    generator = torch.Generator().manual_seed(0)
    rbm, how = RBM(6, 4, generator=generator), Pretraining(epochs=1, batch_size=batch_size)
    data = torch.rand(samples + 5, 6, generator=generator)
    rbm.fit(data[5:], data[:5], how, generator, summing=Noting(2))
    assert met == [2] * several


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_drawn_is_what_torch_would_draw(dtype: torch.dtype) -> None:
    rows = dbn._Rows(0, 7, 7)
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    for _ in range(3):
        mean = torch.rand(7, 5, dtype=dtype)
        found = rows.binary(mean, one)
        assert found.dtype == dtype
        if dtype == torch.float32:
            assert torch.equal(found, torch.bernoulli(mean, generator=other))
        else:
            assert set(found.unique().tolist()) <= {0.0, 1.0}
